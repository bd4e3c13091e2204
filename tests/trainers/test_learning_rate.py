"""How the learning rate goes over a run, and that the optimizer is told."""

from __future__ import annotations

import numpy as np
import pytest

from trainers.learning_rate import RateSchedule


def test_a_constant_rate_rises_and_stays():
    schedule = RateSchedule(num_steps=10, num_rising=4)
    assert [schedule.share(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert RateSchedule().share(0) == RateSchedule().share(10**6) == 1.0


def test_a_cosine_rises_falls_to_its_lowest_share_and_stays_there():
    schedule = RateSchedule(shape="cosine", num_steps=100, num_rising=10, lowest=0.1)
    shares = [schedule.share(step) for step in range(120)]
    assert shares[0] == pytest.approx(0.1) and max(shares) == 1.0 and int(np.argmax(shares)) in (9, 10)
    assert shares[55] == pytest.approx(0.55), "half-way"
    assert shares[100:] == pytest.approx([0.1] * 20)
    assert (np.diff(shares[10:101]) < 0).all()
