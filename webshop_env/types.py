"""The records of the shop: what is for sale, what is wanted, where a session stands, what a page shows.

Reading this file alone tells the story of an episode: a `Session` works on a `Goal`; every action moves it to
another `Page`; buying a `Product` ends it with a score.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

PageKind = Literal["start", "results", "item", "sub_page", "done"]
"""Which page a session is on; `sub_page` is Description, Features, Reviews or Attributes of an item."""


@dataclass(frozen=True, slots=True)
class Product:
    """One article of the catalogue, after loading (field names of the original's file in parentheses)."""

    asin: str
    """Its id, at most 10 characters, upper case in every published catalogue."""
    title: str
    """`name`."""
    description: str
    """`full_description`; may be empty."""
    bullet_points: tuple[str, ...]
    """`small_description`."""
    prices: tuple[float, ...]
    """US dollars: one price, or the two ends of a range as the file gives them; empty when none is known (v1)."""
    price_tag: str
    """The price as pages show it, such as "$12.0" or "$12.0 to $15.0"."""
    category: str
    """The shop's department, such as "garden"."""
    query: str
    """The search label that the product was collected under, lower case."""
    product_category: str
    """A path of categories joined by "›"."""
    options: dict[str, tuple[str, ...]]
    """Option name -> values in listed order (`customization_options`)."""
    attributes: tuple[str, ...]
    """What it is said to be, such as "machine washable"; from the attribute file."""
    main_image: str
    """Address of its first picture; may be empty."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One shopping instruction with its structured target."""

    goal_id: str
    """16 hex digits of the SHA-256 of asin, instruction without price text, sorted options, ordinal among equals."""
    goal_index: int
    """Place in the whole list, whatever the split."""
    asin: str
    """The product that the instruction was written for."""
    instruction_text: str
    """What the agent reads (without the page's "Instruction:")."""
    attributes: tuple[str, ...]
    """The wanted attributes."""
    options: dict[str, str] | tuple[str, ...]
    """The wanted options: name -> value for synthetic goals, values alone for human ones."""
    price_upper: float
    """The price cap in US dollars; 1000000.0 when the instruction names none."""
    name: str
    """Title of the target product."""
    category: str
    query: str
    product_category: str
    weight: float
    """Relative chance of being drawn by a session without a goal."""


@dataclass(slots=True)
class Session:
    """Where one episode stands. Small on purpose: thousands of them share one `Shop`."""

    session_id: str
    goal: Goal
    page_kind: PageKind = "start"
    keywords: tuple[str, ...] = ()
    """The words of the last search, lower case."""
    page_number: int = 1
    """Page of the results, from 1."""
    asin: str | None = None
    """The product of the item page."""
    sub_page: str | None = None
    """"Description", "Features", "Reviews" or "Attributes" while `page_kind` is "sub_page"."""
    options: dict[str, str] = field(default_factory=dict)
    """Selected options, name -> value, in the order of selection."""
    visited: set[str] = field(default_factory=set)
    """Asins whose item page was opened."""
    action_counts: Counter[str] = field(default_factory=Counter)
    """How many actions of each kind were taken."""
    is_done: bool = False
    score: float = 0.0
    reward_breakdown: dict[str, Any] | None = None
    """How `score` came about; None before the purchase."""
