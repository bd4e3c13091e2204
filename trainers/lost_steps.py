"""Where a policy loses steps and episodes in a shop: what could not be done, and what kept a goal from being won.

A rollout's rows say which actions were given; they are played once more in the shop, which tells the rest (pages seen,
options selected, parts of the score). That costs microseconds a step.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.types import StepBatch
from webshop_env.actions import BUTTON_KEYS, BUY, SUB_PAGES, match_key, parse_v0, parse_v1
from webshop_env.pages import Page
from webshop_env.shop import Shop
from webshop_env.text_env import WebShopTextEnv
from webshop_env.types import Goal

KINDS = ("search", "product", "invented product", "option", "way", "text", "buy", "no action")
"""What an action wants. `way`: back, previous, next; `text`: description, features, reviews; `invented product`: what
looks like an asin and is none of the catalogue; `option`: any other click."""
ENDS = (
    "won",
    "never bought: product never listed",
    "never bought: product listed, not opened",
    "never bought: product opened",
    "bought another: product never listed",
    "bought another: product listed",
    "bought it: option missing",
    "bought it: option wrong",
    "bought it as asked, which scores less than 1",
)
"""How an episode can end, each in exactly one way; `product` is that of the goal."""
PARTS = {"r_type": "type", "r_att": "attributes", "r_option": "options", "r_price": "price"}
"""Parts of the score, in the breakdown's names."""
_ASIN = re.compile(r"[a-z0-9]{10}")


@dataclass(slots=True)
class _Episode:
    """What was seen of the goal's product on the way, and how it ended."""

    is_listed: bool = False
    is_opened: bool = False
    was_listed_at_once: bool = False
    """On the first page that any search showed."""
    num_searches: int = 0
    bought: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    breakdown: dict[str, Any] = field(default_factory=dict)


def lost_steps(rows: StepBatch, shop: Shop) -> dict[str, Any]:
    """Counts of steps by what they wanted and whether the page had it, and of episodes by how they ended.

    Args:
        rows: Of a collection in this shop, with the actions that the environment was given.
        shop: Where they were played.

    Returns:
        `steps`: kind -> [possible, impossible], and malformed replies; `ends`: how many episodes ended in which way;
        `parts_missing`: of purchases that did not win, how many lacked which part of the score (one may lack several);
        `num_episodes`; `first_search_lists_it`: episodes whose first search showed the goal's product on its first
        page.

    Raises:
        ValueError: The rows do not say what was done.
    """
    if rows.action is None:
        raise ValueError("rows without actions: take those of a collector, or of a file that it wrote")
    env = WebShopTextEnv(version=shop.version, shop=shop, max_steps=None)
    steps: dict[str, list[int]] = {kind: [0, 0] for kind in KINDS}
    ends, parts = Counter(dict.fromkeys(ENDS, 0)), Counter(dict.fromkeys(PARTS.values(), 0))
    num_malformed = num_at_once = 0
    order = np.lexsort((rows.step_index, rows.episode_id))
    starts = np.flatnonzero(np.diff(rows.episode_id[order], prepend=-1))
    for members in np.split(order, starts[1:]):
        goal = shop.goal_at(int(rows.goal_index[members[0]]))
        env.reset(options={"goal_index": goal.goal_index})
        seen = _Episode()
        for row in members:
            if rows.format_valid[row]:
                kind = _kind(str(rows.action[row]), env.page, shop)
                steps[kind][0 if rows.action_possible[row] else 1] += 1
            else:
                num_malformed += 1
            env.step(str(rows.action[row]))
            _note(seen, env, goal)
        ends["won" if rows.won[members[0]] else _end(seen, goal)] += 1
        num_at_once += seen.was_listed_at_once
        if seen.bought and not rows.won[members[0]]:
            parts.update(name for key, name in PARTS.items() if float(seen.breakdown.get(key, 1.0)) < 1.0)
    return {
        "num_episodes": len(starts),
        "num_steps": len(rows),
        "malformed": num_malformed,
        "steps": steps,
        "first_search_lists_it": num_at_once,
        "ends": dict(ends),
        "parts_missing": dict(parts),
    }


def _kind(action: str, page: Page, shop: Shop) -> str:
    parsed = (parse_v0 if shop.version == "v0" else parse_v1)(action)
    if parsed.kind is None:
        return "no action"
    if parsed.kind == "search":
        return "search"
    text, node = match_key(parsed.argument), page.body.clickables.get(parsed.argument)
    if text in BUTTON_KEYS:
        if text == match_key(BUY):
            return "buy"
        return "text" if text in SUB_PAGES else "way"
    if (node is not None and node.role == "product") or text.upper() in shop.products:
        return "product"
    if node is None and _ASIN.fullmatch(text) and any(character.isdigit() for character in text):
        return "invented product"
    return "option"


def _note(seen: _Episode, env: WebShopTextEnv, goal: Goal) -> None:
    """Takes in the page that an action led to."""
    page, session = env.page, env.session
    is_there = any(node.role == "product" and node.text.upper() == goal.asin for node in page.body.clickables.values())
    if page.kind == "results":
        seen.num_searches += 1
        seen.is_listed |= is_there
        seen.was_listed_at_once |= is_there and seen.num_searches == 1
    seen.is_opened |= session.asin == goal.asin
    if session.is_done and seen.bought is None:
        seen.bought, seen.options = session.asin, dict(session.options)
        seen.breakdown = session.reward_breakdown or {}


def _end(seen: _Episode, goal: Goal) -> str:
    if seen.bought is None:
        if seen.is_opened:
            return "never bought: product opened"
        return f"never bought: product {'listed, not opened' if seen.is_listed else 'never listed'}"
    if seen.bought != goal.asin:
        return f"bought another: product {'listed' if seen.is_listed else 'never listed'}"
    if float(seen.breakdown.get("r_option", 1.0)) == 1.0:
        return "bought it as asked, which scores less than 1"
    wanted = goal.options if isinstance(goal.options, dict) else dict.fromkeys(goal.options, "")
    has_all = len(seen.options) >= len(wanted)
    if isinstance(goal.options, dict):
        has_all = {match_key(name) for name in wanted} <= {match_key(name) for name in seen.options}
    return f"bought it: option {'wrong' if has_all else 'missing'}"
