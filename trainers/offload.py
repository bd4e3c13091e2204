"""Optimizer state that waits on the CPU while nothing is optimised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def state_on(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """Brings the state of an optimizer to a device for the block, and to the CPU afterwards.

    On the CPU nothing moves. The first step makes its state where the weights are, and it leaves like any other.
    """
    _move(optimizer, device)
    try:
        yield
    finally:
        _move(optimizer, torch.device("cpu"))


def _move(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":  # AdamW counts on the CPU where it is not fused
                state[name] = value.to(device, non_blocking=device.type != "cpu")
