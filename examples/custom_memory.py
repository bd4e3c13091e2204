"""How do I write a memory of my own? This one shows the last step in full and earlier ones in a few words.

Run: python examples/custom_memory.py
Train with it: PYTHONPATH=examples python trainers/gigpo_fsdp.py env.memory=custom_memory:summary ...
"""

from __future__ import annotations

import argparse

import webshop_env
from env_manager import EnvConfig, EnvManager, MemoryEntry, MemoryLimits, register_memory
from webshop_env.policies import OraclePolicy


class SummaryMemory:
    """Every step of the episode: pages in their first words, the last one in full."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._entries: list[MemoryEntry] = []

    def reset(self) -> None:
        self._entries.clear()

    def store(self, entry: MemoryEntry) -> None:
        self._entries.append(entry)

    def fetch(self) -> list[MemoryEntry]:
        return [*map(self._summary, self._entries[:-1]), *self._entries[-1:]]

    def _summary(self, entry: MemoryEntry) -> MemoryEntry:
        words = entry.anchor.split()
        short = " ".join(words[: self._num_words]) + (" …" if len(words) > self._num_words else "")
        return MemoryEntry(entry.step_number, short, entry.action)


def make_summary_memory(limits: MemoryLimits) -> SummaryMemory:
    """`env.history_length` is taken as the words of a page."""
    return SummaryMemory(limits.length)


register_memory("summary", make_summary_memory)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    shop = webshop_env.open_shop()
    config = EnvConfig(prompt="no_think", memory="summary", history_length=6)
    manager = EnvManager("WebShop-v1", 1, config, {"shop": shop})
    policy = OraclePolicy(shop)
    observations = manager.reset([1500])
    while observations.is_live[0]:
        prompt = observations.prompts[0]
        observations = manager.step([f"<action>{policy.act(*manager.page(0))}</action>"]).observations
    print(prompt)


if __name__ == "__main__":
    main()
