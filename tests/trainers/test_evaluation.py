"""Intervals and paired comparisons, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trainers.evaluation import (
    Evaluation,
    load_evaluation,
    mean_estimate,
    paired_differences,
    save_evaluation,
    share_estimate,
)
from trainers.settings import SettingsError


def evaluation(won: list[bool], **changes) -> Evaluation:
    fields = {
        "catalogue_hash": "c",
        "split": "eval",
        "temperature": 0.4,
        "seed": 0,
        "goal_index": list(range(len(won))),
        "won": won,
        "task_score": [1.0 if w else 0.5 for w in won],
        "episode_length": [4] * len(won),
    }
    return Evaluation(**(fields | changes))


def test_wilson_interval_of_none_of_ten_and_half_of_hundred():
    none = share_estimate(np.zeros(10, bool))
    assert (none.mean, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(0.2775, abs=1e-4)
    half = share_estimate(np.arange(100) < 50)
    assert (half.low, half.high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))


def test_normal_interval_of_a_mean():
    estimate = mean_estimate(np.array([0.0, 1.0, 0.0, 1.0]))
    half = 1.959964 * np.sqrt(1 / 3) / 2
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    assert mean_estimate(np.array([0.3])).low == 0.3
    with pytest.raises(ValueError, match="at least one"):
        mean_estimate(np.array([]))


def test_paired_difference_sees_what_two_separate_intervals_hide():
    before = evaluation([True] * 50 + [False] * 50)
    after = evaluation([True] * 60 + [False] * 40)
    difference = paired_differences(before, after)["success"]
    assert difference.mean == pytest.approx(0.1)
    assert difference.low > 0
    assert before.success.high > after.success.low


def test_other_goals_or_catalogues_are_not_compared():
    before = evaluation([True, False])
    with pytest.raises(SettingsError, match="different goals"):
        paired_differences(before, evaluation([True, False], goal_index=[0, 2]))
    with pytest.raises(SettingsError, match="different catalogues"):
        paired_differences(before, evaluation([True, False], catalogue_hash="d"))


def test_a_saved_evaluation_comes_back(tmp_path):
    first = evaluation([True, False])
    save_evaluation(first, tmp_path / "e.json")
    assert load_evaluation(tmp_path / "e.json") == first
    (tmp_path / "bad.json").write_text("{}")
    for name in ("bad.json", "none.json"):
        with pytest.raises(SettingsError, match=name):
            load_evaluation(tmp_path / name)
