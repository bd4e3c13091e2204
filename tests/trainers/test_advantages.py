"""Advantages: every worked example of the design, and the promises about order, padding and constants."""

from __future__ import annotations

import time
from dataclasses import replace
from difflib import SequenceMatcher

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_rows import rows_of

from rollout.types import StepBatch, ragged
from trainers.advantages import (
    ESTIMATORS,
    AdvantageConfig,
    compare_within_groups,
    discounted_returns,
    episode_advantages,
    penalties,
    similar_pages,
    step_advantages,
    with_advantages,
)
from trainers.settings import AlgorithmSettings, resolve


def test_one_winner_of_eight_gets_8_75_and_the_others_minus_1_25():
    batch = rows_of([{"rewards": [10]}] + [{"rewards": [0]}] * 7)
    result = with_advantages(batch, AdvantageConfig(step_advantage_w=0.0))
    assert result.advantage.tolist() == [8.75] + [-1.25] * 7


def test_discounted_returns_of_a_win_at_the_fourth_step():
    batch = rows_of([{"rewards": [0, 0, 0, 10]}])
    returns = discounted_returns(batch.reward, batch.episode_id, batch.step_index, gamma=0.95)
    assert returns == pytest.approx([8.57375, 9.025, 9.5, 10.0])
    assert returns.dtype == np.float32


def test_the_penalty_of_a_malformed_reply_stays_at_its_own_step():
    batch = rows_of([{"rewards": [0, 0, 0, 10], "valid": [True, False, True, True]}])
    assert with_advantages(batch, AdvantageConfig()).step_return == pytest.approx([8.57375, 8.925, 9.5, 10.0])


def test_replies_cut_by_the_length_limit_are_spared_where_the_settings_say_so():
    batch = rows_of([{"rewards": [0, 0, 0], "valid": [False, False, True]}])
    batch.reply_is_cut = np.array([True, False, True])
    assert penalties(batch, AdvantageConfig()) == pytest.approx([0.1, 0.1, 0.0])
    assert penalties(batch, AdvantageConfig(penalise_cut=False)) == pytest.approx([0.0, 0.1, 0.0])


def test_strict_mode_also_penalises_actions_that_the_page_does_not_offer():
    batch = rows_of([{"rewards": [0, 0, 0], "valid": [True, False, True]}])
    batch.action_possible = np.array([False, False, True])
    assert penalties(batch, AdvantageConfig()) == pytest.approx([0.0, 0.1, 0.0])
    assert penalties(batch, AdvantageConfig(strict=True)) == pytest.approx([0.1, 0.1, 0.0])
    batch.reply_is_cut = np.array([True, True, False])
    spared = penalties(batch, AdvantageConfig(strict=True, penalise_cut=False))
    assert spared == pytest.approx([0.1, 0.0, 0.0]), "a well-formed reply is not spared for its length"


def test_returns_do_not_leak_between_interleaved_episodes():
    returns = discounted_returns(
        np.float32([1, 100, 2, 200]), np.array([5, 3, 5, 3]), np.int32([1, 0, 0, 1]), gamma=0.5
    )
    assert returns.tolist() == [1.0, 200.0, 2.5, 200.0]


def test_the_step_group_of_one_winner_of_eight():
    values = np.float32([8.57375] + [0.0] * 7)
    result = compare_within_groups(values, np.zeros(8, np.int64))
    assert result == pytest.approx([7.50203125] + [-1.07171875] * 7)


@pytest.mark.parametrize(
    ("baseline", "malformed", "expected"),
    [
        ("step", False, [10 - 20 / 3] * 4 + [-20 / 3] * 2),
        ("episode", False, [5.0] * 4 + [-5.0] * 2),
        ("step", True, [3.35] * 4 + [-6.65, -6.75]),
        ("episode", True, [5.0] * 4 + [-5.0, -5.1]),
    ],
)
def test_baselines_over_rows_and_over_episodes(baseline, malformed, expected):
    batch = rows_of([{"rewards": [0, 0, 0, 10]}, {"rewards": [0, 0], "valid": [True, not malformed]}])
    assert episode_advantages(batch, AdvantageConfig(baseline=baseline)) == pytest.approx(expected)


def test_the_mean_divided_by_the_sample_deviation():
    result = compare_within_groups(np.float32([1, 2, 3]), np.zeros(3, np.int64), mode="mean_std_norm")
    assert result == pytest.approx([-1 / (1 + 1e-6), 0.0, 1 / (1 + 1e-6)])


def test_episodes_count_once_in_the_deviation_too():
    batch = rows_of([{"rewards": [0, 0, 0, 10]}, {"rewards": [0]}])
    result = episode_advantages(batch, AdvantageConfig(mode="mean_std_norm"))
    std = np.std([10, 0], ddof=1)
    assert result == pytest.approx([5 / (std + 1e-6)] * 4 + [-5 / (std + 1e-6)])


def test_a_penalty_among_equal_returns_is_not_blown_up_by_a_deviation_of_zero():
    batch = rows_of([{"rewards": [0, 0], "valid": [True, False]}, {"rewards": [0, 0]}])
    result = episode_advantages(batch, AdvantageConfig(mode="mean_std_norm"))
    assert result == pytest.approx([0.0, -0.1, 0.0, 0.0])


@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
def test_seven_times_0_7_gives_exactly_0(mode):
    batch = rows_of([{"rewards": [0.7], "anchors": [4]}] * 7)
    for baseline in ("episode", "step"):
        result = with_advantages(batch, AdvantageConfig(mode=mode, baseline=baseline))
        assert result.advantage.tolist() == [0.0] * 7


@pytest.mark.parametrize("baseline", ["episode", "step"])
@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
def test_a_lone_episode_and_lone_pages_get_exactly_0(baseline, mode):
    batch = rows_of([{"rewards": [10]}, {"group": 1, "rewards": [3]}])
    result = with_advantages(batch, AdvantageConfig(baseline=baseline, mode=mode))
    assert result.advantage.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("baseline", ["episode", "step"])
@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
def test_the_penalty_of_a_lone_episode_does_not_set_its_rows_against_each_other(baseline, mode):
    batch = rows_of([{"rewards": [0, 10], "valid": [True, False]}])
    config = AdvantageConfig(adv_estimator="grpo", baseline=baseline, mode=mode)
    assert with_advantages(batch, config).advantage.tolist() == [0.0, 0.0]


def test_an_all_won_group_of_different_lengths_still_has_step_credit():
    batch = rows_of([{"rewards": [0, 10], "anchors": [7, 8]}, {"rewards": [0, 0, 10], "anchors": [7, 9, 8]}])
    result = with_advantages(batch, AdvantageConfig())
    half = (9.5 - 9.025) / 2
    assert result.advantage == pytest.approx([half, 0.0, -half, 0.0, 0.0], abs=1e-6)


def test_equal_pages_of_different_groups_are_not_compared():
    batch = rows_of(
        [
            {"group": 0, "rewards": [10], "anchors": [7]},
            {"group": 0, "rewards": [4], "anchors": [7]},
            {"group": 1, "rewards": [2], "anchors": [7]},
        ]
    )
    batch = with_advantages(batch, AdvantageConfig())
    assert step_advantages(batch, AdvantageConfig()).tolist() == [3.0, -3.0, 0.0]


def test_the_weight_scales_the_step_part():
    batch = rows_of([{"rewards": [10], "anchors": [7]}, {"rewards": [0], "anchors": [7]}])
    assert with_advantages(batch, AdvantageConfig(step_advantage_w=0.5)).advantage.tolist() == [7.5, -7.5]
    assert with_advantages(batch, AdvantageConfig(adv_estimator="grpo")).advantage.tolist() == [5.0, -5.0]


def test_similar_pages_join_the_first_page_that_is_near_enough():
    texts = ("results page 1 of red mugs", "results page 1 of red mug", "an item", "results page 1 of red jugs")
    batch = rows_of([{"rewards": [0, 0, 0, 10], "anchors": [0, 1, 2, 3]}], anchor_texts=texts)
    assert SequenceMatcher(None, texts[0], texts[1]).ratio() >= 0.95 > SequenceMatcher(None, texts[0], texts[2]).ratio()
    assert similar_pages(batch, threshold=0.95).tolist()[:3] == [0, 0, 2]
    shuffled = batch.select(np.array([3, 1, 0, 2]))
    assert similar_pages(shuffled, threshold=0.9).tolist() == similar_pages(batch, threshold=0.9)[[3, 1, 0, 2]].tolist()


def random_rows(seed: int) -> StepBatch:
    rng = np.random.default_rng(seed)
    episodes = []
    for group in range(int(rng.integers(1, 4))):
        for _ in range(int(rng.integers(1, 5))):
            length = int(rng.integers(1, 6))
            rewards = [0.0] * (length - 1) + [float(rng.choice([0.0, 10.0, 0.7, 1 / 3]))]
            episodes.append(
                {
                    "group": group,
                    "rewards": rewards,
                    "anchors": rng.integers(0, 4, length).tolist(),
                    "valid": (rng.random(length) > 0.2).tolist(),
                }
            )
    batch = rows_of(episodes, anchor_texts=("alpha beta", "alpha beta!", "gamma", "delta delta"))
    lengths = rng.integers(1, 4, len(batch))
    batch.old_log_probs = ragged([-rng.random(length, dtype=np.float32) for length in lengths])
    batch.ref_log_probs = ragged([row - rng.normal(size=len(row)).astype(np.float32) for row in batch.old_log_probs])
    return batch


CONFIGS = [
    *[
        AdvantageConfig(mode=mode, baseline=baseline, enable_similarity=similar, similarity_thresh=0.9)
        for mode in ("mean_norm", "mean_std_norm")
        for baseline in ("episode", "step")
        for similar in (False, True)
    ],
    *[AdvantageConfig(adv_estimator="grpo", mode=mode) for mode in ("mean_norm", "mean_std_norm")],
    *[AdvantageConfig(adv_estimator="rloo", baseline=baseline) for baseline in ("episode", "step")],
    AdvantageConfig(adv_estimator="reinforce++"),
    *[AdvantageConfig(adv_estimator=estimator, use_kl_in_reward=True, kl_coef=0.5) for estimator in ESTIMATORS],
    AdvantageConfig(baseline="step", mode="mean_std_norm", use_kl_in_reward=True, kl_coef=0.5),
]


def name_of(config: AdvantageConfig) -> str:
    similar = "-similar" if config.enable_similarity else ""
    return f"{config.adv_estimator}-{config.mode}-{config.baseline}{similar}{'-kl' if config.use_kl_in_reward else ''}"


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_row_order_and_padding_change_nothing_at_all(config, seed):
    batch = random_rows(seed)
    expected = with_advantages(batch, config)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(batch))
    shuffled = with_advantages(batch.select(order), config)
    assert shuffled.advantage.tolist() == expected.advantage[order].tolist()
    assert shuffled.step_return.tolist() == expected.step_return[order].tolist()

    # Padding anywhere, with ids of real rows and of none, and with numbers that would spoil any sum.
    places = rng.permutation(len(batch) + 3)
    is_padding = places >= len(batch)
    padded = batch.select(np.r_[order, order[:1].repeat(3)][places])
    padded.row_weight = np.where(is_padding, 0.0, 1.0).astype(np.float32)
    padded.reward[is_padding], padded.episode_return[is_padding] = np.nan, np.inf
    padded.group_id[is_padding] = [0, -5, 7]
    padded.episode_id[is_padding] = [0, 1, 10**9]
    padded.format_valid[is_padding] = False
    for row in np.flatnonzero(is_padding):
        padded.old_log_probs[row] = np.float32([np.nan])
    result = with_advantages(padded, config)
    assert result.advantage[~is_padding].tolist() == expected.advantage[order][places[~is_padding]].tolist()
    assert result.step_return[~is_padding].tolist() == expected.step_return[order][places[~is_padding]].tolist()
    assert not result.advantage[is_padding].any() and not result.step_return[is_padding].any()


def slow_reference(batch: StepBatch, config: AdvantageConfig) -> list[float]:
    """The formulas of section 7 of the design, row by row."""
    rows = range(len(batch))
    cost = np.where(batch.format_valid, np.float32(0), np.float32(config.invalid_action_penalty_coef))
    kl = np.zeros(len(batch), np.float32)
    if config.use_kl_in_reward:
        pairs = zip(batch.old_log_probs, batch.ref_log_probs, strict=True)
        kl = np.float32([config.kl_coef * np.sum(old - reference, dtype=np.float64) for old, reference in pairs])
    score, ahead = batch.episode_return - cost - kl, np.zeros(len(batch))
    for i in sorted(rows, key=lambda i: -batch.step_index[i]):
        after = [ahead[j] for j in rows if batch.episode_id[j] == batch.episode_id[i]
                 and batch.step_index[j] == batch.step_index[i] + 1]  # fmt: skip
        ahead[i] = batch.reward[i] + config.gamma * sum(after)
    ahead = ahead.astype(np.float32) - cost
    page = slow_pages(batch, config)

    def against(value: float, values: list[float], spread: list[float] | None = None) -> float:
        std = np.std(spread or values, ddof=1) if len(values) > 1 else 0.0
        return (value - np.mean(values)) / (std + 1e-6 if config.mode == "mean_std_norm" else 1.0)

    result = []
    for i in rows:
        group = [j for j in rows if batch.group_id[j] == batch.group_id[i]]
        returns = {batch.episode_id[j]: float(batch.episode_return[j]) for j in group}
        is_zero = len(returns) == 1 or len({score[j] for j in group}) == 1
        kl_of = {e: np.mean([float(kl[j]) for j in group if batch.episode_id[j] == e]) for e in returns}
        by_step = [float(score[j]) for j in group]
        by_episode = [value - kl_of[e] for e, value in returns.items()]
        if config.adv_estimator == "reinforce++":
            everywhere = (ahead - kl).astype(np.float64)
            std = np.std(everywhere, ddof=1) if len(set(everywhere)) > 1 else np.inf
            result.append((everywhere[i] - np.mean(everywhere)) / (std + 1e-6))
        elif config.adv_estimator == "rloo":
            own, values = float(score[i]), by_step
            if config.baseline == "episode":
                own, values = returns[batch.episode_id[i]] - kl_of[batch.episode_id[i]], by_episode
            result.append(0.0 if is_zero else score[i] - (sum(values) - own) / (len(values) - 1))
        else:
            if config.baseline == "step":
                a_episode = against(float(score[i]), by_step)
            elif len(set(returns.values())) > 1:
                a_episode = against(float(score[i]), by_episode, list(returns.values()))
            else:
                a_episode = float(score[i]) - np.mean(by_episode)  # no deviation to divide by
            met = [float(ahead[j]) for j in group if page[j] == page[i]]
            a_step = against(float(ahead[i]), met) if len(set(met)) > 1 else 0.0
            weight = config.step_advantage_w if config.adv_estimator == "gigpo" else 0.0
            result.append((0.0 if is_zero else a_episode) + weight * a_step)
    return result


def slow_pages(batch: StepBatch, config: AdvantageConfig) -> dict[int, int]:
    """The first page of its group that is near enough, met in the order of (episode, step)."""
    leaders: list[tuple[int, int]] = []
    found = {}
    for i in sorted(range(len(batch)), key=lambda i: (batch.episode_id[i], batch.step_index[i])):
        text, found[i] = batch.anchor_texts[batch.anchor_id[i]], -1
        for group, anchor in leaders:
            first = batch.anchor_texts[anchor]
            is_near = first == text
            if config.enable_similarity:
                is_near = SequenceMatcher(None, first, text).ratio() >= config.similarity_thresh
            if group == batch.group_id[i] and is_near and found[i] < 0:
                found[i] = anchor
        if found[i] < 0:
            leaders.append((batch.group_id[i], batch.anchor_id[i]))
            found[i] = batch.anchor_id[i]
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), gamma=st.sampled_from([0.95, 1.0, 0.5]), weight=st.sampled_from([1.0, 0.3]))
def test_agrees_with_a_slow_reading_of_the_formulas(config, seed, gamma, weight):
    batch, config = random_rows(seed), replace(config, gamma=gamma, step_advantage_w=weight)
    expected = slow_reference(batch, config)
    assert with_advantages(batch, config).advantage == pytest.approx(expected, abs=1e-5, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_penalty_touches_the_return_of_no_other_step(seed):
    batch = random_rows(seed)
    batch.format_valid[:] = True
    expected = with_advantages(batch, AdvantageConfig()).step_return
    row = seed % len(batch)
    batch.format_valid[row] = False
    got = with_advantages(batch, AdvantageConfig()).step_return
    others = np.arange(len(batch)) != row
    assert got[others].tolist() == expected[others].tolist()
    assert got[row] == expected[row] - np.float32(0.1)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_penalty_touches_the_episode_advantage_of_no_other_row(estimator):
    rewards = [{"rewards": [0, 0, 10]}, {"rewards": [0, 0], "valid": [True, False]}, {"rewards": [0.7]}]
    config = AdvantageConfig(adv_estimator=estimator)
    got = with_advantages(rows_of(rewards), config).advantage
    without = with_advantages(rows_of(rewards), replace(config, invalid_action_penalty_coef=0.0)).advantage
    assert (got - without).tolist() == pytest.approx([0, 0, 0, 0, -0.1, 0], abs=1e-6)
    assert got[[0, 1, 2, 3, 5]].tolist() == without[[0, 1, 2, 3, 5]].tolist()


def test_rloo_leaves_the_episode_itself_out_of_the_mean():
    batch = rows_of([{"rewards": [0, 10]}, {"rewards": [4]}, {"rewards": [0, 0, 1]}])
    got = with_advantages(batch, AdvantageConfig(adv_estimator="rloo")).advantage
    assert got == pytest.approx([7.5, 7.5, 4 - 5.5, -6.0, -6.0, -6.0])
    got = with_advantages(batch, AdvantageConfig(adv_estimator="rloo", baseline="step")).advantage
    assert got == pytest.approx([10 - 17 / 5] * 2 + [4 - 23 / 5] + [1 - 26 / 5] * 3)


def test_reinforce_plus_plus_compares_with_all_rows_of_the_update():
    batch = rows_of([{"rewards": [0, 10]}, {"group": 1, "rewards": [3]}])
    got = with_advantages(batch, AdvantageConfig(adv_estimator="reinforce++", gamma=0.5)).advantage
    mean, std = 6.0, np.std([5, 10, 3], ddof=1)
    assert got == pytest.approx((np.array([5, 10, 3]) - mean) / (std + 1e-6))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 0.7, 10.0, 1 / 3])
def test_equal_one_step_episodes_give_exactly_0_with_every_estimator(estimator, reward):
    batch = rows_of([{"rewards": [reward], "anchors": [4]}] * 7)
    assert with_advantages(batch, AdvantageConfig(adv_estimator=estimator)).advantage.tolist() == [0.0] * 7


def test_the_settings_offer_the_estimators_that_there_are():
    offered = AlgorithmSettings.__dataclass_fields__["adv_estimator"].metadata["only"]
    assert offered == tuple(ESTIMATORS)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_settings_say_which_of_them_an_estimator_reads(estimator):
    """Each other value of algorithm.gigpo either changes some advantage or is noted as doing nothing."""
    others = {"step_advantage_w": 0.5, "mode": "mean_std_norm", "baseline": "step", "enable_similarity": True}
    batch, base = random_rows(3), AdvantageConfig(adv_estimator=estimator, similarity_thresh=0.9)
    expected = with_advantages(batch, base).advantage.tolist()
    for name, value in others.items():
        changes = with_advantages(batch, replace(base, **{name: value})).advantage.tolist() != expected
        words = [f"algorithm.adv_estimator={estimator}", f"algorithm.gigpo.{name}={value}"]
        notes = [note for note in resolve(words)[1] if f"algorithm.gigpo.{name}" in note]
        assert changes != bool(notes), (name, notes)


def test_a_batch_without_rows_that_count_gets_zeros():
    batch = rows_of([{"rewards": [10]}])
    batch.row_weight[:] = 0
    assert with_advantages(batch, AdvantageConfig()).advantage.tolist() == [0.0]


def test_two_hundred_thousand_rows_take_less_than_seconds():
    rng = np.random.default_rng(0)
    num = 200_000
    batch = rows_of([{"rewards": [0.0]}]).select(np.zeros(num, np.int64))
    batch.episode_id = np.arange(num) // 10
    batch.group_id = batch.episode_id // 8
    batch.step_index = (np.arange(num) % 10).astype(np.int32)
    batch.anchor_id = rng.integers(0, 50, num)
    batch.reward = rng.random(num).astype(np.float32)
    began = time.perf_counter()
    with_advantages(batch, AdvantageConfig())
    assert time.perf_counter() - began < 5.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("gamma", 0.0), ("gamma", 1.5), ("step_advantage_w", -1.0), ("mode", "median"), ("adv_estimator", "gae")],
)
def test_a_config_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        AdvantageConfig(**{field: value})
