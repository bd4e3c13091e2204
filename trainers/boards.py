"""Where metrics go besides the terminal and metrics.jsonl: TensorBoard, and Weights & Biases where asked for."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainers.files import write_atomically
from trainers.settings import Settings, SettingsError, flatten


class Board(Protocol):
    """Takes the lines of a run's metrics, by rising update."""

    def add(self, line: Mapping[str, float]) -> None:
        """Records the figures of a line; `update` is its place."""
        ...

    def close(self) -> None:
        """Writes what is buffered; nothing can be added afterwards."""
        ...


def require_boards(loggers: Sequence[str], *, is_first: bool) -> None:
    """Finds out early whether the boards that were asked for can be had; the first rank also logs in.

    Raises:
        SettingsError: W&B is not installed or knows no account.
    """
    if "wandb" not in loggers:
        return
    if importlib.util.find_spec("wandb") is None:
        raise SettingsError(
            "trainer.logger: wandb is not installed: pip install 'shopgym[wandb]', or leave it out of trainer.logger"
        )
    if is_first and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        try:
            wandb.login()
        except wandb.errors.Error as error:
            raise SettingsError(_why_no_wandb(error)) from None


def open_boards(settings: Settings, directory: Path, lines: Sequence[Mapping[str, float]]) -> list[Board]:
    """The boards of a run; the first rank's business alone.

    Args:
        settings: `trainer.logger` names the boards, the rest is shown by them.
        directory: Of the run.
        lines: Metrics of the part of the run that is gone on from; anything later is dropped where a board can.
    """
    boards: list[Board] = []
    if "tensorboard" in settings.trainer.logger:
        if importlib.util.find_spec("tensorboard") is None:
            print("note: TensorBoard is not installed; metrics go to metrics.jsonl only")
        else:
            boards.append(TensorBoard(directory / "tensorboard", lines))
    if "wandb" in settings.trainer.logger:
        boards.append(WeightsAndBiases(settings, directory))
    return boards


class TensorBoard:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, directory: Path, lines: Sequence[Mapping[str, float]]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=int(lines[-1]["update"]) + 1 if lines else None)

    def add(self, line: Mapping[str, float]) -> None:
        for name, value in line.items():
            if name != "update":
                self._writer.add_scalar(name, value, line["update"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run at wandb.ai, or in the run's `wandb/` with WANDB_MODE=offline; one that goes on stays one run."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        """Begins or goes on.

        Raises:
            SettingsError: The server cannot be reached, or refuses.
        """
        import wandb

        known = directory / "wandb_run_id.txt"
        if not known.is_file():
            write_atomically(known, secrets.token_hex(4) + "\n")
        try:
            self._run = wandb.init(
                project=settings.trainer.project_name,
                name=settings.trainer.experiment_name or directory.name,
                id=known.read_text(encoding="utf-8").strip(),
                dir=str(directory),
                config=flatten(settings),
                resume="allow",
                settings=wandb.Settings(console="off"),  # the terminal is ours
            )
        except wandb.errors.Error as error:
            raise SettingsError(_why_no_wandb(error)) from None
        # Lines come several to an update, and again when a run goes on from an earlier checkpoint: W&B's own counter
        # of steps would refuse those.
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def add(self, line: Mapping[str, float]) -> None:
        self._run.log(dict(line))

    def close(self) -> None:
        self._run.finish()


def _why_no_wandb(error: Any) -> str:
    why = " ".join(str(error).split())
    return f"trainer.logger: wandb: {why}; log in, set WANDB_MODE=offline, or leave wandb out of trainer.logger"
