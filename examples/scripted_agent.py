"""How does a function play many episodes at once? It reads a prompt, writes a reply, and the rollout is told as text.

Run: python examples/scripted_agent.py [rollout.parquet]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from env_manager import EnvConfig, EnvManager
from rollout import SamplingParams, TrajectoryCollector, save_batch
from rollout.engines.scripted import ScriptedPolicy
from rollout.report import sample_report
from webshop_env.command_line import run_safely, say

NUM_GOALS, GROUP_SIZE = 6, 2


def reply_to(prompt: str, admissible: tuple[str, ...] | None) -> str:
    """Searches for the words of the task, opens the first result, takes the options that the task names, buys."""
    task = re.search(r"Your assignment: (.*)", prompt).group(1).lower()
    actions = re.findall(r"'((?:click|search)\[.*?\])'", prompt.rpartition("one of the following:")[2])
    if "search[<your query>]" in actions:
        words = re.findall(r"\w+", task.partition(":")[0])
        return f"<action>search[{' '.join(words[-9:-2])}]</action>"
    buttons = [action[len("click[") : -1] for action in actions]
    products = [button for button in buttons if re.fullmatch(r"b[0-9a-z]{9}", button)]
    if products:
        return f"<action>click[{products[0]}]</action>"
    wanted = [button for button in buttons if f": {button}" in task]
    taken = re.search(r"Steps taken so far: (\d+)", prompt)
    num_chosen = int(taken.group(1)) - 2 if taken else 0  # after the search and the product
    return f"<action>click[{wanted[num_chosen] if num_chosen < len(wanted) else 'buy now'}]</action>"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="Parquet file for the episodes")
    out = parser.parse_args().out
    policy = ScriptedPolicy(reply_to)
    manager = EnvManager("WebShop-v1", NUM_GOALS * GROUP_SIZE, EnvConfig(prompt="no_think", max_steps=15))
    collector = TrajectoryCollector(manager)
    batch = collector.collect(
        range(NUM_GOALS), policy, SamplingParams(max_tokens=200), group_size=GROUP_SIZE, update=0, seed=0
    )
    say(sample_report(batch, num_episodes=2, decode=lambda ids: bytes(i for i in ids.tolist() if i < 256).decode()))
    for name, value in collector.statistics.items():
        say(f"{name} = {value:.4g}")
    if out:
        say(f"{len(batch)} steps saved to {save_batch(batch, out)}")
    return 0


if __name__ == "__main__":
    sys.exit(run_safely(main))
