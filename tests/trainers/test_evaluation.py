"""Intervals and paired comparisons, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trainers.evaluation import (
    Evaluation,
    GoalList,
    load_evaluation,
    mean_estimate,
    paired_differences,
    paired_share_estimate,
    pairing_notes,
    save_evaluation,
    share_estimate,
)
from trainers.settings import SettingsError

GOALS = {
    "environment": "WebShop-v1",
    "variant": None,
    "goals": "synthetic",
    "split_by": "goal",
    "catalogue_hash": "c",
}


def evaluation(won: list[bool], **changes) -> Evaluation:
    fields = {
        "goal_list": GoalList(**GOALS),
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
    estimate = mean_estimate(np.array([0.0, 1.0, 0.0, 1.0] * 10), lowest=0.0)
    half = 1.959964 * np.sqrt(10 / 39) / np.sqrt(40)
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    assert mean_estimate(np.array([0.3]), lowest=0.0).low == 0.3
    with pytest.raises(ValueError, match="at least one"):
        mean_estimate(np.array([]), lowest=0.0)


def test_the_interval_of_a_mean_is_no_wider_than_its_values_can_be():
    high, low = evaluation([True, True, False]).score, evaluation([False] * 3, task_score=[0.0, 0.0, 0.3]).score
    assert (high.high, low.low) == (1.0, 0.0)
    assert high.low > 0 and low.high < 1
    lost = mean_estimate(np.array([-1.0, -1.0, 0.0]), lowest=-1.0)
    assert lost.low == -1.0


def test_the_paired_interval_of_shares_by_hand():
    """z^2 / (N + z^2) where no pair differs, and about the normal interval where many do."""
    won = np.arange(100) < 50
    same = paired_share_estimate(won, won)
    assert (same.mean, same.low, same.high) == pytest.approx((0.0, -0.0369935, 0.0369935), abs=1e-6)
    before, after = np.arange(300) < 100, (np.arange(300) >= 20) & (np.arange(300) < 160)  # 60 gained, 20 lost
    usual = paired_share_estimate(before, after)
    normal = mean_estimate(after.astype(float) - before, lowest=-1.0)
    assert usual.mean == pytest.approx(normal.mean)
    assert (usual.low, usual.high) == pytest.approx((normal.low, normal.high), abs=3e-3)
    back = paired_share_estimate(after, before)
    assert (back.mean, back.low, back.high) == pytest.approx((-usual.mean, -usual.high, -usual.low))
    all_gained = paired_share_estimate(np.zeros(10, bool), np.ones(10, bool))
    assert (all_gained.mean, all_gained.high) == pytest.approx((1.0, 1.0))
    assert 0 < all_gained.low < 1


def test_the_ends_of_the_paired_interval_are_where_the_score_test_rejects():
    """The statistic with the nuisance share found by brute force instead of the formula."""
    gained, lost, num = 7, 2, 40
    shares = np.linspace(1e-7, 1, 400_001)
    before = np.r_[np.zeros(gained, bool), np.ones(lost, bool), np.zeros(num - gained - lost, bool)]
    after = np.r_[np.ones(gained, bool), np.zeros(lost, bool), np.zeros(num - gained - lost, bool)]
    found = paired_share_estimate(before, after)
    for end in (found.low, found.high):
        up, rest = shares + end, 1 - 2 * shares - end
        with np.errstate(invalid="ignore", divide="ignore"):
            likelihood = gained * np.log(up) + lost * np.log(shares) + (num - gained - lost) * np.log(rest)
        share = shares[np.nanargmax(likelihood)]
        score = (gained - lost - num * end) / np.sqrt(num * (2 * share + end - end**2))
        assert abs(score) == pytest.approx(1.959964, abs=1e-3)


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("environment", "WebShop-v0"),
        ("variant", "verl"),
        ("goals", "human"),
        ("split_by", "product"),
        ("catalogue_hash", "d"),
    ],
)
def test_goals_from_elsewhere_are_not_compared(name, value):
    other = evaluation([True, False], goal_list=GoalList(**(GOALS | {name: value})))
    with pytest.raises(SettingsError, match=f"differ in their {name.replace('_', ' ')}, .* and {value}"):
        paired_differences(evaluation([True, False]), other)


def test_another_temperature_or_seed_is_noted():
    first = evaluation([True])
    assert pairing_notes(first, temperature=0.4, seed=0) == []
    notes = pairing_notes(first, temperature=0.0, seed=1)
    assert notes == [
        "the earlier evaluation had temperature 0.4, this one has 0.0",
        "the earlier evaluation had seed 0, this one has 1",
    ]


def test_a_saved_evaluation_comes_back(tmp_path):
    first = evaluation([True, False])
    save_evaluation(first, tmp_path / "e.json")
    assert load_evaluation(tmp_path / "e.json") == first
    (tmp_path / "bad.json").write_text("{}")
    for name in ("bad.json", "none.json"):
        with pytest.raises(SettingsError, match=name):
            load_evaluation(tmp_path / name)
