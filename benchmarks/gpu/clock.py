"""How long phases of work on a device take, how busy they keep it, and how much of its memory they need."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class Clock:
    """Seconds and peak memory of phases, GPU work included."""

    def __init__(self, device: torch.device, gauge: BusyGauge | None = None) -> None:
        self.device, self.gauge = device, gauge
        self.seconds: dict[str, float] = {}
        self.peak_gib: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._wait()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.gauge is not None:
            self.gauge.phase = name
        began = time.perf_counter()
        yield
        self._wait()
        self.seconds[name] = time.perf_counter() - began
        if self.device.type == "cuda":
            self.peak_gib[name] = torch.cuda.max_memory_allocated(self.device) / 2**30

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class BusyGauge:
    """How much of the time a kernel ran, by the driver's own account, while a phase was going on, and how much memory
    was taken then, by whatever process and library: torch's own account holds what an engine has that is asleep.

    The driver tells shares of its last sixth of a second or so: phases of a second and more are what this is good for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phase = ""
        self.percent: dict[str, list[int]] = {}
        self.used_gib: dict[str, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> BusyGauge:
        if self.device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def pop(self) -> dict[str, float]:
        """Mean share by phase since this was last asked."""
        found, self.percent = self.percent, {}
        return {phase: round(float(np.mean(values)) / 100, 3) for phase, values in found.items()}

    def pop_memory(self) -> dict[str, float]:
        """Most GiB taken by phase since this was last asked."""
        found, self.used_gib = self.used_gib, {}
        return {phase: round(used, 2) for phase, used in found.items()}

    def _watch(self) -> None:
        while not self._is_over.wait(0.2):
            free, total = torch.cuda.mem_get_info(self.device)
            self.used_gib[self.phase] = max(self.used_gib.get(self.phase, 0.0), (total - free) / 2**30)
            try:
                percent = torch.cuda.utilization(self.device)
            except (ModuleNotFoundError, RuntimeError):  # there is no library to ask
                return
            self.percent.setdefault(self.phase, []).append(percent)
