"""Intervals, by hand and against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from trainers.estimates import cluster_estimate, mean_estimate, paired_share_estimate, runs_estimate, share_estimate


def test_wilson_interval_of_none_of_ten_and_half_of_hundred():
    none = share_estimate(np.zeros(10, bool))
    assert (none.mean, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(0.2775, abs=1e-4)
    half = share_estimate(np.arange(100) < 50)
    assert (half.low, half.high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))


def test_wilson_interval_holds_its_share_whatever_the_rounding():
    for num in range(1, 600):
        none, every = share_estimate(np.zeros(num, bool)), share_estimate(np.ones(num, bool))
        assert none.low == none.mean == 0.0 < none.high
        assert every.low < every.mean == every.high == 1.0


def test_normal_interval_of_a_mean():
    estimate = mean_estimate(np.array([0.0, 1.0, 0.0, 1.0] * 10), lowest=0.0)
    half = 1.959964 * np.sqrt(10 / 39) / np.sqrt(40)
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    assert mean_estimate(np.array([0.3]), lowest=0.0).low == 0.3
    with pytest.raises(ValueError, match="at least one"):
        mean_estimate(np.array([]), lowest=0.0)


def test_the_interval_of_a_mean_is_no_wider_than_its_values_can_be():
    lost = mean_estimate(np.array([-1.0, -1.0, 0.0]), lowest=-1.0)
    assert lost.low == -1.0


def test_few_runs_have_students_interval():
    three = runs_estimate([0.6, 0.7, 0.8], lowest=0.0)
    assert (three.mean, three.low, three.high) == pytest.approx((0.7, 0.4516, 0.9484), abs=1e-4)
    assert runs_estimate([0.1, 0.9], lowest=0.0) == type(three)(0.5, 0.0, 1.0, 2), "no wider than shares can be"
    assert runs_estimate([0.2], lowest=-1.0) == type(three)(0.2, -1.0, 1.0, 1), "one run tells nothing about others"
    with pytest.raises(ValueError, match="at least one"):
        runs_estimate([], lowest=0.0)


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


def test_products_count_alike_however_many_goals_they_have():
    values = np.array([1.0, 1.0, 1.0, 1.0, 0.0])
    estimate = cluster_estimate(values, ["a", "a", "a", "a", "b"])
    assert (estimate.mean, estimate.num) == (0.5, 2)
    assert (estimate.low, estimate.high) == (0.0, 1.0)  # a quarter of the draws takes one product twice
    assert cluster_estimate(values, ["a"] * 5) == type(estimate)(0.8, 0.8, 0.8, 1)
    with pytest.raises(ValueError, match="at least one"):
        cluster_estimate(np.array([]), [])


def test_a_bootstrap_of_single_goals_is_about_the_normal_interval_and_one_of_like_goals_is_wider():
    rng = np.random.default_rng(0)
    values = rng.random(400)
    alone = cluster_estimate(values, [str(i) for i in range(400)])
    normal = mean_estimate(values, lowest=0.0)
    assert (alone.mean, alone.low, alone.high) == pytest.approx((normal.mean, normal.low, normal.high), abs=4e-3)
    alike = cluster_estimate(np.repeat(values[:40], 10), [str(i // 10) for i in range(400)])
    assert alike.high - alike.low > 2 * (normal.high - normal.low)
    assert cluster_estimate(values, [str(i) for i in range(400)]) == alone, "no draw hangs on anything else"
