"""The manager, on a shop and on something that is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import gymnasium
import numpy as np
import pytest

import webshop_env  # noqa: F401  (registers the shops)
from env_manager import EnvConfig, EnvManager, get_env_spec, register_env
from env_manager.registry import won_by_reward
from webshop_env.errors import ShopGymError

SAFE_PATH = ["down", "down", "right", "right", "down", "right"]
"""Across FrozenLake's standard map."""
INTO_A_HOLE = ["right", "down"]


def say(*actions: str) -> list[str]:
    return [f"<action>{action}</action>" for action in actions]


def lake(num_envs: int, **config: object) -> EnvManager:
    return EnvManager("FrozenLake-v1", num_envs, EnvConfig(**config))


@pytest.fixture(scope="module")
def shop() -> Iterator[EnvManager]:
    manager = EnvManager("WebShop-v1", 4, EnvConfig(prompt="no_think", max_steps=4))
    yield manager
    manager.close()


def test_a_lake_is_crossed_in_text() -> None:
    manager = lake(2)
    observations = manager.reset([0, 1])
    assert observations.anchors[0] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert observations.admissible[0] == ("left", "down", "right", "up")
    for n, move in enumerate(SAFE_PATH):
        result = manager.step(say(move, "left"))
        assert result.terminated.tolist() == [n == 5, False]
    assert result.won.tolist() == [True, False]
    assert result.reward.tolist() == [1.0, 0.0]
    assert result.task_score.tolist() == [1.0, 0.0]
    assert result.observations.is_live.tolist() == [False, True]
    assert result.observations.prompts[0] == ""


def test_a_finished_slot_raises_and_the_others_go_on() -> None:
    manager = lake(3)
    manager.reset([0, 0, 0])
    manager.step(say(INTO_A_HOLE[0], "left", "left"))
    result = manager.step(say(INTO_A_HOLE[1], "left", "left"))
    assert result.terminated.tolist() == [True, False, False]
    assert result.task_score.tolist() == [0.0, 0.0, 0.0]
    assert manager.live_slots() == [1, 2]
    with pytest.raises(ShopGymError, match="slot 0 is finished"):
        manager.step(say("left"), [0])
    assert manager.step(say("down", "down")).slots.tolist() == [1, 2]
    assert manager.reset([0, 0, 0]).is_live.all()


def test_slots_can_be_stepped_one_at_a_time_in_any_order() -> None:
    together, apart = lake(3), lake(3)
    together.reset([0, 1, 2])
    apart.reset([0, 1, 2])
    one = together.step(say("right", "down", "jump"))
    for slot, move in ((2, "jump"), (0, "right"), (1, "down")):
        other = apart.step(say(move), [slot])
        assert other.action_possible[0] == one.action_possible[slot]
        assert other.reasons[0] == one.reasons[slot]
    assert other.observations.prompts == one.observations.prompts
    assert other.observations.anchors == one.observations.anchors


@pytest.mark.parametrize(
    ("replies", "slots", "message"),
    [
        (["a"], [0, 1], "1 replies for 2 slots"),
        (["a", "b"], [1, 1], "a slot twice"),
        (["a"], [5], "no slot 5"),
        (["a"], [-1], "no slot -1"),
    ],
)
def test_wrong_calls_are_refused_before_anything_moves(replies: list[str], slots: list[int], message: str) -> None:
    manager = lake(2)
    before = manager.reset([0, 0])
    with pytest.raises(ShopGymError, match=message):
        manager.step(replies, slots)
    after = manager.step(say("left", "left")).observations
    assert "Steps taken so far: 1" in after.prompts[0]
    assert after.anchors == before.anchors


def test_a_step_needs_a_reset_and_a_reset_needs_goals() -> None:
    manager = lake(2)
    with pytest.raises(ShopGymError, match="reset"):
        manager.step(say("left", "left"))
    for goals in ([], [0, 0, 0]):
        with pytest.raises(ShopGymError, match="1 to 2 goals"):
            manager.reset(goals)


def test_a_reset_that_is_refused_leaves_nothing_to_step(shop: EnvManager) -> None:
    shop.reset([1])
    with pytest.raises(ShopGymError, match="goal_index"):
        shop.reset([3, 10**6])
    with pytest.raises(ShopGymError, match="before the first reset"):
        shop.step(["<think>x</think><action>search[rug]</action>"])


def test_seeds_that_gymnasium_refuses_are_refused_before(shop: EnvManager) -> None:
    manager = lake(1)
    with pytest.raises(ShopGymError, match=r"FrozenLake.*at least 0, got -1"):
        manager.reset([-1])
    manager.reset([3])
    assert manager.step(say("left")).actions == ["left"]


@pytest.mark.parametrize("name", [":", "env_manager:", ":WebShop-v1"])
def test_half_a_name_is_no_plug_in(name: str) -> None:
    with pytest.raises(ShopGymError, match=r"env\.env_name: .* is no name with its module"):
        EnvManager(name, 1)


def test_slots_without_a_goal_rest() -> None:
    manager = lake(3)
    assert manager.reset([4]).is_live.tolist() == [True, False, False]
    assert manager.step(say("left")).slots.tolist() == [0]
    with pytest.raises(ShopGymError, match="slot 2 is finished"):
        manager.step(say("left"), [2])


def test_an_episode_is_truncated_at_the_step_limit() -> None:
    manager = lake(2, max_steps=6)
    manager.reset([0, 0])
    for n, move in enumerate(SAFE_PATH):
        result = manager.step(say("left", move))
        assert result.truncated.tolist() == [n == 5, False], "an episode that ends by itself is not truncated"
    assert not result.observations.is_live.any()


def test_a_malformed_reply_is_a_record_and_its_text_still_reaches_the_environment() -> None:
    manager = lake(2)
    manager.reset([0, 0])
    result = manager.step(["down", "<action>down"], is_cut=[False, True])
    assert result.problems == ["no <action>…</action>", "cut at the length limit"]
    assert result.format_valid.tolist() == [False, False]
    assert result.actions == ["down", "<action>down"]
    assert result.action_possible.tolist() == [True, False]
    assert result.reasons[1].startswith("there is no move")


def test_chinese_text_is_malformed_only_where_the_settings_say_so() -> None:
    for reject, problem in ((True, "Chinese characters"), (False, None)):
        manager = lake(1, reject_chinese=reject)
        manager.reset([0])
        result = manager.step(["\u5411\u53f3 <action>right</action>"])
        assert (result.problems, result.actions) == ([problem], ["right"])
        assert result.format_valid.tolist() == [not reject]


def test_a_reply_cut_by_the_length_limit_has_a_reason_of_its_own() -> None:
    manager = lake(3)
    manager.reset([0, 0, 0])
    replies = ["I think that", "I think that", "<action>down</action>"]
    result = manager.step(replies, is_cut=[True, False, True])
    assert result.problems == ["cut at the length limit", "no <action>…</action>", None]


def test_groups_get_the_same_goal_in_neighbouring_slots() -> None:
    manager = EnvManager("WebShop-v1", 6, EnvConfig(prompt="no_think"))
    grouped = manager.reset([7, 9], group_size=3)
    assert grouped.prompts == manager.reset([7, 7, 7, 9, 9, 9]).prompts
    assert len(set(grouped.prompts)) == 2
    assert manager.reset([7], group_size=3).is_live.tolist() == [True] * 3 + [False] * 3
    with pytest.raises(ShopGymError, match="1 to 2 goals for groups of 3, got 3"):
        manager.reset([7, 8, 9], group_size=3)
    with pytest.raises(ShopGymError, match=r"env\.rollout\.n must be at least 1"):
        manager.reset([7], group_size=0)


def test_a_full_memory_fills_the_prompt_and_loses_its_oldest_steps_first() -> None:
    moves = ("left", "jump", "left", "down")
    prompts = []
    for limit in (500, 125):
        manager = lake(1, memory="full", count_tokens=lambda text: len(text.split()), max_prompt_tokens=limit)
        manager.reset([0])
        for move in moves:
            result = manager.step(say(move))
        prompts.append(result.observations.prompts[0])
        manager.close()
    assert all(f"Action {n}: '{move}'" in prompts[0] for n, move in enumerate(moves, start=1))
    assert "The latest 4 of them" in prompts[0]
    assert "Action 4: 'down'" in prompts[1] and "Action 1: 'left'" not in prompts[1]
    assert len(prompts[1].split()) <= 125


def test_a_success_reward_replaces_the_environments_own() -> None:
    manager = lake(2, success_reward=10.0)
    manager.reset([0, 0])
    rewards = [manager.step(say(move, move)).reward.tolist() for move in SAFE_PATH]
    assert rewards == [[0.0, 0.0]] * 5 + [[10.0, 10.0]]


def test_prompts_over_the_budget_are_counted() -> None:
    manager = lake(2, max_prompt_tokens=60, count_tokens=lambda text: len(text.split()))
    observations = manager.reset([0, 0])
    assert observations.prompt_is_cut.tolist() == [True, True]
    assert (manager.num_prompts, manager.num_cut_prompts) == (2, 2)
    roomy = lake(2, max_prompt_tokens=500, count_tokens=lambda text: len(text.split()))
    assert not roomy.reset([0, 0]).prompt_is_cut.any()
    assert (roomy.num_prompts, roomy.num_cut_prompts) == (2, 0)


def test_the_prompts_of_a_step_can_be_encoded_ahead_all_at_once() -> None:
    ahead: list[list[str]] = []
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text.split())

    config = {"max_prompt_tokens": 500, "count_tokens": count}
    manager = lake(3, encode_ahead=ahead.append, **config)
    alone = lake(3, **config)
    assert manager.reset([0, 0]).prompts == alone.reset([0, 0]).prompts
    assert [len(prompts) for prompts in ahead] == [2] and ahead[0] == counted[:2]
    counted.clear()
    for move in INTO_A_HOLE[:2]:
        prompts = manager.step(say(move, "left"), [0, 1]).observations.prompts
        assert prompts == alone.step(say(move, "left"), [0, 1]).observations.prompts
    assert ahead[1:] == [counted[0:2], counted[4:5]], "an episode that is over has no prompt"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"history_length": -1}, "history_length"),
        ({"history_overflow": "none"}, "history_overflow"),
        ({"max_steps": 0}, "max_steps"),
        ({"max_prompt_tokens": 10}, "count_tokens"),
        ({"memory_tokens": 10}, "count_tokens"),
        ({"memory_tokens": -1}, "memory_tokens"),
        ({"memory": "elephant"}, "no memory is called 'elephant'"),
    ],
)
def test_a_config_out_of_range_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ShopGymError, match=message):
        EnvConfig(**config)


def test_an_environment_of_ones_own_plugs_in() -> None:
    spec = replace(get_env_spec("FrozenLake-v1"), won=won_by_reward, template="think")
    register_env(spec, name="MyLake")
    manager = EnvManager("MyLake", 1)
    assert "<think>" in manager.reset([0]).prompts[0]
    with pytest.raises(ShopGymError, match=r"'NoLake'.*FrozenLake-v1.*WebShop-v1"):
        get_env_spec("NoLake")


def test_siblings_get_the_same_goal_and_the_pages_of_a_single_environment(shop: EnvManager) -> None:
    observations = shop.reset([7, 7, 9, 9])
    assert observations.prompts[0] == observations.prompts[1] != observations.prompts[2] == observations.prompts[3]
    single = gymnasium.make("WebShop-v1")
    for goal, slot in ((7, 0), (9, 2)):
        _, info = single.reset(options={"goal_index": goal})
        assert f"Your assignment: {info['instruction_text']}\n" in observations.prompts[slot]
    result = shop.step(say("search[shoes]", "click[buy now]", "search[red]", "jump"))
    page, info = single.step("search[red]")[0::4]
    segments = page.split(" [SEP] ")
    assert result.observations.anchors[2] == " [SEP] ".join(f"'{s}'" for s in segments[2:])
    assert result.observations.admissible[2] == info["available_actions"]
    assert shop.page(2) == (page, info)
    assert result.action_possible.tolist() == [True, False, True, False]
    assert result.format_valid.all()
    assert result.reasons[1] and result.reasons[3] and not result.reasons[0]
    single.close()


def test_a_shops_episode_ends_at_the_managers_step_limit(shop: EnvManager) -> None:
    shop.reset([1])
    truncated = [shop.step(say("click[nothing]")).truncated.tolist() for _ in range(4)]
    assert truncated == [[False], [False], [False], [True]]


def test_a_purchase_ends_an_episode_with_its_score(shop: EnvManager) -> None:
    shop.reset([3])
    result = shop.step(say("search[shoes]"))
    first_product = next(a for a in result.observations.admissible[0] if a.startswith("click[b0"))
    assert shop.step(say(first_product)).task_score.tolist() == [0.0]
    result = shop.step(say("click[buy now]"))
    assert result.terminated.tolist() == [True]
    assert 0.0 <= result.task_score[0] <= 1.0
    assert result.reward.tolist() == result.task_score.tolist()
    assert result.won[0] == (result.task_score[0] == 1.0)


def test_history_shows_the_last_two_steps_with_their_numbers(shop: EnvManager) -> None:
    shop.reset([3])
    for action in ("search[mug]", "click[back to search]", "search[cup]"):
        prompt = shop.step(say(action)).observations.prompts[0]
    history = [line for line in prompt.splitlines() if line.startswith("[Observation")]
    assert [line[: len("[Observation 2")] for line in history] == ["[Observation 2", "[Observation 3"]
    assert history[0].endswith("Action 2: 'click[back to search]']")
    assert history[1] == "[Observation 3: ''Search'', Action 3: 'search[cup]']"
    assert "This is step 4. " in prompt


def test_v0_and_v1_share_goals_and_can_be_driven_alike() -> None:
    for version in ("v0", "v1"):
        manager = EnvManager(f"WebShop-{version}", 2, EnvConfig(prompt="compact", max_steps=2))
        manager.reset([5, 6])
        manager.step(say("search[shoes]", "search[shoes]"))
        result = manager.step(say("click[next >]", "click[next >]"))
        assert result.truncated.all(), "v0 has no limit of its own"
        assert np.all(result.action_possible)
