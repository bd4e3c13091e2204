"""How good a policy is on the test goals, as a record that is small enough to keep one for each point of a curve.

Dimension: N goals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from rollout.collector import CollectorConfig, TrajectoryCollector
from rollout.types import Engine, SamplingParams, StepBatch
from trainers.evaluation import Evaluation, evaluate, goal_list_of, setup_of
from trainers.goals import fixed_goals
from trainers.lost_steps import lost_steps
from trainers.ranks import Ranks
from trainers.settings import Settings
from trainers.worlds import World, goal_ids, goal_products, manager_for
from webshop_env.shop import Shop

TEMPERATURE = 0.4
SEED = 0
"""Of the sampling noise: the same for all arms and seeds."""


@dataclass(frozen=True, kw_only=True)
class HeldOutGoals:
    """Plays the test split with an engine that a run has open."""

    settings: Settings
    world: World
    engine: Engine
    ranks: Ranks
    goals: np.ndarray
    """int32 [N], rising."""
    manager: Any
    """Plays them, all at once or in turns."""

    @classmethod
    def of(cls, settings: Settings, world: World, engine: Engine, ranks: Ranks, *, num: int) -> HeldOutGoals:
        """The first `num` goals of the test split, or all of it where it is smaller; those of the published one are
        500."""
        goals = fixed_goals(world, "test", num)
        manager = manager_for(engine, settings.env, settings.data, min(len(goals), 512))
        return cls(settings=settings, world=world, engine=engine, ranks=ranks, goals=goals, manager=manager)

    def named(self) -> dict[str, Any]:
        """Which goals they are, once for all measurements of a file."""
        return {
            "split": "test",
            **asdict(goal_list_of(self.settings.env, self.world.catalogue_hash)),
            "goal_index": self.goals.tolist(),
            "goal_id": goal_ids(self.world, self.goals),
            "product": goal_products(self.world, self.goals),
        }

    def measure(self, name: str, *, constrained: bool, weight_version: int) -> dict[str, Any]:
        """Plays each goal once.

        Args:
            name: Who plays.
            constrained: Whether replies are held to the page's actions.
            weight_version: Of the weights that the engine must have.
        """
        kept: list[StepBatch] = []
        began = perf_counter()
        evaluation = evaluate(
            TrajectoryCollector(self.manager, CollectorConfig(constrained=constrained)),
            self.engine,
            self.goals,
            SamplingParams(temperature=TEMPERATURE, max_tokens=self.settings.data.max_response_length),
            self.ranks,
            seed=SEED,
            world=self.world,
            goal_list=goal_list_of(self.settings.env, self.world.catalogue_hash),
            split="test",
            setup=setup_of(self.settings.env, self.settings.data, constrained=constrained),
            name=name,
            on_rows=kept.append,
            weight_version=weight_version,
        )
        seconds = perf_counter() - began
        lost = lost_steps(kept[0], self.world) if isinstance(self.world, Shop) else None
        return {"constrained": constrained, "seconds": round(seconds, 3), **record(evaluation, kept[0]), "lost": lost}


def record(evaluation: Evaluation, rows: StepBatch) -> dict[str, Any]:
    """What became of each goal and what the steps were like, without what is the same for every measurement."""
    return {
        "estimates": {name: rounded(asdict(estimate)) for name, estimate in evaluation.estimates().items()},
        "steps": rounded(
            {
                "num": len(rows),
                "malformed_frac": float(np.mean(~rows.format_valid)),
                "impossible_frac": float(np.mean(rows.format_valid & ~rows.action_possible)),
                "truncated_frac": float(np.mean(rows.truncated[rows.step_index == 0])),
                "prompt_mean_tokens": float(np.mean([len(ids) for ids in rows.prompt_ids])),
                "prompt_max_tokens": max(len(ids) for ids in rows.prompt_ids),
                "reply_mean_tokens": float(np.mean([len(ids) for ids in rows.reply_ids])),
            }
        ),
        "won": [int(won) for won in evaluation.won],
        "task_score": [round(score, 4) for score in evaluation.task_score],
        "episode_length": evaluation.episode_length,
    }


def rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Floats to six digits; what is no finite number becomes None, which JSON has a word for."""
    return {
        name: (float(f"{value:.6g}") if np.isfinite(value) else None) if isinstance(value, float) else value
        for name, value in figures.items()
    }
