"""The multi-turn loop: prompts to the policy, replies to the environments, until every episode is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from env_manager.base import EnvManager, Observations
from rollout.flatten import EpisodeRecord, StepRecord, flatten
from rollout.statistics import batch_statistics
from rollout.types import Generation, GenerationRequest, NoiseKey, Policy, SamplingParams, StepBatch
from webshop_env.errors import ShopGymError


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """How episodes are collected."""

    constrained: bool = False
    """Let the policy write only actions that the page offers."""


class TrajectoryCollector:
    """Plays groups of episodes with a policy and returns them as rows."""

    def __init__(self, manager: EnvManager, config: CollectorConfig | None = None) -> None:
        self.manager = manager
        self.config = config or CollectorConfig()
        self.statistics: dict[str, float] = {}
        """Figures of the last `collect`: those of `batch_statistics`, and seconds by phase (`time/<phase>_s`)."""
        self._seconds: dict[str, float] = {}

    def collect(
        self,
        goal_indexes: Sequence[int] | np.ndarray,
        policy: Policy,
        params: SamplingParams,
        *,
        group_size: int,
        update: int,
        seed: int,
        first_episode: int = 0,
    ) -> StepBatch:
        """Plays each goal `group_size` times.

        Episode i of goal g has the number `first_episode + g * group_size + i`, and its group is that number divided
        by `group_size`: ranks that pass their own first episode give numbers that are unique over all of them. More
        episodes than environments are played in several passes of whole groups; what is sampled does not change.

        Args:
            goal_indexes: One per group.
            policy: Its weights must not change meanwhile.
            params: How replies are sampled.
            group_size: Episodes of a goal, at least 1.
            update: Pass of the main loop, part of the name of the sampling noise.
            seed: Seed of the sampling noise.
            first_episode: Number of the first episode, a multiple of `group_size`.

        Returns:
            Rows by (episode_id, step_index).

        Raises:
            ShopGymError: there are no goals, or fewer environments than `group_size`.
            RuntimeError: a reply was written with other weights than the policy began with.
        """
        self._check(goal_indexes, group_size, first_episode)
        self._seconds = {"generate": 0.0, "env": 0.0, "prompt": 0.0}
        prompt_seconds_before = self.manager.prompt_seconds
        goals_per_pass = self.manager.num_envs // group_size
        episodes: list[EpisodeRecord] = []
        for start in range(0, len(goal_indexes), goals_per_pass):
            number = first_episode + start * group_size
            records = [
                EpisodeRecord(episode_id=number + slot, group_id=(number + slot) // group_size, goal_index=int(goal))
                for slot, goal in enumerate(
                    goal for goal in goal_indexes[start : start + goals_per_pass] for _ in range(group_size)
                )
            ]
            self._play(records, policy, params, update=update, seed=seed)
            episodes += records
        # The manager writes prompts inside its reset and step.
        in_manager = self.manager.prompt_seconds - prompt_seconds_before
        self._seconds["prompt"] += in_manager
        self._seconds["env"] -= in_manager
        batch = flatten(episodes)
        times = {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()}
        self.statistics = batch_statistics(batch) | times
        return batch

    def _play(
        self, episodes: Sequence[EpisodeRecord], policy: Policy, params: SamplingParams, *, update: int, seed: int
    ) -> None:
        """Plays one episode per slot to its end; episode s lives in slot s."""
        version = policy.weight_version
        with self._timed("env"):
            observations = self.manager.reset([episode.goal_index for episode in episodes])
        while observations.is_live.any():
            slots = [int(slot) for slot in observations.is_live.nonzero()[0]]
            with self._timed("prompt"):
                requests = [
                    GenerationRequest(
                        prompt_ids=policy.encode(observations.prompts[slot]),
                        noise=NoiseKey(seed, update, episodes[slot].episode_id, len(episodes[slot].steps)),
                        admissible=observations.admissible[slot] if self.config.constrained else None,
                    )
                    for slot in slots
                ]
            with self._timed("generate"):
                generations = policy.generate(requests, params)
            for generation in generations:
                if generation.weight_version != version:
                    raise RuntimeError(
                        f"a reply was written with weights {generation.weight_version}, expected {version}: "
                        "load the engine's weights between two collections, never during one"
                    )
            with self._timed("env"):
                observations = self._step(episodes, slots, requests, generations, observations)

    def _step(
        self,
        episodes: Sequence[EpisodeRecord],
        slots: Sequence[int],
        requests: Sequence[GenerationRequest],
        generations: Sequence[Generation],
        before: Observations,
    ) -> Observations:
        result = self.manager.step(
            [generation.text for generation in generations],
            slots,
            is_cut=[generation.is_cut for generation in generations],
        )
        for s, slot in enumerate(slots):
            episode = episodes[slot]
            episode.steps.append(
                StepRecord(
                    request=requests[s],
                    generation=generations[s],
                    anchor=before.anchors[slot],
                    action=result.actions[s],
                    problem=result.problems[s],
                    reason=result.reasons[s],
                    reward=float(result.reward[s]),
                    action_possible=bool(result.action_possible[s]),
                    prompt_is_cut=bool(before.prompt_is_cut[slot]),
                )
            )
            episode.won = bool(result.won[s])
            episode.truncated = bool(result.truncated[s])
            episode.terminated = bool(result.terminated[s])
            episode.task_score = float(result.task_score[s])
        return result.observations

    def _check(self, goal_indexes: Sequence[int] | np.ndarray, group_size: int, first_episode: int) -> None:
        if len(goal_indexes) == 0:
            raise ShopGymError("collect needs at least one goal")
        if group_size < 1:
            raise ShopGymError(f"env.rollout.n must be at least 1, got {group_size}")
        if group_size > self.manager.num_envs:
            raise ShopGymError(
                f"a group of {group_size} episodes does not fit into {self.manager.num_envs} environments"
            )
        if first_episode % group_size:
            raise ShopGymError(f"first_episode must be a multiple of the group size {group_size}, got {first_episode}")

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = perf_counter()
        yield
        self._seconds[phase] += perf_counter() - began
