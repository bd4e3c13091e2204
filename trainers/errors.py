"""Why a run does not begin or ends early, as one clear line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from webshop_env.errors import ShopGymError


class CheckpointError(ShopGymError):
    """A checkpoint that is not there, or belongs to something else."""


def unreadable(checkpoint: Path, why: object) -> CheckpointError:
    """What to raise for a damaged checkpoint, in one line whatever the reason."""
    text = " ".join(str(why).split()) or type(why).__name__
    return CheckpointError(f"{checkpoint} cannot be read ({text}); go on from an earlier checkpoint")


class TrainingError(Exception):
    """The run cannot go on, and its settings were no mistake; command lines print it and exit with code 1."""

    def __init__(self, message: str, *, on_every_rank: bool = True) -> None:
        """`on_every_rank` says whether all ranks end with this line, so that the first one alone need tell it."""
        super().__init__(message)
        self.on_every_rank = on_every_rank


@contextmanager
def faults_told(place: str, advice: str) -> Iterator[None]:
    """Tells what the machine causes in the block in one line, for commands that have neither phases nor checkpoints.

    Args:
        place: Whose memory it may be.
        advice: What makes the command take less of it.
    """
    try:
        yield
    except (ShopGymError, TrainingError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            what = f"{place} is out of memory: {advice}"
        elif is_disk_full(error):
            what = f"the disk is full ({error}): make room"
        else:
            raise
        raise TrainingError(what, on_every_rank=False) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, NumPy or torch could not get memory, on the CPU or a GPU."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in ("out of memory", "allocate memory"))


def is_disk_full(error: BaseException) -> bool:
    """Whether a device or a quota has no room left, or a file may not grow."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # safetensors tells what the system said in a class of its own.
    texts = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]
    return type(error).__name__ == "SafetensorError" and any(text in str(error) for text in texts)
