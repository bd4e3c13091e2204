"""Many sessions at once give what single environments give."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda env: env.reset(options={"goal_index": [3, -1]}), "0 to 5801, got -1$"),
        (lambda env: env.reset(options={"goal_id": [env.envs[0].shop.goals[3].goal_id, "none"]}), "'none'"),
        (lambda env: env.reset(seed=[5, -5]), "at least 0, got -5"),
        (lambda env: env.reset(seed=-1), "at least 0, got -1"),
        (lambda env: env.step(["search[rug]", 3]), "an action is a text such as .* got int"),
        (lambda env: env.step({"search[rug]", "search[mug]"}), "in a list"),
    ],
)
def test_what_is_refused_moves_no_slot(call, message: str) -> None:
    env = WebShopVectorEnv(2)
    env.reset(options={"goal_index": [1, 2]})
    before = [env.envs[i].page.text for i in range(2)]
    with pytest.raises(ShopGymError, match=message):
        call(env)
    assert [env.envs[i].page.text for i in range(2)] == before
    assert [env.envs[i].session.goal.goal_index for i in range(2)] == [1, 2]


KEYS = ("available_actions", "instruction_text", "goal_index", "page_kind", "asin", "task_score", "won",
        "action_possible", "reason")  # fmt: skip


def same_columns(ours: dict, theirs: dict, slots: list[int]) -> None:
    for key in KEYS:
        assert [ours[key][i] for i in slots] == [theirs[key][i] for i in slots], key


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_autoreset_is_that_of_gymnasiums_own_vector_environment(mode: str) -> None:
    ours = gymnasium.make_vec("WebShop-v1", num_envs=3, max_steps=4, autoreset_mode=mode)
    theirs = gymnasium.make_vec(
        "WebShop-v1", num_envs=3, max_steps=4, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    assert ours.metadata["autoreset_mode"] is theirs.metadata["autoreset_mode"] is AutoresetMode(mode)
    observations, infos = ours.reset(seed=5)
    expected, expected_infos = theirs.reset(seed=5)
    assert observations == expected
    policies, num_ends = [RandomPolicy(i) for i in range(3)], 0
    for _ in range(40):
        actions = [policies[i].act(observations[i], slot_info({key: infos[key] for key in KEYS}, i)) for i in range(3)]
        observations, *outcome, infos = ours.step(actions)
        expected, *expected_outcome, expected_infos = theirs.step(actions)
        assert observations == expected
        for one, other in zip(outcome, expected_outcome, strict=True):
            np.testing.assert_array_equal(one, other)
        same_columns(infos, expected_infos, [0, 1, 2])
        ended = np.flatnonzero(outcome[1] | outcome[2]).tolist()
        num_ends += len(ended)
        assert ("final_info" in infos) == (mode == "SameStep" and bool(ended)) == ("final_info" in expected_infos)
        if "final_info" in infos:
            for key in ("final_obs", "_final_obs", "_final_info"):
                np.testing.assert_array_equal(infos[key], expected_infos[key])
            same_columns(infos["final_info"], expected_infos["final_info"], ended)
    assert num_ends > 6


def test_what_an_episode_ended_with_is_told_once() -> None:
    env = WebShopVectorEnv(2, max_steps=1, autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset(options={"goal_index": [0, 1]})
    _, _, _, truncated, infos = env.step(["search[lamp]", None])
    assert truncated.tolist() == [True, False]
    assert infos["page_kind"].tolist() == ["start", "start"] and infos["final_info"]["page_kind"][0] == "results"
    assert infos["final_info"]["available_actions"][0] and infos["final_info"]["available_actions"][1] is None
    _, _, _, truncated, infos = env.step([None, None])
    assert truncated.tolist() == [False, False] and "final_info" not in infos


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_gymnasiums_wrappers_take_every_mode(mode: AutoresetMode) -> None:
    env = gymnasium.make_vec("WebShop-v1", num_envs=2, max_steps=3, autoreset_mode=mode)
    env = DictInfoToList(RecordEpisodeStatistics(env))
    env.action_space.seed(3)
    assert env.action_space.contains(env.action_space.sample())
    _, infos = env.reset(seed=3)
    assert [info["goal_index"] for info in infos] == list(slot_goals(2, seed=3))
    lengths = []
    for _ in range(3):
        observations, *_, infos = env.step(env.action_space.sample())
        assert env.observation_space.contains(observations)
        lengths += [int(info["episode"]["l"]) for info in infos if "episode" in info]
    assert lengths == [3, 3]
    env.close()


def slot_goals(num_envs: int, *, seed: int) -> list[int]:
    return [WebShopTextEnv().reset(seed=seed + i)[1]["goal_index"] for i in range(num_envs)]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ShopGymError, match="autoreset_mode must be one of NextStep, SameStep, Disabled, got 'Never'"):
        WebShopVectorEnv(2, autoreset_mode="Never")
