"""What a run shows and leaves behind: console, metrics.jsonl, TensorBoard, a learning curve.

Rich, TensorBoard and Matplotlib are used where they are installed; metrics.jsonl is always written.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainers.files import write_atomically


class RunLog:
    """Shows progress and records metrics; silent and without files on all ranks but the first.

    Attributes:
        lines: All metrics so far, one dict per line of metrics.jsonl.
    """

    def __init__(
        self, run_dir: Path, *, total_updates: int, loggers: Sequence[str], lines: list[dict[str, Any]], is_first: bool
    ) -> None:
        """Opens the log.

        Args:
            run_dir: Where files go.
            total_updates: For the progress bar.
            loggers: "console", "tensorboard".
            lines: Metrics of the part of the run that is resumed; anything later on the disk is dropped.
            is_first: Whether this rank prints and writes.
        """
        self.lines = lines
        self._path = run_dir / "metrics.jsonl"
        self._is_first = is_first
        self._seconds: dict[str, float] = {}
        self._console = _Console(total_updates) if is_first and "console" in loggers else None
        self._board = _open_board(run_dir / "tensorboard", lines) if is_first and "tensorboard" in loggers else None
        if is_first:
            write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in lines))

    @contextmanager
    def phase(self, name: str, update: int) -> Iterator[None]:
        """Shows what is going on, and adds its time to the update's `time/<name>_s`."""
        if self._console:
            self._console.show_phase(name, update)
        began = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def log(self, updates_done: int, metrics: dict[str, float]) -> None:
        """Records a line of metrics with the times of the phases since the last one."""
        times = {f"time/{name}_s": round(seconds, 3) for name, seconds in self._seconds.items()}
        self._seconds.clear()
        line = {"update": updates_done, **metrics, **times}
        self.lines.append(line)
        if not self._is_first:
            return
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._board:
            for name, value in line.items():
                if name != "update":
                    self._board.add_scalar(name, value, updates_done)
        if self._console:
            self._console.show_line(line)

    def say(self, text: str) -> None:
        """Prints a line, above the progress bar where there is one."""
        if self._console:
            self._console.say(text)
        elif self._is_first:
            print(text, flush=True)

    def close(self) -> None:
        """Ends the display and flushes what is buffered."""
        if self._console:
            self._console.close()
        if self._board:
            self._board.close()


class _Console:
    """Rich's progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, total_updates: int) -> None:
        self._total = total_updates
        self._progress = self._task = None
        if sys.stdout.isatty():
            with suppress(ImportError):
                from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

                self._progress = Progress(
                    TextColumn("update {task.completed}/{task.total}"),
                    BarColumn(),
                    TextColumn("{task.description}"),
                    TimeElapsedColumn(),
                    TextColumn("left"),
                    TimeRemainingColumn(),
                )
                self._task = self._progress.add_task("", total=total_updates)
                self._progress.start()

    def show_phase(self, name: str, update: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=name, completed=update)

    def show_line(self, line: dict[str, Any]) -> None:
        if "validation/success_frac" in line:
            self.say(
                f"update {line['update']}/{self._total}  validation: success {line['validation/success_frac']:.3f} "
                f"[{line['validation/success_low_frac']:.3f}, {line['validation/success_high_frac']:.3f}]  "
                f"score {line['validation/task_score']:.3f}  n={line['validation/num_goals']:.0f}  "
                f"{line.get('time/validate_s', 0):.1f} s"
            )
        else:
            seconds = sum(value for name, value in line.items() if name in _PHASE_TIMES)
            learned = "no update: every advantage is 0"
            if not line.get("actor/update_skipped"):
                learned = (
                    f"kl {line['actor/kl_to_reference_nats']:.4f}  entropy {line['actor/entropy_nats']:.3f}  "
                    f"clipped {line['actor/ratio_clipped_frac']:.3f}  grad {line['actor/grad_norm']:.2f}"
                )
            self.say(
                f"update {line['update']}/{self._total}  success {line['rollout/success_frac']:.3f}  "
                f"score {line['rollout/task_score']:.3f}  steps {line['rollout/episode_length_steps']:.1f}  "
                f"{learned}  {seconds:.1f} s"
            )

    def say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


_PHASE_TIMES = tuple(f"time/{name}_s" for name in ("collect", "old_log_probs", "reference", "learn", "load"))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl; a last line that a kill cut short is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(text))
    return lines


def draw_curve(metrics: Path, picture: Path) -> bool:
    """Draws success over updates, rollouts and validations with their 95 % intervals.

    Returns:
        False where Matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_metrics(metrics)
    rollouts = [line for line in lines if "rollout/success_frac" in line]
    checks = [line for line in lines if "validation/success_frac" in line]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(
        [line["update"] for line in rollouts],
        [line["rollout/success_frac"] for line in rollouts],
        color="#9aa5b1",
        linewidth=1.2,
        label="rollouts, temperature of training",
    )
    if checks:
        means = [line["validation/success_frac"] for line in checks]
        low = [m - line["validation/success_low_frac"] for m, line in zip(means, checks, strict=True)]
        high = [line["validation/success_high_frac"] - m for m, line in zip(means, checks, strict=True)]
        axes.errorbar(
            [line["update"] for line in checks],
            means,
            yerr=[low, high],
            color="#1f6feb",
            marker="o",
            capsize=3,
            label=f"validation, {checks[0]['validation/num_goals']:.0f} goals, 95 % intervals",
        )
        axes.plot(
            [line["update"] for line in checks],
            [line["validation/task_score"] for line in checks],
            color="#d29922",
            linestyle="--",
            marker=".",
            label="validation, task score",
        )
    axes.set_xlabel("update")
    axes.set_ylabel("share of episodes won, or score")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    figure.tight_layout()
    scratch = picture.with_name(f".{os.getpid()}-{picture.name}")
    figure.savefig(scratch)
    pyplot.close(figure)
    os.replace(scratch, picture)
    return True


def _open_board(directory: Path, lines: Sequence[dict[str, Any]]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("note: TensorBoard is not installed; metrics go to metrics.jsonl only")
        return None
    return SummaryWriter(str(directory), purge_step=lines[-1]["update"] + 1 if lines else None)
