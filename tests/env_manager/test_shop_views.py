"""The shop's pages as the manager sees them."""

from __future__ import annotations

import hashlib
from typing import Any

from env_manager.webshop import VIEW_VERSION, compact_view, full_view

TASK = "Find me a red mug, and price lower than 50.00 dollars"
BUTTONS = ("back to search", "< prev", "description", "features", "reviews", "buy now")


def info(kind: str, *clicks: str, selected: dict[str, str] | None = None, search: bool = False) -> dict[str, Any]:
    actions = (("search[<your query>]",) if search else ()) + tuple(f"click[{c}]" for c in clicks)
    return {
        "instruction_text": TASK,
        "available_actions": actions,
        "page_kind": kind,
        "selected_options": selected or {},
    }


def page(*segments: str) -> str:
    return " [SEP] ".join(("Instruction:", TASK, *segments))


RESULTS = page(
    "Back to Search", "Page 2 (Total results: 50)", "< Prev", "Next >", "B0AAAAAAA1",
    "A very  long title of a Mug with more words than eight", "$12.0", "B0AAAAAAA2", "Cup", "$3.0 to $4.5",
)  # fmt: skip
RESULTS_INFO = info("results", "back to search", "< prev", "next >", "b0aaaaaaa1", "b0aaaaaaa2")
ITEM = page(
    "Back to Search", "< Prev", "color", "Red", "blue | green", "size", "10  oz", "color: buy now",
    "Selected: color: Red", "Big Mug", "Price: $12.0", "Rating: N.A.", "Description", "Features", "Reviews", "Buy Now",
)  # fmt: skip
ITEM_INFO = info(
    "item", *BUTTONS[:2], *BUTTONS[2:], "red", "blue | green", "10 oz", "color: buy now", selected={"color": "Red"}
)


def test_the_anchor_is_the_page_after_the_task_in_quotes() -> None:
    start = full_view(f"WebShop [SEP] Instruction: [SEP] {TASK} [SEP] Search", info("start", search=True))
    assert (start.task, start.anchor) == (TASK, "'Search'")
    assert start.admissible == ("search[<your query>]",)
    view = full_view(page("Back to Search", "< Prev", "Dishwasher safe"), info("sub_page", "back to search", "< prev"))
    assert view.anchor == "'Back to Search' [SEP] '< Prev' [SEP] 'Dishwasher safe'"
    assert view.joiner.join(view.pieces) == view.anchor


def test_a_page_without_the_task_is_its_own_anchor() -> None:
    view = full_view("Thank you [SEP] Your score", info("done"))
    assert view.anchor == "Thank you [SEP] Your score"
    assert view.task == TASK


def test_selected_options_are_part_of_the_anchor_and_protected() -> None:
    view = full_view(ITEM, ITEM_INFO)
    assert "'Selected: color: Red'" in view.anchor
    assert [view.pieces[i] for i in view.protected] == ["'Selected: color: Red'"]


def test_results_in_short() -> None:
    view = compact_view(RESULTS, RESULTS_INFO)
    assert view.joiner.join(view.pieces) == (
        "results 2 | B0AAAAAAA1 A very long title of a Mug with $12.0 | B0AAAAAAA2 Cup $3.0 to $4.5"
        " | < prev | next > | back to search"
    )
    assert view.anchor == full_view(RESULTS, RESULTS_INFO).anchor


def test_an_item_in_short() -> None:
    view = compact_view(ITEM, ITEM_INFO)
    assert view.pieces == (
        "item",
        "selected color = Red",
        "Big Mug $12.0",
        "color: Red, blue | green",
        "size: 10 oz, color: buy now",
        "< prev",
        "back to search",
        "description",
        "features",
        "reviews",
        "buy now",
    )
    assert view.protected == {1}


def test_an_item_without_options_or_selection() -> None:
    observation = page("Back to Search", "< Prev", "Big Mug", "Price: $12.0", "Rating: N.A.", "Buy Now")
    view = compact_view(observation, info("item", "back to search", "< prev", "buy now"))
    assert view.pieces == ("item", "Big Mug $12.0", "< prev", "back to search", "buy now")
    assert view.protected == frozenset()


def test_start_and_sub_pages_in_short() -> None:
    start = compact_view(f"WebShop [SEP] Instruction: [SEP] {TASK} [SEP] Search", info("start", search=True))
    assert start.pieces == ("start",)
    words = " ".join(f"w{n}" for n in range(40))
    sub = compact_view(page("Back to Search", "< Prev", words), info("sub_page", "back to search", "< prev"))
    assert sub.pieces == ("sub page", " ".join(f"w{n}" for n in range(24)), "< prev", "back to search")


def test_what_views_show_belongs_to_their_version() -> None:
    # Policies are made for prompts. When this fails on purpose: raise VIEW_VERSION, add its hash, remake the policy.
    shown = [
        repr((view.task, view.anchor, view.pieces, view.joiner))
        for view in (
            look(*seen) for look in (full_view, compact_view) for seen in ((RESULTS, RESULTS_INFO), (ITEM, ITEM_INFO))
        )
    ]
    known = {"1": "505110a431251a42"}
    assert hashlib.sha256("".join(shown).encode()).hexdigest()[:16] == known[VIEW_VERSION]
