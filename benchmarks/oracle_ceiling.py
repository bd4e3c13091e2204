"""How much can be won at all? The oracle, and rules that read, on the test goals of every split that is trained on.

    python benchmarks/oracle_ceiling.py DIR          DIR holds WebShop's 1,000 products
    python benchmarks/oracle_ceiling.py --small      the embedded catalogue, one product cut

The oracle buys each goal's own product with the goal's options, in at most 15 steps: what WebShop-v0 gives for that is
the most that a policy can be expected to reach. Rules know only what the pages show: one buys at once, one looks
whether a product offers the options and turns back, one does so with the oracle's queries, one has queries of its own
and reads the features of products that have no options to tell them by. Where products are kept apart, means are over
products, and intervals come from drawing products.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, describe_machine, run_script, write_result

from trainers.estimates import cluster_estimate, mean_estimate, share_estimate
from trainers.lost_steps import PARTS
from webshop_env.policies import GuidedPolicy, LookingPolicy, OraclePolicy, Policy, ReadingPolicy, RulePolicy
from webshop_env.shop import Shop, open_shop
from webshop_env.text_env import WebShopTextEnv

RULES: dict[str, Callable[[Shop], Policy]] = {
    "rule": RulePolicy,
    "looking": LookingPolicy,
    "guided": GuidedPolicy,
    "reading": ReadingPolicy,
}
MAX_STEPS = 15
NUM_GOALS = 500
"""Of a test split, at most; the published one has as many."""


def play(shop: Shop, policy: Policy, goals: Sequence[int]) -> dict[str, Any]:
    """One episode a goal: what became of it, and which parts of the score purchases lacked."""
    env = WebShopTextEnv(version=shop.version, shop=shop, max_steps=MAX_STEPS)
    won, score, length = [], [], []
    parts = Counter(dict.fromkeys(PARTS.values(), 0))
    num_bought = 0
    for goal in goals:
        observation, info = env.reset(options={"goal_index": int(goal)})
        is_over, num_steps = False, 0
        while not is_over:
            observation, _, terminated, truncated, info = env.step(policy.act(observation, info))
            is_over, num_steps = terminated or truncated, num_steps + 1
        won.append(int(info["won"]))
        score.append(round(info["task_score"], 4))
        length.append(num_steps)
        if terminated:
            num_bought += 1
            breakdown = info["reward_breakdown"]
            parts.update(name for key, name in PARTS.items() if float(breakdown.get(key, 1.0)) < 1.0)
    products = [shop.goal_at(int(goal)).asin for goal in goals]
    return {
        "success": asdict(share_estimate(np.asarray(won, dtype=bool))),
        "score": asdict(mean_estimate(np.asarray(score), lowest=0.0)),
        "success by product": asdict(cluster_estimate(np.asarray(won), products)),
        "score by product": asdict(cluster_estimate(np.asarray(score), products)),
        "mean_steps": round(float(np.mean(length)), 2),
        "num_bought": num_bought,
        "parts_missing": dict(parts),
        "goals_not_won": [int(goal) for goal, is_won in zip(goals, won, strict=True) if not is_won],
    }


def ceilings(data: str | None, version: Any, split_by: str) -> dict[str, Any]:
    """Facts of a split, and what oracle and rule reach on its test goals."""
    shop = open_shop(data, version=version, split_by=split_by)
    goals = [int(goal) for goal in shop.split("test")[:NUM_GOALS]]
    products = {name: [shop.goal_at(int(goal)).asin for goal in shop.split(name)] for name in ("train", "test")}
    most = Counter(products["train"]).most_common(1)[0][1]
    return {
        "version": version,
        "catalogue_hash": shop.catalogue_hash,
        "split_by": split_by,
        "num_test_goals": len(goals),
        "num_test_products": len(set(products["test"])),
        "num_train_goals": len(products["train"]),
        "num_train_products": len(set(products["train"])),
        "num_shared_products": len(set(products["test"]) & set(products["train"])),
        "train_goals_of_one_product": most,
        "oracle": play(shop, OraclePolicy(shop), goals),
        **{name: without_goals(play(shop, policy(shop), goals)) for name, policy in RULES.items()},
    }


def without_goals(played: dict[str, Any]) -> dict[str, Any]:
    """What became of the goals, without which of them were not won."""
    return {name: value for name, value in played.items() if name != "goals_not_won"}


def percent(estimate: dict[str, float]) -> str:
    """A share with its interval."""
    return f"{100 * estimate['mean']:.1f} [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def table(splits: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a split and version."""
    lines = [
        "| test goals of | goals | products | of them in train | oracle: success (%) | score | macro success (%) | "
        + " | ".join(f"{name}: success (%) | macro success (%)" for name in RULES)
        + " |",
        "| --- " * (7 + 2 * len(RULES)) + "|",
    ]
    for split in splits:
        oracle = split["oracle"]
        rules = [percent(split[name][what]) for name in RULES for what in ("success", "success by product")]
        lines.append(
            f"| {split['split_by']}, {split['version']} | {split['num_test_goals']} | {split['num_test_products']} | "
            f"{split['num_shared_products']} | {percent(oracle['success'])} | {percent(oracle['score'])} | "
            f"{percent(oracle['success by product'])} | {' | '.join(rules)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="directory of a catalogue in WebShop's format; none is the embedded")
    parser.add_argument("--cuts", type=int, default=5, help="product cuts")
    parser.add_argument("--small", action="store_true", help="a smoke run")
    parser.add_argument("--out", type=Path, default=RESULTS / "oracle_ceiling.json")
    args = parser.parse_args()
    cuts = ["goal", *(f"product:{cut}" for cut in range(1 if args.small else args.cuts))]
    command = f"python benchmarks/oracle_ceiling.py {'DIR' if args.data else ''}".rstrip()
    result = describe_machine("numpy") | {"command": command, "max_steps": MAX_STEPS}
    result["splits"] = [ceilings(args.data, version, cut) for version in ("v0", "v1") for cut in cuts]
    print(table(result["splits"]))
    write_result(result, args.out)


if __name__ == "__main__":
    run_script(main)
