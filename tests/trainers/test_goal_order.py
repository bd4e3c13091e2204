"""Goal orders: every goal once, a function of the update, fixed lists for validation; lists instead of splits."""

from __future__ import annotations

import numpy as np
import pytest

from data.prepare import main as prepare
from trainers.goals import (
    GoalOrder,
    fixed_goals,
    goal_notes,
    goals_hash,
    goals_to_play,
    training_goals,
    validation_goals,
    validation_source,
    validation_split,
)
from trainers.settings import SettingsError, resolve
from trainers.worlds import open_world

FILTERED = ("algorithm.filter_groups.enable=true", "data.gen_batch_size=21")


@pytest.fixture(scope="module")
def shop():
    return open_world(resolve([])[0].env)


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    out = tmp_path_factory.mktemp("lists")
    assert prepare(["--train_data_size", "20", "--val_data_size", "30", "--out", str(out)]) == 0
    return out


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


def test_another_batch_size_goes_on_where_the_order_stood():
    before, after = (GoalOrder(np.arange(100), size, seed=1) for size in (4, 8))
    after.go_on(10, before.place(10))
    assert (before.place(10), after.place(10), after.place(11)) == (40, 40, 48)
    assert after.batch(10).tolist() == [*before.batch(10), *before.batch(11)]
    assert after.batch(11).tolist() == [*before.batch(12), *before.batch(13)]


def test_later_tries_of_an_update_play_other_goals_each_once():
    order = GoalOrder(np.arange(50, 70), 4, seed=1)
    first = order.batch(3).tolist()
    tries = [order.batch(3, attempt).tolist() for attempt in range(1, 5)]
    assert sorted([*first, *(goal for goals in tries for goal in goals)]) == list(range(50, 70))
    assert order.batch(3, 5).tolist() == tries[0], "all have been played: from the beginning"
    assert order.batch(4, 1).tolist() != tries[0]
    assert GoalOrder(np.arange(4), 4, seed=1).batch(0, 1).size == 4, "there are no other goals"


@pytest.fixture
def of_products():
    """Ten goals of four products: the goals, and the product of each."""
    return np.arange(100, 110), [*"aaaa", *"bbb", *"cc", "d"]


def test_by_product_each_product_comes_once_and_each_time_with_another_of_its_goals(of_products):
    goals, products = of_products
    of = dict(zip(goals.tolist(), products, strict=True))
    order = GoalOrder(goals, 2, seed=3, products=products)
    epochs = [[int(goal) for update in (2 * e, 2 * e + 1) for goal in order.batch(update)] for e in range(12)]
    assert all(sorted(of[goal] for goal in epoch) == [*"abcd"] for epoch in epochs)
    for product, num in (("a", 4), ("b", 3), ("c", 2), ("d", 1)):
        played = [next(goal for goal in epoch if of[goal] == product) for epoch in epochs]
        rounds = [played[at : at + num] for at in range(0, 12, num)]
        assert all(sorted(r) == [g for g in of if of[g] == product] for r in rounds)
        assert num < 3 or len({tuple(r) for r in rounds}) > 1, "in another order the next time"
    assert len({tuple(of[goal] for goal in epoch) for epoch in epochs}) > 6
    assert GoalOrder(goals, 4, seed=3, products=products).batch(5).tolist() == epochs[5]


def test_by_product_another_seed_plays_other_goals_of_the_products():
    goals, products = np.arange(600), np.repeat([*"abcdef"], 100).tolist()
    first, second = (set(GoalOrder(goals, 6, seed=seed, products=products).batch(0).tolist()) for seed in (1, 2))
    assert first != second
    places = {goal % 100 for goal in first}
    assert len(places) > 1, "products draw for themselves"


def test_by_product_an_order_goes_on_across_epochs_and_after_a_resume(of_products):
    goals, products = of_products
    order = GoalOrder(goals, 3, seed=3, products=products)
    whole = GoalOrder(goals, 1, seed=3, products=products)
    assert np.concatenate([order.batch(u) for u in range(8)]).tolist() == [int(whole.batch(u)[0]) for u in range(24)]
    resumed = GoalOrder(goals, 2, seed=3, products=products)
    resumed.go_on(5, order.place(5))
    assert resumed.batch(6).tolist() == [int(whole.batch(u)[0]) for u in (17, 18)]


def test_by_product_later_tries_play_the_other_products_as_their_epoch_has_them(of_products):
    goals, products = of_products
    of = dict(zip(goals.tolist(), products, strict=True))
    order = GoalOrder(goals, 2, seed=3, products=products)
    for update in range(12):
        epoch = GoalOrder(goals, 4, seed=3, products=products).batch(update // 2).tolist()
        first, others = order.batch(update).tolist(), order.batch(update, 1).tolist()
        assert sorted([*first, *others]) == sorted(epoch)
        assert sorted(of[goal] for goal in [*first, *others]) == [*"abcd"]
        assert order.batch(update, 2).tolist() == others, "all have been played: from the beginning"
    with pytest.raises(SettingsError, match=r"data\.train_batch_size=5 is more than the 4 products of the train split"):
        GoalOrder(goals, 5, seed=3, products=products)


def test_a_run_samples_by_product_where_it_is_told_so(shop, lists):
    plain, by_product = (resolve([f"data.sample_by={by}", "data.train_batch_size=64"])[0] for by in ("goal", "product"))
    order = training_goals(shop, by_product)
    assert order.is_by_product and not training_goals(shop, plain).is_by_product
    assert order.goals.tolist() == training_goals(shop, plain).goals.tolist()
    asins = [shop.goal_at(int(goal)).asin for update in range(10) for goal in order.batch(update)]
    assert len(set(asins)) == 640 < order.epoch_size == len({shop.goal_at(int(goal)).asin for goal in order.goals})
    words = [f"data.train_files={lists / 'train.parquet'}", "data.sample_by=product", "data.train_batch_size=4"]
    listed = training_goals(shop, resolve(words)[0])
    assert listed.is_by_product and len(listed.goals) == 20
    lake = resolve(["recipe=frozenlake", "data.sample_by=product", "data.train_batch_size=4"])[0]
    assert not training_goals(open_world(lake.env), lake).is_by_product, "its goals are of no product"


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


def test_a_goal_list_takes_the_place_of_a_split_and_is_played_by_the_same_order(shop, lists):
    words = [f"data.train_files={lists / 'train.parquet'}", "data.train_batch_size=6", "trainer.seed=4"]
    settings = resolve(words)[0]
    order = training_goals(shop, settings)
    assert len(order.goals) == 20 and set(order.goals.tolist()) <= set(shop.split("train").tolist())
    epoch = np.concatenate([order.batch(update) for update in range(10)])
    assert sorted(epoch[:20].tolist()) == sorted(epoch[20:40].tolist()) == order.goals.tolist()
    resumed = training_goals(shop, settings)
    resumed.go_on(7, order.place(7))  # what a checkpoint saves
    assert [resumed.batch(u).tolist() for u in range(7, 10)] == [order.batch(u).tolist() for u in range(7, 10)]
    assert goals_hash(order.goals) == goals_hash(order.goals[::-1]) != goals_hash(order.goals[1:])


def test_a_list_of_validation_goals_is_that_of_the_split_and_is_played_whole(shop, lists):
    plain = resolve(["data.val_batch_size=30"])[0]
    listed = resolve([f"data.val_files={lists / 'test.parquet'}", "data.val_batch_size=10"])[0]
    expected = validation_goals(shop, plain)
    assert validation_goals(shop, listed).tolist() == expected.tolist()
    assert (validation_source(plain.env, plain.data), validation_source(listed.env, listed.data)) == (
        "eval",
        "test.parquet",
    )


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (("data.train_batch_size=21",), r"data\.train_batch_size=21 is more than the 20 goals of .*train\.parquet"),
        (FILTERED, r"data\.gen_batch_size=21 is more than the 20 goals of .*train\.parquet"),
    ],
)
def test_a_list_shorter_than_the_batch_is_refused(shop, lists, chosen, message):
    words = [f"data.train_files={lists / 'train.parquet'}", f"data.val_files={lists / 'test.parquet'}"]
    with pytest.raises(SettingsError, match=message):
        training_goals(shop, resolve([*words, *chosen])[0])


@pytest.mark.parametrize("num", [1, 30, 31])
def test_a_list_for_validation_is_played_whole(shop, lists, num):
    settings = resolve([f"data.val_files={lists / 'test.parquet'}", f"data.val_batch_size={num}"])[0]
    assert len(validation_goals(shop, settings)) == 30


def test_only_a_shop_has_the_published_validation_goals():
    assert validation_split(resolve(["env.env_name=WebShop-v0", "env.variant=verl"])[0].env) == "test"
    assert validation_split(resolve(["recipe=frozenlake", "env.variant=verl"])[0].env) == "eval"


def test_more_validation_goals_than_the_split_has_are_refused_where_any_are_played(shop):
    num = len(shop.split("eval"))
    too_many = f"data.val_batch_size={num + 1}"
    off = ("trainer.val_before_train=false", "trainer.test_freq=-1")
    assert len(validation_goals(shop, resolve([f"data.val_batch_size={num}"])[0])) == num
    for words in ((), off[:1], off[1:]):
        with pytest.raises(SettingsError, match=f"{too_many} is more than the {num} goals of the eval split; lower it"):
            validation_goals(shop, resolve([too_many, *words])[0])
    validation_goals(shop, resolve([too_many, *off])[0])


def test_a_goal_list_is_played_where_the_split_is_empty(shop, lists, monkeypatch):
    settings = resolve([f"data.val_files={lists / 'test.parquet'}"])[0]
    monkeypatch.setattr(type(shop), "split", lambda self, name: np.zeros(0, dtype=np.int32))
    goals, source = goals_to_play(shop, settings.env, settings.data, split="eval", num=5)
    assert (len(goals), source) == (30, "test.parquet")


def test_an_empty_split_is_refused():
    class Empty:
        catalogue_hash = "00"

        def split(self, name):
            return np.zeros(0, dtype=np.int32)

    settings = resolve([])[0]
    with pytest.raises(SettingsError, match="the eval split of this catalogue is empty; name a goal list"):
        validation_goals(Empty(), settings)
    with pytest.raises(SettingsError, match="16 is more than the 0 goals of the train split"):
        training_goals(Empty(), settings)


def test_goals_that_come_too_often_or_are_tested_on_as_well_are_noted(shop, lists):
    settings = resolve([f"data.train_files={lists / 'train.parquet'}"])[0]
    order = training_goals(shop, settings)
    repeated, shared = goal_notes(order, order.goals[:5], settings)
    assert "holds 20 goals, and this run plays 480: each comes about 24 times" in repeated
    assert shared == "5 of the 5 validation goals are trained on too"
    plain = resolve([])[0]
    assert goal_notes(training_goals(shop, plain), validation_goals(shop, plain), plain) == []
    by_product = resolve(["data.sample_by=product"])[0]
    order = training_goals(shop, by_product)
    assert goal_notes(order, validation_goals(shop, by_product), by_product) == []
    longer = resolve(["data.sample_by=product", "trainer.total_updates=1000"])[0]
    (note,) = goal_notes(order, validation_goals(shop, longer), longer)
    assert f"plays 16000 goals of {order.epoch_size} products, each about {16000 / order.epoch_size:.3g} times" in note


def test_groups_of_one_episode_are_noted(shop):
    def notes(*words: str) -> list[str]:
        settings = resolve(["env.rollout.n=1", *words])[0]
        return goal_notes(training_goals(shop, settings), validation_goals(shop, settings), settings)

    (note,) = notes()
    assert note.startswith("env.rollout.n=1: gigpo compares episodes of one goal")
    assert notes("algorithm.adv_estimator=reinforce++") == []
