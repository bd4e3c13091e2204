"""What a session sees: a page is a record, and text, rich text, HTML, url and actions are renderings of it.

A page is a row of nodes (a text, a button, a product link, an option value). The rows of an item or of a list of
results do not depend on the session, so a `PageBook` makes them once and shares them between all sessions of a shop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Literal, NamedTuple
from urllib.parse import quote

from webshop_env.actions import BACK, BUTTON_KEYS, BUY, NEXT, PREV, SEARCH, SEARCH_HINT, SUB_PAGES, match_key
from webshop_env.errors import ShopGymError
from webshop_env.shop import Shop
from webshop_env.types import PageKind, Product, Session

SEP = " [SEP] "
BASE_URL = "http://127.0.0.1:3000"
OBSERVATION_MODES = ("text", "text_rich", "html", "url")

# The recorded page names of the original, in the order in which it looks for them in a url.
_URL_KINDS = ("search_results", "item_page", "item_sub_page", "done")
_BLANKS = " \n\t\f\r"
_JSON_IN_HTML = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"})


class Node(NamedTuple):
    """One visible text of a page."""

    text: str
    """As it stands on the page, blanks included."""
    role: Literal["text", "button", "product", "option"] = "text"
    option_name: str = ""
    """Group of an option value."""
    value: str = ""
    """The option value itself; `text` is its label, which differs where the value alone would be ambiguous (v1)."""


class Block:
    """A run of nodes that is rendered once and shown on many pages."""

    __slots__ = ("markup", "nodes", "text")

    def __init__(self, nodes: Iterable[Node]) -> None:
        seen = [(node, _visible(node)) for node in nodes]
        self.nodes = tuple(visible for _, visible in seen if visible is not None)
        # v0 offers option values without any text: they are in the markup, and nowhere to be seen.
        self.markup = tuple(visible or node for node, visible in seen if visible or node.role == "option")
        self.text = SEP.join([node.text.strip() for node in self.nodes])


def _visible(node: Node) -> Node | None:
    """Blank nodes vanish if they are empty or hold a newline; other blanks count as one blank (see QUIRKS of v0), but
    for the asin of a product, which is what a click has to name."""
    if node.text.strip(_BLANKS):
        return node
    if not node.text or "\n" in node.text:
        return None
    return node if node.role == "product" else node._replace(text=" ")


_NOTHING = Block(())


@dataclass(frozen=True, slots=True)
class Body:
    """The part of a page that does not depend on the session: everything but instruction and selected options."""

    before: Block
    """Up to where the selected options are shown."""
    after: Block
    clickables: dict[str, Node]
    """What a click can name -> the node, in page order, buttons and products before option values."""
    actions: tuple[str, ...]
    """The same as actions: search first if there is a search bar, then the clicks."""
    clicks: tuple[str, ...]
    """Texts of the clicks."""
    has_search_bar: bool = False


class Page(NamedTuple):
    """What a session sees. Never changed: an action leads to another page."""

    kind: PageKind
    version: str
    header: Block
    body: Body
    selected: Block
    """The selected options in words (v1, item and sub pages only)."""
    session_id: str
    keywords: tuple[str, ...]
    page_number: int
    asin: str | None
    sub_page: str | None
    options: dict[str, str]
    """The selected options when the page was made."""
    visited: frozenset[str]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.header.nodes + self.body.before.nodes + self.selected.nodes + self.body.after.nodes

    @property
    def text(self) -> str:
        """The visible texts, joined by " [SEP] "."""
        body = self.body
        blocks = (self.header, body.before, self.selected, body.after)
        return SEP.join([block.text for block in blocks if block.nodes])

    @property
    def text_rich(self) -> str:
        """One visible text a line, with marks around what can be clicked and what was."""
        lines, clicked_first = [], ""
        url = self.url if self.version == "v0" and self.kind == "item" else ""
        for node in self.nodes:
            if node.role == "button":
                lines.append(f"[button] {node.text} [button_]\n")
            elif node.role == "product":
                mark = "clicked button" if node.text in self.visited else "button"
                lines.append(f"\n[{mark}] {node.text} [{mark}_]\n")
            elif node.role == "option":
                is_clicked = f'"{node.text}"' in url if url else self._is_selected(node)
                mark = "clicked button" if is_clicked else "button"
                lines.append(f"  [{mark}] {node.text} [{mark}_]\n")
                if is_clicked:
                    clicked_first = f"You have clicked {node.text}.\n" + clicked_first
            else:
                lines.append(node.text + "\n")
        return clicked_first + "".join(lines)

    @property
    def html(self) -> str:
        """The page in our own markup; its visible texts are those of `text`."""
        lines = [_HTML_HEAD, f'<body class="{self.kind}">']
        if self.body.has_search_bar:
            lines.append('<input id="search_input" name="query" type="text">')
        body = self.body
        for node in (*self.header.markup, *body.before.markup, *self.selected.markup, *body.after.markup):
            text = _escape(node.text)
            if node.role == "button":
                lines.append(f'<button class="btn" type="button">{text}</button>')
            elif node.role == "product":
                visited = " visited" if node.text in self.visited else ""
                lines.append(f'<a class="product-link{visited}" href="#{text}">{text}</a>')
            elif node.role == "option":
                checked = " checked" if self._is_selected(node) else ""
                name, value = _escape(node.option_name), _escape(node.text)
                lines.append(f'<label><input type="radio" name="{name}" value="{value}"{checked}>{text}</label>')
            else:
                lines.append(f"<p>{text}</p>")
        return "\n".join([*lines, "</body>", "</html>\n"])

    @property
    def url(self) -> str:
        """The address: v0 as published, without any quoting; v1 quotes words and options."""
        if self.version == "v0":
            words, options = "+".join(self.keywords), json.dumps(self.options)
            plain_options = str(self.options)
        else:
            words = "+".join([quote(word, safe="", errors="replace") for word in self.keywords])
            options = plain_options = quote(json.dumps(self.options))
        session, number = self.session_id, self.page_number
        if self.kind == "results":
            return f"{BASE_URL}/search_results/{session}/{words}/{number}"
        if self.kind == "item":
            return f"{BASE_URL}/item_page/{session}/{self.asin}/{words}/{number}/{options}"
        if self.kind == "sub_page":
            return f"{BASE_URL}/item_sub_page/{session}/{self.asin}/{words}/{number}/{self.sub_page}/{plain_options}"
        if self.kind == "done":
            return f"{BASE_URL}/done/{session}/{self.asin}/{plain_options}"
        return f"{BASE_URL}/{session}"

    @property
    def url_kind(self) -> str:
        """The page's name as the original finds it: the first of four names that occurs anywhere in the url."""
        url = self.url
        return next((kind for kind in _URL_KINDS if kind in url), "")

    @property
    def available_actions(self) -> tuple[str, ...]:
        return self.body.actions

    def render(self, mode: str) -> str:
        """The page in one of `OBSERVATION_MODES`."""
        if mode == "text":
            return self.text
        if mode in OBSERVATION_MODES:
            return getattr(self, mode)
        raise ShopGymError(f"observation_mode must be one of {', '.join(OBSERVATION_MODES)}, got {mode!r}")

    def _is_selected(self, node: Node) -> bool:
        return self.options.get(node.option_name) == node.value


_HTML_HEAD = '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>WebShop</title></head>'


def _escape(text: str) -> str:
    return escape(text, quote=True).replace("\r", "&#13;")


class PageBook:
    """Makes the pages of one shop; safe to share between any number of sessions.

    Args:
        shop: What is for sale.
        page_size: Products on a page of results, at least 1.
        show_attrs: Offer the sub page Attributes.
    """

    def __init__(self, shop: Shop, *, page_size: int = 10, show_attrs: bool = False) -> None:
        self.shop = shop
        self.version = shop.version
        self.page_size = page_size
        self.show_attrs = show_attrs
        self._start_body = self._make_start_body()
        self._start_header = lru_cache(maxsize=8192)(_start_header)
        self._header = lru_cache(maxsize=8192)(_header)
        self._results_body = lru_cache(maxsize=4096)(self._make_results_body)
        self._item_body = lru_cache(maxsize=4096)(self._make_item_body)
        self._sub_page_body = lru_cache(maxsize=4096)(self._make_sub_page_body)
        self._selected = lru_cache(maxsize=4096)(_selected_block)

    def __reduce__(self) -> tuple[Callable[..., PageBook], tuple[Shop, int, bool]]:
        """Copies are the shared book itself, and another process makes its own: caches do not travel."""
        return page_book, (self.shop, self.page_size, self.show_attrs)

    def start(self, session: Session) -> Page:
        header = self._start_header(session.goal.instruction_text)
        return Page("start", self.version, header, self._start_body, _NOTHING, session.session_id, (), 1, None, None,
                    {}, frozenset())  # fmt: skip

    def results(self, session: Session, asins: Sequence[str]) -> Page:
        """A page of results.

        Args:
            session: `page_number` says which page; numbers below 1 (v0 only) count from the end as slices do.
            asins: Everything that was found, best first.
        """
        number = session.page_number
        shown = tuple(asins[(number - 1) * self.page_size : number * self.page_size])
        body = self._results_body(shown, number, len(asins))
        return self._page("results", session, body, _NOTHING, visited=frozenset(session.visited))

    def item(self, session: Session) -> Page:
        """The page of the session's product, which must exist."""
        return self._page("item", session, self._item_body(session.asin), self._selected_options(session))

    def sub_page(self, session: Session) -> Page:
        """Description, Features, Reviews or Attributes of the session's product, which must exist."""
        body = self._sub_page_body(session.asin, session.sub_page)
        return self._page("sub_page", session, body, self._selected_options(session))

    def done(self, session: Session) -> Page:
        """The receipt, with the score."""
        body = _body(self.version, _done_nodes(session))
        return self._page("done", session, body, _NOTHING, header=_NOTHING)

    def option_action(self, asin: str, name: str, value: str) -> str:
        """The click that selects a value of an option group, qualified where the value alone would be ambiguous."""
        for click, node in self._item_body(asin).clickables.items():
            if node.role == "option" and node.option_name == name and node.value == value:
                return f"click[{click if self.version == 'v0' else _listed(node.text)}]"
        raise ShopGymError(f"product {asin}: no option {name!r} with the value {value!r}")

    def _page(
        self,
        kind: PageKind,
        session: Session,
        body: Body,
        selected: Block,
        *,
        header: Block | None = None,
        visited: frozenset[str] = frozenset(),
    ) -> Page:
        if header is None:
            header = self._header(session.goal.instruction_text)
        return Page(kind, self.version, header, body, selected, session.session_id, session.keywords,
                    session.page_number, session.asin, session.sub_page, dict(session.options), visited)  # fmt: skip

    def _selected_options(self, session: Session) -> Block:
        chosen = session.options
        if self.version == "v0" or not chosen or session.asin is None:
            return _NOTHING
        names = self.shop.products[session.asin].options
        return self._selected(tuple((name, chosen[name]) for name in names if name in chosen))

    def _make_start_body(self) -> Body:
        return _body(self.version, [Node(SEARCH, "button")], has_search_bar=True)

    def _make_results_body(self, asins: tuple[str, ...], number: int, total: int) -> Body:
        nodes = [Node(BACK, "button"), Node(f"Page {number} (Total results: {total})")]
        if number > 1:
            nodes.append(Node(PREV, "button"))
        if self.version == "v0" or number * self.page_size < total:
            nodes.append(Node(NEXT, "button"))
        for asin in asins:
            product = self.shop.products[asin]
            nodes += [Node(asin, "product"), Node(product.title), Node(_price_text(product))]
        return _body(self.version, nodes)

    def _make_item_body(self, asin: str) -> Body:
        product = self.shop.products[asin]
        options = option_nodes(product, self.version)
        before = [Node(BACK, "button"), Node(PREV, "button"), *options]
        after = [Node(product.title), Node(f"Price: {_price_text(product)}"), Node("Rating: N.A.")]
        names = [name for name in SUB_PAGES.values() if self.show_attrs or name != "Attributes"]
        after += [Node(name, "button") for name in (*names, BUY)]
        return _body(self.version, before, after)

    def _make_sub_page_body(self, asin: str, sub_page: str) -> Body:
        product = self.shop.products[asin]
        texts: list[Node] = []
        if sub_page == "Description":
            texts = [Node(product.description)]
        elif sub_page == "Features":
            texts = [Node(f" {point}") for point in product.bullet_points]
        elif sub_page == "Attributes":
            texts = [Node(f" {attribute}") for attribute in product.attributes]
            texts += [Node(product.category), Node(product.query), Node(product.product_category)]
        if self.version != "v0":
            texts = [node for node in texts if node.text.strip()]
        return _body(self.version, [Node(BACK, "button"), Node(PREV, "button")], texts)


def option_nodes(product: Product, version: str) -> list[Node]:
    """Option groups as they stand on the item page: the name of each, then its values.

    In v1 every label names one value: a value that equals a button or a value of another group (or has no text) is
    shown as "name: value", and what still collides gets a number.
    """
    if version == "v0":
        return [
            node
            for name, values in product.options.items()
            for node in (Node(name), *(Node(value, "option", name, value) for value in values))
        ]
    owners: dict[str, set[tuple[str, str]]] = {}
    for name, values in product.options.items():
        for value in values:
            owners.setdefault(match_key(value), set()).add((name, value))
    labels: dict[tuple[str, str], str] = {}
    taken = {*BUTTON_KEYS, *(key for key, pairs in owners.items() if len(pairs) == 1), ""}
    nodes = []
    for name, values in product.options.items():
        nodes.append(Node(name))
        for value in values:
            label = labels.get((name, value))
            if label is None:
                key = match_key(value)
                label = value
                if key in BUTTON_KEYS or not key or len(owners[key]) > 1:
                    label = _free_label(f"{name}: {value}", taken)
                    taken.add(match_key(label))
                labels[name, value] = label
            nodes.append(Node(label, "option", name, value))
    return nodes


def _free_label(label: str, taken: set[str]) -> str:
    number, numbered = 1, label
    while match_key(numbered) in taken:
        number += 1
        numbered = f"{label} ({number})"
    return numbered


def _body(version: str, before: list[Node], after: Sequence[Node] = (), *, has_search_bar: bool = False) -> Body:
    nodes = [*before, *after]
    clickables: dict[str, Node] = {}
    if version == "v0":
        clickables = {node.text.lower(): node for node in nodes if node.role in ("button", "product")}
        # A later equal text replaces the earlier one at its place, as in the original.
        clickables.update({node.value: node for node in nodes if node.role == "option"})
        clicks = tuple(clickables)
    else:
        for node in nodes:
            if node.role in ("button", "product") and node.text != SEARCH:
                clickables[match_key(node.text)] = node
        for node in nodes:
            if node.role == "option":
                clickables.setdefault(match_key(node.text), node)
        clicks = tuple(_listed(node.text) for node in clickables.values())
    search = (SEARCH_HINT,) if has_search_bar else ()
    actions = search + tuple(f"click[{text}]" for text in clicks)
    return Body(Block(before), Block(after), clickables, actions, clicks, has_search_bar)


def _listed(label: str) -> str:
    return " ".join(label.split()).lower()


def _price_text(product: Product) -> str:
    return product.price_tag or "unavailable"


def _start_header(instruction: str) -> Block:
    return Block([Node("WebShop"), Node("Instruction: "), Node(instruction)])


def _header(instruction: str) -> Block:
    return Block([Node("Instruction:"), Node(instruction)])


def _selected_block(options: tuple[tuple[str, str], ...]) -> Block:
    return Block([Node("Selected: " + "; ".join(f"{name}: {value}" for name, value in options))])


def _done_nodes(session: Session) -> list[Node]:
    options = json.dumps(session.options, sort_keys=True).translate(_JSON_IN_HTML)
    texts = ["Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)"]
    texts += ["Purchased", "asin", str(session.asin), "options", options, "attrs", "None", "category", "None"]
    texts += ["query", "None", "product category", "None", "Target", "asin", "options", "attrs", "price upper"]
    texts += ["instuction text", "category", "product category", "query", "Goal ", "None", "Reward"]
    texts += ["Your score (min 0.0, max 1.0)", str(session.score), "Reward Details ", "None"]
    return [Node(text) for text in texts]


@lru_cache(maxsize=64)
def page_book(shop: Shop, page_size: int = 10, show_attrs: bool = False) -> PageBook:
    """The page book of a shop, shared by everyone who asks for the same one."""
    return PageBook(shop, page_size=page_size, show_attrs=show_attrs)
