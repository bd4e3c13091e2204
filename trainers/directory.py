"""The directory of a run: which one it is, and its settings inside, so that the run can go on from them."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from trainers.checkpoint import RunState, set_later_aside
from trainers.files import write_atomically
from trainers.ranks import Ranks
from trainers.settings import Settings, SettingsError, flatten


def run_directory(settings: Settings) -> Path:
    """Where the run writes: that of the run resumed, the one asked for, or the next free one in outputs/."""
    trainer = settings.trainer
    if trainer.resume_from:
        path = Path(trainer.resume_from).expanduser().resolve()
        return next(p for p in (path, *path.parents) if (p / "settings.yaml").is_file())
    if trainer.output_dir:
        path = Path(trainer.output_dir).expanduser()
        if (path / "settings.yaml").is_file():
            raise SettingsError(
                f"trainer.output_dir: {path} holds a run; go on with trainer.resume_from={path}, or name another"
            )
        return path
    name = trainer.experiment_name or Path(settings.recipe).stem
    path, number = Path("outputs") / name, 1
    while (path / "settings.yaml").is_file():
        number += 1
        path = Path("outputs") / f"{name}-{number}"
    return path


def take_directory(settings: Settings, ranks: Ranks, state: RunState) -> Path:
    """Makes the run directory of all ranks, with the settings inside; the first writing of a run."""
    directory: Path = ranks.gather(run_directory(settings) if ranks.is_first else None)[0]
    if ranks.is_first:
        if settings.trainer.resume_from:
            set_later_aside(directory, state.updates_done)
        saved = flatten(settings) | {"trainer.resume_from": None, "trainer.output_dir": str(directory)}
        for key in ("actor_rollout_ref.model.path", "env.webshop.data_dir", "data.train_files", "data.val_files"):
            saved[key] = from_anywhere(saved[key])
        write_atomically(directory / "settings.yaml", yaml.safe_dump(saved, sort_keys=False, allow_unicode=True))
    return directory


def from_anywhere(path: str | None) -> str | None:
    """The whole path of what is there, so that a run can be resumed from another working directory; else what came."""
    if not path:
        return path
    whole = Path(os.path.expandvars(path)).expanduser()
    return str(whole.resolve()) if whole.exists() else path
