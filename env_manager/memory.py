"""What an episode remembers for its next prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from webshop_env.errors import ShopGymError


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """One past step: what the agent saw and what it did then."""

    step_number: int
    """Counted from 1 over the whole episode."""
    anchor: str
    action: str


class Memory(Protocol):
    """One per environment; emptied when an episode begins."""

    def reset(self) -> None:
        """Forgets everything."""
        ...

    def store(self, entry: MemoryEntry) -> None:
        """Takes in the step that was just made."""
        ...

    def fetch(self) -> list[MemoryEntry]:
        """What the next prompt may show, oldest first; empty at the start of an episode."""
        ...


class HistoryMemory:
    """The last `length` steps, word for word. A length of 0 remembers nothing."""

    def __init__(self, length: int) -> None:
        self._entries: deque[MemoryEntry] = deque(maxlen=length)

    def reset(self) -> None:
        self._entries.clear()

    def store(self, entry: MemoryEntry) -> None:
        self._entries.append(entry)

    def fetch(self) -> list[MemoryEntry]:
        return list(self._entries)


MEMORIES: dict[str, Callable[[int], Memory]] = {"history": HistoryMemory}
"""Memory by the name that settings use; each is made from the history length."""


def make_memory(name: str, length: int) -> Memory:
    """One memory of the named kind.

    Raises:
        ShopGymError: no memory has this name.
    """
    if name not in MEMORIES:
        raise ShopGymError(f"env.memory: no memory is called {name!r}; there are {', '.join(sorted(MEMORIES))}")
    return MEMORIES[name](length)
