"""The learning curve of a run as lines that a template can draw.

Dimension: the lines of metrics.jsonl; those of training and those of validation hold different figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SIZE, SMALL_SIZE = (820, 290), (460, 190)
"""Width and height of the first chart and of the others."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 10, 28


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart."""

    label: str
    style: int
    """Which of the three looks it has."""
    path: str
    """SVG points, "x,y x,y"."""
    dots: tuple[tuple[float, float, str], ...]
    """x, y and what stands there in words."""
    bands: tuple[tuple[float, float, float], ...]
    """x and the two ends of an interval."""
    last: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with axes."""

    title: str
    width: int
    height: int
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    left: int = _LEFT

    @property
    def right(self) -> int:
        return self.width - _RIGHT

    @property
    def bottom(self) -> int:
        return self.height - _BOTTOM


_Lines = Sequence[Mapping[str, float]]
_MAIN = (
    ("rollouts", "rollout/success_frac", 0),
    ("validation", "validation/success_frac", 1),
    ("validation, score", "validation/task_score", 2),
)
_SMALL = (
    ("Score of rollouts", "rollout/task_score"),
    ("Episode length (steps)", "rollout/episode_length_steps"),
    ("Malformed replies (share)", "rollout/invalid_format_frac"),
    ("KL to the reference (nats)", "actor/kl_to_reference_nats"),
    ("Entropy (nats)", "actor/entropy_nats"),
    ("Gradient norm", "actor/grad_norm"),
    ("Clipped ratios (share)", "actor/ratio_clipped_frac"),
    ("Collecting (s)", "time/collect_s"),
)


def charts(lines: _Lines) -> list[Chart]:
    """Success with validation intervals first, then small charts of what else was measured."""
    if not lines:
        return []
    main = [(label, _points(lines, key), style) for label, key, style in _MAIN]
    made = [_chart("Success over updates", main, SIZE, y_range=(0.0, 1.0), bands=_intervals(lines))]
    for title, key in _SMALL:
        points = _points(lines, key)
        if points:
            made.append(_chart(title, [(title, points, 1)], SMALL_SIZE))
    return made


def _points(lines: _Lines, key: str) -> list[tuple[float, float]]:
    return [(line["update"], line[key]) for line in lines if key in line]


def _intervals(lines: _Lines) -> dict[float, tuple[float, float]]:
    low, high = "validation/success_low_frac", "validation/success_high_frac"
    return {line["update"]: (line[low], line[high]) for line in lines if low in line and high in line}


def _chart(
    title: str,
    rows: list[tuple[str, list[tuple[float, float]], int]],
    size: tuple[int, int],
    *,
    y_range: tuple[float, float] | None = None,
    bands: Mapping[float, tuple[float, float]] | None = None,
) -> Chart:
    width, height = size
    points = [point for _, row, _ in rows for point in row]
    first, last = min((x for x, _ in points), default=0.0), max((x for x, _ in points), default=1.0)
    y_low, y_high = y_range or _nice_range([y for _, y in points])

    def x_of(x: float) -> float:
        return round(_LEFT + (x - first) / max(last - first, 1e-9) * (width - _LEFT - _RIGHT), 1)

    def y_of(y: float) -> float:
        share = (min(max(y, y_low), y_high) - y_low) / (y_high - y_low)
        return round(height - _BOTTOM - share * (height - _TOP - _BOTTOM), 1)

    series = tuple(
        Series(
            label=label,
            style=style,
            path=" ".join(f"{x_of(x)},{y_of(y)}" for x, y in row),
            dots=tuple((x_of(x), y_of(y), f"update {x:g}: {label} {_number(y)}") for x, y in row)
            if style and len(row) <= 60
            else (),
            bands=tuple((x_of(x), y_of(lo), y_of(hi)) for x, (lo, hi) in (bands or {}).items()) if style == 1 else (),
            last=_number(row[-1][1]),
        )
        for label, row, style in rows
        if row
    )
    x_ticks = tuple((x_of(x), f"{x:g}") for x in _ticks(first, last, whole=True))
    y_ticks = tuple((y_of(y), _number(y)) for y in _ticks(y_low, y_high))
    return Chart(title, width, height, series, x_ticks, y_ticks)


def _nice_range(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low >= 0 and low < 0.5 * high:
        low = 0.0
    if high == low:
        high, low = high + (abs(high) or 1.0) * 0.5, low - (abs(low) or 0.0) * 0.5
    return low, high


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Four to eight round numbers from low to high."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    if whole:
        step = max(step, 1.0)
    start = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(start, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    if value == 0 or 0.001 <= abs(value) < 10_000:
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return f"{value:.2g}"
