"""Where steps and episodes are lost, on episodes that are played to end in a known way."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.flatten import EpisodeRecord, StepRecord, flatten
from rollout.types import Generation, GenerationRequest, NoiseKey, StepBatch
from trainers.lost_steps import ENDS, lost_steps
from webshop_env.policies import OraclePolicy
from webshop_env.shop import Shop, open_shop
from webshop_env.text_env import WebShopTextEnv

MALFORMED = "buy it"
BUY = "click[buy now]"


def play(shop: Shop, goal: int, actions: list[str]) -> EpisodeRecord:
    """An episode of these actions, as the collector would record it."""
    env = WebShopTextEnv(version=shop.version, shop=shop)
    env.reset(options={"goal_index": goal})
    steps = []
    for action in actions:
        *_, info = env.step(action)
        request = GenerationRequest(np.zeros(1, np.int32), NoiseKey(0, 0, 0, 0))
        steps.append(
            StepRecord(
                request=request,
                generation=Generation(np.zeros(1, np.int32), np.zeros(1, np.float32), action, is_cut=False),
                anchor="",
                action=action,
                problem="no tag" if action == MALFORMED else None,
                reason=info["reason"],
                reward=0.0,
                action_possible=info["action_possible"],
                prompt_is_cut=False,
            )
        )
    return EpisodeRecord(
        episode_id=goal,
        group_id=goal,
        goal_index=goal,
        steps=steps,
        won=info["won"],
        terminated=env.session.is_done,
        task_score=env.session.score,
    )


def rows(*episodes: EpisodeRecord) -> StepBatch:
    return flatten(episodes)


@pytest.fixture(scope="module", params=["v0", "v1"])
def shop(request: pytest.FixtureRequest) -> Shop:
    return open_shop(version=request.param)


def shown(shop: Shop, goal: int) -> list[str]:
    """What the oracle does."""
    oracle, env = OraclePolicy(shop), WebShopTextEnv(version=shop.version, shop=shop)
    observation, info = env.reset(options={"goal_index": goal})
    actions = []
    while not env.session.is_done:
        actions.append(oracle.act(observation, info))
        observation, *_, info = env.step(actions[-1])
    return actions


def with_options(shop: Shop) -> tuple[int, list[str]]:
    """A goal that the oracle wins with at least two options from the first page, and how."""
    for goal in range(200):
        actions = shown(shop, goal)
        num_options = len(shop.goal_at(goal).options)
        if num_options >= 2 and len(actions) == 3 + num_options and play(shop, goal, actions).won:
            return goal, actions
    raise AssertionError("no such goal")


def test_each_end_is_told_from_the_others(shop: Shop) -> None:
    goal, actions = with_options(shop)
    search, opened = actions[:2]
    other = next(a for a in shop.products if a != shop.goal_at(goal).asin)
    elsewhere = f"search[{shop.products[other].title}]"
    ends = {
        "won": actions,
        "never bought: product never listed": [MALFORMED, elsewhere],
        "never bought: product listed, not opened": [search],
        "never bought: product opened": [search, opened],
        "bought it: option missing": [search, opened, *actions[3:-1], BUY],
        "bought another: product never listed": None,
        "bought another: product listed": None,
    }
    env = WebShopTextEnv(version=shop.version, shop=shop)
    for name, first in (("never listed", [elsewhere]), ("listed", [search, "click[back to search]", elsewhere])):
        env.reset(options={"goal_index": goal})
        for action in first:
            *_, info = env.step(action)
        asin = f"click[{other.lower()}]"
        assert asin in info["available_actions"]
        ends[f"bought another: product {name}"] = [*first, asin, BUY]
    for end, played in ends.items():
        found = lost_steps(rows(play(shop, goal, played)), shop)["ends"]
        assert {name for name, num in found.items() if num} == {end}
    assert set(ends) < set(ENDS)


def test_parts_of_a_score_that_a_purchase_lacked(shop: Shop) -> None:
    goal, actions = with_options(shop)
    found = lost_steps(rows(play(shop, goal, [*actions[:2], BUY])), shop)
    assert found["parts_missing"] == {"type": 0, "attributes": 0, "options": 1, "price": 0}
    won = lost_steps(rows(play(shop, goal, actions)), shop)
    assert not any(won["parts_missing"].values())


def test_steps_by_what_they_wanted_and_whether_the_page_had_it(shop: Shop) -> None:
    goal, actions = with_options(shop)
    far = next(a for a in shop.products if a != shop.goal_at(goal).asin)
    played = [MALFORMED, "click[b0zz99zz99]", f"click[{far.lower()}]", "click[no such option]", "click[next >]"]
    found = lost_steps(rows(play(shop, goal, [*played, BUY, "hm[", *actions])), shop)
    steps = found["steps"]
    assert found["malformed"] == 1 and found["num_steps"] == len(played) + 2 + len(actions)
    assert steps["invented product"] == [0, 1] and steps["product"] == [1, 1]
    assert steps["option"] == [len(actions) - 3, 1] and steps["way"] == [0, 1]
    assert steps["buy"] == [1, 1] and steps["search"] == [1, 0] and steps["no action"] == [0, 1]
    assert found["malformed"] + sum(map(sum, steps.values())) == found["num_steps"]
    assert found["first_search_lists_it"] == 1


def test_rows_without_actions_are_refused(shop: Shop) -> None:
    batch = rows(play(shop, 0, ["search[red mug]"]))
    batch.action = None
    with pytest.raises(ValueError, match="rows without actions"):
        lost_steps(batch, shop)
