"""Goal orders: every goal once, a function of the update, fixed lists for validation."""

from __future__ import annotations

import numpy as np
import pytest

from trainers.settings import SettingsError, resolve
from trainers.worlds import GoalOrder, fixed_goals, open_world


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


def test_an_environment_that_is_no_shop_is_refused():
    with pytest.raises(SettingsError, match="CartPole"):
        open_world(resolve(["env.env_name=CartPole-v1"])[0].env)
