"""Rewards per reply token, and the KL as part of them, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from step_rows import rows_of

from rollout.types import StepBatch, ragged
from trainers.advantages import AdvantageConfig, penalties, step_advantages, with_advantages
from trainers.episode_reward import padded, token_level_scores
from trainers.kl_in_reward import row_kl, token_kl, token_level_rewards


def with_replies(batch: StepBatch, lengths: list[int]) -> StepBatch:
    batch.reply_ids = ragged([np.arange(length, dtype=np.int32) for length in lengths])
    return batch


def with_log_probs(batch: StepBatch, gaps: list[list[float]]) -> StepBatch:
    """Rows whose tokens are exp(gap) times as likely for the old policy as for the reference."""
    batch = with_replies(batch, [len(row) for row in gaps])
    batch.old_log_probs = ragged([np.full(len(row), -1.0, np.float32) for row in gaps])
    batch.ref_log_probs = ragged([np.float32(-1.0) - np.asarray(row, np.float32) for row in gaps])
    return batch


def test_each_row_of_a_won_episode_has_its_return_at_its_last_token():
    scores = token_level_scores(with_replies(rows_of([{"rewards": [0, 0, 10]}]), [3, 1, 2]))
    assert [row.tolist() for row in scores] == [[0, 0, 10], [10], [0, 10]]
    assert [float(row.sum()) for row in scores] == [10.0] * 3
    assert all(row.dtype == np.float32 for row in scores)


def test_scores_can_be_divided_by_the_steps_of_the_episode():
    batch = with_replies(rows_of([{"rewards": [0, 0, 0, 10]}, {"rewards": [3]}]), [2] * 5)
    scores = token_level_scores(batch, normalize_by_length=True)
    assert [row.tolist() for row in scores] == [[0, 2.5]] * 4 + [[0, 3]]


def test_a_malformed_reply_has_the_return_too_and_padding_rows_have_nothing():
    batch = with_replies(rows_of([{"rewards": [0, 10], "valid": [False, True]}]), [2, 2])
    assert [row.tolist() for row in token_level_scores(batch)] == [[0, 10], [0, 10]]
    batch.row_weight[1] = 0
    assert [row.tolist() for row in token_level_scores(batch)] == [[0, 10], [0, 0]]


def test_a_matrix_is_filled_up_on_the_right():
    matrix, is_token = padded(ragged([np.float32([1, 2]), np.zeros(0, np.float32), np.float32([3, 0, 5])]))
    assert matrix.tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 5]]
    assert is_token.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert padded(ragged([]))[0].shape == (0, 0)


def test_the_kl_is_taken_from_every_tokens_reward():
    batch = with_log_probs(rows_of([{"rewards": [0, 10]}]), [[0.5, -0.25], [1.0]])
    assert [row.tolist() for row in token_kl(batch, kind="kl")] == [[0.5, -0.25], [1.0]]
    rewards = token_level_rewards(batch, kl_coef=0.1)
    assert rewards[0].tolist() == pytest.approx([-0.05, 10.025])
    assert rewards[1].tolist() == pytest.approx([9.9])
    assert row_kl(batch, kind="kl").tolist() == [0.25, 1.0]
    assert row_kl(batch, kind="abs").tolist() == [0.75, 1.0]
    assert row_kl(batch, kind="mse").tolist() == pytest.approx([(0.25 + 0.0625) / 2, 0.5])
    k3 = math.exp(-0.5) + math.exp(0.25) - 2 + 0.25
    assert row_kl(batch, kind="low_var_kl")[0] == pytest.approx(k3, rel=1e-5)


def test_the_episode_score_of_a_row_is_less_by_its_own_kl():
    """Returns 10 and 0, three rows with KL 1, 3 and 2 nats at a cost of 0.1 each."""
    batch = with_log_probs(rows_of([{"rewards": [0, 10]}, {"rewards": [0]}]), [[1.0], [1.0, 2.0], [2.0]])
    config = {"adv_estimator": "grpo", "use_kl_in_reward": True, "kl_coef": 0.1}
    got = with_advantages(batch, AdvantageConfig(**config, baseline="step"))
    assert got.row_kl.tolist() == [1.0, 3.0, 2.0]
    mean = (9.9 + 9.7 - 0.2) / 3
    assert got.advantage == pytest.approx([9.9 - mean, 9.7 - mean, -0.2 - mean])
    got = with_advantages(batch, AdvantageConfig(**config))  # each episode counts with the mean of its rows
    mean = (9.8 - 0.2) / 2
    assert got.advantage == pytest.approx([9.9 - mean, 9.7 - mean, -0.2 - mean])
    rewards = token_level_rewards(batch, kl_coef=0.1)
    assert [row.sum() for row in rewards] == pytest.approx([9.9, 9.7, -0.2])


def test_the_kl_reaches_no_step_advantage_and_no_other_row_in_the_discounted_return():
    episodes = [{"rewards": [0, 10], "anchors": [7, 8]}, {"rewards": [0, 0], "anchors": [7, 8]}]
    batch = with_log_probs(rows_of(episodes), [[1.0], [2.0], [0.5], [0.0]])
    config = AdvantageConfig(use_kl_in_reward=True, kl_coef=0.5)
    got, plain = with_advantages(batch, config), with_advantages(batch, AdvantageConfig())
    assert got.step_return.tolist() == plain.step_return.tolist()
    assert step_advantages(got, config).tolist() == step_advantages(plain, AdvantageConfig()).tolist()
    assert got.advantage.tolist() != plain.advantage.tolist()
    assert penalties(got, config).tolist() == [0.0] * 4


def test_equal_outcomes_differ_by_their_kl_which_no_deviation_blows_up():
    batch = with_log_probs(rows_of([{"rewards": [10]}, {"rewards": [10]}]), [[0.01], [0.03]])
    for mode in ("mean_norm", "mean_std_norm"):
        config = AdvantageConfig(adv_estimator="grpo", mode=mode, use_kl_in_reward=True, kl_coef=1.0)
        assert with_advantages(batch, config).advantage == pytest.approx([0.01, -0.01], abs=1e-6)


def test_a_policy_that_still_is_the_reference_pays_nothing():
    batch = with_log_probs(rows_of([{"rewards": [0.7]}] * 7), [[0.0, 0.0]] * 7)
    got = with_advantages(batch, AdvantageConfig(use_kl_in_reward=True))
    assert got.advantage.tolist() == [0.0] * 7 and got.row_kl.tolist() == [0.0] * 7


@pytest.mark.parametrize("missing", ["old_log_probs", "ref_log_probs"])
def test_missing_log_probs_are_asked_for_by_name(missing):
    batch = with_log_probs(rows_of([{"rewards": [1]}, {"rewards": [2]}]), [[0.1], [0.2]])
    setattr(batch, missing, None)
    with pytest.raises(ValueError, match=f"needs {missing}"):
        with_advantages(batch, AdvantageConfig(use_kl_in_reward=True))
    assert with_advantages(batch, AdvantageConfig()).row_kl is None
