"""Worlds: which goals an environment has, and settings that reach its manager."""

from __future__ import annotations

import numpy as np
import pytest

from trainers.settings import SettingsError, resolve
from trainers.worlds import make_manager, open_shop_world, open_world, world_notes
from webshop_env.errors import ShopGymError


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


def test_the_other_search_engine_is_taken_and_missed_in_one_line(monkeypatch):
    settings = resolve(["env.webshop.search=pyserini", "env.webshop.num_products=5"])[0]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ShopGymError, match=r"pip install 'shopgym\[pyserini\]'") as caught:
        open_world(settings.env)
    assert "\n" not in str(caught.value)
