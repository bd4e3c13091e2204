"""A page of the shop as templates need it: every visible text with its number, every control with what it does.

The page for people shows all texts of the page record, in another order and with more room. The numbers say what the
order of the record is, so that whoever reads the page (WebShopSite-v0 does) gets the agent's text back.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from webshop_env.actions import BACK, BUY, NEXT, PREV, SEARCH, match_key
from webshop_env.pages import Node, Page
from webshop_env.shop import Shop
from webshop_env.types import Product

NUM_TINTS = 8
"""Colours of the tiles that stand where pictures would be."""


class Piece(NamedTuple):
    """One text of a page."""

    number: int | None
    """Its place among the visible texts; None for an option without any text (v0)."""
    text: str
    click: int | None
    """Which of the page's clicks it is; None for what does nothing."""
    click_text: str
    """What a click names: `click[<this>]`."""
    is_selected: bool = False


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """The values of one option."""

    name: Piece | None
    values: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """A product in a list of results."""

    link: Piece
    title: Piece | None
    price: Piece
    product: Product
    tint: int
    is_visited: bool


@dataclass(slots=True, kw_only=True)
class ShownPage:
    """The pieces of a page, by what they are."""

    kind: str
    has_search_bar: bool
    actions: tuple[str, ...]
    instruction: str
    product: Product | None
    tint: int
    selected: dict[str, str]
    header: list[Piece]
    back: Piece | None = None
    prev: Piece | None = None
    next: Piece | None = None
    search: Piece | None = None
    buy: Piece | None = None
    count: Piece | None = None
    """"Page 1 (Total results: 50)"."""
    hits: list[Hit]
    groups: list[OptionGroup]
    chosen: Piece | None = None
    """"Selected: color: red"."""
    title: Piece | None = None
    price: Piece | None = None
    rating: Piece | None = None
    tabs: list[Piece]
    """Description, Features, Reviews, Attributes."""
    texts: list[Piece]
    """Of a sub page or the receipt."""
    sub_page: str = ""
    page_number: int = 1
    keywords: str = ""


def tint_of(product: Product) -> int:
    """Which colour a product's tile has: the same for all of one query label."""
    return zlib.crc32(product.query.encode("utf-8", "replace")) % NUM_TINTS


def show(page: Page, shop: Shop) -> ShownPage:
    """Sorts the pieces of a page."""
    product = shop.products.get(page.asin) if page.asin and page.kind in ("item", "sub_page", "done") else None
    shown = ShownPage(
        kind=page.kind,
        has_search_bar=page.body.has_search_bar,
        actions=page.available_actions,
        instruction=page.header.nodes[-1].text if page.header.nodes else "",
        product=product,
        tint=tint_of(product) if product else 0,
        selected=dict(page.options),
        header=[],
        hits=[],
        groups=[],
        tabs=[],
        texts=[],
        sub_page=page.sub_page or "",
        page_number=page.page_number,
        keywords=" ".join(page.keywords),
    )
    names = list(page.body.clickables)
    visible = iter(page.nodes)
    waiting = next(visible, None)
    number = 0

    def pieces(row: Iterable[Node]) -> list[tuple[Node, Piece]]:
        nonlocal number, waiting
        made = []
        for node in row:
            is_visible = node is waiting
            click = _click_of(node, page, names)
            piece = Piece(
                number=number if is_visible else None,
                text=node.text,
                click=click,
                click_text="" if click is None else page.body.clicks[click],
                is_selected=node.role == "option" and page.options.get(node.option_name) == node.value,
            )
            made.append((node, piece))
            if is_visible:
                number, waiting = number + 1, next(visible, None)
        return made

    shown.header = [piece for _, piece in pieces(page.header.markup)]
    before = pieces(page.body.before.markup)
    shown.chosen = next((piece for _, piece in pieces(page.selected.markup)), None)
    _sort(shown, page, shop, before, pieces(page.body.after.markup))
    return shown


def _click_of(node: Node, page: Page, names: list[str]) -> int | None:
    if node.role == "text":
        return None
    if page.version == "v0":
        key = node.value if node.role == "option" else node.text.lower()
    else:
        key = match_key(node.text)
    return names.index(key) if key in page.body.clickables else None


def _sort(
    shown: ShownPage,
    page: Page,
    shop: Shop,
    before: list[tuple[Node, Piece]],
    after: list[tuple[Node, Piece]],
) -> None:
    buttons = {BACK: "back", PREV: "prev", NEXT: "next", BUY: "buy", SEARCH: "search"}
    rest: list[tuple[Node, Piece]] = []
    for node, piece in (*before, *after):
        if node.role == "button" and node.text in buttons:
            setattr(shown, buttons[node.text], piece)
        elif node.role == "button":
            shown.tabs.append(piece)
        else:
            rest.append((node, piece))
    if page.kind == "results":
        shown.count = rest[0][1]
        starts = [i for i, (node, _) in enumerate(rest) if node.role == "product"]
        for start, end in zip(starts, [*starts, len(rest)][1:], strict=True):
            (node, link), *texts = rest[start:end]
            product = shop.products[node.text]
            title = texts[0][1] if len(texts) > 1 else None
            shown.hits.append(Hit(link, title, texts[-1][1], product, tint_of(product), node.text in page.visited))
    elif page.kind == "item":
        num_options = sum(node.role != "button" for node, _ in before)
        shown.groups = _option_groups(rest[:num_options])
        *title_pieces, shown.price, shown.rating = (piece for _, piece in rest[num_options:])
        shown.title = title_pieces[0] if title_pieces else None
    else:
        shown.texts = [piece for _, piece in rest]


def _option_groups(row: list[tuple[Node, Piece]]) -> list[OptionGroup]:
    groups: list[OptionGroup] = []
    last: str | None = None
    for node, piece in row:
        if node.role == "text":
            groups.append(OptionGroup(piece, ()))
            last = None
        elif groups and last in (None, node.option_name):
            groups[-1] = OptionGroup(groups[-1].name, (*groups[-1].values, piece))
            last = node.option_name
        else:  # a group without a name
            groups.append(OptionGroup(None, (piece,)))
            last = node.option_name
    return groups
