"""The loss, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainers.losses import (
    KL_KINDS,
    LossConfig,
    clipped_policy_loss,
    kl_estimate,
    row_coefficients,
    token_losses,
)


def policy_loss(ratio: float, advantage: float, **limits: float) -> tuple[float, bool, bool]:
    loss, got, clipped, dual = clipped_policy_loss(
        torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), LossConfig(**limits)
    )
    assert got.item() == pytest.approx(ratio, rel=1e-5)
    return loss.item(), bool(clipped), bool(dual)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "is_clipped", "is_dual_clipped"),
    [
        (1.0, 2.0, -2.0, False, False),
        (1.5, 2.0, -2.4, True, False),  # earns nothing above 1.2
        (0.5, 2.0, -1.0, False, False),  # a good action that became rarer is pulled back in full
        (0.5, -2.0, 1.6, True, False),  # earns nothing below 0.8
        (1.5, -2.0, 3.0, False, False),
        (5.0, -2.0, 6.0, False, True),  # dual clip: at most 3 times the advantage
    ],
)
def test_the_clips(ratio, advantage, expected, is_clipped, is_dual_clipped):
    loss, clipped, dual = policy_loss(ratio, advantage)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert (clipped, dual) == (is_clipped, is_dual_clipped)


def test_low_and_high_clip_are_separate():
    assert policy_loss(1.25, 1.0, clip_ratio_high=0.28)[0] == pytest.approx(-1.25)
    assert policy_loss(0.85, -1.0, clip_ratio_low=0.1)[0] == pytest.approx(0.9)


def test_nothing_flows_back_from_a_clipped_token():
    log_prob = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    loss, *_ = clipped_policy_loss(log_prob, torch.zeros(2), torch.ones(2), LossConfig())
    loss.sum().backward()
    assert log_prob.grad.tolist() == pytest.approx([0.0, -1.1])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("kl", 0.5), ("abs", 0.5), ("mse", 0.125), ("low_var_kl", math.exp(-0.5) + 0.5 - 1)],
)
def test_kl_estimates_of_a_token_that_became_likelier_by_half_a_nat(kind, expected):
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), kind=kind).item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_equal_policies_have_no_kl_and_extreme_ones_a_finite_one(kind):
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0]), kind=kind).item() == 0.0
    assert math.isfinite(kl_estimate(torch.tensor([-500.0]), torch.tensor([0.0]), kind=kind).item())


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 4, 1 / 4, 0.0]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 0.0]),
        ("seq-mean-token-mean", [1 / 2, 1 / 6, 0.0]),
    ],
)
def test_row_coefficients_of_replies_of_one_and_three_tokens_and_a_padding_row(mode, expected):
    result = row_coefficients(np.array([1, 3, 7]), np.array([1, 1, 0]), loss_agg_mode=mode)
    assert result.tolist() == pytest.approx(expected)


def test_a_mini_batch_in_which_nothing_counts_has_no_coefficients():
    assert row_coefficients(np.array([2]), np.array([0.0]), loss_agg_mode="token-mean").tolist() == [0.0]


def test_the_total_is_policy_minus_entropy_plus_kl():
    losses = token_losses(
        torch.tensor([-1.0]),
        torch.tensor([0.7]),
        torch.tensor([-1.0]),
        torch.tensor([-1.5]),
        torch.tensor([2.0]),
        LossConfig(entropy_coeff=0.1, kl_loss_coef=0.5, kl_loss_type="kl"),
    )
    assert losses.total.item() == pytest.approx(-2.0 - 0.07 + 0.25)


def test_a_kl_term_without_reference_says_what_is_missing():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="ref_log_probs"):
        token_losses(one, one, one, None, one, LossConfig())
    assert token_losses(one, one, one, None, one, LossConfig(use_kl_loss=False)).kl is None


def test_truncated_weights_multiply_the_policy_part_alone_and_carry_no_gradient():
    log_probs = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    engine = torch.log(torch.tensor([0.5, 4.0, 1.0, 1.0])) - 1.0
    engine[3] = float("nan")  # the engine gave none
    config = LossConfig(entropy_coeff=0.1, kl_loss_coef=0.5, kl_loss_type="kl", tis_imp_ratio_cap=1.5)
    losses = token_losses(
        *(log_probs, torch.full((4,), 0.7), log_probs.detach(), torch.full((4,), -1.5), torch.full((4,), 2.0), config),
        rollout_log_probs=engine,
    )
    assert losses.policy.tolist() == pytest.approx([-3.0, -0.5, -2.0, -2.0])  # ratios 2 (capped), 1/4, 1
    assert losses.total.tolist() == pytest.approx([policy - 0.07 + 0.25 for policy in (-3.0, -0.5, -2.0, -2.0)])
    losses.policy.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-3.0, -0.5, -2.0, -2.0])


def test_the_engines_log_probs_do_not_count_without_a_cap_and_are_asked_for_with_one():
    one = torch.ones(1)
    config = LossConfig(use_kl_loss=False)
    assert token_losses(one, one, one, None, one, config, rollout_log_probs=-9 * one).policy.item() == -1.0
    with pytest.raises(ValueError, match="rollout_log_probs"):
        token_losses(one, one, one, None, one, LossConfig(use_kl_loss=False, tis_imp_ratio_cap=2.0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip_ratio_low", 1.0),
        ("clip_ratio_high", -0.1),
        ("clip_ratio_c", 1.0),
        ("kl_loss_type", "k7"),
        ("loss_agg_mode", "sum"),
        ("tis_imp_ratio_cap", 0.0),
    ],
)
def test_a_config_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        LossConfig(**{field: value})
