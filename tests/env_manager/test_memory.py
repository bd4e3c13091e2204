"""What episodes remember."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from env_manager import EnvConfig, EnvManager
from env_manager import memory as memory_module
from env_manager.memory import FullMemory, HistoryMemory, MemoryEntry, MemoryLimits, make_memory, register_memory
from webshop_env.errors import ShopGymError


def entries(*numbers: int) -> list[MemoryEntry]:
    return [MemoryEntry(n, f"page {n}", f"action {n}") for n in numbers]


def test_history_keeps_the_last_steps_oldest_first() -> None:
    memory = HistoryMemory(2)
    assert memory.fetch() == []
    for entry in entries(1, 2, 3):
        memory.store(entry)
    assert memory.fetch() == entries(2, 3)
    memory.reset()
    assert memory.fetch() == []


def test_a_length_of_zero_remembers_nothing() -> None:
    memory = make_memory("history", MemoryLimits(length=0))
    memory.store(entries(1)[0])
    assert memory.fetch() == []


def count_words(text: str) -> int:
    """Two words of chat template on top."""
    return len(text.split()) + 2


def test_a_full_memory_keeps_the_whole_episode() -> None:
    memory = make_memory("full", MemoryLimits(length=0))
    for entry in entries(1, 2, 3):
        memory.store(entry)
    assert memory.fetch() == entries(1, 2, 3), "the history length is not its limit"
    memory.reset()
    assert memory.fetch() == []


def test_a_full_memory_keeps_the_latest_steps_of_its_budget() -> None:
    memory = FullMemory(max_tokens=9, count_tokens=count_words)
    for entry in entries(1, 2, 3):  # four words each
        memory.store(entry)
    assert memory.fetch() == entries(2, 3)
    long = MemoryEntry(4, "word " * 4, "act")
    memory.store(long)
    assert memory.fetch() == [*entries(3), long], "5 + 4 words are 9"
    memory.store(MemoryEntry(5, "word " * 20, "act"))
    assert memory.fetch() == [], "a step is never shown in part, and what came before it is older"
    memory.store(entries(6)[0])
    assert memory.fetch() == entries(6)


def test_a_budget_of_tokens_needs_a_way_to_count_them() -> None:
    with pytest.raises(ShopGymError, match="count_tokens"):
        FullMemory(max_tokens=10)


def test_a_memory_of_ones_own_is_chosen_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory_of_mine.py").write_text(
        "from env_manager import register_memory\n"
        "from env_manager.memory import HistoryMemory\n"
        "register_memory('one', lambda limits: HistoryMemory(1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    memory = make_memory("memory_of_mine:one", MemoryLimits(length=5))
    for entry in entries(1, 2):
        memory.store(entry)
    assert memory.fetch() == entries(2)
    with pytest.raises(ShopGymError, match=r"env\.memory: 'nowhere_at_all:one' wants the module"):
        make_memory("nowhere_at_all:one", MemoryLimits())


def test_a_module_that_lacks_one_of_its_imports_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory_with_needs.py").write_text("import nowhere_at_all.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ShopGymError, match=r"'memory_with_needs' was found, but 'nowhere_at_all'.*install 'nowhere_at"):
        make_memory("memory_with_needs:one", MemoryLimits())


@pytest.mark.parametrize("make", [HistoryMemory(1), lambda: HistoryMemory(1), None])
def test_what_makes_no_memory_from_limits_is_refused(make: Any) -> None:
    with pytest.raises(ShopGymError, match=r"^register_memory: 'odd' needs a function from MemoryLimits to a memory"):
        register_memory("odd", make)


class OddMemory(HistoryMemory):
    """Fetches what it was told to."""

    fetched: Any = None

    def fetch(self) -> Any:
        return self.fetched


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    return lambda make: monkeypatch.setitem(memory_module._MEMORIES, "odd", make)


def test_a_memory_without_its_methods_is_refused(own_memory: Callable[[Any], None]) -> None:
    own_memory(lambda limits: object())
    with pytest.raises(ShopGymError, match=r"^env\.memory: 'odd' makes something without reset, store, fetch: <object"):
        EnvConfig(memory="odd")


@pytest.mark.parametrize("fetched", [None, "text", ["text"]])
def test_what_a_memory_fetches_must_be_entries(own_memory: Callable[[Any], None], fetched: Any) -> None:
    own_memory(lambda limits: OddMemory(1))
    OddMemory.fetched = fetched
    manager = EnvManager("FrozenLake-v1", 1, EnvConfig(memory="odd"))
    with pytest.raises(ShopGymError, match=r"^env\.memory: fetch of OddMemory must return a list of MemoryEntry, got "):
        manager.reset([0])


def test_an_unknown_memory_is_named() -> None:
    with pytest.raises(ShopGymError, match=r"env\.memory.*'elephant'.*history"):
        make_memory("elephant", MemoryLimits())
