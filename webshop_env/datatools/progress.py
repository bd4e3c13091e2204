"""A bar for what takes minutes: on a terminal it moves, in a log it is a line now and then."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import TracebackType

BAR_CHARS = 24


class Progress:
    """Shows on stderr how much is done; a context, so that the bar goes away at the end. What is quick shows nothing.

    Args:
        label: What is being done.
        total: How much there is to do, in any unit.
        delay_s: Show nothing before that.
    """

    def __init__(self, label: str, total: int, *, delay_s: float = 1.0) -> None:
        self._label, self._total = label, max(total, 1)
        self._is_terminal = sys.stderr.isatty()
        self._interval_s = 0.2 if self._is_terminal else 15.0
        self._started_s = time.monotonic()
        self._next_s = self._started_s + (delay_s if self._is_terminal else self._interval_s)
        self._is_shown = False

    def __call__(self, done: int) -> None:
        """Tell how much is done by now."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s, self._is_shown = now_s + self._interval_s, True
        frac = min(done / self._total, 1.0)
        passed_s = now_s - self._started_s
        left = f", {_clock(passed_s / frac - passed_s)} left" if frac > 0.02 else ""
        if self._is_terminal:
            bar = "#" * round(frac * BAR_CHARS)
            _show(f"\r{self._label} [{bar:<{BAR_CHARS}}] {frac:4.0%}  {_clock(passed_s)}{left}\x1b[K")
        else:
            _show(f"{self._label}: {frac:.0%} after {_clock(passed_s)}{left}\n")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown and self._is_terminal:
            _show("\r\x1b[K")


def _show(text: str) -> None:
    with suppress(OSError):  # nobody looks any more, as after `2>&1 | head`; that is no reason to stop
        sys.stderr.write(text)
        sys.stderr.flush()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
