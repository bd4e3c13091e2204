"""A rollout over the ranks: each plays whole groups, all get all rows.

Of ranks that share an engine the first plays, and the others follow it.
"""

from __future__ import annotations

import numpy as np

from rollout.collector import TrajectoryCollector
from rollout.constrained import ActionGrammar
from rollout.engines.led import LedEngine
from rollout.flatten import concatenate
from rollout.types import Policy, SamplingParams, StepBatch
from trainers.ranks import Ranks
from webshop_env.errors import ShopGymError


def collect_over_ranks(
    collector: TrajectoryCollector,
    policy: Policy,
    goals: np.ndarray,
    params: SamplingParams,
    ranks: Ranks,
    *,
    group_size: int,
    update: int,
    seed: int,
    first_group: int = 0,
    weight_version: int | None = None,
) -> StepBatch:
    """Plays whole groups with each engine, then gives every rank all rows, by (episode_id, step_index).

    Groups are numbered from `first_group` on. Where a `weight_version` is given, a policy of another is an error.

    Raises:
        ShopGymError: On every rank, where an environment or an endpoint of any of them cannot go on.
    """
    led = policy if isinstance(policy, LedEngine) else None
    mine = ranks.block(len(goals), ranks_per_share=led.groups.size if led else 1)
    share: StepBatch | None = None
    failure: ShopGymError | None = None
    try:
        if led and not led.groups.is_leader:
            led.follow()
        elif len(mine):
            share = collector.collect(
                goals[mine.start : mine.stop],
                policy,
                params,
                group_size=group_size,
                update=update,
                seed=seed,
                first_episode=(first_group + mine.start) * group_size,
                weight_version=weight_version,
            )
    except ShopGymError as error:  # the others must hear of it, or they wait for this rank's rows
        failure = error
    if led and led.groups.is_leader:
        led.has_played()
    gathered = ranks.gather((share, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    for _, why in gathered:
        if why is not None:
            raise ShopGymError(why)
    return concatenate([part for part, _ in gathered if part is not None])


def failed_episodes(collector: TrajectoryCollector, ranks: Ranks) -> dict[str, float]:
    """How many episodes were left out on any rank since this was last asked, as a figure; all ranks must ask."""
    (num,) = ranks.sum([collector.pop_failed_episodes()])
    return {"rollout/failed_episodes": float(num)}


def unwritable_actions(grammar: ActionGrammar | None, ranks: Ranks) -> dict[str, float]:
    """How many actions of pages so far no reply can take, over all ranks, as a figure; nothing where there are none.

    All ranks must ask, and all have a grammar or none. They are actions that the tokenizer does not give back.
    """
    if grammar is None:
        return {}
    num = len(set().union(*ranks.gather(grammar.left_out)))
    return {"rollout/unwritable_actions": float(num)} if num else {}
