"""The multi-turn loop: prompts to the policy, replies to the environments, until every episode is over.

With a policy that streams, an episode goes on as soon as its own reply is there; with one that does not, the prompts
of all live episodes are sent at once. The episodes are the same: what is sampled depends on no other episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from env_manager.base import EnvManager, Observations
from rollout.flatten import EpisodeRecord, StepRecord, flatten
from rollout.statistics import batch_statistics
from rollout.types import (
    Generation,
    GenerationRequest,
    NoiseKey,
    Policy,
    SamplingParams,
    StepBatch,
    StreamingPolicy,
)
from webshop_env.errors import ShopGymError


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """How episodes are collected."""

    constrained: bool = False
    """Let the policy write only actions that the page offers."""


GATHERED = 16
"""One in so many of the replies that are being written must be finished before their episodes go on, together: a pass
of the model that reads prompts beside them costs twice one that only writes, whether it reads one or eight."""
PHASES = ("prompt", "generate", "env", "flatten")
"""What a rollout spends time on: prompts and their tokens, waiting for the policy, stepping, making rows."""


class TrajectoryCollector:
    """Plays groups of episodes with a policy and returns them as rows."""

    def __init__(self, manager: EnvManager, config: CollectorConfig | None = None) -> None:
        self.manager = manager
        self.config = config or CollectorConfig()
        self.statistics: dict[str, float] = {}
        """Figures of the last `collect`: those of `batch_statistics`, and seconds by phase (`time/<phase>_s`)."""
        self.num_failed_episodes = 0
        """Episodes left out since construction because their environment was lost twice."""
        self._num_failed_before = 0
        self._last_failure = ""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seconds_before = dict(self._seconds)

    def collect(
        self,
        goal_indexes: Sequence[int] | np.ndarray,
        policy: Policy | StreamingPolicy,
        params: SamplingParams,
        *,
        group_size: int,
        update: int,
        seed: int,
        first_episode: int = 0,
        weight_version: int | None = None,
    ) -> StepBatch:
        """Plays each goal `group_size` times.

        Episode i of goal g has the number `first_episode + g * group_size + i`, and its group is that number divided
        by `group_size`: ranks that pass their own first episode give numbers that are unique over all of them. More
        episodes than environments are played in several passes of whole groups; what is sampled does not change.

        Args:
            goal_indexes: One per group.
            policy: Its weights must not change meanwhile. One that streams is used so.
            params: How replies are sampled.
            group_size: Episodes of a goal, at least 1.
            update: Pass of the main loop, part of the name of the sampling noise.
            seed: Seed of the sampling noise.
            first_episode: Number of the first episode, a multiple of `group_size`.
            weight_version: Version stamp that the policy's weights must have; None takes those that it has.

        Returns:
            Rows by (episode_id, step_index). An episode whose environment was lost is played once more; one that is
            lost again is left out and counted in `num_failed_episodes`.

        Raises:
            ShopGymError: there are no goals, fewer environments than `group_size`, or no episode is left.
            RuntimeError: the policy's weights are not those asked for, or a reply was written with others than it
                began with.
        """
        self._check(goal_indexes, group_size, first_episode)
        if weight_version is not None and policy.weight_version != weight_version:
            raise RuntimeError(
                f"the engine has weights {policy.weight_version}, expected {weight_version}: "
                "it must take the actor's weights after each update, before the next collection"
            )
        began = dict(self._seconds)
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
            lost = [record for record in records if record.failed]
            if lost:  # The noise has the episode's name: played again it is the same episode.
                again = [
                    EpisodeRecord(episode_id=e.episode_id, group_id=e.group_id, goal_index=e.goal_index) for e in lost
                ]
                self._play(again, policy, params, update=update, seed=seed)
                records = [r for r in records if not r.failed] + [r for r in again if not r.failed]
                records.sort(key=lambda record: record.episode_id)
                self.num_failed_episodes += sum(record.failed for record in again)
            episodes += records
        if not episodes:
            raise ShopGymError(
                "every episode of the collection failed: its environments were lost twice, at last by "
                f"{' '.join(self._last_failure.split())}; they have to be mended first"
            )
        # The manager writes prompts inside its reset and step.
        in_manager = self.manager.prompt_seconds - prompt_seconds_before
        self._seconds["prompt"] += in_manager
        self._seconds["env"] -= in_manager
        with self._timed("flatten"):
            batch = flatten(episodes)
        times = {f"time/{phase}_s": self._seconds[phase] - began[phase] for phase in PHASES}
        self.statistics = batch_statistics(batch) | times
        return batch

    def pop_seconds(self) -> dict[str, float]:
        """Seconds by phase (`time/<phase>_s`) of all collections since this was last asked."""
        spent = {f"time/{phase}_s": self._seconds[phase] - self._seconds_before[phase] for phase in PHASES}
        self._seconds_before = dict(self._seconds)
        return spent

    def pop_failed_episodes(self) -> int:
        """Episodes left out (`num_failed_episodes`) since this was last asked."""
        num_new = self.num_failed_episodes - self._num_failed_before
        self._num_failed_before = self.num_failed_episodes
        return num_new

    def _play(
        self,
        episodes: Sequence[EpisodeRecord],
        policy: Policy | StreamingPolicy,
        params: SamplingParams,
        *,
        update: int,
        seed: int,
    ) -> None:
        """Plays one episode per slot to its end; episode s lives in slot s."""
        version = policy.weight_version
        engine = policy if isinstance(policy, StreamingPolicy) else _AllAtOnce(policy)
        with self._timed("env"):
            observations = self.manager.reset([episode.goal_index for episode in episodes])
        to_ask = observations.is_live.nonzero()[0].tolist()
        waiting: dict[int, tuple[int, GenerationRequest]] = {}
        while to_ask or waiting:
            with self._timed("prompt"):
                requests = [
                    GenerationRequest(
                        prompt_ids=policy.encode(observations.prompts[slot]),
                        noise=NoiseKey(seed, update, episodes[slot].episode_id, len(episodes[slot].steps)),
                        admissible=observations.admissible[slot] if self.config.constrained else None,
                    )
                    for slot in to_ask
                ]
            with self._timed("generate"):
                if requests:
                    numbers = engine.submit(requests, params)
                    waiting.update(zip(numbers, zip(to_ask, requests, strict=True), strict=True))
                finished: list[tuple[int, GenerationRequest, Generation]] = []
                enough = -(-len(waiting) // GATHERED)
                while waiting and len(finished) < enough:
                    # Replies that nobody waits for belong to a collection that was interrupted.
                    finished += [(*waiting.pop(n), generation) for n, generation in engine.poll() if n in waiting]
            finished.sort(key=lambda item: item[0])
            for _, _, generation in finished:
                if generation.weight_version != version:
                    raise RuntimeError(
                        f"a reply was written with weights {generation.weight_version}, expected {version}: "
                        "load the engine's weights between two collections, never during one"
                    )
            to_ask = []
            if finished:
                slots = [slot for slot, _, _ in finished]
                with self._timed("env"):
                    observations = self._step(
                        episodes, slots, [r for _, r, _ in finished], [g for _, _, g in finished], observations
                    )
                to_ask = [slot for slot in slots if observations.is_live[slot]]

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
            if result.failed[s]:
                episode.failed, self._last_failure = True, result.reasons[s]
                continue
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


class _AllAtOnce:
    """A policy that only answers whole lists, spoken to as if it streamed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._answers: list[tuple[int, Generation]] = []

    def submit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[int]:
        self._answers = list(enumerate(self._policy.generate(requests, params)))
        return list(range(len(requests)))

    def poll(self) -> list[tuple[int, Generation]]:
        return self._answers
