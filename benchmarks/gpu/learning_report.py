"""Table and curves of arms: what `learning.py report` prints and draws of the files that arms leave."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS

from trainers.estimates import (
    Estimate,
    cluster_estimate,
    mean_estimate,
    paired_share_estimate,
    runs_estimate,
    share_estimate,
)
from trainers.lost_steps import ENDS, KINDS
from webshop_env.errors import ShopGymError

PUBLISHED = (
    ("published: Qwen2.5-1.5B, GiGPO", 67.4, 83.5),
    ("published: Qwen2.5-1.5B, GRPO", 56.8, 75.8),
)
"""Success and score in percent; 150 updates of 362 s on two H100s, without imitation."""
MAIN = "gigpo"
"""The arm that others of the same place are compared with."""
Arm = dict[str, Any]


def read_arms(paths: Sequence[Path]) -> list[Arm]:
    """Files of arms, by name and seed; other JSON files are left out.

    Raises:
        ShopGymError: There is none among them, one cannot be read, or two are of one arm and seed.
    """
    contents = {path: _content(path) for path in paths}
    arms: list[Arm] = []
    files: dict[tuple[str, int], Path] = {}
    for path, content in contents.items():
        if not isinstance(content, dict) or "arm" not in content or not content.get("measurements"):
            continue
        other = files.setdefault((content["arm"], content["seed"]), path)
        if other != path:
            raise ShopGymError(
                f"report: {other} and {path} are both of {content['arm']}, seed {content['seed']}; leave one out"
            )
        arms.append(content)
    if not arms:
        raise ShopGymError("report: none of the files is an arm's; give those that learning.py arm wrote")
    return sorted(arms, key=lambda arm: (arm["arm"] != MAIN, arm["arm"], arm["seed"]))


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShopGymError(f"report: {path} cannot be read as JSON ({type(error).__name__}); leave it out") from None


def as_trained(arm: Arm) -> list[dict[str, Any]]:
    """Measurements under the decoding that the arm trains with, by updates."""
    constrained = arm["settings"]["actor_rollout_ref.rollout.constrained"]
    return [m for m in arm["measurements"] if m["constrained"] == constrained]


def success(arm: Arm, measurement: dict[str, Any]) -> Estimate:
    """Share of test goals won; the mean over products where the split keeps products apart."""
    won = np.asarray(measurement["won"], dtype=bool)
    return cluster_estimate(won, arm["goals"]["product"]) if by_product(arm) else share_estimate(won)


def score(arm: Arm, measurement: dict[str, Any]) -> Estimate:
    """Mean task score, taken over products in the same case."""
    scores = np.asarray(measurement["task_score"])
    return cluster_estimate(scores, arm["goals"]["product"]) if by_product(arm) else mean_estimate(scores, lowest=0.0)


def by_product(arm: Arm) -> bool:
    """Whether the arm's split keeps products apart."""
    return str(arm["goals"]["split_by"]) != "goal"


def ceiling(arm: Arm, ceilings: dict[str, Any]) -> dict[str, Any] | None:
    """What the oracle reaches on the arm's test goals; None where that was not measured for this catalogue."""
    version, goals = str(arm["goals"]["environment"]).removeprefix("WebShop-"), arm["goals"]
    for split in ceilings["splits"]:
        cut = "product:0" if goals["split_by"] == "product" else goals["split_by"]
        is_same = split["catalogue_hash"] == goals["catalogue_hash"] and split["num_test_goals"] == len(
            goals["product"]
        )
        if is_same and (split["version"], split["split_by"]) == (version, cut):
            return dict(split["oracle"])
    return None


def percent(estimate: Estimate) -> str:
    """A share in percent with its interval."""
    return f"{100 * estimate.mean:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def points(estimate: Estimate) -> str:
    """A difference in points with its interval."""
    return f"{100 * estimate.mean:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"


def results_table(arms: Sequence[Arm], ceilings: dict[str, Any]) -> str:
    """Markdown: a row an arm and seed, then what was published."""
    lines = [
        "| arm | seed | split | updates | s an update | GPU s | start: success (%) | success (%) | score (%) | "
        "oracle: success / score (%) | against gigpo (points) | unconstrained: success (%) |",
        "| --- " * 12 + "|",
    ]
    mains = {(arm["place"], arm["seed"]): arm for arm in arms if arm["arm"] == MAIN}
    for arm in arms:
        measured = as_trained(arm)
        first, last = measured[0], measured[-1]
        oracle = ceiling(arm, ceilings)
        name = "success by product" if by_product(arm) else "success"
        best = (
            ""
            if oracle is None
            else f"{100 * oracle[name]['mean']:.1f} / {100 * oracle[name.replace('success', 'score')]['mean']:.1f}"
        )
        main = mains.get((arm["place"], arm["seed"]))
        difference = ""
        if main is not None and main is not arm and main["goals"]["goal_id"] == arm["goals"]["goal_id"]:
            # Arms of unlike lengths are compared after as many updates, as near as there are measurements: seconds of
            # arms that shared a GPU are no measure. Of two as near the later one: it flatters least.
            beside = min(as_trained(main), key=lambda m: (abs(m["updates"] - last["updates"]), -m["updates"]))
            before, after = (np.asarray(m["won"], dtype=bool) for m in (beside, last))
            alike = beside["updates"] == last["updates"]
            when = f"after {last['updates']}" if alike else f"{last['updates']} against {beside['updates']}"
            difference = f"{points(paired_share_estimate(before, after))}, {when} updates"
        free = [m for m in arm["measurements"] if not m["constrained"] and m["updates"] == last["updates"]]
        seconds, over = arm["updates"]["wall_s"], " over products" if by_product(arm) else ""
        lines.append(
            f"| {arm['arm']} | {arm['seed']} | {arm['place']} | {last['updates']} | "
            f"{np.median(seconds) if seconds else float('nan'):.2f} | {last['train_s']:.0f} | "
            f"{percent(success(arm, first))} | {percent(success(arm, last))}{over} | "
            f"{percent(score(arm, last))} | {best} | "
            f"{difference} | {percent(success(arm, free[0])) if free and free[0] is not last else ''} |"
        )
    for name, won, scored in PUBLISHED:
        lines.append(f"| {name} | | | 150 | 362 | 108,600 | | {won} | {scored} | | | |")
    return "\n".join(lines)


def seeds_table(arms: Sequence[Arm]) -> str:
    """Markdown: mean and range over the seeds of arms that have several; "" where none has."""
    lines = []
    for name in dict.fromkeys(arm["arm"] for arm in arms):
        last = [success(arm, as_trained(arm)[-1]).mean for arm in arms if arm["arm"] == name]
        if len(last) > 1:
            lines.append(
                f"| {name} | {len(last)} | {100 * np.mean(last):.1f} | {100 * min(last):.1f} to {100 * max(last):.1f} |"
            )
    head = ["| arm | seeds | success, mean (%) | range (%) |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *lines]) if lines else ""


def cuts_table(arms: Sequence[Arm]) -> str:
    """Markdown: mean over the cuts of arms that differ in their cut alone; "" where none does.

    A cut is another choice of test products, and another training: the interval is over cuts.
    """
    lines = []
    of_cuts = [arm for arm in arms if by_product(arm)]
    for name, seed in dict.fromkeys((_without_cut(arm), arm["seed"]) for arm in of_cuts):
        mine = [arm for arm in of_cuts if (_without_cut(arm), arm["seed"]) == (name, seed)]
        last = [success(arm, as_trained(arm)[-1]).mean for arm in mine]
        if len(last) > 1:
            scores = [score(arm, as_trained(arm)[-1]).mean for arm in mine]
            lines.append(
                f"| {name} | {seed} | {len(last)} | {percent(runs_estimate(last, lowest=0.0))} | {100 * min(last):.1f} "
                f"to {100 * max(last):.1f} | {percent(runs_estimate(scores, lowest=0.0))} |"
            )
    head = [
        "| arm | seed | cuts | success over products, mean over cuts (%) | range (%) | score, the same (%) |",
        "| --- " * 6 + "|",
    ]
    return "\n".join([*head, *lines]) if lines else ""


def _without_cut(arm: Arm) -> str:
    return re.sub(r"_cut\d+", "", str(arm["arm"]))


def lost_table(arms: Sequence[Arm]) -> str:
    """Markdown: a column for each start and each arm's end, of its first seed; rows are shares in percent."""
    shown: list[str] = []
    columns: list[tuple[str, dict[str, Any]]] = []
    for arm in arms:
        if arm["arm"] in shown or not all(m.get("lost") for m in (as_trained(arm)[0], as_trained(arm)[-1])):
            continue
        shown.append(arm["arm"])
        for m in arm["measurements"]:  # arms of one start have it in common
            free = "" if m["constrained"] else ", unconstrained"
            if m["updates"] == 0 and m.get("lost") and all(m["lost"] != lost for _, lost in columns):
                columns.append((f"start of {arm['place']}{free}", m["lost"]))
        columns.append((f"{arm['arm']}, end", as_trained(arm)[-1]["lost"]))
    if not columns:
        return ""
    lines = [f"| | {' | '.join(name for name, _ in columns)} |", "| --- " * (len(columns) + 1) + "|"]

    def row(title: str, values: Sequence[str]) -> None:
        lines.append(f"| {title} | {' | '.join(values)} |")

    def share(part: float, whole: float) -> str:
        return f"{100 * part / whole:.1f}" if whole else ""

    row("steps", [f"{lost['num_steps']:,}" for _, lost in columns])
    row("malformed (% of steps)", [share(lost["malformed"], lost["num_steps"]) for _, lost in columns])
    for kind in KINDS:
        wanted = [lost["steps"][kind] for _, lost in columns]
        if any(map(sum, wanted)):
            row(
                f"{kind}: % of steps, of these not possible",
                [
                    f"{share(sum(pair), lost['num_steps'])}, {share(pair[1], sum(pair)) or 0}"
                    for pair, (_, lost) in zip(wanted, columns, strict=True)
                ],
            )
    row(
        "first search lists the product at once (% of episodes)",
        [share(lost["first_search_lists_it"], lost["num_episodes"]) for _, lost in columns],
    )
    for end in ENDS:
        row(f"{end} (% of episodes)", [share(lost["ends"][end], lost["num_episodes"]) for _, lost in columns])
    for part in ("type", "attributes", "options", "price"):
        row(
            f"bought without winning, {part} not met (% of episodes)",
            [share(lost["parts_missing"][part], lost["num_episodes"]) for _, lost in columns],
        )
    return "\n".join(lines)


def draw_curves(arms: Sequence[Arm], picture: Path) -> None:
    """Test success with intervals over updates and over seconds; splits that keep products apart have their own row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in ([a for a in arms if not by_product(a)], [a for a in arms if by_product(a)]) if row]
    figure, panels = pyplot.subplots(
        len(rows), 2, figsize=(14, 4.4 * len(rows)), dpi=120, sharex="col", sharey=True, squeeze=False
    )
    for row, axes in zip(rows, panels, strict=True):
        _draw_row(row, axes)
    panels[-1][0].set_xlabel("update")
    panels[-1][1].set_xlabel("seconds of training, one GPU")
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    pyplot.close(figure)


def _draw_row(arms: Sequence[Arm], panels: Sequence[Any]) -> None:
    colours = ("#1f6feb", "#d29922", "#2da44e", "#cf222e", "#8250df", "#57606a", "#bf3989", "#1b7c83", "#953800")
    styles = ("-", "--", ":", "-.", (0, (1, 3)))
    names = list(dict.fromkeys(_without_cut(arm) for arm in arms))
    splits = sorted({arm["goals"]["split_by"] for arm in arms})
    for axes, key in zip(panels, ("updates", "train_s"), strict=True):
        for arm in arms:
            name, split = _without_cut(arm), arm["goals"]["split_by"]
            dash, number = divmod(names.index(name), len(colours))  # more arms than colours
            colour, style = colours[number], styles[(dash + splits.index(split)) % len(styles)]
            is_first = arm is next(other for other in arms if _without_cut(other) == name)
            measured = as_trained(arm)
            means = [success(arm, m) for m in measured]
            places = [m[key] for m in measured]
            label = name if is_first else None
            axes.plot(places, [e.mean for e in means], color=colour, linestyle=style, marker=".", label=label)
            alpha = 0.1 if len(splits) == 1 else 0.03  # else many lie on each other
            axes.fill_between(
                places, [e.low for e in means], [e.high for e in means], color=colour, alpha=alpha, linewidth=0
            )
        if len(splits) > 1:
            for style, split in zip(styles, splits, strict=False):
                axes.plot([], [], color="#57606a", linestyle=style, label=f"split {split}")
        axes.axhline(PUBLISHED[0][1] / 100, color="#57606a", linestyle=":", linewidth=1)
        axes.text(0.99, PUBLISHED[0][1] / 100 + 0.01, "published GiGPO, 1.5B", ha="right", fontsize=8, color="#57606a",
                  transform=axes.get_yaxis_transform())  # fmt: skip
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test goals won, mean over products" if by_product(arms[0]) else "share of test goals won")
    panels[1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)  # beside the curves


def head(arms: Sequence[Arm]) -> str:
    """Where, when, with what and how the arms ran."""
    lines = []
    for arm in arms:
        versions = ", ".join(f"{name} {number}" for name, number in arm["versions"].items())
        hardware = arm["hardware"].get("gpu", arm["hardware"]["cpu"])
        lines.append(f"- {arm['arm']}, seed {arm['seed']}: {arm['date']}, {hardware}; {versions}; `{arm['command']}`")
    return "\n".join(lines)


def report(paths: Sequence[Path], out: Path) -> str:
    """Draws the curves into a directory and gives everything else as Markdown.

    Args:
        paths: Files of arms.
        out: Where `learning.png` goes.
    """
    arms = read_arms(paths)
    ceilings = json.loads((RESULTS / "oracle_ceiling.json").read_text(encoding="utf-8"))
    draw_curves(arms, out / "learning.png")
    parts = [
        head(arms),
        results_table(arms, ceilings),
        seeds_table(arms),
        cuts_table(arms),
        lost_table(arms),
        "![test success](learning.png)",
    ]
    return "\n\n".join(part for part in parts if part)
