"""What Python need not search for garbage while a run trains."""

from __future__ import annotations

import gc
import weakref

import pytest

from trainers import gigpo_fsdp
from trainers.memory import FULL_COLLECTION_AFTER, little_garbage_collection


class Knot:
    """Garbage that only a search finds: it holds itself."""

    def __init__(self) -> None:
        self.itself = self


def knot() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


def test_what_exists_is_left_alone_and_new_garbage_is_still_found() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    old = Knot()
    found = weakref.ref(old)
    with little_garbage_collection():
        assert gc.get_freeze_count() > frozen + 1000
        assert gc.get_threshold() == (*before[:2], FULL_COLLECTION_AFTER)
        del old
        new = knot()
        gc.collect(1)
        assert new() is None, "found among the young"
        assert found() is not None, "not looked at"
    assert gc.get_freeze_count() == 0 and gc.get_threshold() == before
    gc.collect()
    assert found() is None


def test_all_is_as_before_after_an_error_and_a_higher_threshold_stays() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(900, 5, 1000)
        with pytest.raises(KeyError), little_garbage_collection():
            assert gc.get_threshold() == (900, 5, 1000)
            raise KeyError
        assert gc.get_threshold() == (900, 5, 1000) and gc.get_freeze_count() == 0
    finally:
        gc.set_threshold(*before)


def test_training_does_so_from_its_first_update_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Ended(Exception):
        pass

    def look(run: object) -> None:
        seen.append(gc.get_freeze_count())
        raise Ended

    monkeypatch.setattr(gigpo_fsdp, "rollout_sampling", look)
    run = type("Run", (), {"settings": None, "log": None, "state": None})()
    with pytest.raises(Ended):
        gigpo_fsdp.train(run)
    assert seen[0] > 1000 and gc.get_freeze_count() == 0
