"""The processes of a run: one without a launcher, many under torchrun, the same code for both."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainers.settings import SettingsError


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who this process is among how many, and what it computes on."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        """True on the one rank that prints and writes files."""
        return self.rank == 0

    def block(self, num: int, *, ranks_per_share: int = 1) -> range:
        """A contiguous share of `num` items, sizes differing by at most one; so many neighbours have the same."""
        number = self.rank // ranks_per_share
        small, extra = divmod(num, self.world // ranks_per_share)
        start = number * small + min(number, extra)
        return range(start, start + small + (number < extra))

    def gather(self, item: Any) -> list[Any]:
        """The same item from every rank, by rank; all ranks must call it."""
        if self.world == 1:
            return [item]
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item)
        return items

    def sum(self, values: Sequence[float]) -> np.ndarray:
        """float64 sums over all ranks."""
        return np.sum([np.asarray(share, dtype=np.float64) for share in self.gather(list(values))], axis=0)

    def max(self, values: Sequence[float]) -> np.ndarray:
        """float64 maxima over all ranks."""
        return np.max([np.asarray(share, dtype=np.float64) for share in self.gather(list(values))], axis=0)

    def all_of(self, claim: bool) -> bool:
        """Whether it holds on every rank; all ranks must ask."""
        return all(self.gather(claim))

    def any_of(self, claim: bool) -> bool:
        """Whether it holds on some rank; all ranks must ask."""
        return any(self.gather(claim))

    def barrier(self) -> None:
        """Waits until all ranks are here."""
        if self.world > 1:
            dist.barrier()


def start_ranks(device: str = "auto") -> Ranks:
    """Joins the process group that torchrun set up, or makes one of a single process.

    Args:
        device: "auto" takes this rank's GPU where there is one; "cpu" or "cuda".

    Raises:
        SettingsError: "cuda" where torch sees no GPU.
    """
    use_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not use_gpu:
        raise SettingsError("device=cuda, but there is no GPU that torch can use")
    backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(place)
        torch.backends.cuda.enable_cudnn_sdp(False)  # plans anew, for tenths of a second, at every new shape
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    world = dist.get_world_size()
    return Ranks(dist.get_rank(), world, place, init_device_mesh(place.type, (world,)))


def stop_ranks() -> None:
    """Leaves the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def joined_ranks(device: str = "auto") -> Iterator[Ranks]:
    """The ranks of a block. They leave together: one that is still in a collective when another closes its connections
    may be aborted by the library's thread. After an error nobody is waited for: the others may never come.

    Args:
        device: As in `start_ranks`.
    """
    ranks = start_ranks(device)
    try:
        yield ranks
        ranks.barrier()
    finally:
        stop_ranks()


def leave_process(code: int = 0) -> None:
    """Ends a rank of many at once; does nothing in a process that is alone.

    Everything is written and the ranks have left their group when this is called. What is skipped is the interpreter's
    teardown: threads of the process group that let go of a tensor during it abort the process ("terminate called
    without an active exception", once in some twenty runs on two ranks), and torchrun then reports a finished run as
    failed.

    Args:
        code: Exit code.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def set_threads() -> None:
    """Shares the cores of the machine among its ranks; without a launcher OMP_NUM_THREADS has the last word.

    torchrun sets OMP_NUM_THREADS=1 by itself, whatever the number of cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if "LOCAL_WORLD_SIZE" in os.environ or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores // num_local_ranks))
    with suppress(RuntimeError):  # can only be set once, before any parallel work
        torch.set_num_interop_threads(1)
