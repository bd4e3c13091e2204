"""More products to learn from: instructions for those that have attributes but none, composed as the others' are.

    python benchmarks/gpu/more_products.py --data DIR --out MORE --cuts 0 1
    python benchmarks/gpu/learning.py arm product --cut 0 --data DIR --train-data MORE --start START --out RESULTS

585 of WebShop's 1,000 products have no instruction, so no goals. Where one of their attributes is also asked for by
some instruction, another is made of it: "Find me mouthwash with tea tree". MORE gets the same products with these, and
for each cut the train goals of all products but those that DIR's cut keeps for tests and validations. The price caps of
WebShop-v0 are drawn one goal after the other, so those of the old goals are others: play the tests in DIR.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # machine.py is beside the other benchmarks

import numpy as np
from machine import run_script

from trainers.files import atomic_directory, require_writable
from trainers.goal_files import save_goals
from trainers.settings import resolve
from trainers.worlds import open_world
from webshop_env.errors import ShopGymError
from webshop_env.shop import Shop

FIND = "Find me "
PLACES = ("before", "with", "for")
"""Of an attribute in an instruction: "Find me gluten free, vegan cookies with pecans for kids"."""
_LEAD = re.compile(r" (with|for) ")


def places_of_attributes(instructions: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, str]) -> dict[str, str]:
    """Where instructions put each attribute that they ask for, most often.

    Args:
        instructions: By asin, as in items_ins*.json.
        kinds: By asin, what a product is called in its instruction; not empty.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for asin, kind in kinds.items():
        entry = instructions.get(asin, {})
        before, found, after = (entry.get("instruction") or "").removeprefix(FIND).partition(kind)
        for attribute in entry.get("instruction_attributes") or () if found else ():
            if attribute in before:
                counts[attribute]["before"] += 1
            elif attribute in after and (lead := _LEAD.findall(after.partition(attribute)[0])):
                counts[attribute][lead[-1]] += 1
    return {attribute: max(PLACES, key=lambda place: seen[place]) for attribute, seen in counts.items()}


def composed(kind: str, attributes: Sequence[str], places: Mapping[str, str]) -> str:
    """An instruction that asks for these attributes."""
    asked = {place: ", ".join(a for a in attributes if places[a] == place) for place in PLACES}
    before = f"{asked['before']} " if asked["before"] else ""
    return FIND + before + kind + "".join(f" {place} {asked[place]}" for place in PLACES[1:] if asked[place])


def with_more(
    products: Sequence[Mapping[str, Any]], instructions: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """items_ins*.json with an instruction for each product that has an attribute which others ask for."""
    kinds = {product["asin"]: kind for product in products if (kind := str(product["query"]).lower().strip())}
    places = places_of_attributes(instructions, kinds)
    more = {}
    for asin, entry in instructions.items():
        attributes = [attribute for attribute in entry["attributes"] if attribute in places]
        more[asin] = dict(entry)
        if not entry.get("instruction") and attributes and asin in kinds:
            more[asin] |= {
                "instruction": composed(kinds[asin], attributes, places),
                "instruction_attributes": attributes,
            }
    return more


def write_catalogue(data: Path, out: Path) -> int:
    """MORE's files; returns how many instructions were composed.

    Raises:
        ShopGymError: `data` holds no such files.
    """
    names = sorted(path.name for path in data.glob("*.json") if path.name != "manifest.json")
    ins, items = (
        next((name for name in names if name.startswith(start)), None) for start in ("items_ins", "items_shuffle")
    )
    if ins is None or items is None:
        raise ShopGymError(f"--data: {data} holds no items_shuffle*.json and items_ins*.json")
    products, instructions = (json.loads((data / name).read_text(encoding="utf-8")) for name in (items, ins))
    more = with_more(products, instructions)
    for name in names:
        if name == ins:
            (out / name).write_text(json.dumps(more), encoding="utf-8")
        else:
            shutil.copyfile(data / name, out / name)
    return sum(bool(entry.get("instruction")) for entry in more.values()) - sum(
        bool(entry.get("instruction")) for entry in instructions.values()
    )


def write_list(data: Path, more: Path, cut: int) -> str:
    """The train goals of MORE that a cut of DIR allows; returns a line about them."""
    words = ["env.env_name=WebShop-v0", f"env.webshop.split_by=product:{cut}"]
    old, new = (resolve([*words, f"env.webshop.data_dir={place}"])[0].env for place in (data, more))
    shop, larger = open_world(old), open_world(new)
    assert isinstance(shop, Shop) and isinstance(larger, Shop)
    kept_apart = {shop.goal_at(int(goal)).asin for split in ("eval", "test") for goal in shop.split(split)}
    goals = [i for i in range(len(larger.goals)) if larger.goal_at(i).asin not in kept_apart]
    path = more / f"cut{cut}.parquet"
    save_goals(path, np.asarray(goals, dtype=np.int32), larger, new, split="train", modality="text")
    num = len({larger.goal_at(i).asin for i in goals})
    before = len({shop.goal_at(int(goal)).asin for goal in shop.split("train")})
    return f"{path.name}: {len(goals)} goals of {num} products ({before} without the composed ones)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of WebShop's 1,000 products")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--cuts", type=int, nargs="+", default=[0, 1], help="numbers of product cuts")
    options = parser.parse_args()
    if options.out.exists():
        raise ShopGymError(f"--out: {options.out} is there already; name another directory, or delete it")
    require_writable(options.out, setting="--out")
    with atomic_directory(options.out) as scratch:
        print(f"{write_catalogue(options.data, scratch)} instructions composed")
        for cut in options.cuts:
            print(write_list(options.data, scratch, cut))
    print(options.out)


if __name__ == "__main__":
    run_script(main)
