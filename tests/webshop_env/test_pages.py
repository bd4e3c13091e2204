"""Pages: labels that name one thing, and HTML that an independent parser reads as the same page."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from odd_shop import BUTTONS, ODD_VALUES, write_odd_catalogue
from page_reader import read

from webshop_env.actions import match_key
from webshop_env.errors import ShopGymError
from webshop_env.pages import SEP, Page, option_nodes, page_book
from webshop_env.session import begin, take
from webshop_env.shop import Shop, open_shop


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_odd_catalogue(tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module", params=["v0", "v1"])
def shop(request: pytest.FixtureRequest, folder: Path) -> Shop:
    return open_shop(folder, version=request.param)


def walk(shop: Shop, seed: int, num_steps: int = 25) -> list[Page]:
    rng = random.Random(seed)
    book = page_book(shop, page_size=4, show_attrs=True)
    session, page = begin(book, rng.choice(shop.goals), "s")
    pages = [page]
    for _ in range(num_steps):
        action = rng.choice(page.available_actions or ("click[none]",))
        action = "search[mug]" if action.startswith("search") else action
        page = take(book, session, page, action, rng).page
        pages.append(page)
    return pages


def test_an_independent_parser_finds_the_texts_and_actions_of_the_page(shop):
    kinds = set()
    for seed in range(20):
        for page in walk(shop, seed):
            kinds.add(page.kind)
            reader = read(page)
            assert SEP.join(reader.texts) == page.text
            assert reader.actions(page.version) == list(page.available_actions)
    assert kinds == {"start", "results", "item", "sub_page", "done"}


def test_checked_options_in_html_are_the_selected_ones(folder):
    shop = open_shop(folder, version="v1")
    book = page_book(shop)
    session, page = begin(book, shop.goals[0], "s")
    for action in ("search[odd mug]", "click[b000000004]", "click[print: café]", "click[café]"):
        page = take(book, session, page, action, random.Random(0)).page
    assert read(page).checked == ["café"] and session.options == {"print": "café"}
    assert (
        "You have clicked café.\n" in page.text_rich and "  [clicked button] café [clicked button_]\n" in page.text_rich
    )


def test_labels_in_v1_name_one_value_each(folder):
    products = open_shop(folder, version="v1").products
    labels = [node.text for node in option_nodes(products["B000000002"], "v1") if node.role == "option"]
    assert labels == ["red", "color: white", "trim: white", "gold"]
    buttons = [node.text for node in option_nodes(products["B000000003"], "v1") if node.role == "option"]
    assert buttons == [f"mode: {text.lower()}" for text in BUTTONS]
    odd = [match_key(node.text) for node in option_nodes(products["B000000004"], "v1") if node.role == "option"]
    assert len(set(odd)) == len(ODD_VALUES)


def test_a_qualified_label_that_is_itself_a_value_gets_a_number(folder):
    nodes = option_nodes(open_shop(folder, version="v1").products["B000000006"], "v1")
    assert [node.text for node in nodes if node.role == "option"] == ["color: red (2)", "color: red", "trim: red"]


def test_blank_bullets_leave_an_empty_segment_in_v0_and_nothing_in_v1(folder):
    texts = {}
    for version in ("v0", "v1"):
        shop = open_shop(folder, version=version)
        book = page_book(shop)
        session, page = begin(book, shop.goals[0], "s")
        for action in ("search[plain mug]", "click[b000000001]", "click[features]"):
            page = take(book, session, page, action, random.Random(0)).page
        texts[version] = page.text.split(SEP)[2:]
    assert texts == {
        "v0": ["Back to Search", "< Prev", "Holds tea", ""],
        "v1": ["Back to Search", "< Prev", "Holds tea"],
    }


def test_a_missing_price_is_shown_as_unavailable_in_v1(folder):
    shop = open_shop(folder, version="v1")
    book = page_book(shop)
    session, page = begin(book, shop.goals[0], "s")
    for action in ("search[free mug]", "click[b000000005]"):
        page = take(book, session, page, action, random.Random(0)).page
    assert "Price: unavailable" in page.text.split(SEP)


def test_an_unknown_observation_mode_is_one_clear_line(shop):
    page = begin(page_book(shop), shop.goals[0], "s")[1]
    with pytest.raises(ShopGymError, match="observation_mode must be one of text, text_rich, html, url, got 'json'"):
        page.render("json")
