"""What the optimizer minimises: clipped PPO, an entropy bonus, a KL term to the frozen reference.

Everything here works on flat tensors of reply tokens, one entry per token: rows are ragged and nothing is padded.
How tokens are averaged is decided once for a whole mini-batch, as one coefficient per row; micro-batches then only
add up, so that their size, and the number of ranks, cannot change a gradient.

Dimensions: T reply tokens of a micro-batch, N rows of a mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import get_args

import numpy as np
import torch

from trainers.mismatch import importance_weights
from trainers.settings import ActorSettings, Aggregation, KlKind

KL_KINDS, AGGREGATIONS = get_args(KlKind), get_args(Aggregation)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Weights and limits of the loss; the defaults are those of the settings."""

    clip_ratio_low: float = ActorSettings.clip_ratio_low
    """A probability ratio below 1 minus this earns nothing more, in [0, 1)."""
    clip_ratio_high: float = ActorSettings.clip_ratio_high
    """A probability ratio above 1 plus this earns nothing more, at least 0."""
    clip_ratio_c: float = ActorSettings.clip_ratio_c
    """Dual clip: with a negative advantage the loss is at most this times its size; above 1."""
    entropy_coeff: float = ActorSettings.entropy_coeff
    """Weight of the entropy bonus."""
    use_kl_loss: bool = ActorSettings.use_kl_loss
    """Whether the KL term to the reference is added."""
    kl_loss_coef: float = ActorSettings.kl_loss_coef
    """Weight of the KL term."""
    kl_loss_type: KlKind = ActorSettings.kl_loss_type
    """How the KL is estimated from the log-probs of the sampled tokens."""
    loss_agg_mode: Aggregation = ActorSettings.loss_agg_mode
    """How tokens are averaged over a mini-batch."""
    tis_imp_ratio_cap: float | None = ActorSettings.tis_imp_ratio_cap
    """Largest truncated importance weight between trainer and engine, above 0; None leaves the gap uncorrected."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_ratio_low < 1.0:
            raise ValueError(f"clip_ratio_low must be in [0, 1), got {self.clip_ratio_low}")
        if self.clip_ratio_high < 0.0:
            raise ValueError(f"clip_ratio_high must be at least 0, got {self.clip_ratio_high}")
        if self.clip_ratio_c <= 1.0:
            raise ValueError(f"clip_ratio_c must be above 1, got {self.clip_ratio_c}")
        if self.tis_imp_ratio_cap is not None and self.tis_imp_ratio_cap <= 0.0:
            raise ValueError(f"tis_imp_ratio_cap must be above 0, got {self.tis_imp_ratio_cap}")
        if self.kl_loss_type not in KL_KINDS:
            raise ValueError(f"kl_loss_type must be one of {', '.join(KL_KINDS)}, got {self.kl_loss_type!r}")
        if self.loss_agg_mode not in AGGREGATIONS:
            raise ValueError(f"loss_agg_mode must be one of {', '.join(AGGREGATIONS)}, got {self.loss_agg_mode!r}")

    @classmethod
    def of(cls, actor: ActorSettings) -> LossConfig:
        """What the settings of an actor say."""
        return cls(**{field.name: getattr(actor, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The parts of the loss, per token [T]; `total` is what is weighted, added up and differentiated."""

    total: torch.Tensor
    policy: torch.Tensor
    kl: torch.Tensor | None
    ratio: torch.Tensor
    is_clipped: torch.Tensor
    is_dual_clipped: torch.Tensor


def row_coefficients(reply_lengths: np.ndarray, row_weights: np.ndarray, *, loss_agg_mode: str) -> np.ndarray:
    """What each token of a row counts in the loss of its mini-batch.

    Args:
        reply_lengths: int [N], tokens of each reply.
        row_weights: float32 [N], 0 for rows that do not count.
        loss_agg_mode: See `LossConfig`.

    Returns:
        float64 [N]; all 0 for a mini-batch in which nothing counts.
    """
    lengths, weights = np.asarray(reply_lengths, dtype=np.float64), np.asarray(row_weights, dtype=np.float64)
    weights = np.where(lengths > 0, weights, 0.0)
    if loss_agg_mode == "token-mean":
        return weights / max(float((weights * lengths).sum()), 1e-12)
    per_row = weights / max(float(weights.sum()), 1e-12)
    return per_row if loss_agg_mode == "seq-mean-token-sum" else per_row / np.maximum(lengths, 1.0)


def clipped_policy_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """PPO's surrogate with a low, a high and a dual clip.

    Args:
        log_probs: float32 [T], of the weights that are trained.
        old_log_probs: float32 [T], of the weights before the first optimizer step.
        advantages: float32 [T].
        config: The clip limits.

    Returns:
        loss [T], ratio [T], clipped [T] (bool), dual-clipped [T] (bool).
    """
    # A difference of 20 is a ratio of 5e8: whatever is beyond it is clipped anyway, and must not overflow.
    ratio = torch.exp(torch.clamp(log_probs - old_log_probs, -20.0, 20.0))
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    loss = torch.maximum(plain, clipped)
    bound = -advantages * config.clip_ratio_c
    is_dual_clipped = (advantages < 0) & (loss > bound)
    return torch.where(is_dual_clipped, bound, loss), ratio, clipped > plain, is_dual_clipped


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, *, kind: str) -> torch.Tensor:
    """How far the policy is from the reference at each sampled token, float32 [T].

    `kl` is the plain log-ratio, `abs` its size, `mse` half its square, `low_var_kl` Schulman's k3
    (exp(d) - d - 1 with d = ref - current), which is never negative and has little variance; it is capped at 10.
    """
    difference = ref_log_probs - log_probs
    if kind == "kl":
        return -difference
    if kind == "abs":
        return difference.abs()
    if kind == "mse":
        return 0.5 * difference.square()
    if kind == "low_var_kl":
        bounded = torch.clamp(difference, -20.0, 20.0)
        return torch.clamp(torch.exp(bounded) - bounded - 1.0, max=10.0)
    raise ValueError(f"kl_loss_type must be one of {', '.join(KL_KINDS)}, got {kind!r}")


def token_losses(
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor | None,
    advantages: torch.Tensor,
    config: LossConfig,
    *,
    rollout_log_probs: torch.Tensor | None = None,
) -> TokenLosses:
    """All parts of the loss per token, and their weighted sum; every tensor is float32 [T].

    The engine's `rollout_log_probs` count with `tis_imp_ratio_cap` alone, and only in the policy's part.
    """
    policy, ratio, is_clipped, is_dual_clipped = clipped_policy_loss(log_probs, old_log_probs, advantages, config)
    if config.tis_imp_ratio_cap is not None:
        if rollout_log_probs is None:
            raise ValueError("tis_imp_ratio_cap needs rollout_log_probs, the engine's log-probs of its tokens")
        policy = policy * importance_weights(old_log_probs - rollout_log_probs, cap=config.tis_imp_ratio_cap)
    total = policy - config.entropy_coeff * entropy
    kl = None
    if config.use_kl_loss:
        if ref_log_probs is None:
            raise ValueError("use_kl_loss needs ref_log_probs: fill them with Reference.with_log_probs(batch)")
        kl = kl_estimate(log_probs, ref_log_probs, kind=config.kl_loss_type)
        total = total + config.kl_loss_coef * kl
    return TokenLosses(total, policy, kl, ratio, is_clipped, is_dual_clipped)
