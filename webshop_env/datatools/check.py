"""Say what a directory holds as a catalogue: rows, repairs, skips, goals, splits, hash."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from webshop_env.catalog import Catalog, find_files, load_catalog
from webshop_env.command_line import say
from webshop_env.datatools.command import Command
from webshop_env.errors import ShopGymError
from webshop_env.goals import SPLITS, build_goals, split_indexes
from webshop_env.json_stream import iter_object
from webshop_env.nouns import can_tag
from webshop_env.shop import EMBEDDED_CATALOGUE, index_file


def check_catalogue(data_dir: Path, *, version: str = "v1", num_products: int | None = None) -> dict[str, Any]:
    """Read a catalogue as a shop would and report; plain values that JSON can hold.

    Raises:
        CatalogError: A file is missing or is not what it should be.
    """
    catalog = load_catalog(data_dir, version=version, num_products=num_products)  # type: ignore[arg-type]
    skipped = [warning for warning in catalog.warnings if warning.is_skipped]
    repaired = [warning for warning in catalog.warnings if not warning.is_skipped]
    prices = [product.prices for product in catalog.products.values()]
    return {
        "directory": str(catalog.directory),
        "version": version,
        "catalogue_hash": catalog.catalogue_hash,
        "files": {path.name: path.stat().st_size for path in sorted(catalog.directory.glob("*.json"))},
        "num_rows": len(catalog.products) + len(skipped),
        "num_products": len(catalog.products),
        "num_rows_skipped": len(skipped),
        "num_rows_repaired": len({warning.row for warning in repaired}),
        "warnings": catalog.warning_counts,
        "warning_list": [
            {"row": w.row, "asin": w.asin, "kind": w.kind, "detail": w.detail, "is_skipped": w.is_skipped}
            for w in catalog.warnings
        ],
        "num_without_price": sum(not price for price in prices),
        "num_with_price_range": sum(len(price) > 1 for price in prices),
        "num_with_options": sum(bool(product.options) for product in catalog.products.values()),
        "goals": {kind: _check_goals(catalog, kind) for kind in ("synthetic", "human")},
        "nouns": _check_nouns(catalog),
        "search_index": "built" if index_file(catalog).exists() else "made at the first search; data build keeps it",
    }


def _check_goals(catalog: Catalog, kind: str) -> dict[str, Any]:
    goal_list = build_goals(catalog, kind)  # type: ignore[arg-type]
    indexes = {split_by: split_indexes(goal_list, split_by) for split_by in ("goal", "product")}
    return {
        "num_goals": len(goal_list.goals),
        "num_products_with_goals": len(set(goal_list.columns.rows.tolist())),
        "num_asins_unknown": _num_asins_unknown(catalog, kind),
        "splits": {cut: {name: len(arrays[name]) for name in SPLITS} for cut, arrays in indexes.items()},
    }


def _num_asins_unknown(catalog: Catalog, kind: str) -> int:
    """Asins of the instruction file that no product for sale has: what is said of them makes no goal."""
    files = find_files(catalog.directory)
    path = files.human if kind == "human" else files.instructions
    known = set(catalog.asin_in_files.values())
    return sum(asin not in known for asin, _ in iter_object(path)) if path else 0


def _check_nouns(catalog: Catalog) -> dict[str, Any]:
    missing = list(catalog.nouns.missing(product.title for product in catalog.products.values()))
    return {**catalog.nouns.describe(), "num_names_to_tag": len(missing), "can_tag": can_tag()}


def as_text(report: dict[str, Any], *, num_shown: int) -> str:
    """The report for people, with `num_shown` odd rows, of which each kind has one if there is room."""
    lines = [
        f"{report['directory']} as WebShop-{report['version']}",
        f"  hash      {report['catalogue_hash']}",
        f"  rows      {report['num_rows']}: {report['num_products']} products, {report['num_rows_skipped']} skipped, "
        f"{report['num_rows_repaired']} repaired",
        f"  products  {report['num_with_options']} with options, {report['num_with_price_range']} with a price range, "
        f"{report['num_without_price']} without a price",
    ]
    for kind, goals in report["goals"].items():
        lines.append(f"  goals     {goals['num_goals']} {kind}, of {goals['num_products_with_goals']} products")
        if goals["num_asins_unknown"]:
            lines.append(f"            instructions for {goals['num_asins_unknown']} asins that are not for sale here")
        for cut, sizes in goals["splits"].items() if goals["num_goals"] else ():
            parts = ", ".join(f"{name} {sizes[name]}" for name in ("train", "eval", "test"))
            lines.append(f"  split     by {cut}: {parts}")
    nouns = report["nouns"]
    if nouns["num_names_to_tag"]:
        remedy = "data build tags them" if nouns["can_tag"] else "no shop can open: pip install shopgym[nouns]"
        lines.append(f"  nouns     {nouns['num_names_to_tag']} product names are in no noun file; {remedy}")
    else:
        lines.append(f"  nouns     of all names, from {nouns['source']} ({nouns['tagger']})")
    lines.append(f"  search    index {report['search_index']}")
    odd = report["warning_list"]
    if odd:
        lines.append("  odd rows  " + ", ".join(f"{kind} {count}" for kind, count in report["warnings"].items()))
    for warning in _shown(odd, num_shown):
        fate = "skipped" if warning["is_skipped"] else "repaired"
        lines.append(f"    row {warning['row']} {warning['asin']}: {warning['kind']}: {warning['detail']} [{fate}]")
    if len(odd) > num_shown:
        lines.append(f"    and {len(odd) - num_shown} more (--show N, or --json for all)")
    return "\n".join(lines)


def _shown(odd: list[dict[str, Any]], num_shown: int) -> list[dict[str, Any]]:
    """The first of each kind and then the first of all, in file order: many of one kind hide no other kind."""
    firsts = set({warning["kind"]: place for place, warning in reversed(list(enumerate(odd)))}.values())
    places = sorted(range(len(odd)), key=lambda place: (place not in firsts, place))
    return [odd[place] for place in sorted(places[:num_shown])]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data_dir", nargs="?", type=Path, default=EMBEDDED_CATALOGUE, help="directory (default: the embedded one)"
    )
    parser.add_argument("--version", default="v1", choices=["v0", "v1"], help="which version reads it (default v1)")
    parser.add_argument("--products", type=int, default=None, metavar="N", help="only the first N rows")
    parser.add_argument("--show", type=int, default=20, metavar="N", help="odd rows to list (default 20)")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.show < 0:
        raise ShopGymError(f"--show must be at least 0, got {arguments.show}")
    report = check_catalogue(arguments.data_dir, version=arguments.version, num_products=arguments.products)
    if arguments.json:
        say(json.dumps(report, indent=2))
    else:
        say(as_text(report, num_shown=arguments.show))
    return 0


CHECK = Command("check", __doc__.split("\n")[0], _add_arguments, _run)
