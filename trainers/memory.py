"""How much memory a rank has in use, for the metrics."""

from __future__ import annotations

import os
from pathlib import Path

import torch

GIB = 2.0**30


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
