"""From episodes of steps to one row per step.

Dimensions: N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from rollout.types import Generation, GenerationRequest, StepBatch, ragged


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step of one episode, as the collector saw it."""

    request: GenerationRequest
    generation: Generation
    anchor: str
    action: str
    problem: str | None
    reason: str
    reward: float
    action_possible: bool
    prompt_is_cut: bool


@dataclass(slots=True, kw_only=True)
class EpisodeRecord:
    """One run from reset to the end."""

    episode_id: int
    group_id: int
    goal_index: int
    steps: list[StepRecord] = field(default_factory=list)
    won: bool = False
    truncated: bool = False
    terminated: bool = False
    task_score: float = 0.0
    failed: bool = False
    """Its environment was lost, not its policy: it says nothing."""

    @property
    def episode_return(self) -> float:
        return sum(step.reward for step in self.steps)


def flatten(episodes: Sequence[EpisodeRecord]) -> StepBatch:
    """One row per step, episodes in the given order, steps in theirs; anchors are numbered as they first occur."""
    pairs = [(episode, step) for episode in episodes for step in episode.steps]
    anchors: dict[str, int] = {}
    anchor_id = [anchors.setdefault(step.anchor, len(anchors)) for _, step in pairs]

    def of_episode(name: str, dtype: type) -> np.ndarray:
        return np.asarray([getattr(episode, name) for episode, _ in pairs], dtype=dtype)

    def of_step(name: str, dtype: type) -> np.ndarray:
        return np.asarray([getattr(step, name) for _, step in pairs], dtype=dtype)

    return StepBatch(
        prompt_ids=ragged([step.request.prompt_ids for _, step in pairs]),
        reply_ids=ragged([step.generation.reply_ids for _, step in pairs]),
        rollout_log_probs=ragged([step.generation.log_probs for _, step in pairs]),
        admissible=ragged([step.request.admissible for _, step in pairs]),
        group_id=of_episode("group_id", np.int64),
        episode_id=of_episode("episode_id", np.int64),
        anchor_id=np.asarray(anchor_id, dtype=np.int64),
        step_index=np.asarray([i for episode in episodes for i in range(len(episode.steps))], dtype=np.int32),
        goal_index=of_episode("goal_index", np.int32),
        reward=of_step("reward", np.float32),
        episode_return=of_episode("episode_return", np.float32),
        episode_length=np.asarray([len(episode.steps) for episode, _ in pairs], dtype=np.int32),
        format_valid=np.asarray([step.problem is None for _, step in pairs], dtype=bool),
        action_possible=of_step("action_possible", bool),
        won=of_episode("won", bool),
        truncated=of_episode("truncated", bool),
        task_score=of_episode("task_score", np.float32),
        row_weight=np.ones(len(pairs), dtype=np.float32),
        anchor_texts=tuple(anchors),
        action=ragged([step.action for _, step in pairs]),
        problem=ragged([step.problem for _, step in pairs]),
        reason=ragged([step.reason for _, step in pairs]),
        terminated=of_episode("terminated", bool),
        prompt_is_cut=of_step("prompt_is_cut", bool),
        reply_is_cut=np.asarray([step.generation.is_cut for _, step in pairs], dtype=bool),
    )


def concatenate(batches: Sequence[StepBatch]) -> StepBatch:
    """One batch of all rows, by (episode_id, step_index), whoever collected them.

    Anchors are numbered anew, as they first occur in that order: the result does not depend on how episodes were
    dealt to the batches. A column must be filled in all batches or in none.

    Raises:
        ValueError: there are no batches, or a column is filled in some of them only.
    """
    if not batches:
        raise ValueError("concatenate needs at least one batch")
    columns: dict[str, Any] = {}
    for name in (f.name for f in fields(StepBatch) if f.name != "anchor_texts"):
        parts = [getattr(batch, name) for batch in batches]
        if any(part is None for part in parts):
            if not all(part is None for part in parts):
                raise ValueError(f"column {name} is filled in some of the batches only")
            columns[name] = None
        else:
            columns[name] = np.concatenate(parts)
    texts = [batch.anchor_texts[anchor] for batch in batches for anchor in batch.anchor_id]
    order = np.lexsort((columns["step_index"], columns["episode_id"]))
    anchors: dict[str, int] = {}
    anchor_id = np.empty(len(order), dtype=np.int64)
    for row in order:
        anchor_id[row] = anchors.setdefault(texts[row], len(anchors))
    columns["anchor_id"] = anchor_id
    return replace(StepBatch(**columns), anchor_texts=tuple(anchors)).select(order)
