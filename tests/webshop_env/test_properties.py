"""Random walks over random catalogues: whatever a file holds and a policy writes, the promises of an episode hold.

2,000 walks for each version in CI, 200 elsewhere.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_reader import read

from webshop_env.actions import match_key
from webshop_env.pages import Page, PageBook
from webshop_env.session import take
from webshop_env.shop import Shop, open_shop
from webshop_env.text_env import WebShopTextEnv
from webshop_env.types import Session

NUM_WALKS = 2000 if os.environ.get("CI") == "true" else 200
NUM_STEPS = 10

WORDS = ["mug", "red", "blue", "large", "café", "x-large", "pack of 2", "lamp"]
BUTTONS = ["Buy Now", "Search", "Description", "Features", "Reviews", "Attributes", "< Prev", "Next >",
           "Back to Search"]  # fmt: skip
ODD_TEXTS = ['15"', "a & b", "50% / 50%", "<b>", "🙂", "  padded ", "it's", "[odd]", "a]b", "&amp;", "two\nlines", "\t",
             " ", "", "&#13;", "\r", "\x00", "\u2028", "İ", "ß", "ſs", "x" * 300, "size: large", "</p>"]  # fmt: skip
ODD_PRICES = ["12.99", "$12.99.", "$N/A", "Free", "EUR 5", "$1,299.00", "$20 - $10", "$12.99 ($1.08/Ounce)", "", None,
              "$", "$1.2.3", 12.5, -3, ["$4"], True, "$12,99", "9" * 400]  # fmt: skip
# fmt: off
texts = st.one_of(st.sampled_from(WORDS + BUTTONS + ODD_TEXTS), st.text(max_size=6))
values = st.one_of(
    texts.map(lambda text: {"value": text}), st.just({"value": None}), st.none(), texts, st.integers(0, 9)
)
groups = st.dictionaries(
    st.one_of(st.sampled_from(["Color", "color", "Size", "Buy Now", ""]), texts),
    st.one_of(st.lists(values, max_size=3), st.none()), max_size=3
)
odd_rows = st.fixed_dictionaries({}, optional={
    "asin": st.one_of(st.sampled_from(["B000000001", "b000000002", "B0 1", "Next >", "< Prev", "Search", "nan", "", "ß",
                                       "SS", "a/b", "B00000000012"]), st.none(), st.text(max_size=10)),
    "name": st.one_of(texts, st.none()),
    "full_description": st.one_of(texts, st.none()),
    "small_description": st.one_of(st.lists(st.one_of(texts, st.none()), max_size=2), texts, st.none()),
    "pricing": st.one_of(st.sampled_from(ODD_PRICES), st.text(alphabet="$0123456789., -", max_size=8)),
    "images": st.sampled_from([[], ["a.jpg"], None, [None]]),
    "category": st.sampled_from(["garden", "", None]),
    "query": st.sampled_from(["mugs", None]),
    "product_category": st.sampled_from(["Home › Mugs", None]),
    "customization_options": st.one_of(groups, st.sampled_from(["", None, [], "text"])),
})
# fmt: on


@dataclass(frozen=True)
class Case:
    """A catalogue and a walk over it."""

    rows: list[dict[str, Any]]
    wish: str
    noise: str
    seed: int
    page_size: int
    show_attrs: bool


cases = st.builds(
    Case,
    rows=st.lists(odd_rows, min_size=1, max_size=4),
    wish=texts,
    noise=st.one_of(texts, st.text(max_size=20)),
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 2, 50]),
    show_attrs=st.booleans(),
)


def open_case(case: Case, version: str, folder: Path) -> Shop:
    """The first row is always for sale and wanted; the others are as odd as they come."""
    plain = {
        "asin": "B000000001",
        "name": "Red Mug",
        "full_description": "A mug.",
        "small_description": ["Holds tea"],
        "pricing": "$9.99$12.99",
        "images": ["a.jpg"],
        "category": "garden",
        "query": "mugs",
        "product_category": "Home › Mugs",
        "customization_options": {"Color": [{"value": "Red"}, {"value": "Blue"}]},
    }
    first = {**plain, **case.rows[0], "asin": "B000000001"}
    if version == "v0" or not first["customization_options"]:
        first["customization_options"] = plain["customization_options"]  # v0 makes no goal of an empty group
    rows = [first] + [{**plain, "asin": f"B00000001{i}", **row} for i, row in enumerate(case.rows[1:])]
    wishes = {
        str(row["asin"]): {"attributes": ["tea safe"], "instruction": case.wish, "instruction_attributes": ["tea safe"]}
        for row in rows[::2]
    }
    for name, table in (("items_shuffle", rows), ("items_ins_v2", wishes)):
        (folder / f"{name}.json").write_text(json.dumps(table))
    nouns = {str(row["asin"]): ["mug"] for row in rows}
    (folder / "name_nouns.json").write_text(json.dumps(nouns))
    return open_shop(folder, version=version)


def walk(shop: Shop, case: Case, mode: str = "text") -> Iterator[tuple[str, WebShopTextEnv, tuple[Any, ...]]]:
    """Actions, mostly from the page and sometimes noise, with what the environment answered to each."""
    version = shop.version
    env = WebShopTextEnv(
        version=version, shop=shop, page_size=case.page_size, show_attrs=case.show_attrs, observation_mode=mode
    )
    observation, info = env.reset(seed=case.seed)
    yield "", env, (observation, 0.0, False, False, info)
    rng = random.Random(case.seed)
    noises = [case.noise, f"click[{case.noise}]", f"search[{case.noise}]", "search[mug]", "click[buy now]"]
    for _ in range(NUM_STEPS):
        offered = info["available_actions"]
        action = rng.choice(offered) if offered and rng.random() < 0.8 else rng.choice(noises)
        action = action.replace("<your query>", rng.choice(["mug", "red", case.noise or "x"]))
        result = env.step(action)
        yield action, env, result
        info = result[4]


def clone(session: Session) -> Session:
    """The session as it stands; goals and products are shared, since nobody changes them."""
    return replace(
        session, options=dict(session.options), visited=set(session.visited), action_counts=copy(session.action_counts)
    )


def check_offer(book: PageBook, session: Session, page: Page, case: Case) -> None:
    """v1: what the page lists is accepted, and any other click is refused and changes nothing."""
    rng = random.Random(case.seed)
    listed = {match_key(action[len("click[") : -1]) for action in page.available_actions}
    for action in page.available_actions:
        outcome = take(book, clone(session), page, action, rng)
        assert outcome.reason == "", (action, outcome.reason)
    others = [*BUTTONS, *book.shop.products, case.noise, *WORDS]
    others += [
        value for product in book.shop.products.values() for group in product.options.values() for value in group
    ]
    for text in dict.fromkeys(others):
        if match_key(text) not in listed:
            after = clone(session)
            outcome = take(book, after, page, f"click[{text}]", rng)
            assert outcome.reason and outcome.page is page and outcome.reward == 0.0 and not outcome.is_done
            assert after == session


def check_page(page: Page) -> None:
    reader = read(page)
    assert " [SEP] ".join(reader.texts) == page.text
    assert reader.actions(page.version) == list(page.available_actions)
    assert all(isinstance(page.render(mode), str) for mode in ("text_rich", "url"))


@pytest.mark.parametrize("version", ["v1", "v0"])
@settings(max_examples=NUM_WALKS, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
@given(case=cases)
def test_walks_keep_their_promises(version: str, case: Case):
    with tempfile.TemporaryDirectory() as folder:
        shop = open_case(case, version, Path(folder))
        seen = []
        for action, env, result in walk(shop, case):
            seen.append((action, *result))
            observation, reward, terminated, truncated, info = result
            assert observation == env.page.text and 0.0 <= reward <= 1.0 and not (terminated and truncated)
            assert info["action_possible"] == (info["reason"] == "")
            check_page(env.page)
            if version == "v1":
                check_offer(env._book, env.session, env.page, case)
        again = [(action, *result) for action, _, result in walk(shop, case)]
        assert again == seen


@settings(max_examples=NUM_WALKS // 10, deadline=None, derandomize=True, database=None)
@given(case=cases)
def test_every_goal_of_any_v1_catalogue_can_be_won(case: Case):
    with tempfile.TemporaryDirectory() as folder:
        shop = open_case(case, "v1", Path(folder))
        for goal in shop.goals:
            env = WebShopTextEnv(shop=shop, max_steps=None)
            env.reset(options={"goal_index": goal.goal_index})
            book = env._book
            env.session.keywords = ("mug",)
            env.session.asin, env.session.page_kind = goal.asin, "item"
            page = book.item(env.session)
            for name, value in goal.options.items():
                outcome = take(book, env.session, page, book.option_action(goal.asin, name, value), random.Random(0))
                assert outcome.reason == ""
                page = outcome.page
            assert env.session.options == goal.options
            outcome = take(book, env.session, page, "click[buy now]", random.Random(0))
            assert (outcome.reward, outcome.is_done) == (1.0, True)
