"""From what a policy wrote to an action: `search[words]` or `click[text]`, or the reason why it is neither."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

MAX_ACTION_CHARS = 20_000
"""Longer actions are refused by v1; no page of any catalogue needs more."""
SEARCH_HINT = "search[<your query>]"
"""How a page with a search bar is listed among the available actions."""

BACK, PREV, NEXT, BUY, SEARCH = "Back to Search", "< Prev", "Next >", "Buy Now", "Search"
SUB_PAGES = {name.lower(): name for name in ("Description", "Features", "Reviews", "Attributes")}

_NEXT_ACTION = re.compile(r"\]\s*(?:search|click)\s*\[", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """An action in parts; `problem` is "" exactly when `kind` is set."""

    kind: Literal["search", "click"] | None
    argument: str = ""
    """Lower case. v0 keeps its blanks; v1 keeps them for a search and normalises them for a click."""
    problem: str = ""


def match_key(text: str) -> str:
    """Two texts with the same key are one and the same thing to click in v1: case and runs of blanks do not count."""
    return " ".join(text.split()).casefold()


BUTTON_KEYS = frozenset(map(match_key, (BACK, PREV, NEXT, BUY, SEARCH, *SUB_PAGES)))
"""What v1 calls neither a product nor an option value."""


def parse_v0(text: str) -> ParsedAction:
    """Read an action as the published benchmark does.

    That is the pattern "anything, `[`, anything, `]`", greedy, from the start of the text and on its first line only;
    what follows the last `]` of the line is ignored. Done by hand, because a regular expression needs quadratic time
    for a long line of brackets.
    """
    line = text.partition("\n")[0]
    close = line.rfind("]")
    bracket = line.rfind("[", 0, max(close - 1, 0))
    if bracket < 1:
        return ParsedAction(None, problem=f"not of the form search[words] or click[text]: {_short(text)}")
    name, argument = line[:bracket], line[bracket + 1 : close].lower()
    if name == "search":
        return ParsedAction("search", argument)
    if name == "click":
        return ParsedAction("click", argument)
    return ParsedAction(None, problem=f"there is no action named {_short(name)}, only search and click")


def parse_v1(text: str) -> ParsedAction:
    """Read an action with any case and any surrounding blanks; everything up to the last `]` is its argument."""
    if len(text) > MAX_ACTION_CHARS:
        return ParsedAction(None, problem=f"the action has {len(text)} characters, at most {MAX_ACTION_CHARS} are read")
    stripped = text.strip()
    name, bracket, rest = stripped.partition("[")
    kind = name.strip().lower()
    if not bracket or kind not in ("search", "click"):
        return ParsedAction(None, problem=f"not of the form search[words] or click[text]: {_short(text)}")
    if not rest.endswith("]"):
        return ParsedAction(None, problem=f"the closing ] is missing: {_short(text)}")
    argument = rest[:-1]
    if not argument:
        return ParsedAction(None, problem=f"nothing between the brackets: {_short(text)}")
    if kind == "click":
        return ParsedAction("click", match_key(argument))
    if _NEXT_ACTION.search(argument):
        return ParsedAction(None, problem=f"more than one action: {_short(text)}")
    return ParsedAction("search", argument.lower())


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
