"""How far the engine's log-probs are from the trainer's for the same tokens, and the weights that make up for it.

An engine computes with other kernels, in another precision, with other batches: it samples from a distribution that is
not quite the one that the loss takes the tokens for. The gap is always measured; correcting it is a setting.

Dimension: T reply tokens of a micro-batch.
"""

from __future__ import annotations

import torch

from trainers.ranks import Ranks

LARGE_GAP_NATS = 0.1
"""A token beyond it was about a tenth likelier, or less likely, for the engine than for the trainer."""


def importance_weights(gap: torch.Tensor, *, cap: float) -> torch.Tensor:
    """What each token's policy loss is multiplied by: min(trainer's probability / engine's, cap), without gradient.

    Args:
        gap: float32 [T], old log-probs minus the engine's; NaN where the engine gave none, which weighs 1.
        cap: Largest weight, above 0. It bounds the variance; what is cut off is bias.

    Returns:
        float32 [T].
    """
    gap = gap.detach()
    # A gap of 20 is a ratio of 5e8: it is capped anyway, and must not overflow.
    ratio = torch.exp(torch.clamp(gap, -20.0, 20.0)).clamp(max=cap)
    return torch.where(torch.isnan(gap), torch.ones_like(gap), ratio)


class MismatchTotals:
    """Sums of an update's gaps, weighted as the loss weights its tokens."""

    def __init__(self, *, cap: float | None = None) -> None:
        """`cap` as in the loss; None where the gap is not corrected."""
        self.cap = cap
        self.sums = torch.zeros(5, dtype=torch.float64)
        self.largest_nats = torch.zeros(())

    def add(self, gap: torch.Tensor, weights: torch.Tensor) -> None:
        """Counts tokens, both [T]; those that the engine gave no log-probs for, and those of weight 0, are left out.

        Sums stay where the tokens are until `metrics`: a GPU need not be waited for.
        """
        is_known = (weights > 0) & ~torch.isnan(gap)
        gap, weights = torch.where(is_known, gap, 0.0), torch.where(is_known, weights, 0.0)
        cap = float("inf") if self.cap is None else self.cap
        factor = importance_weights(gap, cap=cap)
        columns = (
            torch.ones_like(gap),
            gap.abs(),
            (gap.abs() > LARGE_GAP_NATS).float(),
            factor,
            (factor >= cap).float(),
        )
        self.sums = self.sums.to(gap.device) + (torch.stack(columns) * weights).sum(dim=1).double()
        self.largest_nats = torch.cat([self.largest_nats.to(gap.device)[None], gap.abs()]).amax()

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Figures over all ranks: those of the weights where the gap is corrected, none where the engine gave none."""
        weight, *sums = ranks.sum(self.sums.tolist())
        (largest,) = ranks.max([float(self.largest_nats)])
        if weight == 0:
            return {}
        mean, large, factor, capped = (float(total / weight) for total in sums)
        figures = {
            "actor/engine_gap_mean_nats": mean,
            "actor/engine_gap_max_nats": float(largest),
            "actor/engine_gap_large_frac": large,
        }
        if self.cap is not None:
            figures |= {"actor/importance_weight_mean": factor, "actor/importance_capped_frac": capped}
        return figures
