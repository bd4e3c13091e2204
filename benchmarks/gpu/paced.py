"""A training run that is measured between its updates and ends after so many seconds of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import perf_counter

from trainers.interrupts import Interrupts
from trainers.ranks import Ranks


class PacedUpdates(Interrupts):
    """Lets something happen between two updates of the trainer's own loop, and ends it as a signal would.

    The loop asks its `Interrupts` for each update, so nothing of it has to be written twice here.
    """

    def __init__(self, ranks: Ranks, *, after: Callable[[int, float], None], is_over: Callable[[], bool]) -> None:
        """Takes what happens in between.

        Args:
            ranks: Of the run.
            after: Called after each update with their number so far and the seconds that it took.
            is_over: Asked before each update.
        """
        super().__init__(ranks)
        self._after, self._is_over = after, is_over

    def until_asked(self, updates: Iterable[int]) -> Iterator[int]:
        """The updates, until a signal or `is_over` ends them."""
        for update in super().until_asked(updates):
            if self._is_over():
                self.is_asked = True
                return
            began = perf_counter()
            yield update
            self._after(update + 1, perf_counter() - began)
