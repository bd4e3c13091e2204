"""Page flow: v0 as recorded, v1 as listed on its pages."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odd_shop import BUTTONS, ODD_VALUES, write_odd_catalogue

from webshop_env.pages import SEP, Page, PageBook, page_book
from webshop_env.session import begin, take
from webshop_env.shop import open_shop
from webshop_env.types import Session

RNG = random.Random(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_odd_catalogue(tmp_path_factory.mktemp("odd"))


def play(book: PageBook, *actions: str) -> tuple[Session, Page]:
    session, page = begin(book, book.shop.goals[0], "s")
    for action in actions:
        outcome = take(book, session, page, action, RNG)
        assert not outcome.reason, f"{action}: {outcome.reason}"
        page = outcome.page
    return session, page


def book_of(folder: Path, version: str, **settings) -> PageBook:
    return page_book(open_shop(folder, version=version), **settings)


# v0's surprises that are seldom recorded


def test_v0_an_option_named_like_a_button_acts_as_the_button(folder):
    book = book_of(folder, "v0")
    _, page = play(book, "search[button mug]", "click[b000000003]", "click[description]")
    assert page.kind == "sub_page"
    session, page = play(book, "search[button mug]", "click[b000000003]", "click[next >]")
    assert page.kind == "item" and session.options == {"mode": "next >"}


def test_v0_prev_after_the_query_search_results_shows_page_0(folder):
    book = book_of(folder, "v0")
    _, page = play(book, "search[plain search_results]", "click[b000000001]", "click[< prev]")
    assert page.text.split(SEP)[3] == "Page 0 (Total results: 1)" and "B0" not in page.text


def test_v0_a_search_that_fails_forgets_the_product_under_the_page(folder):
    book = book_of(folder, "v0")
    session, page = play(book, "search[plain mug]", "click[b000000001]", "click[red]")
    for action in ("search[<a> x]", "search[<c>]", "click[blue]", "click[description]", "click[buy now]"):
        outcome = take(book, session, page, action, RNG)
        assert outcome.reason and outcome.page is page and not outcome.is_done
    assert session.asin is None and session.options == {"color": "blue"}


def test_v0_random_products_are_drawn_from_the_given_generator(folder):
    book = book_of(folder, "v0")
    session, page = begin(book, book.shop.goals[0], "s")
    outcome = take(book, session, page, "search[<r>]", random.Random(1))
    assert "the catalogue has 23" in outcome.reason


# v1: what is listed works, what is not listed does nothing


@pytest.mark.parametrize("query", ["search_results", "item_page", "item_sub_page", "done", "a/b", "?", "mug [us]"])
def test_v1_prev_from_an_item_returns_to_the_results_of_any_query(folder, query):
    book = book_of(folder, "v1")
    session, before = play(book, f"search[plain {query}]")
    _, item = play(book, f"search[plain {query}]", "click[b000000001]")
    _, after = play(book, f"search[plain {query}]", "click[b000000001]", "click[< prev]")
    assert item.kind == "item" and after.text == before.text and "Page 1 " in after.text
    assert session.keywords == tuple(f"plain {query}".split())


def test_v1_pages_end_where_the_results_end(folder):
    book = book_of(folder, "v1", page_size=8)
    session, page = play(book, "search[mug]", "click[next >]", "click[next >]")
    assert "Page 3 (Total results: 23)" in page.text and "click[next >]" not in page.available_actions
    assert take(book, session, page, "click[next >]", RNG).reason
    assert play(book, "search[mug]", "click[next >]", "click[< prev]")[1].text == play(book, "search[mug]")[1].text


def test_v1_searches_only_where_there_is_a_search_bar(folder):
    book = book_of(folder, "v1")
    session, page = play(book, "search[mug]")
    outcome = take(book, session, page, "search[lamp]", RNG)
    assert outcome.reason == "there is no search bar on this page" and outcome.page is page
    assert session.keywords == ("mug",)


def test_v1_has_no_debug_keywords(folder):
    assert "Total results: 0)" in play(book_of(folder, "v1"), "search[<r>]")[1].text


def test_v1_selected_options_are_shown_in_page_order_and_survive_sub_pages(folder):
    book = book_of(folder, "v1")
    session, page = play(book, "search[plain mug]", "click[b000000001]", "click[Large]", "click[RED]")
    shown = page.text.split(SEP)
    assert shown[shown.index("large") + 1] == "Selected: color: red; size: large"
    for name in ("Description", "Features", "Reviews"):
        sub_page = take(book, session, page, f"click[{name}]", RNG).page
        assert "Selected: color: red; size: large" in sub_page.text
        back = take(book, session, sub_page, "click[< Prev]", RNG).page
        assert back.text == page.text and session.options == {"size": "large", "color": "red"}
    assert "Selected:" not in play(book, "search[plain mug]", "click[b000000001]")[1].text


@pytest.mark.parametrize("value", [text.lower() for text in BUTTONS])
def test_v1_values_named_like_buttons_are_selected_by_their_qualified_name(folder, value):
    book = book_of(folder, "v1")
    session, page = play(book, "search[button mug]", "click[b000000003]", f"click[Mode: {value}]")
    assert session.options == {"mode": value} and f"Selected: mode: {value}" in page.text and page.kind == "item"


def test_v1_equal_values_of_two_groups_are_both_reachable(folder):
    book = book_of(folder, "v1")
    session, page = play(book, "search[twin mug]", "click[b000000002]", "click[color: white]", "click[trim: white]")
    assert session.options == {"color": "white", "trim": "white"}
    assert take(book, session, page, "click[white]", RNG).reason == "this page does not offer click[white]"


def test_v1_every_odd_value_can_be_selected_and_wins(folder):
    book = book_of(folder, "v1")
    product = book.shop.products["B000000004"]
    goals = [goal for goal in book.shop.goals if goal.asin == product.asin]
    assert len(goals) == len(ODD_VALUES)
    for goal in goals:
        session, page = begin(book, goal, "s")
        option = book.option_action(product.asin, "print", goal.options["print"])
        for action in ("search[odd mug]", "click[b000000004]", option, "click[buy now]"):
            outcome = take(book, session, page, action, RNG)
            assert not outcome.reason
            page = outcome.page
        assert (outcome.reward, outcome.is_done) == (1.0, True)


def test_v1_nothing_happens_after_the_end(folder):
    book = book_of(folder, "v1")
    session, page = play(book, "search[plain mug]", "click[b000000001]", "click[buy now]")
    outcome = take(book, session, page, "search[mug]", RNG)
    assert outcome.reason == "the episode is over" and outcome.page is page and outcome.reward == 0.0


@pytest.mark.parametrize("query", [" ", "!?;", "red " * 2500, '+title:"mug" AND (a OR b)~2', "🙂🙂", "\ud800"])
def test_v1_any_query_gives_the_same_page_twice(folder, query):
    book = book_of(folder, "v1")
    pages = [play(book, f"search[{query}]")[1] for _ in range(2)]
    assert pages[0].kind == "results" and pages[0].text == pages[1].text and pages[0].url == pages[1].url


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**9), noise=st.text(max_size=30), version=st.sampled_from(["v0", "v1"]))
def test_random_walks_never_raise_and_offer_exactly_what_works(folder, seed, noise, version):
    book = book_of(folder, version, page_size=3, show_attrs=bool(seed % 2))
    rng = random.Random(seed)
    session, page = begin(book, rng.choice(book.shop.goals), "s")
    for _ in range(15):
        refused = take(book, session, page, rng.choice([noise, f"click[{noise}]", "click[nothing of that kind]"]), rng)
        if version == "v1" and match_none(page, noise):
            assert refused.reason and refused.page is page and refused.reward == 0.0
        page = refused.page
        actions = page.available_actions
        if not actions:
            break
        action = rng.choice(actions)
        text = f"search[{rng.choice(['mug', 'odd', noise.replace(']', '') or 'x'])}]" if "search[" in action else action
        outcome = take(book, session, page, text, rng)
        if version == "v1" and "search[" not in text:
            assert not outcome.reason, text
        for mode in ("text", "text_rich", "html", "url"):
            assert outcome.page.render(mode)
        page = outcome.page


def match_none(page: Page, noise: str) -> bool:
    """The noise is neither an action nor the text of one."""
    return "[" not in noise and " ".join(noise.split()).casefold() not in page.body.clickables
