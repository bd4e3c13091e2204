"""How long do advantages take, and does the time grow with the rows alone?

    python benchmarks/bench_advantages.py                      1,920, 20,000 and 200,000 rows

The rows are those of a real rollout of the embedded shop (a scripted policy that draws actions of the page), repeated
with new groups and episodes until there are enough; half of the episodes are said to be won, one reply in twenty to be
malformed. Similar pages are looked for in the first rollout alone: that compares texts, group by group.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import numpy as np
from bench_rollout import GROUP_SIZE, MAX_PROMPT_TOKENS, NUM_GROUPS, NUM_STEPS, DrawnActions
from machine import RESULTS, describe_machine, run_script, write_result

from env_manager import EnvConfig, EnvManager
from rollout import CollectorConfig, SamplingParams, TrajectoryCollector
from rollout.types import StepBatch
from trainers.advantages import ESTIMATORS, AdvantageConfig, similar_pages, with_advantages
from trainers.goals import fixed_goals
from webshop_env.shop import open_shop


def played_rows(num_groups: int) -> StepBatch:
    """Rows of `num_groups` groups of 8 episodes of 15 steps, with made-up outcomes."""
    shop = open_shop()
    policy = DrawnActions(sorted({product.query for product in shop.products.values()}))
    config = EnvConfig(
        prompt="compact", max_steps=NUM_STEPS, max_prompt_tokens=MAX_PROMPT_TOKENS, count_tokens=policy.count_tokens
    )
    manager = EnvManager("WebShop-v1", num_groups * GROUP_SIZE, config, {"shop": shop})
    collector = TrajectoryCollector(manager, CollectorConfig(constrained=True))
    goals = fixed_goals(shop, "train", num_groups)
    batch = collector.collect(goals, policy, SamplingParams(), group_size=GROUP_SIZE, update=0, seed=0)
    is_won = batch.episode_id % 2 == 0
    return replace(
        batch,
        reward=np.where(is_won & (batch.step_index == NUM_STEPS - 1), 10.0, 0.0).astype(np.float32),
        episode_return=np.where(is_won, 10.0, 0.0).astype(np.float32),
        format_valid=np.random.default_rng(0).random(len(batch)) > 0.05,
    )


def repeated(batch: StepBatch, num_rows: int) -> StepBatch:
    """`num_rows` rows: the batch again and again, with groups and episodes of their own, the last one cut short."""
    rows = np.arange(num_rows)
    again, copy = batch.select(rows % len(batch)), rows // len(batch)
    return replace(
        again,
        group_id=again.group_id + copy * (1 + batch.group_id.max()),
        episode_id=again.episode_id + copy * (1 + batch.episode_id.max()),
    )


def times(batch: StepBatch, config: AdvantageConfig, *, repeats: int) -> dict[str, Any]:
    """Seconds of `with_advantages`, after one call that is not counted."""
    found = []
    for _ in range(repeats + 1):
        began, began_cpu = perf_counter(), process_time()
        with_advantages(batch, config)
        found.append((perf_counter() - began, process_time() - began_cpu))
    clock, cpu = np.asarray(found[1:]).T
    return {
        "num_rows": len(batch),
        "estimator": config.adv_estimator,
        "s": {"mean": float(clock.mean()), "std": float(clock.std()), "min": float(clock.min())},
        "cpu_s": {"mean": float(cpu.mean()), "std": float(cpu.std()), "min": float(cpu.min())},
        "cpu_us_per_row": float(1e6 * cpu.mean() / len(batch)),
    }


def print_tables(result: dict[str, Any]) -> None:
    """As Markdown, for `benchmarks/README.md`."""
    print("| estimator | rows | all (s) | all (CPU s) | a row (CPU µs) |\n| --- | --- | --- | --- | --- |")
    for row in result["times"]:
        clock, cpu = row["s"], row["cpu_s"]
        print(
            f"| {row['estimator']} | {row['num_rows']:,} | {clock['mean']:.4f} ± {clock['std']:.4f} "
            f"| {cpu['mean']:.4f} ± {cpu['std']:.4f} | {row['cpu_us_per_row']:.2f} |"
        )
    similar = result["similarity"]
    heads = (f"pages of {similar['num_rows']:,} rows, compared in groups", "pages", "clusters")
    print(f"\n| {' | '.join(heads)} | all (s) | all (CPU s) | a row (CPU µs) |\n|{' --- |' * 6}")
    print(
        f"| gigpo with enable_similarity, thresh {similar['threshold']} | {similar['num_pages']:,} "
        f"| {similar['num_clusters']:,} | {similar['s']['mean']:.2f} "
        f"| {similar['cpu_s']['mean']:.2f} | {similar['cpu_us_per_row']:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1920, 20_000, 200_000], help="numbers of rows")
    parser.add_argument("--groups", type=int, default=NUM_GROUPS, help="groups of the rollout that is repeated")
    parser.add_argument("--repeats", type=int, default=10, help="calls that are timed")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_advantages.json")
    options = parser.parse_args()
    if min(*options.rows, options.groups, options.repeats) < 1:
        parser.error("--rows, --groups and --repeats must be at least 1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    machine = describe_machine("numpy")
    batch = played_rows(options.groups)
    config = AdvantageConfig(enable_similarity=True)
    pages = similar_pages(batch, threshold=config.similarity_thresh)
    result = {
        **machine,
        "config": {
            "group_size": GROUP_SIZE,
            "num_steps": NUM_STEPS,
            "num_groups_played": options.groups,
            "repeats": options.repeats,
            "baseline": config.baseline,
            "mode": config.mode,
        },
        "times": [
            times(repeated(batch, num), AdvantageConfig(adv_estimator=estimator), repeats=options.repeats)
            for estimator in ESTIMATORS
            for num in options.rows
        ],
        "similarity": {
            **times(batch, config, repeats=1),
            "threshold": config.similarity_thresh,
            "num_pages": len(np.unique(np.stack([batch.group_id, batch.anchor_id]), axis=1).T),
            "num_clusters": len(np.unique(np.stack([batch.group_id, pages]), axis=1).T),
        },
    }
    print_tables(result)
    write_result(result, options.out)


if __name__ == "__main__":
    run_script(main)
