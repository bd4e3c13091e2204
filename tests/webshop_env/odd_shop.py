"""A small catalogue with everything that is hard to click, for the tests of pages, sessions and environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BUTTONS = ["Buy Now", "Search", "Description", "< Prev", "Back to Search", "Next >"]
ODD_VALUES = ['15"', "café", "a & b", "50%", "50% / 50%", "<b>", "🙂", "  padded  ", "x" * 300, "it's", "[odd]", "a]b"]


def row(asin: str, name: str, options: dict[str, list[str]] | None = None, **changes: Any) -> dict[str, Any]:
    record = {
        "asin": asin,
        "name": name,
        "full_description": f"The {name}.",
        "small_description": ["Holds tea", " "],
        "pricing": "$12.99",
        "images": ["https://example.org/a.jpg"],
        "category": "garden",
        "query": "mugs",
        "product_category": "Home › Kitchen › Mugs",
        "customization_options": {key: [{"value": v} for v in values] for key, values in (options or {}).items()},
    }
    return {**record, **changes}


def write_odd_catalogue(folder: Path) -> Path:
    """23 mugs: one plain, one with equal values in two groups, one with buttons as values, one with odd values."""
    rows = [
        row("B000000001", "Plain Mug", {"Color": ["Red", "Blue"], "Size": ["Small", "Large"]}),
        row("B000000002", "Twin Mug", {"Color": ["Red", "White"], "Trim": ["White", "Gold"]}),
        row("B000000003", "Button Mug", {"Mode": BUTTONS}),
        row("B000000004", "Odd Mug", {"Print": ODD_VALUES}),
        row("B000000005", "Free Mug", pricing=""),
        row("B000000006", "Colon Mug", {"Color": ["Red", "color: red"], "Trim": ["Red"]}),
        *(row(f"B0000001{i:02}", f"Spare Mug {i}") for i in range(17)),
    ]
    wishes = {
        r["asin"]: {"attributes": ["tea safe"], "instruction": "Find me a mug", "instruction_attributes": ["tea safe"]}
        for r in rows[:4]
    }
    (folder / "items_shuffle.json").write_text(json.dumps(rows))
    (folder / "items_ins_v2.json").write_text(json.dumps(wishes))
    (folder / "items_human_ins.json").write_text("{}")
    (folder / "name_nouns.json").write_text(json.dumps({r["asin"]: ["mug"] for r in rows}))
    return folder
