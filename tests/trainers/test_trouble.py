"""Each trouble is told by figures that have it, not by those that have it not, and once until it clears."""

from __future__ import annotations

import pytest

from trainers.trouble import TROUBLES, TroubleWatch

HEALTHY = {
    "update": 1,
    "rollout/success_frac": 0.4,
    "rollout/mixed_group_frac": 0.6,
    "rollout/num_groups": 16.0,
    "rollout/num_episodes": 128.0,
    "rollout/purchase_frac": 0.9,
    "rollout/episode_length_steps": 4.5,
    "rollout/cut_prompt_frac": 0.05,
    "rollout/prompt_length_max_tokens": 300.0,
    "rollout/cut_reply_frac": 0.01,
    "rollout/reply_length_max_tokens": 40.0,
    "actor/first_ratio_distance": 1e-6,
    "actor/skipped_steps": 0.0,
    "actor/engine_gap_mean_nats": 1e-3,
    "actor/entropy_nats": 0.02,
    "actor/kl_to_reference_nats": 0.05,
    "actor/kl_to_old_nats": 0.001,
}


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"rollout/mixed_group_frac": 0.0}, "all groups equal", "success 0.400"),
        ({"rollout/purchase_frac": 0.0}, "no purchase", "raise env.max_steps"),
        ({"rollout/cut_prompt_frac": 0.51}, "most prompts cut", "51% of the prompts"),
        ({"rollout/cut_reply_frac": 0.75}, "most replies cut", "limit of 40 tokens"),
        ({"actor/first_ratio_distance": 0.06}, "ratio far from 1 at the first mini-batch", "0.060 away from 1"),
        ({"actor/skipped_steps": 2.0}, "optimizer steps skipped", "2 optimizer steps of the update"),
        ({"actor/engine_gap_mean_nats": 0.2}, "engine far from trainer", "0.200 nats"),
        ({"actor/entropy_nats": 0.0019}, "entropy collapse", "0.0019 nats"),
        ({"actor/kl_to_reference_nats": 1.5}, "KL explosion", "KL 1.500"),
        ({"actor/kl_to_old_nats": 0.3}, "KL explosion within an update", "0.300 nats a token within"),
    ],
)
def test_each_trouble_is_named_once_until_it_clears(changes, name, words):
    watch = TroubleWatch()
    assert watch.look(HEALTHY) == []
    (told,) = watch.look(HEALTHY | changes)
    assert told.startswith(f"{name}: ") and words in told
    assert "{" not in told and "\n" not in told
    assert watch.look(HEALTHY | changes) == [], "it lasts"
    assert watch.look({"update": 2, "validation/success_frac": 0.4}) == [], "a line that says nothing of it"
    assert watch.look(HEALTHY | changes) == []
    assert watch.look(HEALTHY) == [], "it cleared"
    assert watch.look(HEALTHY | changes) == [told]


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout/mixed_group_frac": 1 / 16},
        {"rollout/mixed_group_frac": 0.0, "rollout/num_groups": 128.0},  # groups of one cannot differ
        {"rollout/purchase_frac": 1 / 128},
        {"rollout/cut_prompt_frac": 0.5},
        {"rollout/cut_reply_frac": 0.5},
        {"actor/first_ratio_distance": 0.05},
        {"actor/engine_gap_mean_nats": 0.1},
        {"actor/entropy_nats": 0.0021},
        {"actor/kl_to_reference_nats": 1.0, "actor/kl_to_old_nats": 0.2},
    ],
)
def test_what_is_just_not_one_is_not_told(changes):
    watch = TroubleWatch([HEALTHY])
    assert watch.look(HEALTHY | changes) == []


def test_an_update_that_goes_too_far_is_told_without_a_reference_too():
    line = {name: value for name, value in HEALTHY.items() if name != "actor/kl_to_reference_nats"}
    (told,) = TroubleWatch().look(line | {"actor/kl_to_old_nats": 0.3})
    assert told.startswith("KL explosion within an update: ")


def test_every_trouble_has_its_figures_here():
    assert {name for trouble in TROUBLES for name in trouble.needs} <= set(HEALTHY)


def test_a_run_that_goes_on_remembers_what_was_told_and_how_it_began():
    trouble = HEALTHY | {"rollout/purchase_frac": 0.0}
    resumed = TroubleWatch([HEALTHY, trouble])
    assert resumed.look(trouble) == []
    (told,) = resumed.look(trouble | {"actor/entropy_nats": 0.001})
    assert told.startswith("entropy collapse")


def test_an_update_that_was_skipped_says_nothing_of_the_actor():
    line = {name: value for name, value in HEALTHY.items() if not name.startswith("actor/")}
    watch = TroubleWatch()
    (told,) = watch.look(line | {"rollout/mixed_group_frac": 0.0})
    assert told.startswith("all groups equal")
