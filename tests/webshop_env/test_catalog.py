"""Reading catalogues: what published files give, and what becomes of rows that no original survives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from webshop_env.catalog import Catalog, Instruction, index_document, load_catalog, read_pricing, shown_price
from webshop_env.errors import CatalogError


def row(asin: str, **changes: Any) -> dict[str, Any]:
    record = {
        "asin": asin,
        "name": "Red Mug",
        "full_description": "A mug.",
        "small_description": ["Holds tea", "Red"],
        "pricing": "$12.99",
        "images": ["https://example.org/mug.jpg"],
        "category": "garden",
        "query": " Mugs ",
        "product_category": "Home › Kitchen › Mugs",
        "customization_options": "",
    }
    return {**record, **changes}


def load(tmp_path: Path, rows: list[Any], *, version: str = "v1", instructions: Any = None, **kwargs: Any) -> Catalog:
    (tmp_path / "items_shuffle.json").write_text(json.dumps(rows))
    (tmp_path / "items_ins_v2.json").write_text(json.dumps(instructions or {}))
    return load_catalog(tmp_path, version=version, **kwargs)


def test_a_plain_row_becomes_a_product_without_a_warning(tmp_path):
    options = {"Size": [{"value": " S/M "}, {"value": "XL", "image": "x.jpg"}]}
    catalog = load(
        tmp_path, [row("B01", customization_options=options)], instructions={"B01": {"attributes": ["tea safe"]}}
    )
    product = catalog.products["B01"]
    assert (product.title, product.query, product.prices, product.price_tag) == ("Red Mug", "mugs", (12.99,), "$12.99")
    assert product.options == {"size": ("s | m", "xl")}
    assert product.attributes == ("tea safe",)
    assert product.main_image == "https://example.org/mug.jpg"
    assert catalog.warnings == ()


def test_the_index_document_is_title_description_first_bullet_and_options(tmp_path):
    options = {"Color": [{"value": "Red"}, {"value": "Blue"}], "Size": [{"value": "XL"}]}
    product = load(tmp_path, [row("B01", customization_options=options)]).products["B01"]
    assert index_document(product) == "red mug a mug. holds tea color: red, blue, and size: xl"


def test_num_products_takes_rows_from_the_start_and_changes_the_hash(tmp_path):
    rows = [row("B01"), row("B02")]
    whole, part = load(tmp_path, rows), load(tmp_path, rows, num_products=1)
    assert list(part.products) == ["B01"] and list(whole.products) == ["B01", "B02"]
    assert part.catalogue_hash != whole.catalogue_hash == load(tmp_path, rows).catalogue_hash


V0_PRICES = {
    "$12.99": ((12.99,), "$12.99"),
    "$12$15.5": ((12.0, 15.5), "$12.0 to $15.5"),
    "$1,299.00": ((1299.0,), "$1299.0"),
    "$20 - $10": ((20.0, 10.0), "$20.0 to $10.0"),
    "$12.99 ($1.08/Ounce)": ((12.99, 1.08), "$12.99 to $1.08"),
    "": ((100.0,), "$100.0"),
    None: ((100.0,), "$100.0"),
}


@pytest.mark.parametrize("text", V0_PRICES)
def test_v0_reads_prices_as_published(text):
    odd: list[str] = []
    assert read_pricing(text, "v0", lambda kind, detail: odd.append(kind)) == V0_PRICES[text]
    assert odd == []


@pytest.mark.parametrize("text", ["12.99", "$N/A", "Free", "$1.2.3"])
def test_v0_sells_for_100_what_the_original_cannot_read(text):
    odd: list[str] = []
    assert read_pricing(text, "v0", lambda kind, detail: odd.append(kind)) == ((100.0,), "$100.0")
    assert odd == ["price"]


V1_PRICES = {  # text -> the price shown and scored, the tag, whether there is a warning
    "$12.99": (12.99, "$12.99", False),
    "$12.99$15.99": (15.99, "$15.99", False),
    "": (None, "unavailable", False),
    None: (None, "unavailable", False),
    "12.99": (12.99, "$12.99", True),
    "$12.99.": (12.99, "$12.99", True),
    "$N/A": (None, "unavailable", True),
    "Free": (0.0, "$0.0", True),
    "EUR 5": (None, "unavailable", True),
    "5 €": (None, "unavailable", True),
    "$1,299.00": (1299.0, "$1299.0", True),
    "$20 - $10": (20.0, "$20.0", True),
    "$12.99 ($1.08/Ounce)": (12.99, "$12.99", True),
    "$12,99": (None, "unavailable", True),  # twelve or a thousand? better none than a wrong one
    "$1.2.3": (None, "unavailable", True),
    "$,5": (None, "unavailable", True),
    "9" * 400: (None, "unavailable", True),
    "$0": (0.0, "$0.0", False),
    "US $5 to $7.50": (7.5, "$7.5", True),
    "$": (None, "unavailable", True),
}


@pytest.mark.parametrize("pricing", [12.5, 7, ["$7"]])
def test_a_price_that_is_no_text_is_read_with_a_warning(pricing):
    odd: list[str] = []
    prices, tag = read_pricing(pricing, "v1", lambda kind, detail: odd.append(kind))
    assert odd == ["price"] and tag == f"${shown_price(prices)}" in ("$12.5", "$7.0")


@pytest.mark.parametrize("pricing", [True, {"amount": 5}, float("nan"), float("inf")])
def test_what_is_no_price_at_all_is_unavailable(pricing):
    odd: list[str] = []
    assert read_pricing(pricing, "v1", lambda kind, detail: odd.append(kind)) == ((), "unavailable")
    assert odd == ["price"]


@pytest.mark.parametrize("text", V1_PRICES)
def test_v1_scores_the_price_that_it_shows(text):
    odd: list[str] = []
    prices, tag = read_pricing(text, "v1", lambda kind, detail: odd.append(kind))
    price, wanted_tag, is_odd = V1_PRICES[text]
    assert tag == wanted_tag and bool(odd) == is_odd
    assert math.isnan(shown_price(prices)) if price is None else shown_price(prices) == price


def test_odd_rows_are_repaired_or_skipped_and_listed(tmp_path):
    rows = [
        row("B01", images=[]),
        row("B02", name=None, category=None, full_description=None),
        row("B03", customization_options={"Size": None, "Color": [{"value": None}, {"value": "  "}, {"value": "Red"}]}),
        row("b04"),
        row("B01", name="Other"),
        row("B0123456789"),
        row("nan"),
        {"name": "no asin"},
        "not an object",
        row("B05", name="Taza \U0001f375 café"),
    ]
    catalog = load(tmp_path, rows, instructions={"b04": {"attributes": ["tea safe"]}})
    assert list(catalog.products) == ["B01", "B02", "B03", "B04", "B05"]
    assert catalog.products["B01"].title == "Red Mug" and catalog.products["B01"].main_image == ""
    assert catalog.products["B02"].title == "B02" and catalog.products["B02"].description == ""
    assert catalog.products["B03"].options == {"color": ("red",)}
    assert catalog.products["B04"].attributes == ("tea safe",)
    assert catalog.products["B05"].title == "Taza \U0001f375 café"
    assert catalog.warning_counts == {
        "asin": 3,
        "category": 1,
        "duplicate asin": 1,
        "full_description": 1,
        "images": 1,
        "lower-case asin": 1,
        "name": 1,
        "options": 3,
        "row": 1,
    }
    assert [warning.row for warning in catalog.warnings if warning.is_skipped] == [4, 5, 6, 7, 8]


def test_asins_that_could_not_be_clicked_are_skipped_in_v1_and_kept_in_v0(tmp_path):
    rows = [row("B0 1"), row(" b0  1 "), row("Next >"), row("search"), row("   "), row("ß"), row("SS")]
    catalog = load(tmp_path, rows)
    assert list(catalog.products) == ["B0 1", "SS"]
    assert [(w.row, w.kind) for w in catalog.warnings if w.is_skipped] == [
        (1, "duplicate asin"), (2, "asin"), (3, "asin"), (4, "asin"), (6, "duplicate asin"),
    ]  # fmt: skip
    assert len(load(tmp_path, rows, version="v0").products) == 7


def test_options_that_could_not_be_clicked_are_left_out_of_v1_and_listed(tmp_path):
    options = {
        "Empty": [],
        "Null": [{"value": None}],
        "Long": [{"value": "x" * 5000}, {"value": "short"}],
        "Size": [{"value": "S"}],
        "size": ["M", 7],
    }
    catalog = load(tmp_path, [row("B01", customization_options=options)])
    assert catalog.products["B01"].options == {"long": ("short",), "size": ("m", "7")}
    assert [(w.kind, w.detail.split(";")[0]) for w in catalog.warnings] == [
        ("options", "option 'Empty' has no value"),
        ("options", "option 'Null' has a value that is not a text"),
        ("options", "option 'Null' has no value"),
        ("options", "option 'Long' has a value of 5000 characters"),
        ("options", "option 'size' comes twice"),
    ]
    assert load(tmp_path, [row("B01", customization_options=["S"])]).warning_counts == {"options": 1}


def test_a_missing_or_malformed_file_is_one_line_that_names_it(tmp_path):
    with pytest.raises(CatalogError, match="no such directory"):
        load_catalog(tmp_path / "nowhere")
    with pytest.raises(CatalogError, match=r"no items_shuffle\*\.json"):
        load_catalog(tmp_path)
    with pytest.raises(CatalogError, match=r"items_ins_v2\.json: must hold an object by asin"):
        load(tmp_path, [row("B01")], instructions=["B01"])
    broken = {"B01": {"attributes": [], "instruction": 7, "instruction_attributes": []}}
    with pytest.raises(CatalogError, match=r"items_ins_v2\.json: product B01: instruction must be a text"):
        load(tmp_path, [row("B01")], instructions=broken)
    with pytest.raises(CatalogError, match="none of its 0 rows is a product"):
        load(tmp_path, [])
    (tmp_path / "items_shuffle.json").write_text("{")
    with pytest.raises(CatalogError, match=r"items_shuffle\.json: not JSON") as caught:
        load_catalog(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "items_shuffle.json").write_text("[" * 100_000)
    with pytest.raises(CatalogError, match=r"items_shuffle\.json: not JSON"):
        load_catalog(tmp_path)
    (tmp_path / "items_shuffle.json").unlink()
    (tmp_path / "items_shuffle.json").mkdir()
    with pytest.raises(CatalogError, match=r"items_shuffle\.json: cannot be read"):
        load_catalog(tmp_path)


@pytest.mark.parametrize("key", ["instruction_attributes", "instruction_options"])
@pytest.mark.parametrize("value", ["red", {"color": "red"}, "", None, 7])
def test_a_human_instruction_needs_lists_lest_a_text_becomes_its_letters(tmp_path, key, value):
    human = {"instruction": "a red mug.", "instruction_attributes": ["tea safe"], "instruction_options": ["red"]}
    path = tmp_path / "items_human_ins.json"
    path.write_text(json.dumps({"B01": [human]}))
    assert load(tmp_path, [row("B01")]).human_instructions["B01"] == (
        Instruction("a red mug", ("tea safe",), ("red",)),
    )
    path.write_text(json.dumps({"B01": [human, {**human, key: value}]}))
    with pytest.raises(CatalogError, match=r"items_human_ins\.json: product B01: instruction_attributes and") as caught:
        load(tmp_path, [row("B01")])
    assert "\n" not in str(caught.value)


def test_a_home_directory_may_be_written_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    load(tmp_path, [row("B01")])
    assert load_catalog("~").directory == tmp_path


def test_the_published_file_loads_whole(reference_dir):
    catalog = load_catalog(reference_dir / "webshop-1k", version="v0")
    assert (len(catalog.products), len(catalog.instructions), len(catalog.human_instructions)) == (1000, 415, 13)
    assert not any(warning.is_skipped for warning in catalog.warnings)
    assert sum(len(product.prices) == 2 for product in catalog.products.values()) == 93


def test_both_versions_read_the_published_file_alike_but_for_prices(reference_dir):
    v0, v1 = (load_catalog(reference_dir / "webshop-1k", version=version) for version in ("v0", "v1"))
    assert [index_document(p) for p in v0.products.values()] == [index_document(p) for p in v1.products.values()]
    assert {p.price_tag for p in v1.products.values() if not p.prices} == {"unavailable"}
    assert sum(not product.prices for product in v1.products.values()) == 89
