"""SIGTERM and Ctrl-C as a wish: the update at hand is finished and saved, then the run ends well."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Self

from trainers.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalNotes:
    """Notes the signals that reach this process while it is entered; a second Ctrl-C ends the process at once.

    Outside the main thread (a run inside somebody's actor or notebook worker) Python delivers no signals: nothing is
    noted there.

    Attributes:
        is_noted: Whether one came.
    """

    def __init__(self) -> None:
        self.is_noted = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_noted:  # launchers and schedulers may repeat themselves while the process ends
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first, self.is_noted = not self.is_noted, True  # before the line: who reads it may send the next at once
        if is_first:
            name = signal.Signals(number).name
            line = f"\n{name}: the run ends after the update at hand, with a checkpoint (Ctrl-C ends it now)\n"
            os.write(2, line.encode())  # print is not safe inside a signal handler
        elif number == signal.SIGINT:
            signal.default_int_handler(number, frame)


class Interrupts(SignalNotes):
    """The wish to end a run, of whichever rank it reached.

    Attributes:
        is_asked: Whether `until_asked` stopped before its end, on every rank alike.
        is_asked_elsewhere: Looked at before each update: the wish may have reached the process that started the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.is_asked = False
        self.is_asked_elsewhere: Callable[[], bool] = bool
        self._ranks = ranks

    def until_asked(self, updates: Iterable[int]) -> Iterator[int]:
        """The updates, as long as no rank was asked to stop; every rank must go through them."""
        for update in updates:
            if self._ranks.any_of(self.is_noted or self.is_asked_elsewhere()):
                self.is_asked = True
                return
            yield update
