"""Many sessions at once give what single environments give."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from webshop_env import ShopGymError, WebShopTextEnv, WebShopVectorEnv
from webshop_env.policies import RandomPolicy


def slot_info(infos: dict, i: int) -> dict:
    return {key: values[i] for key, values in infos.items()}


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_slots_give_the_episodes_of_single_environments(version):
    vector = WebShopVectorEnv(4, version=version)
    singles = [WebShopTextEnv(version=version) for _ in range(4)]
    policies = [RandomPolicy(i) for i in range(4)]
    observations, infos = vector.reset(seed=11)
    for i, single in enumerate(singles):
        assert single.reset(seed=11 + i) == (observations[i], slot_info(infos, i))
    for _ in range(20):
        actions = [policies[i].act(observations[i], slot_info(infos, i)) for i in range(4)]
        observations, rewards, terminations, truncations, infos = vector.step(actions)
        assert rewards.dtype == np.float64 and terminations.dtype == truncations.dtype == bool
        for i, single in enumerate(singles):
            expected = single.step(actions[i])
            assert expected == (observations[i], rewards[i], terminations[i], truncations[i], slot_info(infos, i))


def test_make_vec_gives_the_native_vector_environment():
    env = gymnasium.make_vec("WebShop-v1", num_envs=3, max_steps=5)
    assert isinstance(env, WebShopVectorEnv) and env.metadata["autoreset_mode"] == AutoresetMode.DISABLED
    observations, infos = env.reset(options={"goal_index": np.array([4, 4, 9])})
    assert infos["goal_index"].tolist() == [4, 4, 9] and observations[0] == observations[1] != observations[2]
    assert env.observation_space.contains(observations) and len({id(slot.shop) for slot in env.envs}) == 1


def test_none_leaves_a_slot_untouched_and_finished_slots_stay():
    env = WebShopVectorEnv(2, max_steps=1)
    env.reset(options={"goal_index": [0, 1]})
    first = env.step(["search[lamp]", None])
    assert first[3].tolist() == [True, False] and first[4]["page_kind"].tolist() == ["results", "start"]
    second = env.step([None, None])
    assert second[0] == first[0] and second[3].tolist() == [True, False] and second[1].tolist() == [0.0, 0.0]
    assert env.step([None, "search[lamp]"])[0][0] == first[0][0]


def test_a_mask_resets_some_slots_only():
    env = WebShopVectorEnv(2)
    env.reset(options={"goal_index": [0, 1]})
    before = env.step(["search[lamp]", "search[lamp]"])[0]
    after, infos = env.reset(options={"reset_mask": np.array([False, True]), "goal_index": [7, 8]})
    assert after[0] == before[0] and after[1].startswith("WebShop") and infos["goal_index"].tolist() == [0, 8]


def test_arrays_of_an_earlier_step_are_not_changed_by_a_later_one():
    env = WebShopVectorEnv(1, max_steps=2)
    env.reset(seed=0)
    first = env.step(["search[lamp]"])
    env.step(["click[none]"])
    assert first[3].tolist() == [False] and first[4]["page_kind"].tolist() == ["results"]


def test_mistakes_of_the_caller_are_one_clear_line():
    env = WebShopVectorEnv(2)
    with pytest.raises(ShopGymError, match="call reset before step"):
        env.step(["a", "b"])
    env.reset(seed=0)
    with pytest.raises(ShopGymError, match="2 slots need 2 actions, got 1"):
        env.step(["a"])
    with pytest.raises(ShopGymError, match="goal_index needs one entry for each of the 2 slots"):
        env.reset(options={"goal_index": 3})
    with pytest.raises(ShopGymError, match="2 slots need 2 seeds, got 3"):
        env.reset(seed=[1, 2, 3])
    with pytest.raises(ShopGymError, match="num_envs must be a whole number of at least 1"):
        WebShopVectorEnv(0)
    with pytest.raises(ShopGymError, match="no setting 'max_step'"):
        WebShopVectorEnv(2, max_step=3)
