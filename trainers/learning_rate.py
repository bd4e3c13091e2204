"""How the learning rate goes over the steps of a run: it rises, stays, or falls along a cosine.

A share is a function of the step's number alone, so a run that was resumed goes on where it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainers.settings import RateShape


@dataclass(frozen=True, kw_only=True, slots=True)
class RateSchedule:
    """Share of the highest learning rate that a step has."""

    shape: RateShape = "constant"
    """What follows the rise."""
    num_steps: int = 1
    """Steps after which a cosine has arrived at the lowest share; it stays there."""
    num_rising: int = 0
    """Steps of a straight rise at the beginning."""
    lowest: float = 0.0
    """Share at the end of a cosine."""

    def share(self, step: int) -> float:
        """In [0, 1], of the step with this number, counted from 0."""
        if step < self.num_rising:
            return (step + 1) / self.num_rising
        if self.shape == "constant":
            return 1.0
        done = min(1.0, (step - self.num_rising) / max(1, self.num_steps - self.num_rising))
        return self.lowest + (1 - self.lowest) / 2 * (1 + math.cos(math.pi * done))
