"""The KL to the frozen reference as part of the reward (`algorithm.use_kl_in_reward`).

At every reply token, `kl_coef` times the estimate of the KL between the policy before the update and the reference is
taken from the token's reward. Advantages are one number per row, so what counts there is the row's sum (`row_kl`);
`token_level_rewards` is the long form, to look at and for estimators from elsewhere. The loss knows nothing of it;
the KL that the loss can have (`use_kl_loss`) is another, and touches no reward.

Dimensions: N rows, R_i reply tokens of row i.
"""

from __future__ import annotations

import numpy as np
import torch

from rollout.types import StepBatch, ragged
from trainers.episode_reward import token_level_scores
from trainers.losses import kl_estimate


def token_kl(batch: StepBatch, *, kind: str) -> np.ndarray:
    """The KL at every reply token, object [N] of float32 [R_i] in nats; `kind` as in `losses.kl_estimate`.

    Raises:
        ValueError: The log-probs of the old policy or of the reference are not there.
    """
    if batch.old_log_probs is None or batch.ref_log_probs is None:
        missing = "old_log_probs" if batch.old_log_probs is None else "ref_log_probs"
        raise ValueError(f"the KL in reward needs {missing}: fill both in before with_advantages(batch, config)")
    return ragged(
        [
            kl_estimate(torch.as_tensor(old), torch.as_tensor(reference), kind=kind).numpy()
            for old, reference in zip(batch.old_log_probs, batch.ref_log_probs, strict=True)
        ]
    )


def row_kl(batch: StepBatch, *, kind: str) -> np.ndarray:
    """float32 [N]: the KL of each row's reply, in nats (its tokens added up in float64)."""
    return np.asarray([np.sum(row, dtype=np.float64) for row in token_kl(batch, kind=kind)], dtype=np.float32)


def token_level_rewards(batch: StepBatch, *, kl_coef: float, kind: str = "kl") -> np.ndarray:
    """`episode_reward.token_level_scores` less what the KL costs at each token, object [N] of float32 [R_i]."""
    scores, kl = token_level_scores(batch), token_kl(batch, kind=kind)
    return ragged([score - np.float32(kl_coef) * row for score, row in zip(scores, kl, strict=True)])
