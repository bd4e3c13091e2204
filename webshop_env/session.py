"""How actions move a session: plain functions from (session, page, action) to the next page.

v0 follows the published benchmark, down to what a click means when an option is named like a button. v1 offers
exactly what its page lists. Neither raises: what cannot be done leaves the page and says why.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from webshop_env.actions import BACK, BUY, NEXT, PREV, SUB_PAGES, ParsedAction, parse_v0, parse_v1
from webshop_env.errors import ShopGymError
from webshop_env.pages import Node, Page, PageBook
from webshop_env.types import Goal, Session

RANDOM_RESULTS = 50
"""How many products v0's debug keyword `<r>` shows."""


class Outcome(NamedTuple):
    """What an action led to."""

    page: Page
    reward: float
    """The score if this action was the purchase, else 0."""
    is_done: bool
    """This action was the purchase."""
    reason: str
    """Why nothing happened; "" if the action was possible."""


class _Refusal(Exception):
    """The action does nothing; in v0 also where the original would have raised."""


def begin(book: PageBook, goal: Goal, session_id: str) -> tuple[Session, Page]:
    """Start an episode on the start page."""
    session = Session(session_id=session_id, goal=goal)
    return session, book.start(session)


def take(book: PageBook, session: Session, page: Page, action: str, rng: random.Random) -> Outcome:
    """Take one action.

    Args:
        book: The pages of the shop.
        session: Changed in place; in v0 also by some actions that leave the page (as the original's session was when
            it raised half way).
        page: Where the session stands.
        action: Any text.
        rng: Only read by v0's keyword `<r>`.
    """
    try:
        if book.version == "v0":
            next_page = _take_v0(book, session, page, parse_v0(action), rng)
        else:
            next_page = _take_v1(book, session, page, parse_v1(action))
    except _Refusal as refusal:
        return Outcome(page, 0.0, False, str(refusal))
    if next_page.kind == "done":
        return Outcome(next_page, session.score, True, "")
    return Outcome(next_page, 0.0, False, "")


def _take_v1(book: PageBook, session: Session, page: Page, action: ParsedAction) -> Page:
    if session.is_done:
        raise _Refusal("the episode is over")
    if action.kind is None:
        raise _Refusal(action.problem)
    if action.kind == "search":
        if not page.body.has_search_bar:
            raise _Refusal("there is no search bar on this page")
        return _show_results(book, session, tuple(action.argument.split()), 1)
    node = page.body.clickables.get(action.argument)
    if node is None:
        raise _Refusal(_not_offered(action.argument))
    if node.role == "product":
        return _open_product(book, session, node.text)
    if node.role == "option":
        return _select_option(book, session, node.option_name, node.value)
    if node.text == BUY:
        return _buy(book, session)
    if node.text == BACK:
        return _show_start(book, session)
    if node.text == NEXT:
        return _show_results(book, session, session.keywords, session.page_number + 1)
    if node.text == PREV:
        if page.kind == "results":
            return _show_results(book, session, session.keywords, session.page_number - 1)
        if page.kind == "sub_page":
            return _show_item(book, session)
        return _show_results(book, session, session.keywords, session.page_number)
    return _show_sub_page(book, session, node.text)


def _take_v0(book: PageBook, session: Session, page: Page, action: ParsedAction, rng: random.Random) -> Page:
    if action.kind is None:
        raise _Refusal(action.problem)
    text = action.argument
    if action.kind == "search":
        return _show_results(book, session, tuple(text.split(" ")), 1, rng)
    node = page.body.clickables.get(text)
    if node is None or text == "search":
        raise _Refusal(_not_offered(text))
    return _click_v0(book, session, page, text, node, rng)


def _click_v0(book: PageBook, session: Session, page: Page, text: str, node: Node, rng: random.Random) -> Page:
    # The text decides before the node does, so an option that is named like a button acts as the button.
    if text == BUY.lower():
        return _buy(book, session)
    if text == BACK.lower():
        return _show_start(book, session)
    if text in (NEXT.lower(), PREV.lower()):
        kind = page.url_kind
        if text == PREV.lower() and kind == "item_page":
            return _show_results(book, session, session.keywords, session.page_number, rng)
        if kind == "search_results":
            step = 1 if text == NEXT.lower() else -1
            return _show_results(book, session, session.keywords, session.page_number + step, rng)
    elif text in SUB_PAGES:
        return _show_sub_page(book, session, SUB_PAGES[text])
    if node.role == "product":
        return _open_product(book, session, text.upper())
    if node.role == "option":
        return _select_option(book, session, node.option_name.lower(), text)
    return _show_item(book, session)


def _show_start(book: PageBook, session: Session) -> Page:
    session.page_kind = "start"
    session.keywords, session.page_number = (), 1
    session.asin = session.sub_page = None
    session.options = {}
    session.visited = set()
    session.action_counts.clear()
    return book.start(session)


def _show_results(
    book: PageBook, session: Session, keywords: tuple[str, ...], page_number: int, rng: random.Random | None = None
) -> Page:
    session.keywords, session.page_number = keywords, page_number
    session.action_counts["search"] += 1
    session.asin = session.sub_page = None
    session.options = {}
    asins = _find_v0(book, keywords, rng) if rng is not None else _find(book, keywords)
    session.page_kind = "results"
    return book.results(session, asins)


def _find(book: PageBook, keywords: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return book.shop.search(keywords)
    except ShopGymError as error:
        raise _Refusal(f"the search failed: {error}") from None


def _find_v0(book: PageBook, keywords: tuple[str, ...], rng: random.Random) -> tuple[str, ...]:
    """Search, with the original's debug keywords; where it raises, the action is refused."""
    products = book.shop.products
    first, rest = keywords[0], " ".join(keywords[1:]).strip()
    if first == "<r>":
        if len(products) < RANDOM_RESULTS:
            raise _Refusal(f"<r> shows {RANDOM_RESULTS} products, the catalogue has {len(products)}")
        return tuple(rng.sample(list(products), RANDOM_RESULTS))
    if first == "<a>":
        raise _Refusal("<a> fails in the original")
    if first == "<c>":
        if len(keywords) < 2:
            raise _Refusal("<c> needs a category")
        return book.shop.asins_labelled("category", keywords[1].strip())
    if first == "<q>":
        return book.shop.asins_labelled("query", rest)
    return _find(book, keywords)


def _open_product(book: PageBook, session: Session, asin: str) -> Page:
    session.asin = asin
    session.action_counts["asin"] += 1
    session.visited.add(asin)
    return _show_item(book, session)


def _select_option(book: PageBook, session: Session, name: str, value: str) -> Page:
    session.options[name] = value
    session.action_counts["options"] += 1
    return _show_item(book, session)


def _show_item(book: PageBook, session: Session) -> Page:
    _require_product(book, session)
    session.page_kind, session.sub_page = "item", None
    return book.item(session)


def _show_sub_page(book: PageBook, session: Session, name: str) -> Page:
    _require_product(book, session)
    session.action_counts[name] += 1
    session.page_kind, session.sub_page = "sub_page", name
    return book.sub_page(session)


def _buy(book: PageBook, session: Session) -> Page:
    asin = _require_product(book, session)
    try:
        score, breakdown = book.shop.score(session.goal, asin, session.options)
    except ShopGymError as error:
        raise _Refusal(f"the score cannot be computed: {error}") from None
    session.action_counts["purchase"] += 1
    session.page_kind, session.sub_page = "done", None
    session.is_done, session.score, session.reward_breakdown = True, score, breakdown
    return book.done(session)


def _require_product(book: PageBook, session: Session) -> str:
    """The session's asin; in v0 a search that raised has cleared it under the page that is still shown."""
    if session.asin is None or session.asin not in book.shop.products:
        raise _Refusal("the session has no product any more, as in the original after a search that failed")
    return session.asin


def _not_offered(text: str) -> str:
    return f"this page does not offer click[{text if len(text) <= 60 else text[:57] + '...'}]"
