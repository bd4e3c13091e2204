"""Goal orders: every goal once, a function of the update, fixed lists for validation."""

from __future__ import annotations

import numpy as np
import pytest

from trainers.settings import SettingsError, resolve
from trainers.worlds import GoalOrder, fixed_goals, make_manager, open_shop_world, open_world, world_notes
from webshop_env.errors import ShopGymError


@pytest.fixture(scope="module")
def shop():
    return open_world(resolve([])[0].env)


def test_every_goal_comes_once_before_any_comes_again():
    goals = np.arange(100, 110)
    order = GoalOrder(goals, 4, seed=3)
    drawn = np.concatenate([order.batch(update) for update in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == goals.tolist()
    assert drawn[:10].tolist() != drawn[10:20].tolist()


def test_the_goals_of_an_update_are_a_function_of_its_number():
    goals = np.arange(50)
    straight = [GoalOrder(goals, 8, seed=1).batch(update).tolist() for update in range(4)]
    assert GoalOrder(goals, 8, seed=1).batch(3).tolist() == straight[3]
    assert GoalOrder(goals, 8, seed=2).batch(3).tolist() != straight[3]


def test_later_tries_of_an_update_play_other_goals_each_once():
    order = GoalOrder(np.arange(50, 70), 4, seed=1)
    first = order.batch(3).tolist()
    tries = [order.batch(3, attempt).tolist() for attempt in range(1, 5)]
    assert sorted([*first, *(goal for goals in tries for goal in goals)]) == list(range(50, 70))
    assert order.batch(3, 5).tolist() == tries[0], "all have been played: from the beginning"
    assert order.batch(4, 1).tolist() != tries[0]
    assert GoalOrder(np.arange(4), 4, seed=1).batch(0, 1).size == 4, "there are no other goals"


def test_a_batch_larger_than_the_split_is_refused():
    with pytest.raises(SettingsError, match=r"data\.train_batch_size=9"):
        GoalOrder(np.arange(8), 9, seed=0)


def test_validation_goals_are_fixed_and_of_their_split(shop):
    goals = fixed_goals(shop, "eval", 300)
    assert len(set(goals.tolist())) == 300
    assert set(goals.tolist()) <= set(shop.split("eval").tolist())
    assert goals.tolist() == fixed_goals(shop, "eval", 300).tolist()
    assert set(fixed_goals(shop, "eval", 100).tolist()) <= set(goals.tolist())
    assert len(fixed_goals(shop, "eval", 10**6)) == len(shop.split("eval"))


def test_goals_of_what_is_no_shop_are_seeds_in_three_splits():
    lake = open_world(resolve(["env.env_name=FrozenLake-v1"])[0].env)
    assert [len(lake.split(name)) for name in ("test", "eval", "train", "all")] == [500, 1000, 10_000, 11_500]
    parts = np.concatenate([lake.split(name) for name in ("test", "eval", "train")])
    assert parts.dtype == np.int32 and parts.tolist() == lake.split("all").tolist()
    other = open_world(resolve(["env.env_name=TextWorld-v0"])[0].env)
    assert lake.catalogue_hash != other.catalogue_hash
    assert world_notes(lake) == []


def test_an_environment_that_nobody_registered_is_refused():
    with pytest.raises(ShopGymError, match=r"'CartPole-v1' is not registered.*FrozenLake-v1"):
        open_world(resolve(["env.env_name=CartPole-v1"])[0].env)
    with pytest.raises(ShopGymError, match=r"'no_such_module:Mine-v0'.*PYTHONPATH"):
        open_world(resolve(["env.env_name=no_such_module:Mine-v0"])[0].env)
    with pytest.raises(SettingsError, match="FrozenLake-v1' is not a shop"):
        open_shop_world(resolve(["env.env_name=FrozenLake-v1"])[0].env)


def test_settings_reach_the_manager():
    words = ["env.env_name=FrozenLake-v1", "env.memory=full", "env.memory_tokens=7", "env.prompt=no_think"]
    settings = resolve([*words, "env.projection.reject_chinese=false"])[0]
    manager = make_manager(settings.env, settings.data, 2, count_tokens=lambda text: len(text.split()))
    assert (manager.config.memory, manager.config.memory_tokens) == ("full", 7)
    assert not manager.config.reject_chinese
    with pytest.raises(SettingsError, match=r"data\.max_prompt_length=16 is less than the \d+ tokens"):
        settings = resolve([*words, "data.max_prompt_length=16"])[0]
        make_manager(settings.env, settings.data, 2, count_tokens=lambda text: len(text.split()))
    with pytest.raises(ShopGymError, match=r"env\.memory: no memory is called 'elephant'"):
        settings = resolve([*words, "env.memory=elephant"])[0]
        make_manager(settings.env, settings.data, 2, count_tokens=None)
