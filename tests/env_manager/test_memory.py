"""What episodes remember."""

from __future__ import annotations

import pytest

from env_manager.memory import HistoryMemory, MemoryEntry, MemoryLimits, make_memory
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


def test_an_unknown_memory_is_named() -> None:
    with pytest.raises(ShopGymError, match=r"env\.memory.*'elephant'.*history"):
        make_memory("elephant", MemoryLimits())
