"""How the shop's pages look to the manager: the published full text, and a short form for small models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from env_manager.types import PageView

VIEW_VERSION = "1"
"""Raise it with every change of what the views below show; a test holds the pages of version 1 fast."""
SEPARATOR = " [SEP] "
TITLE_WORDS_IN_RESULTS = 8
TITLE_WORDS_ON_ITEM = 16
WORDS_OF_A_TEXT = 24
"""Words that are left of a description or a feature, unless the template says otherwise."""
REFUSED = frozenset({"click[search]"})
"""The published pages list their search button among the actions, and take no click on it."""
_BUTTONS = ("< prev", "next >", "back to search", "description", "features", "reviews", "attributes", "buy now")


def full_view(observation: str, info: Mapping[str, Any]) -> PageView:
    """The page as published: its segments after the task, each in single quotes.

    The whole observation is taken when the task is not found as a segment.
    """
    task, segments = _split(observation, info)
    quoted = tuple(f"'{segment}'" for segment in segments)
    # v1 shows the selected options in a segment of their own.
    is_chosen = bool(info.get("selected_options"))
    protected = frozenset(i for i, s in enumerate(segments) if is_chosen and s.startswith("Selected: "))
    anchor = SEPARATOR.join(quoted) if task is not None else observation
    return PageView(
        task=info["instruction_text"],
        anchor=anchor,
        pieces=quoted if task is not None else (observation,),
        joiner=SEPARATOR,
        protected=protected,
        admissible=tuple(info["available_actions"]),
        refused=REFUSED,
    )


def compact_view(observation: str, info: Mapping[str, Any], *, text_words: int = WORDS_OF_A_TEXT) -> PageView:
    """The page without its constant words: a line of products, or a product with its options and the selected ones.

    Long titles are shortened to their first words, and a description or a feature to `text_words`. The anchor stays
    the full page.
    """
    full = full_view(observation, info)
    _, segments = _split(observation, info)
    actions = tuple(info["available_actions"])
    clickable = {_key(action[len("click[") : -1]) for action in actions if action.startswith("click[")}
    buttons = [name for name in _BUTTONS if name in clickable]
    kind = info["page_kind"]
    protected: frozenset[int] = frozenset()
    if kind == "results":
        pieces = [f"results {_page_number(segments)}", *_products(segments, clickable), *buttons]
    elif kind == "item":
        selected = dict(info.get("selected_options") or {})
        title, price, options = _item(segments, clickable)
        chosen = ["selected " + ", ".join(f"{name} = {value}" for name, value in selected.items())] if selected else []
        pieces = ["item", *chosen, f"{_first_words(title, TITLE_WORDS_ON_ITEM)} {price}", *options, *buttons]
        protected = frozenset({1}) if chosen else protected
    elif kind == "start":
        pieces = ["start"]
    else:
        texts = [_first_words(s, text_words) for s in segments if _key(s) not in clickable]
        pieces = [kind.replace("_", " "), *texts, *buttons]
    return PageView(
        task=full.task,
        anchor=full.anchor,
        pieces=tuple(" ".join(piece.split()) for piece in pieces),
        joiner=" | ",
        protected=protected,
        admissible=actions,
        refused=REFUSED,
    )


def _split(observation: str, info: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """The task as it stands on the page (None: it does not) and the segments after it."""
    segments = observation.split(SEPARATOR)
    task = info["instruction_text"].strip()
    if task not in segments:
        return None, segments
    return task, segments[segments.index(task) + 1 :]


def _page_number(segments: Sequence[str]) -> str:
    return next((s.split()[1] for s in segments if s.startswith("Page ")), "1")


def _key(text: str) -> str:
    """How clicks are written: lower case, single blanks."""
    return " ".join(text.split()).lower()


def _products(segments: Sequence[str], clickable: set[str]) -> list[str]:
    """One piece per product: asin, first words of the title, price."""
    pieces: list[str] = []
    starts = [i for i, s in enumerate(segments) if _key(s) in clickable and _key(s) not in _BUTTONS]
    for start, end in zip(starts, [*starts, len(segments)][1:], strict=True):  # no products: no pieces
        asin, *rest = segments[start:end]
        price = rest[-1] if len(rest) > 1 else ""
        title = _first_words(rest[0], TITLE_WORDS_IN_RESULTS) if rest else ""
        pieces.append(" ".join(part for part in (asin, title, price) if part))
    return pieces


def _item(segments: Sequence[str], clickable: set[str]) -> tuple[str, str, list[str]]:
    """Title, price tag and one piece per option group, found by their places around the "Price: …" segment."""
    at_price = next((i for i, s in enumerate(segments) if s.startswith("Price: ")), None)
    if at_price is None or at_price == 0:
        return "", "", []
    options: list[tuple[str, list[str]]] = []
    for segment in segments[: at_price - 1]:
        if _key(segment) in _BUTTONS:
            continue
        if _key(segment) in clickable:
            if options:
                options[-1][1].append(segment)
        else:
            options.append((segment, []))
    pieces = [f"{name}: {', '.join(values)}" for name, values in options if values]
    return segments[at_price - 1], segments[at_price].removeprefix("Price: "), pieces


def _first_words(text: str, num_words: int) -> str:
    return " ".join(text.split()[:num_words])
