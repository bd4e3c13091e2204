"""Means with 95 % intervals: of shares, of scores, of paired differences, of products that goals share.

Dimension: N goals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z_95 = 1.959963984540054
"""Standard normal quantile of two-sided 95 %."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Two-sided 95 % quantile of Student's distribution for the mean of so many values."""
NUM_RESAMPLES = 2000
BOOTSTRAP_SEED = 233


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float
    num: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.num})"


def share_estimate(hits: np.ndarray) -> Estimate:
    """Share of True in bool [N] with Wilson's 95 % interval, which holds for 0 and for N hits too."""
    num = len(hits)
    if num == 0:
        raise ValueError("an estimate needs at least one value")
    share = float(np.mean(hits))
    centre = (share + Z_95**2 / (2 * num)) / (1 + Z_95**2 / num)
    half = Z_95 / (1 + Z_95**2 / num) * math.sqrt(share * (1 - share) / num + Z_95**2 / (4 * num**2))
    # At no hits and at N an end is the share itself, which rounding misses on either side.
    return Estimate(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)), num)


def mean_estimate(values: np.ndarray, *, lowest: float) -> Estimate:
    """Mean of float [N] in [lowest, 1] with the normal 95 % interval, no wider than the values can be.

    Values that are all equal, a single one among them, have an interval of no width.
    """
    if len(values) == 0:
        raise ValueError("an estimate needs at least one value")
    values = np.asarray(values, dtype=np.float64)
    mean = float(values.mean())
    half = Z_95 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(mean, max(lowest, mean - half), min(1.0, mean + half), len(values))


def runs_estimate(figures: Sequence[float], *, lowest: float) -> Estimate:
    """Mean of one figure a run, with Student's 95 % interval: how far other runs of the same kind may lie from these.

    Args:
        figures: Of a run each, in [lowest, 1]; a single one has the widest interval there is.
        lowest: 0 for shares, -1 for differences of shares.
    """
    if len(figures) == 0:
        raise ValueError("an estimate needs at least one value")
    values = np.asarray(figures, dtype=np.float64)
    mean, num = float(values.mean()), len(values)
    if num == 1:
        return Estimate(mean, lowest, 1.0, 1)
    half = T_95.get(num, Z_95) * float(values.std(ddof=1)) / math.sqrt(num)
    return Estimate(mean, max(lowest, mean - half), min(1.0, mean + half), num)


def paired_share_estimate(before: np.ndarray, after: np.ndarray) -> Estimate:
    """How much larger the share of True is in `after` than in `before`, both bool [N], pair by pair.

    The 95 % interval holds the differences that Tango's score test for paired shares (Statistics in Medicine 17, 1998)
    does not reject. Where many pairs differ it is about the normal interval; where none does it is
    +-z^2 / (N + z^2), not a point.
    """
    num = len(before)
    if num == 0:
        raise ValueError("an estimate needs at least one pair")
    num_gained, num_lost = int(np.sum(~before & after)), int(np.sum(before & ~after))
    return Estimate(
        (num_gained - num_lost) / num,
        -_highest_share_difference(num_lost, num_gained, num),
        _highest_share_difference(num_gained, num_lost, num),
        num,
    )


def _highest_share_difference(num_gained: int, num_lost: int, num: int) -> float:
    """Upper end of Tango's interval, by halving what is left; its statistic falls as the difference grows."""
    low, high = (num_gained - num_lost) / num, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        linear = (2 * num - num_gained + num_lost) * middle - num_gained - num_lost
        lost_share = (math.sqrt(linear**2 + 8 * num * num_lost * middle * (1 - middle)) - linear) / (4 * num)
        variance = num * (2 * lost_share + middle * (1 - middle))
        if (num * middle - num_gained + num_lost) ** 2 > Z_95**2 * variance:
            high = middle
        else:
            low = middle
    return high


def cluster_estimate(values: np.ndarray, clusters: Sequence[str]) -> Estimate:
    """Mean over clusters of each cluster's mean, with a bootstrap of whole clusters.

    Goals of one product are alike: as N independent values they would promise more than they know, and a product with
    many goals would outweigh the others.

    Args:
        values: float or bool [N].
        clusters: [N], equal for values that belong together.

    Returns:
        The 95 % interval holds the middle of the means of 2,000 draws with replacement, always the same ones; `num`
        counts clusters. A single cluster has an interval of no width.
    """
    if len(values) == 0:
        raise ValueError("an estimate needs at least one value")
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    means = np.bincount(cluster, weights=np.asarray(values, dtype=np.float64)) / np.bincount(cluster)
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    draws = [float(means[rng.integers(len(means), size=len(means))].mean()) for _ in range(NUM_RESAMPLES)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return Estimate(float(means.mean()), float(low), float(high), len(means))
