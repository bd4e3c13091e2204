"""A number of rows that micro-batches and ranks divide, made as the published code makes it, for comparison with it.

Nothing here needs it: a mini-batch may have any number of rows. The published code repeats random rows, or removes
some, until the number is a multiple of what each rank takes at once. Repeated rows count twice in every mean over rows,
in the figures of the rollout too.

Dimension: N rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rollout.types import StepBatch
from trainers.advantages import discounted_returns
from trainers.settings import DataSettings, RowMode, Settings, SettingsError

_ROW_CHOICE = 3
"""Keeps the seeds of this choice apart from those of the row order and of the goal order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowConfig:
    """How many rows an update may have."""

    row_mode: RowMode = DataSettings.row_mode
    """`pad` leaves the rows as they are; `copy` repeats some, `delete` removes some."""
    multiple: int = 1
    """What the number of rows has to be a multiple of."""
    gamma: float
    """Discount of the returns, which cannot be computed any more once rows are repeated or gone."""

    @classmethod
    def of(cls, settings: Settings, *, num_ranks: int) -> RowConfig:
        """What the settings of a run say: the least common multiple of the three micro-batches, times the ranks.

        Raises:
            SettingsError: A rollout of one step an episode would be removed as a whole.
        """
        roles = settings.actor_rollout_ref
        multiple = num_ranks * math.lcm(
            roles.rollout.log_prob_micro_batch_size_per_gpu,
            roles.ref.log_prob_micro_batch_size_per_gpu,
            roles.actor.ppo_micro_batch_size_per_gpu,
        )
        num_episodes = settings.data.train_batch_size * settings.env.rollout.n
        if settings.data.row_mode == "delete" and num_episodes < multiple:
            raise SettingsError(
                f"data.row_mode=delete keeps a multiple of {multiple} rows (the micro-batches of "
                f"actor_rollout_ref.actor, .rollout and .ref, on {num_ranks} ranks), and {num_episodes} episodes may "
                "have fewer; take smaller micro-batches, more episodes, or data.row_mode=copy"
            )
        return cls(row_mode=settings.data.row_mode, multiple=multiple, gamma=settings.algorithm.gamma)


def with_row_mode(batch: StepBatch, config: RowConfig, *, seed: int, update: int) -> tuple[StepBatch, dict[str, float]]:
    """The rows with some repeated at the end, or some removed, and figures of that.

    Args:
        batch: Whole episodes. The result has `discounted_return`, from before anything was repeated or removed.
        config: The mode; with `pad` the batch comes back as it is.
        seed: With `update`, names the choice, which is the same on every rank.
        update: Number of the update.
    """
    remainder = len(batch) % config.multiple
    if config.row_mode == "pad" or remainder == 0:
        return batch, {}
    returns = discounted_returns(batch.reward, batch.episode_id, batch.step_index, gamma=config.gamma)
    batch = replace(batch, discounted_return=returns)
    rng, rows = np.random.default_rng((_ROW_CHOICE, seed, update)), np.arange(len(batch))
    if config.row_mode == "copy":
        num = config.multiple - remainder
        copies = rng.choice(rows, num, replace=num > len(rows))
        return batch.select(np.r_[rows, copies]), {"rollout/num_copied_rows": float(num)}
    removed = rng.choice(rows, remainder, replace=False)
    return batch.select(np.setdiff1d(rows, removed)), {"rollout/num_deleted_rows": float(remainder)}
