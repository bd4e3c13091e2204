"""Dynamic sampling: groups whose episodes all end alike teach little; play on until enough groups differ.

The outcome decides, not the shaped reward: whether an episode was won, or its task score. The number of tries is
bounded, and other groups of the last try make up what is still missing. A try may play more groups than are wanted:
episodes side by side cost less than tries one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rollout.flatten import concatenate
from rollout.types import StepBatch

Outcome = Literal["won", "task_score"]


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """When to play on."""

    enable: bool = False
    """Off: one try, all of its groups."""
    max_num_gen_batches: int = 10
    """Most tries, at least 1, the first one included."""
    outcome: Outcome = "won"
    """What has to differ within a group: whether the episode was won, or its task score."""

    def __post_init__(self) -> None:
        if self.max_num_gen_batches < 1:
            raise ValueError(f"max_num_gen_batches must be at least 1, got {self.max_num_gen_batches}")
        if self.outcome not in get_args(Outcome):
            raise ValueError(f"outcome must be one of {', '.join(get_args(Outcome))}, got {self.outcome!r}")


def groups_that_differ(batch: StepBatch, outcome: Outcome | Literal["episode_return"] = "won") -> np.ndarray:
    """int64 [G'], rising: the groups in which not all episodes ended alike. A group of one episode never differs."""
    groups, group = np.unique(batch.group_id, return_inverse=True)
    values = np.asarray(getattr(batch, outcome), dtype=np.float64)
    highest, lowest = np.full(len(groups), -np.inf), np.full(len(groups), np.inf)
    np.maximum.at(highest, group, values)
    np.minimum.at(lowest, group, values)
    return groups[highest > lowest]


def collect_until_groups_differ(
    collect: Callable[[int], StepBatch], config: FilterConfig, *, num_groups: int
) -> tuple[StepBatch, dict[str, float]]:
    """Plays tries until `num_groups` groups differ or the bound is reached.

    Args:
        collect: Plays try t, from 0, and returns all of its rows. Episodes and groups of all tries are numbered
            differently. Over several ranks it returns the rows of all of them, so that all decide alike.
        config: Outcome and bound.
        num_groups: Groups that are wanted, at most those of one try.

    Returns:
        The rows to train on: the first `num_groups` groups that differ; where the bound comes first, those that did
        and the first others of the last try, as many groups in all. And figures (`filter/<what>`); when the filter is
        off, one unfiltered try and no figures.
    """
    if not config.enable:
        return collect(0), {}
    kept: list[StepBatch] = []
    num_missing, num_played, num_different = num_groups, 0, 0
    for attempt in range(config.max_num_gen_batches):
        batch = collect(attempt)
        groups, different = np.unique(batch.group_id), groups_that_differ(batch, config.outcome)
        num_played += len(groups)
        num_different += len(different)
        chosen = different[:num_missing]
        if attempt == config.max_num_gen_batches - 1:
            others = np.setdiff1d(groups, chosen)
            chosen = np.concatenate([chosen, others[: num_missing - len(chosen)]])
        kept.append(batch.select(np.isin(batch.group_id, chosen)))
        num_missing -= len(chosen)
        if num_missing == 0:
            break
    rows = concatenate(kept)
    return rows, {
        "filter/num_tries": float(attempt + 1),
        "filter/num_groups_played": float(num_played),
        "filter/num_groups_trained_on": float(len(np.unique(rows.group_id))),
        "filter/different_frac": num_different / num_played,
    }
