"""What every environment and every backend of the manager promises: written once, run against each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest

from env_manager import EnvManager, Observations, StepResult
from webshop_env.errors import ShopGymError

SEARCH = "search[<your query>]"
ODD_ACTIONS = ("", " ", "jump", "click[]", "search[", "]", "\n", "{0}", "\x00", "\u7ea2\u8272", "a" * 100_000)
ODD_REPLIES = (*ODD_ACTIONS, "<action>", "</action><action>", "<action></action>", "<action>jump</action>")
ACTION_KEYS = ("available_actions", "action_possible", "reason")


def check_env(
    make: Callable[[], gymnasium.Env], *, num_steps: int = 12, seed: int = 0, offers_hold: bool = True
) -> None:
    """Holds a text environment to its contract.

    Args:
        make: A new environment each time.
        num_steps: Steps of each walk.
        seed: Of the walk and of the resets.
        offers_hold: Every offered action does something; not so in WebShop-v0, as published.
    """
    first, second = make(), make()
    try:
        walks = [_walk(env, num_steps, seed, offers_hold) for env in (first, second)]
        assert walks[0] == walks[1], "equal seeds and actions give equal episodes"
        assert _walk(first, num_steps, seed, offers_hold) == walks[0], "an episode does not depend on those before it"

        observation, info = first.reset(seed=seed)
        for action in ODD_ACTIONS:
            _, reward, terminated, truncated, info = first.step(action)
            assert not info["action_possible"] and isinstance(info["reason"], str) and info["reason"]
            assert (reward, terminated, truncated) == (0.0, False, False), f"{action[:20]!r} changes nothing"
        again, fresh_info = first.reset(seed=seed)
        assert again == observation and fresh_info["available_actions"]
    finally:
        first.close()
        second.close()


def check_manager(
    make: Callable[[int], EnvManager],
    goals: Sequence[int],
    *,
    max_steps: int,
    seed: int = 0,
    group_size: int = 2,
) -> None:
    """Holds a manager, with whatever backend and environment, to its contract.

    Args:
        make: A new manager with so many slots, each of whose episodes has at most `max_steps` steps; the template
            demands no thought.
        goals: At least two.
        max_steps: As configured.
        seed: Of what the policy writes.
        group_size: Episodes of a goal.
    """
    num_envs = len(goals) * group_size
    manager, other = make(num_envs), make(num_envs)
    try:
        with pytest.raises(ShopGymError, match="reset"):
            manager.step(["x"] * num_envs)
        how = {"group_size": group_size, "max_steps": max_steps, "seed": seed}
        episodes = [_play(each, goals, one_by_one=False, **how) for each in (manager, other)]
        assert episodes[0] == episodes[1], "equal goals and replies give equal episodes"
        assert _play(other, goals, one_by_one=True, **how) == episodes[0], "in whatever order"
        _check_groups(manager, goals, group_size)
        _check_odd_replies(manager, goals, max_steps)
        _check_wrong_calls(manager, goals)
    finally:
        manager.close()
        other.close()


def _walk(env: gymnasium.Env, num_steps: int, seed: int, offers_hold: bool) -> list[tuple[Any, ...]]:
    """What a random walk over offered actions shows."""
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    shown: list[tuple[Any, ...]] = [(observation, *(info[key] for key in ACTION_KEYS[:1]))]
    assert env.observation_space.contains(observation)
    for _ in range(num_steps):
        action = _choose(rng, info["available_actions"])
        observation, reward, terminated, truncated, info = env.step(action)
        assert env.observation_space.contains(observation)
        assert isinstance(reward, float) and isinstance(terminated, bool) and isinstance(truncated, bool)
        assert not (terminated and truncated), "an end of its own is no end by the limit"
        assert info["action_possible"] == (info["reason"] == "")
        assert info["action_possible"] or not offers_hold, f"{action} was offered"
        assert isinstance(info["available_actions"], tuple)
        shown.append((action, observation, reward, terminated, truncated, *(info[key] for key in ACTION_KEYS)))
        if terminated or truncated:
            break
        assert info["available_actions"], "an episode that goes on has something to do"
    return shown


def _choose(rng: np.random.Generator, actions: Sequence[str]) -> str:
    action = actions[int(rng.integers(len(actions)))]
    return f"search[{rng.choice(['red', 'shoes', 'lamp'])}]" if action == SEARCH else action


def _play(
    manager: EnvManager,
    goals: Sequence[int],
    *,
    group_size: int,
    max_steps: int,
    seed: int,
    one_by_one: bool,
) -> list[list[tuple[Any, ...]]]:
    """Plays all slots to their ends; what each slot saw and got, step by step."""
    num_envs = len(goals) * group_size
    rngs = [np.random.default_rng((seed, slot)) for slot in range(num_envs)]
    seen: list[list[tuple[Any, ...]]] = [[] for _ in range(num_envs)]
    observations = manager.reset(goals, group_size=group_size)
    assert observations.is_live.all()
    while observations.is_live.any():
        live = manager.live_slots()
        assert live == observations.is_live.nonzero()[0].tolist()
        replies = {slot: f"<action>{_choose(rngs[slot], observations.admissible[slot])}</action>" for slot in live}
        before = observations
        for slots in [[slot] for slot in reversed(live)] if one_by_one else [live]:
            resting = {slot: manager.page(slot) for slot in range(num_envs) if slot not in slots}
            result = manager.step([replies[slot] for slot in slots], slots)
            observations = result.observations
            _check_result(result, slots)
            for slot, page in resting.items():
                assert manager.page(slot) == page, "who was not asked does not move"
            for s, slot in enumerate(slots):
                row = (result.reward[s], result.terminated[s], result.truncated[s], result.won[s], result.task_score[s])
                seen[slot].append(
                    (before.prompts[slot], before.anchors[slot], result.actions[s], *(value.item() for value in row))
                )
                is_over = bool(result.terminated[s] or result.truncated[s])
                assert result.truncated[s] == (len(seen[slot]) == max_steps and not result.terminated[s])
                _check_slot(observations, slot, is_live=not is_over)
                if is_over:
                    with pytest.raises(ShopGymError, match=f"slot {slot} is finished"):
                        manager.step(["<action>x</action>"], [slot])
    return seen


def _check_result(result: StepResult, slots: Sequence[int]) -> None:
    num = len(slots)
    assert result.slots.tolist() == list(slots)
    assert len(result.actions) == len(result.problems) == len(result.reasons) == num
    for name in ("format_valid", "action_possible", "terminated", "truncated", "won"):
        values = getattr(result, name)
        assert values.dtype == bool and values.shape == (num,), name
    for name in ("reward", "task_score"):
        values = getattr(result, name)
        assert values.dtype == np.float32 and values.shape == (num,) and np.isfinite(values).all(), name
    assert not (result.terminated & result.truncated).any()
    assert not (result.won & ~result.terminated).any(), "only an episode that ended by itself is won"
    assert ((result.task_score >= 0) & (result.task_score <= 1)).all()
    assert result.format_valid.all() and result.problems == [None] * num, "an action in its tags"
    assert result.action_possible.tolist() == [reason == "" for reason in result.reasons]
    assert result.action_possible.all(), "what was done was offered"


def _check_slot(observations: Observations, slot: int, *, is_live: bool) -> None:
    """A live slot is asked something; one whose episode is over is asked nothing."""
    assert bool(observations.is_live[slot]) == is_live
    for column in (observations.prompts, observations.anchors, observations.admissible):
        assert bool(column[slot]) == is_live


def _check_groups(manager: EnvManager, goals: Sequence[int], group_size: int) -> None:
    observations = manager.reset(goals, group_size=group_size)
    for slot in range(len(goals) * group_size):
        first = slot - slot % group_size
        for column in (observations.prompts, observations.anchors, observations.admissible):
            assert column[slot] == column[first], "siblings begin alike"


def _check_odd_replies(manager: EnvManager, goals: Sequence[int], max_steps: int) -> None:
    """Whatever a policy writes is a record with a reason; the page stays, the step counts."""
    for start in range(0, len(ODD_REPLIES), max_steps):
        first = manager.reset(goals[:1])
        for number, reply in enumerate(ODD_REPLIES[start : start + max_steps], start=1):
            result = manager.step([reply])
            assert result.format_valid[0] == (result.problems[0] is None)
            assert not result.action_possible[0] and result.reasons[0], reply[:20]
            assert result.reward[0] == 0.0 and not result.terminated[0]
            assert result.truncated[0] == (number == max_steps)
            if number < max_steps:
                assert result.observations.anchors[0] == first.anchors[0]


def _check_wrong_calls(manager: EnvManager, goals: Sequence[int]) -> None:
    """A caller's mistake is said at once and moves nothing."""
    manager.reset(goals[:2])
    pages = [manager.page(slot) for slot in (0, 1)]
    for replies, slots in ((["a"], [0, 1]), (["a", "b"], [0, 0]), (["a"], [manager.num_envs]), (["a"], [-1])):
        with pytest.raises(ShopGymError):
            manager.step(replies, slots)
    for wrong in ([], [0] * (manager.num_envs + 1)):
        with pytest.raises(ShopGymError):
            manager.reset(wrong)
    assert [manager.page(slot) for slot in (0, 1)] == pages
