"""Figures that make a rollout readable, from its rows alone.

Computed after the rows of all ranks are together, they do not depend on the number of ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from rollout.filters import groups_that_differ
from rollout.types import StepBatch


def batch_statistics(batch: StepBatch) -> dict[str, float]:
    """Means over episodes, steps or step groups of a batch; empty for a batch without rows.

    Keys are `rollout/<what>_<unit>`. Fractions of steps count rows, fractions of episodes count episodes. Step groups
    are the rows of one (group, anchor); their shares are of rows. A row alone in its group, and one of a group in
    which it went on equally well everywhere, get no step credit. A mixed group is one whose episodes have not all the
    same return. A loop in lock-step, which goes on to ask finished episodes until the last one is over, would have
    generated `generated_tokens / lock_step_frac` tokens (the replies that it throws away taken to be as long as the
    others).
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
        "rollout/lock_step_frac": len(batch) / (len(firsts) * batch.episode_length.max()),
        **_step_group_figures(batch),
    }
    if batch.terminated is not None:
        ended = batch.terminated[firsts]
        figures["rollout/purchase_frac"] = ended.mean()
        if ended.any():
            figures["rollout/purchase_score"] = batch.task_score[firsts][ended].mean()
    if batch.prompt_is_cut is not None:
        figures["rollout/cut_prompt_frac"] = batch.prompt_is_cut.mean()
    if batch.reply_is_cut is not None:
        figures["rollout/cut_reply_frac"] = batch.reply_is_cut.mean()
    if batch.row_kl is not None:
        figures["rollout/reward_kl_nats"] = batch.row_kl.sum() / max(1, reply_lengths.sum())
    if batch.problem is not None:
        figures |= _shares("invalid", (p for p in batch.problem if p is not None), len(batch))
    if batch.reason is not None:
        impossible = batch.reason[~batch.action_possible]
        # What a page refused is named in brackets or after a colon; the kind of reason stands before.
        figures |= _shares("impossible", (re.split(r"[\[:]", reason)[0] for reason in impossible), len(batch))
    return {key: float(value) for key, value in figures.items()}


LATE = ("rollout/step_credit_frac", "rollout/reward_kl_nats")
"""Figures that only rows with advantages have: they are of the rows learnt from, whatever was played.

`step_credit_frac` is the share of rows whose page was met again in their group, and went on to another return: what
GiGPO's step advantages have to work with, by equal pages and whatever estimator is chosen.
"""


def with_statistics(batch: StepBatch, played: Mapping[str, float]) -> dict[str, float]:
    """All figures of an update: `rollout/<what>` tells what was played, `trained/<what>` what is learnt from.

    Args:
        batch: Rows with advantages.
        played: Figures so far. Where they hold those of `batch_statistics`, more was played than is learnt from, or
            rows were repeated or removed; else the batch is all that was played, and nothing is told twice.
    """
    figures = batch_statistics(batch)
    if "rollout/num_steps" not in played:
        return figures | dict(played)
    late = {name: figures[name] for name in LATE if name in figures}
    trained = {name.replace("rollout/", "trained/", 1): value for name, value in figures.items() if name not in late}
    return dict(played) | trained | late


def _step_group_figures(batch: StepBatch) -> dict[str, float]:
    keys = np.stack([batch.group_id, batch.anchor_id], axis=1)
    _, step_group, sizes = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    size_of_row = sizes[step_group]
    figures = {
        "rollout/step_group_size": sizes.mean(),
        "rollout/step_group_max_size": sizes.max(),
        "rollout/singleton_step_frac": (size_of_row == 1).mean(),
        "rollout/num_groups": len(np.unique(batch.group_id)),
        "rollout/mixed_group_frac": len(groups_that_differ(batch, "episode_return")) / len(np.unique(batch.group_id)),
    }
    for least, most in ((2, 4), (5, 8)):
        is_within = (size_of_row >= least) & (size_of_row <= most)
        figures[f"rollout/step_group_of_{least}_to_{most}_frac"] = is_within.mean()
    figures["rollout/step_group_over_8_frac"] = (size_of_row > 8).mean()
    if batch.step_return is not None:
        highest = np.full(len(sizes), -np.inf)
        lowest = np.full(len(sizes), np.inf)
        np.maximum.at(highest, step_group, batch.step_return)
        np.minimum.at(lowest, step_group, batch.step_return)
        figures["rollout/step_credit_frac"] = (highest > lowest)[step_group].mean()
    return figures


def _shares(name: str, texts: Iterable[str], num_rows: int) -> dict[str, float]:
    """How often each text occurs, as `rollout/<name>/<text>_frac` of the rows."""
    counts = Counter("_".join(re.findall(r"[^\W_]+", text.lower()))[:60] for text in texts)
    return {f"rollout/{name}/{slug}_frac": count / num_rows for slug, count in sorted(counts.items())}
