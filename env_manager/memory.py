"""What an episode remembers for its next prompts.

A memory of one's own is a class with `reset`, `store` and `fetch`, made known by `register_memory`; see
`examples/custom_memory.py`.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from env_manager.plugins import import_plugin
from env_manager.types import TokenCounter, one_line
from webshop_env.errors import ShopGymError


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """One past step: what the agent saw and what it did then."""

    step_number: int
    """Counted from 1 over the whole episode."""
    anchor: str
    action: str
    thought: str = ""
    """What the reply reasoned inside <think>, blanks made single; "" for nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimits:
    """What the settings allow a memory; each kind uses what it has a use for."""

    length: int = 2
    """Past steps (`env.history_length`), at least 0."""
    max_tokens: int | None = None
    """Tokens of all that is fetched (`env.memory_tokens`), at least 0; None: only the prompt's own limit."""
    count_tokens: TokenCounter | None = None
    """Tokens of a text as a prompt; needed with `max_tokens`."""


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


class FullMemory:
    """Every step of the episode; with a budget, the latest steps whose pages and actions keep to it together.

    Steps are never shown in part: one that is larger than the budget ends what is remembered before it.
    """

    def __init__(self, max_tokens: int | None = None, count_tokens: TokenCounter | None = None) -> None:
        if max_tokens is not None and count_tokens is None:
            raise ShopGymError("env.memory_tokens needs count_tokens, a function from a prompt to its tokens")
        self._max_tokens, self._count_tokens = max_tokens, count_tokens
        self._entries: deque[tuple[MemoryEntry, int]] = deque()
        self._num_tokens = 0

    def reset(self) -> None:
        self._entries.clear()
        self._num_tokens = 0

    def store(self, entry: MemoryEntry) -> None:
        size = 0
        if self._max_tokens is not None and self._count_tokens is not None:
            # An empty prompt has the tokens of the chat template, which stand once in the whole prompt.
            size = self._count_tokens(f"{entry.anchor}\n{entry.action}") - self._count_tokens("")
        self._entries.append((entry, size))
        self._num_tokens += size
        while self._max_tokens is not None and self._num_tokens > self._max_tokens:
            self._num_tokens -= self._entries.popleft()[1]

    def fetch(self) -> list[MemoryEntry]:
        return [entry for entry, _ in self._entries]


MemoryMaker = Callable[[MemoryLimits], Memory]

_MEMORIES: dict[str, MemoryMaker] = {
    "history": lambda limits: HistoryMemory(limits.length),
    "full": lambda limits: FullMemory(limits.max_tokens, limits.count_tokens),
}


def register_memory(name: str, make: MemoryMaker) -> None:
    """Makes a memory known under a name, for `env.memory`; a later one replaces it.

    Raises:
        ShopGymError: `make` is no function of a `MemoryLimits`.
    """
    try:
        inspect.signature(make).bind(MemoryLimits())
    except TypeError as error:
        raise ShopGymError(
            f"register_memory: {name!r} needs a function from MemoryLimits to a memory, not {one_line(make)} ({error})"
        ) from None
    _MEMORIES[name] = make


def make_memory(name: str, limits: MemoryLimits) -> Memory:
    """One memory of the named kind; "module:name" imports the module that registers it first.

    Raises:
        ShopGymError: no memory has this name, or what is made is none.
    """
    known = import_plugin(name, setting="env.memory")
    if known not in _MEMORIES:
        raise ShopGymError(
            f"env.memory: no memory is called {known!r}; there are {', '.join(sorted(_MEMORIES))}; one of your own "
            "is named with the module that registers it, as in custom_memory:summary"
        )
    memory = _MEMORIES[known](limits)
    missing = [method for method in ("reset", "store", "fetch") if not callable(getattr(memory, method, None))]
    if missing:
        raise ShopGymError(f"env.memory: {name!r} makes something without {', '.join(missing)}: {one_line(memory)}")
    return memory


def fetched(memory: Memory) -> Sequence[MemoryEntry]:
    """What a memory lets the next prompt show.

    Raises:
        ShopGymError: They are no list of entries.
    """
    entries = memory.fetch()
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, MemoryEntry) for entry in entries):
        raise ShopGymError(
            f"env.memory: fetch of {type(memory).__name__} must return a list of MemoryEntry, got {one_line(entries)}"
        )
    return entries
