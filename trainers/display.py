"""What a run shows and leaves behind: the terminal, metrics.jsonl, warnings, a learning curve.

Rich and Matplotlib are used where they are installed; metrics.jsonl is always written.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainers.boards import Board
from trainers.files import write_atomically
from trainers.trouble import TroubleWatch

METRICS = "metrics.jsonl"
"""File of a run directory."""


class RunLog:
    """Shows progress and records metrics; silent and without files on all ranks but the first.

    Attributes:
        lines: All metrics so far, one dict per line of metrics.jsonl.
        current_phase: Name of the phase that goes on, or of the last one.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        total_updates: int,
        lines: list[dict[str, Any]],
        is_first: bool,
        memory: Callable[[], dict[str, float]] = dict,
        console: bool = True,
        boards: Sequence[Board] = (),
    ) -> None:
        """Opens the log.

        Args:
            run_dir: Where files go.
            total_updates: For the progress bar and the time left.
            lines: Metrics of the part of the run that is resumed; anything later on the disk is dropped.
            is_first: Whether this rank prints and writes.
            memory: GiB in use by place, asked before and after each phase.
            console: Whether each line is shown; what is said, warnings among it, always is.
            boards: Where the lines go as well.
        """
        self.lines = lines
        self.current_phase = "open"
        self._path = run_dir / METRICS
        self._is_first = is_first
        self._seconds: dict[str, float] = {}
        self._memory = memory
        self._used: dict[str, float] = {}
        self._trouble = TroubleWatch(lines)
        self._warned: set[str] = set()
        self._boards = boards
        done = int(lines[-1]["update"]) if lines else 0
        self._console = _Console(total_updates, done) if is_first and console else None
        if is_first:
            write_atomically(self._path, "".join(_json_line(line) for line in lines))

    @contextmanager
    def phase(self, name: str, update: int) -> Iterator[None]:
        """Shows what is going on, and adds its time to the update's `time/<name>_s`.

        Memory in use is noted as `memory/<name>_before_<place>_gib` and `memory/<name>_after_<place>_gib`.
        """
        self.current_phase = name
        if self._console:
            self._console.show_phase(name, update)
        self._note_memory(f"{name}_before")
        began = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
        self._note_memory(f"{name}_after")

    def log(self, updates_done: int, metrics: dict[str, float]) -> None:
        """Records a line of metrics with the times of the phases since the last one, and warns of troubles."""
        times = {f"time/{name}_s": round(seconds, 3) for name, seconds in self._seconds.items()}
        self._seconds.clear()
        line = {"update": updates_done, **metrics, **times, **self._used}
        self._used.clear()
        if line.get("time/collect_s") and "rollout/generated_tokens" in line:
            line["time/collect_tokens_per_s"] = round(line["rollout/generated_tokens"] / line["time/collect_s"], 1)
        self.lines.append(line)
        if not self._is_first:
            return
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(_json_line(line))
        for board in self._boards:
            board.add(line)
        if self._console:
            self._console.show_line(line)
        for trouble in self._trouble.look(line):
            self.say(f"warning: {trouble}")

    def _note_memory(self, when: str) -> None:
        self._used |= {f"memory/{when}_{place}_gib": round(size, 3) for place, size in self._memory().items()}

    def say(self, text: str) -> None:
        """Prints a line, above the live view where there is one."""
        if self._console:
            self._console.say(text)
        elif self._is_first:
            print(text, flush=True)

    def warn_once(self, topic: str, text: str) -> None:
        """Warns of something, and never again of the same topic."""
        if topic not in self._warned:
            self._warned.add(topic)
            self.say(f"warning: {text}")

    def close(self) -> None:
        """Ends the display and flushes what is buffered."""
        if self._console:
            self._console.close()
        for board in self._boards:
            board.close()


class _Console:
    """One plain line for each line of metrics; on a terminal with Rich also a live view of the run below them."""

    def __init__(self, total_updates: int, updates_done: int) -> None:
        self._total, self._first = total_updates, updates_done
        self._began: float | None = None
        self._view: _LiveView | None = None
        if sys.stdout.isatty():
            with suppress(ImportError):
                self._view = _LiveView(total_updates, updates_done)

    def show_phase(self, name: str, update: int) -> None:
        if self._began is None and name != "validate":  # the first validation is no part of any update
            self._began = time.perf_counter()
        if self._view:
            self._view.show_phase(name, update)

    def show_line(self, line: dict[str, Any]) -> None:
        place = f"update {line['update']}/{self._total}"
        if "validation/success_frac" in line:
            shown = _validation_text(line)
            self.say(f"{place}  {shown}  {line.get('time/validate_s', 0):.1f} s")
        else:
            left = self._time_left(line["update"])
            seconds = sum(value for name, value in line.items() if name in _PHASE_TIMES)
            speed = line.get("time/collect_tokens_per_s")
            self.say(
                f"{place}  success {line['rollout/success_frac']:.3f}  "
                f"score {line['rollout/task_score']:.3f}  steps {line['rollout/episode_length_steps']:.1f}  "
                f"{_learning_text(line)}  {seconds:.1f} s"
                + (f"  {speed:.0f} tokens/s" if speed else "")
                + (f"  {left} left" if left else "")
            )
        if self._view:
            self._view.show_line(line, self._time_left(line["update"]))

    def say(self, text: str) -> None:
        if self._view:
            self._view.say(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._view:
            self._view.close()

    def _time_left(self, update: int) -> str:
        """What the remaining updates will take if they are as long as those of this process so far; "" if unknown."""
        num_done = update - self._first
        if self._began is None or num_done <= 0 or update >= self._total:
            return ""
        seconds = (time.perf_counter() - self._began) / num_done * (self._total - update)
        if seconds < 100:
            return f"{seconds:.0f} s"
        return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class _LiveView:
    """Rich's view of a run: a bar with phase and time left, the latest figures, the latest validation."""

    FIGURES = (
        ("success", "rollout/success_frac", ".3f"),
        ("score", "rollout/task_score", ".3f"),
        ("KL", "actor/kl_to_reference_nats", ".4f"),
        ("clipped", "actor/ratio_clipped_frac", ".3f"),
        ("entropy", "actor/entropy_nats", ".3f"),
        ("tokens/s", "time/collect_tokens_per_s", ".0f"),
    )

    def __init__(self, total_updates: int, updates_done: int) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("update {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._task = self._progress.add_task("", total=total_updates, completed=updates_done, left="")
        self._figures = self._validation = ""
        self._live = Live(get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        texts = [Text(text, overflow="ellipsis", no_wrap=True) for text in (self._figures, self._validation) if text]
        return Group(self._progress, *texts)

    def show_phase(self, name: str, update: int) -> None:
        self._progress.update(self._task, description=name.replace("_", " "), completed=update)

    def show_line(self, line: dict[str, Any], left: str) -> None:
        self._progress.update(self._task, completed=line["update"], left=f"{left} left" if left else "")
        if "validation/success_frac" in line:
            self._validation = f"update {line['update']}: {_validation_text(line)}"
            return
        self._figures = "  ".join(
            f"{name} {format(line[key], form) if key in line else '-'}" for name, key, form in self.FIGURES
        )

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._live.stop()


_PHASE_TIMES = tuple(f"time/{name}_s" for name in ("collect", "old_log_probs", "reference", "learn", "load"))


def _validation_text(line: dict[str, Any]) -> str:
    return (
        f"validation: success {line['validation/success_frac']:.3f} "
        f"[{line['validation/success_low_frac']:.3f}, {line['validation/success_high_frac']:.3f}]  "
        f"score {line['validation/task_score']:.3f}  n={line['validation/num_goals']:.0f}"
    )


def _learning_text(line: dict[str, Any]) -> str:
    if line.get("actor/update_skipped"):
        return "no update: every advantage is 0"
    kl = line.get("actor/kl_to_reference_nats")  # there is none without a reference
    return ("" if kl is None else f"kl {kl:.4f}  ") + (
        f"entropy {line['actor/entropy_nats']:.3f}  "
        f"clipped {line['actor/ratio_clipped_frac']:.3f}  grad {line['actor/grad_norm']:.2f}"
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl, NaN where it has null; a last line that a kill cut short is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            line = json.loads(text)
            lines.append({name: float("nan") if value is None else value for name, value in line.items()})
    return lines


def _json_line(line: dict[str, Any]) -> str:
    """A line of metrics.jsonl; what is no finite number is null, which JSON has a word for."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


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
        # Rounding may put an end on the wrong side of the mean, by next to nothing; pyplot refuses that.
        low = [max(0.0, m - line["validation/success_low_frac"]) for m, line in zip(means, checks, strict=True)]
        high = [max(0.0, line["validation/success_high_frac"] - m) for m, line in zip(means, checks, strict=True)]
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
