"""Does one advantage estimator learn more than another from the same budget?

    python benchmarks/compare_estimators.py                            GRPO and GiGPO, the default run, 3 seeds each
    python benchmarks/compare_estimators.py --runs DIR                 with runs that DIR holds; the others are made
    python benchmarks/compare_estimators.py --runs DIR --collect       with these alone
    python benchmarks/compare_estimators.py data.train_batch_size=8    with other settings, the same for all runs

Runs of one seed start from the same policy, play the same goals in the same order and are validated on the same goals
with the same noise, so that they are compared goal by goal. Over seeds, a goal counts once, with the mean of its
differences; how much the runs themselves differ from seed to seed is told beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from machine import RESULTS, describe_machine, run_script, write_result

from trainers.display import read_metrics
from trainers.estimates import mean_estimate, paired_share_estimate, runs_estimate
from trainers.settings import SettingsError
from webshop_env.errors import ShopGymError

ROOT = Path(__file__).resolve().parent.parent
MAY_DIFFER = ("algorithm.adv_estimator", "trainer.seed", "trainer.output_dir", "trainer.experiment_name")


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What a run directory says of a run that reached its last update."""

    estimator: str
    seed: int
    settings: dict[str, Any]
    rollouts: list[tuple[int, float]]
    """Update and share of its training episodes that were won."""
    validations: list[tuple[int, float, float]]
    """Update, success, score."""
    last: dict[str, Any]
    """The last validation, goal by goal."""


def read_run(directory: Path) -> FinishedRun | None:
    """A run from its directory; None if it has not reached its last update."""
    if not (directory / "settings.yaml").is_file():
        return None
    settings = yaml.safe_load((directory / "settings.yaml").read_text(encoding="utf-8"))
    last = directory / "validations" / f"update_{settings['trainer.total_updates']:06d}.json"
    if not last.is_file():
        return None
    lines = read_metrics(directory / "metrics.jsonl")
    success, score = "validation/success_frac", "validation/task_score"
    return FinishedRun(
        settings["algorithm.adv_estimator"],
        settings["trainer.seed"],
        settings,
        [(line["update"], line["rollout/success_frac"]) for line in lines if "rollout/success_frac" in line],
        [(line["update"], line[success], line[score]) for line in lines if success in line],
        json.loads(last.read_text(encoding="utf-8")),
    )


def make_run(directory: Path, estimator: str, seed: int, words: Sequence[str]) -> None:
    """Trains, in a process of its own."""
    own = [f"algorithm.adv_estimator={estimator}", f"trainer.seed={seed}", f"trainer.output_dir={directory}"]
    command = [sys.executable, str(ROOT / "trainers" / "gigpo_fsdp.py"), *words, *own]
    print(" ".join(command[1:]), flush=True)
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise ShopGymError(f"the run of {estimator} with seed {seed} ended with exit code {done.returncode}")


def require_one_budget(runs: Sequence[FinishedRun]) -> None:
    """Refuses runs that differ in more than estimator and seed, or were validated on other goals.

    Raises:
        SettingsError: Naming the first difference.
    """
    first = runs[0]
    for run in runs[1:]:
        for key in sorted(first.settings.keys() | run.settings.keys()):
            then, now = first.settings.get(key), run.settings.get(key)
            if key not in MAY_DIFFER and then != now:
                raise SettingsError(f"{key}: {then} with {first.estimator}, {now} with {run.estimator}: not comparable")
        if run.last["goal_index"] != first.last["goal_index"] or run.last["goal_list"] != first.last["goal_list"]:
            raise SettingsError(f"{run.estimator} with seed {run.seed} was validated on other goals")


def compare(runs: Sequence[FinishedRun], estimators: tuple[str, str]) -> dict[str, Any]:
    """How much better the second estimator is, seed by seed and over the seeds that both have."""
    found = {(run.estimator, run.seed): run for run in runs}
    seeds = sorted(seed for name, seed in found if name == estimators[0] and (estimators[1], seed) in found)
    per_seed, won, scores, curves = [], [], [], []
    for seed in seeds:
        before, after = (found[name, seed] for name in estimators)
        won.append(np.asarray(after.last["won"], float) - np.asarray(before.last["won"], float))
        scores.append(np.asarray(after.last["task_score"]) - np.asarray(before.last["task_score"]))
        curves.append(np.mean([share for _, share in after.rollouts]) - np.mean([s for _, s in before.rollouts]))
        share = paired_share_estimate(np.asarray(before.last["won"]), np.asarray(after.last["won"]))
        per_seed.append(
            {
                "seed": seed,
                "success": [float(np.mean(run.last["won"])) for run in (before, after)],
                "score": [float(np.mean(run.last["task_score"])) for run in (before, after)],
                "rollout_success": [float(np.mean([s for _, s in run.rollouts])) for run in (before, after)],
                "success_difference": asdict(share),
                "score_difference": asdict(mean_estimate(scores[-1], lowest=-1.0)),
            }
        )
    return {
        "estimators": list(estimators),
        "per_seed": per_seed,
        "over_seeds": {
            name: {
                "over_goals": asdict(mean_estimate(np.mean(values, axis=0), lowest=-1.0)),
                "over_runs": asdict(runs_estimate([float(np.mean(row)) for row in values], lowest=-1.0)),
            }
            for name, values in (("success_difference", won), ("score_difference", scores))
        }
        | {"rollout_success_difference": {"over_runs": asdict(runs_estimate(curves, lowest=-1.0))}},
    }


def draw(runs: Sequence[FinishedRun], picture: Path) -> bool:
    """Draws success in rollouts and validations over updates; thin lines are runs, thick ones their mean.

    Returns:
        False where Matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), dpi=110, sharey=True)
    for name, colour in zip(dict.fromkeys(run.estimator for run in runs), ("#d29922", "#1f6feb"), strict=False):
        mine = [run for run in runs if run.estimator == name]
        for panel, curves in (
            (panels[0], [run.rollouts for run in mine]),
            (panels[1], [[point[:2] for point in run.validations] for run in mine]),
        ):
            for curve in curves:
                panel.plot(*zip(*curve, strict=True), color=colour, linewidth=0.8, alpha=0.5)
            updates = [update for update, _ in curves[0]]
            means = np.mean([[share for _, share in curve] for curve in curves], axis=0)
            panel.plot(updates, means, color=colour, linewidth=2.2, label=f"{name}, {len(mine)} seeds")
    panels[0].set_title("training rollouts")
    panels[1].set_title(f"validation on {len(runs[0].last['won'])} goals")
    panels[0].set_ylabel("share of episodes won")
    for panel in panels:
        panel.set_xlabel("update")
        panel.grid(alpha=0.3)
        panel.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    pyplot.close(figure)
    return True


def print_table(result: dict[str, Any]) -> None:
    """As Markdown, for `benchmarks/README.md`."""
    first, second = result["estimators"]

    def points(estimate: dict[str, Any]) -> str:
        return f"{100 * estimate['mean']:+.1f} [{100 * estimate['low']:+.1f}, {100 * estimate['high']:+.1f}]"

    heads = (
        "seed",
        f"success {first} (%)",
        f"success {second} (%)",
        "difference (points)",
        "score difference (points)",
    )
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for row in result["per_seed"]:
        before, after = (f"{100 * share:.1f}" for share in row["success"])
        differences = f"{points(row['success_difference'])} | {points(row['score_difference'])}"
        print(f"| {row['seed']} | {before} | {after} | {differences} |")
    pooled = result["over_seeds"]
    for name, kind in (("all, over goals", "over_goals"), ("all, over runs", "over_runs")):
        success, score = (points(pooled[f"{what}_difference"][kind]) for what in ("success", "score"))
        print(f"| {name} | | | {success} | {score} |")
    print(f"\nSuccess in training rollouts, all updates: {points(pooled['rollout_success_difference']['over_runs'])}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="settings that all runs share, as key=value")
    parser.add_argument(
        "--estimators", nargs=2, default=["grpo", "gigpo"], help="the second is compared with the first"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("outputs/compare_estimators"), help="where the runs lie")
    parser.add_argument("--collect", action="store_true", help="train nothing")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "gigpo_grpo.png")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare_estimators.json")
    options = parser.parse_args(arguments)
    runs = []
    for seed in options.seeds:
        for estimator in options.estimators:
            directory = options.runs / f"{estimator}_{seed}"
            run = read_run(directory)
            if run is None and not options.collect:
                make_run(directory, estimator, seed, options.words)
                run = read_run(directory)
            if run is None:
                print(f"not finished: {directory}", file=sys.stderr)
            else:
                runs.append(run)
    if {run.estimator for run in runs} != set(options.estimators):
        raise ShopGymError(f"{options.runs} holds no finished runs of both {' and '.join(options.estimators)}")
    require_one_budget(runs)
    result = {
        **describe_machine("numpy", "torch", "transformers"),
        "settings": {key: value for key, value in runs[0].settings.items() if key not in MAY_DIFFER},
        "goal_list": runs[0].last["goal_list"],
        "runs": [
            {"estimator": run.estimator, "seed": run.seed, "rollouts": run.rollouts, "validations": run.validations}
            for run in runs
        ],
        **compare(runs, tuple(options.estimators)),
    }
    print_table(result)
    if draw(runs, options.picture):
        print(f"\n{options.picture}")
    write_result(result, options.out)


if __name__ == "__main__":
    run_script(main)
