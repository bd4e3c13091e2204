"""Rows repeated and removed as the published code does it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from step_rows import rows_of

from trainers.advantages import AdvantageConfig, with_advantages
from trainers.row_modes import RowConfig, with_row_mode
from trainers.settings import SettingsError, resolve

PUBLISHED = [
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
]


def config_of(*words: str, num_ranks: int = 2) -> RowConfig:
    return RowConfig.of(resolve([*PUBLISHED, *words])[0], num_ranks=num_ranks)


def long_batch(num: int = 1890):
    return rows_of([{"group": i // 8, "rewards": [0.0] * 13 + [10.0 * (i % 2)]} for i in range(num // 14)])


@pytest.mark.parametrize(
    ("micro_batches", "num_ranks", "expected"), [((16, 16, 8), 2, 32), ((16, 16, 8), 1, 16), ((6, 4, 5), 3, 180)]
)
def test_the_multiple_is_that_of_all_micro_batches_times_the_ranks(micro_batches, num_ranks, expected):
    words = [f"{word.partition('=')[0]}={size}" for word, size in zip(PUBLISHED, micro_batches, strict=True)]
    assert config_of("data.row_mode=copy", *words, num_ranks=num_ranks).multiple == expected


@pytest.mark.parametrize(("mode", "expected"), [("pad", 1890), ("copy", 1920), ("delete", 1888)])
def test_the_published_rollout_of_1890_rows(mode, expected):
    batch = long_batch()
    result, figures = with_row_mode(batch, config_of(f"data.row_mode={mode}"), seed=0, update=3)
    assert len(result) == expected
    assert sum(figures.values()) == abs(expected - 1890)
    assert result.discounted_return is None if mode == "pad" else len(result.discounted_return) == expected
    ids = list(zip(result.episode_id.tolist(), result.step_index.tolist(), strict=True))
    assert len(set(ids)) == min(1890, expected)  # no row is copied twice, none is lost beside those removed
    again, _ = with_row_mode(batch, config_of(f"data.row_mode={mode}"), seed=0, update=3)
    assert again.episode_id.tolist() == result.episode_id.tolist()
    other, _ = with_row_mode(batch, config_of(f"data.row_mode={mode}"), seed=0, update=4)
    assert (other.episode_id.tolist() == result.episode_id.tolist()) == (mode == "pad")


@pytest.mark.parametrize("mode", ["copy", "delete"])
def test_rows_keep_the_returns_that_they_had_in_their_episode(mode):
    batch = long_batch()
    batch.format_valid[::5] = False
    whole = with_advantages(batch, AdvantageConfig(baseline="step"))
    expected = {(e, s): g for e, s, g in zip(whole.episode_id, whole.step_index, whole.step_return, strict=True)}
    result, _ = with_row_mode(batch, config_of(f"data.row_mode={mode}"), seed=0, update=0)
    result = with_advantages(result, AdvantageConfig(baseline="step"))
    for episode, step, value in zip(result.episode_id, result.step_index, result.step_return, strict=True):
        assert value == expected[episode, step]


def test_a_copied_row_counts_twice_in_the_mean_over_rows_and_its_episode_once_in_that_over_episodes():
    batch = replace(rows_of([{"rewards": [10]}, {"rewards": [0]}]), discounted_return=np.float32([10, 0]))
    batch = batch.select(np.array([0, 1, 0]))
    result = with_advantages(batch, AdvantageConfig(adv_estimator="grpo", baseline="step"))
    assert result.advantage == pytest.approx([10 - 6.667, -6.667, 10 - 6.667], abs=1e-3)
    result = with_advantages(batch, AdvantageConfig(adv_estimator="grpo"))
    assert result.advantage.tolist() == [5.0, -5.0, 5.0]


def test_more_copies_than_rows_are_possible():
    result, figures = with_row_mode(
        rows_of([{"rewards": [1.0]}] * 3), RowConfig(row_mode="copy", multiple=32, gamma=0.95), seed=0, update=0
    )
    assert len(result) == 32 and figures == {"rollout/num_copied_rows": 29.0}


def test_removing_is_refused_at_start_where_nothing_might_be_left():
    with pytest.raises(SettingsError, match=r"data.row_mode=delete keeps a multiple of 32 rows .* 16 episodes"):
        config_of("data.row_mode=delete", "data.train_batch_size=2")
    assert config_of("data.row_mode=copy", "data.train_batch_size=2").multiple == 32
