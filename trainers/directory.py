"""The directory of a run: which one it is, and its settings inside, so that the run can go on from them.

A run that goes on with other settings keeps those of before as `settings.NNNNNN.yaml`, by the updates done until then;
metrics that it drops go to `superseded/`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from trainers.checkpoint import RunState, set_later_aside
from trainers.display import METRICS, read_metrics
from trainers.files import keep_copy, write_atomically
from trainers.ranks import Ranks
from trainers.settings import Settings, SettingsError, flatten


def run_directory(settings: Settings, *, but: Collection[Path] = ()) -> Path:
    """Where the run writes: that of the run resumed, the one asked for, or the next free one in outputs/ `but` some."""
    trainer = settings.trainer
    if trainer.resume_from:
        path = Path(trainer.resume_from).expanduser().resolve()
        return next(p for p in (path, *path.parents) if (p / SETTINGS).is_file())
    if trainer.output_dir:
        path = Path(trainer.output_dir).expanduser()
        if (path / SETTINGS).is_file():
            raise SettingsError(
                f"trainer.output_dir: {path} holds a run; go on with trainer.resume_from={path}, or name another"
            )
        if (path / CHECKPOINTS).is_dir():  # would be taken for those of the new run
            raise SettingsError(f"trainer.output_dir: {path} holds checkpoints of another run; name another place")
        return path
    name = trainer.experiment_name or Path(settings.recipe).stem
    path, number = Path("outputs") / name, 1
    while (path / SETTINGS).is_file() or (path / CHECKPOINTS).is_dir() or path in but:
        number += 1
        path = Path("outputs") / f"{name}-{number}"
    return path


@contextmanager
def only_writer(directory: Path, ranks: Ranks) -> Iterator[None]:
    """Keeps a run's directory from being written by two processes at once, where its file system knows locks.

    The lock goes with the process, however that ends; the empty file stays.

    Raises:
        SettingsError: Another process writes there; on every rank.
    """
    refusal = None
    with ExitStack() as held:
        if ranks.is_first:
            directory.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open(directory / LOCK, "a", encoding="utf-8"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refusal = f"{directory} is being written by another process: stop that first, or wait until it is done"
            except OSError:  # no locks there
                pass
        refusal = ranks.gather(refusal)[0]
        if refusal:
            raise SettingsError(refusal)
        yield


def shared_directory(settings: Settings, ranks: Ranks, *, but: Collection[Path] = ()) -> Path:
    """The run directory of all ranks: that of the first."""
    directory: Path = ranks.gather(run_directory(settings, but=but) if ranks.is_first else None)[0]
    return directory


def new_directory(settings: Settings, ranks: Ranks, held: ExitStack, undo: ExitStack) -> Path:
    """The directory of a new run, locked as `only_writer` does it until `held` ends.

    Of two runs that begin at the same moment one gets it before the other has written anything there. Where it had to
    be made, `undo` takes it away again as long as nothing but the lock is in it.

    Raises:
        SettingsError: The one asked for is another process's, or has become a run's; on every rank.
    """
    in_use: list[Path] = []
    while True:
        directory = shared_directory(settings, ranks, but=in_use)
        is_made = ranks.is_first and not directory.exists()
        with ExitStack() as locked:
            try:
                locked.enter_context(only_writer(directory, ranks))
            except SettingsError:
                if settings.trainer.output_dir:
                    raise
                in_use.append(directory)
                continue
            if shared_directory(settings, ranks, but=in_use) == directory:  # and nobody's run by now
                held.push(locked.pop_all())
                if is_made:
                    undo.callback(_discard, directory)
                return directory


def _discard(directory: Path) -> None:
    (directory / LOCK).unlink(missing_ok=True)
    with suppress(OSError):  # something is in it
        directory.rmdir()


def take_directory(directory: Path, settings: Settings, state: RunState) -> None:
    """Puts the settings into a run directory, after what must not be lost is out of the way; the first rank's work."""
    text = yaml.safe_dump(_saved(settings, directory), sort_keys=False, allow_unicode=True)
    file, done = directory / SETTINGS, state.updates_done
    if settings.trainer.resume_from:
        _keep_metrics(directory, done)
        set_later_aside(directory, done)
        if file.read_text(encoding="utf-8") != text:
            keep_copy(file, file.with_stem(f"{file.stem}.{done:06d}"))
    write_atomically(file, text)


def settings_before(settings: Settings, ranks: Ranks) -> dict[str, Any]:
    """What the run that is resumed had, by key; empty for a new run."""
    found: dict[str, Any] = {}
    if settings.trainer.resume_from and ranks.is_first:
        found = yaml.safe_load((run_directory(settings) / SETTINGS).read_text(encoding="utf-8"))
    return dict(ranks.gather(found)[0])


def change_notes(before: Mapping[str, Any], settings: Settings, updates_done: int) -> list[str]:
    """What to tell about a run that goes on with other settings than before: each of them, old and new."""
    now = _saved(settings, None)
    changed = [key for key in now if key in before and before[key] != now[key] and key not in _OF_THE_PLACE]
    notes = [f"{key} {before[key]} -> {now[key]} from update {updates_done + 1} on" for key in changed]
    notes += [
        f"with another {key} the goal order is another: some come again before all have come once"
        for key in ("trainer.seed", "data.sample_by")
        if key in changed
    ]
    return notes


SETTINGS = "settings.yaml"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
_OF_THE_PLACE = ("trainer.resume_from", "trainer.output_dir")
"""Settings that say where a run lies."""


def _saved(settings: Settings, directory: Path | None) -> dict[str, Any]:
    """The settings of a run as its directory keeps them."""
    saved = flatten(settings) | {"trainer.resume_from": None, "trainer.output_dir": str(directory)}
    for key in ("actor_rollout_ref.model.path", "env.webshop.data_dir", "data.train_files", "data.val_files"):
        saved[key] = from_anywhere(saved[key])
    return saved


def _keep_metrics(directory: Path, updates_done: int) -> None:
    """Keeps the metrics as they are in `superseded/`, if there are lines from after an update."""
    file = directory / METRICS
    last = max((int(line["update"]) for line in read_metrics(file)), default=0) if file.is_file() else 0
    if last > updates_done:
        keep_copy(file, directory / "superseded" / f"{file.stem}.{last:06d}{file.suffix}")


def from_anywhere(path: str | None) -> str | None:
    """The whole path of what is there, so that a run can be resumed from another working directory; else what came."""
    if not path:
        return path
    whole = Path(os.path.expandvars(path)).expanduser()
    return str(whole.resolve()) if whole.exists() else path
