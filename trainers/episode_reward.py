"""The reward of a row as scores of its reply tokens, the form in which verl's estimators take it.

No training here reads these scores: the estimators of `advantages.py` need no such form, because a row's tokens share
one advantage, and so the KL in reward is taken from a row's reward as one number (`kl_in_reward.row_kl`). They are
there to be looked at, and for estimators from elsewhere: whoever brings one calls `token_level_scores` (verl's name
too), or `kl_in_reward.token_level_rewards` (its `token_level_rewards`), and `padded` where it wants a matrix.

Dimensions: N rows, R_i reply tokens of row i, R of the longest.
"""

from __future__ import annotations

import numpy as np

from rollout.types import StepBatch, ragged


def token_level_scores(batch: StepBatch, *, normalize_by_length: bool = False) -> np.ndarray:
    """Zero but for the return of the row's episode at the last token of its reply.

    Each row of an episode gets the whole return. Penalties are not in it.

    Args:
        batch: Rows; one of weight 0, or without a reply, gets zeros only.
        normalize_by_length: Divide the return by the steps of the episode.

    Returns:
        object [N] of float32 [R_i].
    """
    returns = batch.episode_return.astype(np.float64)
    if normalize_by_length:
        returns = returns / batch.episode_length
    rows = [np.zeros(len(reply), dtype=np.float32) for reply in batch.reply_ids]
    for row, value, weight in zip(rows, returns, batch.row_weight, strict=True):
        if len(row) and weight > 0:
            row[-1] = value
    return ragged(rows)


def padded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ragged values as a matrix, for code that wants one.

    Args:
        rows: object [N] of float32 [R_i].

    Returns:
        float32 [N, R], filled up with 0 on the right, and bool [N, R], True at reply tokens.
    """
    lengths = np.asarray([len(row) for row in rows], dtype=np.int64)
    is_token = np.arange(lengths.max(initial=0)) < lengths[:, None]
    matrix = np.zeros(is_token.shape, dtype=np.float32)
    if is_token.any():
        matrix[is_token] = np.concatenate(list(rows))
    return matrix, is_token
