"""Whole episodes that a run leaves behind for the viewer: those of validations, and what some updates learn from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.storage import save_batch
from rollout.types import StepBatch
from trainers.advantages import AdvantageConfig, episode_advantages, step_advantages
from trainers.settings import EnvSettings
from webshop_env.errors import ShopGymError
from webshop_env.shop import Shop

if TYPE_CHECKING:
    from trainers.run import Run
    from trainers.worlds import World


def keep_rows(run: Run, update: int, batch: StepBatch) -> None:
    """Keeps what the first, the last and each update before a validation learn from, in `rollouts/`.

    Args:
        run: Where to.
        update: Pass of the main loop, from 0.
        batch: With advantages.
    """
    number, trainer = update + 1, run.settings.trainer
    is_checked = trainer.test_freq > 0 and number % trainer.test_freq == 0
    if run.ranks.is_first and (is_checked or number in (1, trainer.total_updates)):
        path = run.directory / "rollouts" / f"update_{number:06d}.parquet"
        with can_do_without(run):
            write_rows(run, batch, path, AdvantageConfig.of(run.settings))


@contextmanager
def can_do_without(run: Run) -> Iterator[None]:
    """Warns once where what the block writes, files for people, cannot be written; the run goes on without them."""
    try:
        yield
    except (ShopGymError, OSError) as error:
        run.log.warn_once("files for people", f"{error}; the run goes on without such files for the viewer")


def write_rows(run: Run, batch: StepBatch, path: Path, config: AdvantageConfig | None = None) -> Path:
    """Writes rows with their prompts and replies as text and, once they have advantages, the two parts of each.

    Padding is left out, and so are parts that do not make up the advantage (other estimators, a KL in the reward).

    Args:
        run: Whose tokenizer and environment they are of.
        batch: Any rows.
        path: A file that is replaced.
        config: How the batch's advantages were made; None leaves the parts out.
    """
    batch = batch.select(np.flatnonzero(batch.row_weight > 0))
    extra: dict[str, Any] = {
        "prompt": run.tokenizer.batch_decode(list(batch.prompt_ids), skip_special_tokens=True),
        "reply": run.tokenizer.batch_decode(list(batch.reply_ids), skip_special_tokens=True),
    }
    if config is not None and batch.advantage is not None:
        episode = episode_advantages(batch, config)
        step = np.float32(config.step_advantage_w) * step_advantages(batch, config)
        if np.allclose(episode + step, batch.advantage, atol=1e-5):
            extra |= {"episode_advantage": episode, "step_advantage": step}
    return save_batch(batch, path, extra=extra, world=world_record(run.settings.env, run.world))


def world_record(env: EnvSettings, world: World) -> dict[str, Any]:
    """What was played in, for files: enough to make such an environment again where its catalogue is."""
    record: dict[str, Any] = {"env_id": env.env_name, "catalogue_hash": world.catalogue_hash, "settings": {}}
    if isinstance(world, Shop):
        names = ("goals", "split_by", "search", "preseed", "num_products", "variant", "limit_goals")
        record["settings"] = {name: world.settings[name] for name in names} | {"max_steps": env.max_steps}
    return record
