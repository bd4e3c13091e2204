"""Why a run does not begin or ends early, as one clear line."""

from __future__ import annotations

from webshop_env.errors import ShopGymError


class CheckpointError(ShopGymError):
    """A checkpoint that is not there, or belongs to something else."""


class TrainingError(Exception):
    """The run cannot go on, and its settings were no mistake; command lines print it and exit with code 1."""

    def __init__(self, message: str, *, on_every_rank: bool = True) -> None:
        """`on_every_rank` says whether all ranks end with this line, so that the first one alone need tell it."""
        super().__init__(message)
        self.on_every_rank = on_every_rank
