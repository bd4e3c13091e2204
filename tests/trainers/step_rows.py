"""Batches written down by hand, one row per step, for tests of what becomes of rewards."""

from __future__ import annotations

import numpy as np

from rollout.types import StepBatch, ragged


def rows_of(episodes: list[dict], *, anchor_texts: tuple[str, ...] = ()) -> StepBatch:
    """A batch from episodes such as {"group": 0, "rewards": [0, 10], "anchors": [1, 2], "valid": [True, False]}."""
    columns: dict[str, list] = {name: [] for name in ("group", "episode", "anchor", "step", "reward", "ret", "n", "ok")}
    for number, episode in enumerate(episodes):
        rewards = episode["rewards"]
        for step, reward in enumerate(rewards):
            columns["group"].append(episode.get("group", 0))
            columns["episode"].append(number)
            columns["anchor"].append(episode["anchors"][step] if "anchors" in episode else 1000 * number + step)
            columns["step"].append(step)
            columns["reward"].append(reward)
            columns["ret"].append(np.float32(sum(rewards)))
            columns["n"].append(len(rewards))
            columns["ok"].append(episode["valid"][step] if "valid" in episode else True)
    num = len(columns["step"])
    return StepBatch(
        prompt_ids=ragged([np.array([1], np.int32)] * num),
        reply_ids=ragged([np.array([2], np.int32)] * num),
        rollout_log_probs=ragged([np.zeros(1, np.float32)] * num),
        admissible=ragged([None] * num),
        group_id=np.array(columns["group"], np.int64),
        episode_id=np.array(columns["episode"], np.int64),
        anchor_id=np.array(columns["anchor"], np.int64),
        step_index=np.array(columns["step"], np.int32),
        goal_index=np.zeros(num, np.int32),
        reward=np.array(columns["reward"], np.float32),
        episode_return=np.array(columns["ret"], np.float32),
        episode_length=np.array(columns["n"], np.int32),
        format_valid=np.array(columns["ok"], bool),
        action_possible=np.ones(num, bool),
        won=np.zeros(num, bool),
        truncated=np.zeros(num, bool),
        task_score=np.zeros(num, np.float32),
        row_weight=np.ones(num, np.float32),
        anchor_texts=anchor_texts,
    )
