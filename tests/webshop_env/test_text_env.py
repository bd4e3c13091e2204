"""The registered environments: Gymnasium's contract, settings, and what info says."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import webshop_env
from webshop_env import ShopGymError, WebShopTextEnv
from webshop_env.policies import OraclePolicy

INFO_KEYS = [
    "available_actions", "goal_index", "goal_id", "instruction_text", "page_kind", "asin", "selected_options",
    "task_score", "won", "action_possible", "reason", "reward_breakdown",
]  # fmt: skip


def oracle_episode(env: WebShopTextEnv, goal_index: int) -> list[tuple]:
    policy = OraclePolicy(env.shop)
    observation, info = env.reset(options={"goal_index": goal_index})
    steps = []
    while True:
        result = env.step(policy.act(observation, info))
        steps.append(result)
        observation, _, terminated, truncated, info = result
        if terminated or truncated:
            return steps


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_gymnasiums_checker_has_nothing_to_say(version):
    env = gymnasium.make(f"WebShop-{version}", render_mode="ansi").unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)


def test_the_id_works_from_any_folder_with_the_embedded_catalogue(tmp_path):
    code = "import gymnasium; print(gymnasium.make('webshop_env:WebShop-v1').reset(seed=1)[0])"
    root = Path(webshop_env.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("WebShop [SEP] Instruction: [SEP] ")


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_info_has_the_same_keys_from_reset_to_the_purchase(version):
    env = WebShopTextEnv(version=version)
    _, info = env.reset(options={"goal_index": 7})
    assert list(info) == INFO_KEYS and info["goal_index"] == 7 and not info["won"]
    assert info["available_actions"][0] == "search[<your query>]" and info["reward_breakdown"] == {}
    *before, last = oracle_episode(env, 7)
    assert all(list(step[4]) == INFO_KEYS and step[1] == 0.0 and step[4]["task_score"] == 0.0 for step in before)
    _, reward, terminated, truncated, info = last
    assert list(info) == INFO_KEYS and (terminated, truncated) == (True, False)
    assert info["task_score"] == reward and info["page_kind"] == "done" and info["reward_breakdown"]["r_type"] == 1.0
    assert info["selected_options"] == env.shop.goals[7].options and info["asin"] == env.shop.goals[7].asin


def test_get_available_actions_has_the_originals_form():
    env = gymnasium.make("WebShop-v0", disable_env_checker=True)
    env.reset(options={"goal_index": 0})
    assert env.unwrapped.get_available_actions() == {"has_search_bar": True, "clickables": ["search"]}


@pytest.mark.parametrize("index", [3, np.int32(3), np.int64(3), np.array(3), np.uint8(3)])
def test_reset_takes_any_whole_number_and_the_id_of_a_goal(index):
    env = WebShopTextEnv()
    first = env.reset(options={"goal_index": index})
    assert first[1]["goal_index"] == 3
    assert env.reset(options={"goal_id": first[1]["goal_id"]}) == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goal_index": 10**6}, "goal_index must be in 0 to"),
        ({"goal_index": -1}, "goal_index must be in 0 to"),
        ({"goal_index": 1.5}, "goal_index must be an integer"),
        ({"goal_index": "3"}, "goal_index must be an integer"),
        ({"goal_id": "nope"}, "nope"),
        ({"goal": 3}, "reset options are one of goal_index, goal_id, got goal"),
        ({"goal_index": 3, "goal_id": "x"}, "reset options are one of"),
    ],
)
def test_reset_refuses_what_is_no_goal_in_one_line(options, message):
    with pytest.raises(ShopGymError, match=message) as caught:
        WebShopTextEnv().reset(options=options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"observation_mod": "text"}, "no setting 'observation_mod'; did you mean observation_mode"),
        ({"observation_mode": "pdf"}, "observation_mode must be one of text, text_rich, html, url, got 'pdf'"),
        ({"max_steps": 0}, "max_steps must be a whole number of at least 1, got 0"),
        ({"page_size": 2.5}, "page_size must be a whole number of at least 1, got 2.5"),
        ({"num_prev_obs": -1}, "num_prev_obs must be a whole number of at least 0"),
        ({"reward": "dense"}, "reward must be one of None, score, sparse, got 'dense'"),
        ({"split": "dev"}, "split must be one of None, train, eval, test, all, got 'dev'"),
        ({"render_mode": "human"}, "render_mode must be one of None, ansi"),
        *(({"success_reward": n}, f"success_reward must be finite, got {n}") for n in (math.nan, math.inf, -math.inf)),
        ({"preseed": 3}, "preseed belongs to WebShop-v0"),
        ({"variant": "verl"}, "variant='verl' belongs to WebShop-v0"),
        ({"goals": "robot"}, "goals must be one of"),
        ({"data_dir": "/nowhere"}, "/nowhere"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(settings, message):
    with pytest.raises(ShopGymError, match=message) as caught:
        gymnasium.make("WebShop-v1", **settings)
    assert "\n" not in str(caught.value)


def test_a_shared_shop_excludes_the_settings_that_would_open_another():
    shop = webshop_env.open_shop()
    assert WebShopTextEnv(shop=shop).shop is shop
    with pytest.raises(ShopGymError, match="shop= is already open: num_products can only be given without it"):
        WebShopTextEnv(shop=shop, num_products=10)
    with pytest.raises(ShopGymError, match="WebShop-v0 was given a shop of version v1"):
        WebShopTextEnv(version="v0", shop=shop)


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_the_seed_decides_the_goals_that_are_drawn(version):
    env, twin = WebShopTextEnv(version=version), WebShopTextEnv(version=version)
    env.reset()
    env.step("search[lamp]")
    draws = [
        [one.reset(seed=5)[1]["goal_index"]] + [one.reset()[1]["goal_index"] for _ in range(5)] for one in (env, twin)
    ]
    assert draws[0] == draws[1] and len(set(draws[0])) > 1


@pytest.mark.parametrize("split", ["train", "eval", "test"])
def test_drawn_goals_are_of_the_split(split):
    env = WebShopTextEnv(split=split)
    members = set(env.shop.split(split).tolist())
    env.reset(seed=0)
    assert {env.reset()[1]["goal_index"] for _ in range(50)} <= members


def test_max_steps_truncates_and_then_nothing_happens():
    env = WebShopTextEnv(max_steps=2)
    env.reset(seed=0)
    assert env.step("nonsense")[2:4] == (False, False)
    assert env.step("search[lamp]")[2:4] == (False, True)
    observation, reward, terminated, truncated, info = env.step("click[back to search]")
    assert (reward, terminated, truncated, info["reason"]) == (0.0, False, True, "the episode is over")
    assert observation == env.page.text and info["page_kind"] == "results"
    assert WebShopTextEnv().settings.max_steps == 15 and WebShopTextEnv(version="v0").settings.max_steps is None


def test_a_purchase_on_the_last_step_is_terminated_not_truncated():
    env = WebShopTextEnv()
    num_steps = len(oracle_episode(env, 3))
    last = oracle_episode(WebShopTextEnv(max_steps=num_steps), 3)[-1]
    assert last[2:4] == (True, False) and last[1] == 1.0


def test_the_sparse_reward_pays_only_for_a_score_of_one():
    env = WebShopTextEnv(reward="sparse")
    assert oracle_episode(env, 3)[-1][1] == 10.0
    assert oracle_episode(WebShopTextEnv(reward="sparse", success_reward=2.5), 3)[-1][1] == 2.5
    assert WebShopTextEnv(version="v0", variant="verl").settings.reward == "sparse"
    goal = env.shop.goals[3]
    env.reset(options={"goal_index": 3})
    for action in (f"search[{goal.name}]", f"click[{goal.asin}]", "click[buy now]"):
        _, reward, terminated, _, info = env.step(action)
    assert terminated and reward == 0.0 and 0.0 < info["task_score"] < 1.0 and not info["won"]


def test_history_puts_earlier_observations_and_actions_first():
    env = WebShopTextEnv(num_prev_obs=1, num_prev_actions=2)
    start, _ = env.reset(options={"goal_index": 0})
    assert env.step("foo")[0] == f"{start} [SEP] foo [SEP] {start}"
    observation = env.step("search[lamp]")[0]
    assert observation == f"foo [SEP] {start} [SEP] search[lamp] [SEP] {env.page.text}"


@pytest.mark.parametrize("mode", ["text", "text_rich", "html", "url"])
def test_each_observation_mode_is_a_rendering_of_the_page(mode):
    env = WebShopTextEnv(observation_mode=mode, render_mode="ansi")
    assert env.reset(seed=0)[0] == env.page.render(mode)
    assert env.step("search[lamp]")[0] == env.page.render(mode)
    assert env.render() == env.page.text_rich


def test_what_a_policy_can_write_never_raises_and_what_it_cannot_is_refused():
    env = WebShopTextEnv()
    with pytest.raises(ShopGymError, match="call reset before step"):
        env.step("search[lamp]")
    env.reset(seed=0)
    for action in ("", "\x00", "search[\ud800]", "click[" * 1000, "a" * 1_000_000, "search[]", "click[a] click[b]"):
        _, reward, terminated, _, info = env.step(action)
        assert (reward, terminated) == (0.0, False) and info["action_possible"] == (info["reason"] == "")
    with pytest.raises(ShopGymError, match="an action is a text"):
        env.step(None)


def test_v0_named_sessions_keep_their_goal():
    env = WebShopTextEnv(version="v0", session_prefix="p-")
    first = env.reset(options={"session": "abc"})[1]["goal_index"]
    env.reset(options={"session": "xyz"})
    assert env.reset(options={"session": "abc"})[1]["goal_index"] == first
    assert env.page.url.endswith("/p-abc")
    assert env.reset(options={"session": 5})[1]["goal_index"] == 5
