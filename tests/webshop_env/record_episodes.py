"""Record episodes of the embedded catalogue: `python tests/webshop_env/record_episodes.py` writes `recorded/` anew.

What an agent sees and earns must not change by accident. Where it changes on purpose, the difference of these files
shows what, and the environment gets a new version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from webshop_env.policies import OraclePolicy, RandomPolicy
from webshop_env.text_env import WebShopTextEnv

RECORDED = Path(__file__).resolve().parent / "recorded"
MAX_STEPS = 12

ORACLE_GOALS = {"synthetic": (0, 600, 4000), "human": (7, 40)}
RANDOM_GOALS = {"synthetic": (1, 2, 3, 1700), "human": (11,)}
# What policies that mean well never do.
ODD_ACTIONS = [
    "search[]", "Search[Lamp]", "search[!?;]", "click[next >]", "click[< prev]", "click[back to search]",
    "search[lamp] click[buy now]", "search[<r>]", "click[buy now]", "nonsense", "search[search_results]",
    "click[next >]",
]  # fmt: skip


def episodes(version: str) -> Iterator[dict[str, Any]]:
    """All recorded episodes of a version, in the order of its file."""
    for goals in ("synthetic", "human"):
        env = WebShopTextEnv(version=version, goals=goals, max_steps=MAX_STEPS, show_attrs=goals == "human")
        for index in ORACLE_GOALS[goals]:
            yield _episode(env, "oracle", index, OraclePolicy(env.shop).act)
        for index in RANDOM_GOALS[goals]:
            yield _episode(env, "random", index, RandomPolicy(seed=index).act)
        rest = iter(ODD_ACTIONS)
        yield _episode(env, "odd", 5, lambda observation, info, rest=rest: next(rest))
    env = WebShopTextEnv(version=version, max_steps=MAX_STEPS)
    yield _episode(env, "drawn", None, RandomPolicy(seed=0).act)


def _episode(env: WebShopTextEnv, policy: str, goal_index: int | None, act: Any) -> dict[str, Any]:
    observation, info = env.reset(seed=1, options=None if goal_index is None else {"goal_index": goal_index})
    steps = [_step(env, None, 0.0, False, False, info)]
    is_over = False
    while not is_over:
        action = act(observation, info)
        observation, reward, terminated, truncated, info = env.step(action)
        steps.append(_step(env, action, reward, terminated, truncated, info))
        is_over = terminated or truncated
    return {
        "policy": policy,
        "goals": env.settings.goals,
        "goal_index": info["goal_index"],
        "goal_id": info["goal_id"],
        "steps": steps,
    }


def _step(
    env: WebShopTextEnv, action: str | None, reward: float, terminated: bool, truncated: bool, info: dict[str, Any]
) -> dict[str, Any]:
    page = env.page
    return {
        "action": action,
        "text": page.text,
        "url": page.url,
        "available_actions": list(info["available_actions"]),
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
        "reason": info["reason"],
        "selected_options": info["selected_options"],
        "reward_breakdown": info["reward_breakdown"] or None,
    }


def as_lines(version: str) -> str:
    """The content of a version's file: one episode a line."""
    return "".join(json.dumps(episode, ensure_ascii=True, sort_keys=True) + "\n" for episode in episodes(version))


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for version in ("v0", "v1"):
        (RECORDED / f"{version}.jsonl").write_text(as_lines(version), encoding="ascii")
