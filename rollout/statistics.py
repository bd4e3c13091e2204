"""Figures that make a rollout readable, from its rows alone.

Computed after the rows of all ranks are together, they do not depend on the number of ranks.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from rollout.types import StepBatch


def batch_statistics(batch: StepBatch) -> dict[str, float]:
    """Means over episodes, steps or step groups of a batch; empty for a batch without rows.

    Keys are `rollout/<what>_<unit>`. Fractions of steps count rows, fractions of episodes count episodes. The share
    of singletons is of rows: a row alone in its (group, anchor) gets no step credit.
    """
    if len(batch) == 0:
        return {}
    _, firsts = np.unique(batch.episode_id, return_index=True)
    reply_lengths = np.asarray([len(ids) for ids in batch.reply_ids])
    prompt_lengths = np.asarray([len(ids) for ids in batch.prompt_ids])
    figures = {
        "rollout/success_frac": batch.won[firsts].mean(),
        "rollout/task_score": batch.task_score[firsts].mean(),
        "rollout/episode_return": batch.episode_return[firsts].mean(),
        "rollout/episode_length_steps": batch.episode_length[firsts].mean(),
        "rollout/truncated_frac": batch.truncated[firsts].mean(),
        "rollout/num_episodes": len(firsts),
        "rollout/num_steps": len(batch),
        "rollout/invalid_format_frac": 1.0 - batch.format_valid.mean(),
        "rollout/impossible_action_frac": 1.0 - batch.action_possible.mean(),
        "rollout/prompt_length_tokens": prompt_lengths.mean(),
        "rollout/prompt_length_max_tokens": prompt_lengths.max(),
        "rollout/reply_length_tokens": reply_lengths.mean(),
        "rollout/reply_length_max_tokens": reply_lengths.max(),
        "rollout/generated_tokens": reply_lengths.sum(),
        **_step_group_figures(batch),
    }
    if batch.terminated is not None:
        figures["rollout/purchase_frac"] = batch.terminated[firsts].mean()
    if batch.prompt_is_cut is not None:
        figures["rollout/cut_prompt_frac"] = batch.prompt_is_cut.mean()
    if batch.reply_is_cut is not None:
        figures["rollout/cut_reply_frac"] = batch.reply_is_cut.mean()
    if batch.problem is not None:
        for problem, count in sorted(Counter(p for p in batch.problem if p is not None).items()):
            figures[f"rollout/invalid/{_slug(problem)}_frac"] = count / len(batch)
    return {key: float(value) for key, value in figures.items()}


def _step_group_figures(batch: StepBatch) -> dict[str, float]:
    keys = np.stack([batch.group_id, batch.anchor_id], axis=1)
    _, sizes = np.unique(keys, axis=0, return_counts=True)
    _, group_sizes = np.unique(batch.group_id, return_counts=True)
    return {
        "rollout/step_group_size": sizes.mean(),
        "rollout/singleton_step_frac": (sizes == 1).sum() / len(batch),
        "rollout/num_groups": len(group_sizes),
    }


def _slug(problem: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in problem.lower()).split()
    return "_".join(words)
