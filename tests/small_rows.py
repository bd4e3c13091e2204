"""Rows that are quickly learnt from, for tests of the learners."""

from __future__ import annotations

import numpy as np

from rollout.types import StepBatch, ragged


def rows(seed: int, num: int = 4) -> StepBatch:
    """`num` rows of five prompt and three reply tokens with made-up advantages."""
    rng = np.random.default_rng(seed)
    zeros, ones = np.zeros(num, np.float32), np.ones(num, bool)
    return StepBatch(
        prompt_ids=ragged([rng.integers(2, 200, 5).astype(np.int32) for _ in range(num)]),
        reply_ids=ragged([rng.integers(2, 200, 3).astype(np.int32) for _ in range(num)]),
        rollout_log_probs=ragged([np.zeros(3, np.float32)] * num),
        admissible=ragged([None] * num),
        group_id=np.zeros(num, np.int64),
        episode_id=np.arange(num),
        anchor_id=np.zeros(num, np.int64),
        step_index=np.zeros(num, np.int32),
        goal_index=np.zeros(num, np.int32),
        reward=zeros,
        episode_return=zeros,
        episode_length=np.ones(num, np.int32),
        format_valid=ones,
        action_possible=ones,
        won=ones,
        truncated=ones,
        task_score=zeros,
        row_weight=np.ones(num, np.float32),
        advantage=rng.normal(size=num).astype(np.float32),
    )
