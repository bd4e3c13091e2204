"""A rank's memory: how much of it is in use, for the metrics, and what Python need not search for garbage."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

GIB = 2.0**30
FULL_COLLECTION_AFTER = 200
"""Collections of younger objects between two of all objects: what 20 to 50 rollouts make. Python's own choice is 10."""


def memory_in_use(device: torch.device) -> dict[str, float]:
    """GiB by place: `process`, the resident memory of this process where the system tells it; `gpu`, what is taken on
    this rank's GPU by everything on it (engines keep memory that torch does not count)."""
    used = {}
    status = Path("/proc/self/statm")
    if status.is_file():
        used["process"] = int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used["gpu"] = (total - free) / GIB
    return used


@contextmanager
def little_garbage_collection() -> Iterator[None]:
    """Lets Python search for garbage among new objects as ever, but rarely among all of them.

    A rollout makes so many objects that it would be done in every other one and take a tenth of its time: shop, engine
    and caches are a million objects to look at. What exists by now is taken for needed until the end.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], max(FULL_COLLECTION_AFTER, thresholds[2]))
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
