"""Advantages: every worked example of the design, and the promises about order, padding and constants."""

from __future__ import annotations

import time
from difflib import SequenceMatcher

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.types import StepBatch, ragged
from trainers.advantages import (
    AdvantageConfig,
    compare_within_groups,
    discounted_returns,
    episode_advantages,
    penalties,
    similar_pages,
    step_advantages,
    with_advantages,
)


def rows_of(episodes: list[dict], *, anchor_texts: tuple[str, ...] = ()) -> StepBatch:
    """A batch from episodes such as {"group": 0, "rewards": [0, 10], "anchors": [1, 2], "valid": [True, False]}."""
    columns: dict[str, list] = {name: [] for name in ("group", "episode", "anchor", "step", "reward", "ret", "n", "ok")}
    for number, episode in enumerate(episodes):
        rewards = episode["rewards"]
        for step, reward in enumerate(rewards):
            columns["group"].append(episode.get("group", 0))
            columns["episode"].append(number)
            columns["anchor"].append(episode["anchors"][step] if "anchors" in episode else 1000 * number + step)
            columns["step"].append(step)
            columns["reward"].append(reward)
            columns["ret"].append(np.float32(sum(rewards)))
            columns["n"].append(len(rewards))
            columns["ok"].append(episode["valid"][step] if "valid" in episode else True)
    num = len(columns["step"])
    return StepBatch(
        prompt_ids=ragged([np.array([1], np.int32)] * num),
        reply_ids=ragged([np.array([2], np.int32)] * num),
        rollout_log_probs=ragged([np.zeros(1, np.float32)] * num),
        admissible=ragged([None] * num),
        group_id=np.array(columns["group"], np.int64),
        episode_id=np.array(columns["episode"], np.int64),
        anchor_id=np.array(columns["anchor"], np.int64),
        step_index=np.array(columns["step"], np.int32),
        goal_index=np.zeros(num, np.int32),
        reward=np.array(columns["reward"], np.float32),
        episode_return=np.array(columns["ret"], np.float32),
        episode_length=np.array(columns["n"], np.int32),
        format_valid=np.array(columns["ok"], bool),
        action_possible=np.ones(num, bool),
        won=np.zeros(num, bool),
        truncated=np.zeros(num, bool),
        task_score=np.zeros(num, np.float32),
        row_weight=np.ones(num, np.float32),
        anchor_texts=anchor_texts,
    )


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
    return rows_of(episodes, anchor_texts=("alpha beta", "alpha beta!", "gamma", "delta delta"))


CONFIGS = [
    AdvantageConfig(mode=mode, baseline=baseline, enable_similarity=similar, similarity_thresh=0.9)
    for mode in ("mean_norm", "mean_std_norm")
    for baseline in ("episode", "step")
    for similar in (False, True)
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.mode}-{c.baseline}-{c.enable_similarity}")
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_row_order_and_padding_change_nothing_at_all(config, seed):
    batch = random_rows(seed)
    expected = with_advantages(batch, config)
    order = np.random.default_rng(seed).permutation(len(batch))
    shuffled = with_advantages(batch.select(order), config)
    assert shuffled.advantage.tolist() == expected.advantage[order].tolist()
    assert shuffled.step_return.tolist() == expected.step_return[order].tolist()

    padded = batch.select(np.r_[order, order[:3]])
    padded.row_weight = np.r_[np.ones(len(order)), np.zeros(len(padded) - len(order))].astype(np.float32)
    padded.reward[len(order) :] = 99.0
    padded.episode_return[len(order) :] = 99.0
    result = with_advantages(padded, config)
    assert result.advantage.tolist() == [*expected.advantage[order], *[0.0] * (len(padded) - len(order))]


def slow_reference(batch: StepBatch, config: AdvantageConfig) -> list[float]:
    """The formulas of the design, row by row."""
    num = len(batch)
    row = {(batch.episode_id[i], batch.step_index[i]): i for i in range(num)}
    score = [
        float(np.float32(batch.episode_return[i] - np.float32(0.0 if batch.format_valid[i] else 0.1)))
        for i in range(num)
    ]
    g = [0.0] * num
    for episode, step in sorted(row, reverse=True):
        after = row.get((episode, step + 1))
        g[row[episode, step]] = float(batch.reward[row[episode, step]]) + (0.95 * g[after] if after is not None else 0)
    g = [float(np.float32(np.float32(g[i]) - np.float32(0.0 if batch.format_valid[i] else 0.1))) for i in range(num)]
    result = []
    for i in range(num):
        group = [j for j in range(num) if batch.group_id[j] == batch.group_id[i]]
        page = [j for j in group if batch.anchor_id[j] == batch.anchor_id[i]]
        is_lone = len({batch.episode_id[j] for j in group}) == 1
        is_zero = is_lone or len({score[j] for j in group}) == 1
        a_episode = 0.0 if is_zero else score[i] - np.mean([score[j] for j in group])
        a_step = g[i] - np.mean([g[j] for j in page]) if len({g[j] for j in page}) > 1 else 0.0
        result.append(a_episode + a_step)
    return result


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_agrees_with_a_slow_reading_of_the_formulas(seed):
    batch, config = random_rows(seed), AdvantageConfig(baseline="step")
    assert with_advantages(batch, config).advantage == pytest.approx(slow_reference(batch, config), abs=1e-5)


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
