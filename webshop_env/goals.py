"""Goals of a catalogue in their published order, and the cuts that keep training and test goals apart."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from webshop_env.catalog import Catalog
from webshop_env.errors import ShopGymError
from webshop_env.goal_list import (
    NO_CAP_USD,
    GoalColumns,
    GoalKind,
    GoalList,
    combinations,
    price_text,
    running_sums,
    synthetic_text,
)
from webshop_env.types import Goal

__all__ = [
    "NO_CAP_USD",
    "SPLITS",
    "GoalKind",
    "GoalList",
    "Variant",
    "build_goals",
    "cap_candidates",
    "draw_goal",
    "original_record",
    "price_cap",
    "price_text",
    "running_weights",
    "select_goals",
    "split_indexes",
    "splits",
]

Variant = Literal["verl"] | None

SPLIT_SEED = 233
"""Seed of the published shuffle, which fixes the order of goals and so the splits."""
SPLITS = ("train", "eval", "test", "all")

_CAPS_USD = tuple(10.0 * i for i in range(1, 100))
_FIRST_EVAL, _FIRST_TRAIN = 500, 1500
_MIN_GOALS_FOR_PUBLISHED_CUT = 3000
_MAX_GOALS_PER_PRODUCT = 6


def build_goals(
    catalog: Catalog,
    kind: GoalKind = "synthetic",
    *,
    preseed: int = 0,
    variant: Variant = None,
    limit_goals: int | None = None,
    filter_goals: Callable[[int, Goal], bool] | None = None,
    on_row: Callable[[int], None] | None = None,
) -> GoalList:
    """All goals of a catalogue, in the order that every published number uses.

    Args:
        catalog: Its version decides how prices and caps come about: v0 draws them, v1 computes them.
        kind: "synthetic", every combination of the options of a product with an instruction; or "human".
        preseed: Seed of v0's private generator; v1 does not look at it.
        variant: "verl" shuffles with `preseed` instead of 233, as verl-agent's copy does (v0 only).
        limit_goals: Keep this many, drawn by weight; None or -1 keeps all.
        filter_goals: Called with (place in the whole list, goal); what it refuses is left out.
        on_row: Called now and then with the number of products that are done.
    """
    rng = random.Random(preseed)
    is_v0 = catalog.version == "v0"
    prices = _drawn_prices(catalog, rng) if is_v0 else np.fmax(*catalog.prices.T)  # v1: as `shown_price`
    make = _synthetic_goals if kind == "synthetic" else _human_goals
    columns = make(catalog, prices, rng if is_v0 else None, on_row or (lambda row: None))
    order = list(range(len(columns.rows)))
    rng.seed(preseed if variant == "verl" else SPLIT_SEED)
    rng.shuffle(order)
    whole = GoalList.of(
        catalog,
        kind,
        columns.take(np.array(order, dtype=np.int32)),
        prices=prices,
        rng_state=rng.getstate(),
        whole_indexes=np.arange(len(order), dtype=np.int32),
        num_whole=len(order),
    )
    return select_goals(whole, limit_goals=limit_goals, filter_goals=filter_goals)


def select_goals(
    whole: GoalList,
    *,
    limit_goals: int | None = None,
    filter_goals: Callable[[int, Goal], bool] | None = None,
) -> GoalList:
    """Some goals of a whole list; arguments as for `build_goals`."""
    kept: Sequence[int] = range(whole.num_whole)
    if filter_goals is not None:
        kept = [i for i, goal in enumerate(whole.goals) if filter_goals(i, goal)]
    rng = random.Random()
    rng.setstate(whole.rng_state)
    if limit_goals is not None and -1 < limit_goals < len(kept):
        drawn = _draw_distinct(rng, whole.columns.weights[np.array(kept, dtype=np.int32)].tolist(), limit_goals)
        kept = [kept[i] for i in drawn]
    if len(kept) == whole.num_whole:
        return whole
    places = np.array(kept, dtype=np.int32)
    return GoalList.of(
        whole.catalog,
        whole.kind,
        whole.columns.take(places),
        prices=whole.prices,
        rng_state=rng.getstate(),
        whole_indexes=places,
        num_whole=whole.num_whole,
    )


def running_weights(goals: Sequence[Goal]) -> np.ndarray:
    """Sums of weights for `draw_goal`, float64, with the leading 0 that the original has."""
    return running_sums(np.array([goal.weight for goal in goals], dtype=np.float64))


def draw_goal(rng: random.Random, goals: Sequence[Goal], sums: Sequence[float] | np.ndarray | None = None) -> int:
    """Index of a goal drawn by weight, as the original draws for a session without a goal.

    One too high by the original's leading 0: goal 0 is never drawn, and the last has two shares.

    Args:
        rng: One uniform draw is taken from it.
        goals: At least one.
        sums: `running_weights(goals)`, when it is at hand.
    """
    return _draw(rng, running_weights(goals) if sums is None else sums)


def cap_candidates(price_usd: float) -> tuple[float, ...]:
    """The at most four multiples of ten, up to 990, next above a price; none when the price is not known."""
    return tuple(itertools.islice((cap for cap in _CAPS_USD if cap > price_usd), 4))


def price_cap(goal_id: str, price_usd: float) -> float:
    """v1's cap of a goal: a pure function of the split seed, the goal's id and the shown price, never below it.

    Distributed as the original's, the larger of two different candidates; `NO_CAP_USD` with fewer than two.
    """
    candidates = cap_candidates(price_usd)
    if len(candidates) < 2:
        return NO_CAP_USD
    pairs = tuple(itertools.combinations(candidates, 2))
    digest = hashlib.sha256(f"{SPLIT_SEED}:{goal_id}".encode()).digest()
    return pairs[int.from_bytes(digest[:8], "big") % len(pairs)][1]


def original_record(goal: Goal) -> dict[str, Any]:
    """The goal as the original keeps it, keys in its order, so that JSON texts and their hashes can be compared."""
    is_synthetic = isinstance(goal.options, dict)
    return {
        "asin": goal.asin,
        "category": goal.category,
        "query": goal.query,
        "name": goal.name,
        "product_category": goal.product_category,
        "instruction_text": goal.instruction_text,
        "attributes": list(goal.attributes),
        "price_upper": int(NO_CAP_USD) if goal.price_upper == NO_CAP_USD else goal.price_upper,
        "goal_options": goal.options.copy() if isinstance(goal.options, dict) else list(goal.options),
        "weight": goal.weight if is_synthetic else int(goal.weight),
    }


def splits(num_goals: int) -> dict[str, range]:
    """Where "test", "eval" and "train" lie in the whole list, in this order and without overlap.

    The published cut (500, 1,000, rest) from 3,000 goals on; below a tenth, a fifth and the rest, the first two at
    least one goal where there are three.
    """
    first_eval, first_train = _FIRST_EVAL, _FIRST_TRAIN
    if num_goals < _MIN_GOALS_FOR_PUBLISHED_CUT:
        first_eval = max(num_goals // 10, min(1, num_goals // 2))
        first_train = first_eval + max(num_goals // 5, min(1, num_goals // 3))
    return {
        "test": range(first_eval),
        "eval": range(first_eval, first_train),
        "train": range(first_train, num_goals),
    }


def split_indexes(goal_list: GoalList, split_by: str) -> dict[str, np.ndarray]:
    """Goal indexes (int32, rising) of every split.

    Args:
        goal_list: As built; goals that a filter left out are in no split, the others keep theirs.
        split_by: "goal" is the published cut; "product" shares no product between splits ("product:3" is another
            such cut): by hash of asin 20 % of the products with goals to test, 10 % to eval, at most six goals of
            each, and all goals of the other products to train.
    """
    whole = goal_list.whole_indexes
    is_whole = len(whole) == goal_list.num_whole
    if split_by != "goal":
        indexes = _by_product(goal_list, _product_cut(split_by))
    elif is_whole:  # parts of the list itself, which may be mapped from a file
        indexes = {name: whole[part.start : part.stop] for name, part in splits(goal_list.num_whole).items()}
    else:
        indexes = {
            name: _places((part.start <= whole) & (whole < part.stop))
            for name, part in splits(goal_list.num_whole).items()
        }
    indexes["all"] = whole[:] if is_whole else np.arange(len(whole), dtype=np.int32)
    for places in indexes.values():
        places.flags.writeable = False
    return indexes


def _product_cut(split_by: str) -> int:
    name, _, number = str(split_by).partition(":")
    if name != "product" or not (number.isdigit() or not number):
        raise ShopGymError(f"split_by must be 'goal', 'product' or 'product:NUMBER', got {split_by!r}")
    return int(number or 0)


def _by_product(goal_list: GoalList, cut: int) -> dict[str, np.ndarray]:
    rows, products = np.unique(goal_list.columns.rows, return_inverse=True)  # products: place of each goal's in `rows`
    asins = [goal_list.catalog.asins[row] for row in rows.tolist()]
    digests = [hashlib.sha256(f"{cut}:{asin}".encode(errors="replace")).digest() for asin in asins]
    ordered = sorted(range(len(asins)), key=digests.__getitem__)
    num_test = max(round(0.2 * len(ordered)), min(1, len(ordered) // 2))
    num_eval = max(round(0.1 * len(ordered)), min(1, len(ordered) // 3))
    rank = np.empty(len(ordered), dtype=np.int64)
    rank[ordered] = np.arange(len(ordered))
    rank_of_goal = rank[products]
    is_test = rank_of_goal < num_test
    is_eval = ~is_test & (rank_of_goal < num_test + num_eval)
    by_product = np.argsort(products, kind="stable")
    num_before = np.empty(len(products), dtype=np.int64)  # goals of the same product that come earlier
    starts = np.searchsorted(products[by_product], np.arange(len(rows)))
    num_before[by_product] = np.arange(len(products)) - starts[products[by_product]]
    is_early = num_before < _MAX_GOALS_PER_PRODUCT
    return {
        "train": _places(~is_test & ~is_eval),
        "eval": _places(is_eval & is_early),
        "test": _places(is_test & is_early),
    }


def _places(is_member: np.ndarray) -> np.ndarray:
    return np.flatnonzero(is_member).astype(np.int32)


def _drawn_prices(catalog: Catalog, rng: random.Random) -> np.ndarray:
    drawn = (low if math.isnan(high) else rng.uniform(low, high) for low, high in catalog.prices.tolist())
    return np.fromiter(drawn, dtype=np.float64, count=len(catalog.prices))


def _drawn_cap(rng: random.Random, price_usd: float) -> float:
    candidates = cap_candidates(price_usd)
    return max(rng.sample(candidates, 2)) if len(candidates) >= 2 else NO_CAP_USD


def _synthetic_goals(
    catalog: Catalog, prices: np.ndarray, rng: random.Random | None, on_row: Callable[[int], None]
) -> GoalColumns:
    """In product order. With a generator one cap is drawn for each product, without one each goal's is computed."""
    rows, wishes, ids, lengths = array("i"), array("q"), array("Q"), array("i")
    caps, weights = array("d"), array("d")
    counts: Counter[str] = Counter()
    of_products: list[tuple[tuple[str, ...], int]] = []
    for asin, instruction in catalog.instructions.items():
        product, row = catalog.products[asin], catalog.rows[asin]
        on_row(row)
        price = float(prices[row])
        drawn_cap = _drawn_cap(rng, price) if rng else None
        ordinals: Counter[str] = Counter()
        num = 0
        for num, options in enumerate(combinations(product), start=1):
            text = synthetic_text(instruction, options)
            goal_id = _goal_id(asin, text, sorted(options.items()), ordinals)
            rows.append(row)
            wishes.append(num - 1)
            ids.append(int(goal_id, 16))
            caps.append(price_cap(goal_id, price) if drawn_cap is None else drawn_cap)
            lengths.append(len(text) + len(price_text(caps[-1])))
        for attribute in instruction.attributes:
            counts[attribute] += num
        of_products.append((instruction.attributes, num))
    for attributes, num in of_products:
        if num:
            weights.extend([_weight(attributes, counts)] * num)
    return GoalColumns(*map(np.asarray, (rows, wishes, ids, caps, weights, lengths)))


def _human_goals(
    catalog: Catalog, prices: np.ndarray, rng: random.Random | None, on_row: Callable[[int], None]
) -> GoalColumns:
    rows, wishes, ids, caps, lengths = array("i"), array("q"), array("Q"), array("d"), array("i")
    for asin, instructions in catalog.human_instructions.items():
        row = catalog.rows[asin]
        on_row(row)
        price = float(prices[row])
        ordinals: Counter[str] = Counter()
        for wish, instruction in enumerate(instructions):
            if not instruction.attributes:
                continue
            goal_id = _goal_id(asin, instruction.text, sorted(instruction.options), ordinals)
            rows.append(row)
            wishes.append(wish)
            ids.append(int(goal_id, 16))
            caps.append(_drawn_cap(rng, price) if rng else price_cap(goal_id, price))
            lengths.append(len(instruction.text) + len(price_text(caps[-1])))
    return GoalColumns(*map(np.asarray, (rows, wishes, ids, caps, array("d", [1.0]) * len(rows), lengths)))


def _goal_id(asin: str, text: str, options: list[Any], ordinals: Counter[str]) -> str:
    """An id that hangs on what is wanted alone; equal wishes are told apart by their order in the catalogue."""
    key = json.dumps([asin, text, options])
    ordinal = ordinals[key]
    ordinals[key] += 1
    return hashlib.sha256(f"{key}:{ordinal}".encode()).hexdigest()[:16]


def _weight(attributes: tuple[str, ...], counts: Mapping[str, int]) -> float:
    """Mean rarity of the attributes; 0.0 for a goal without any."""
    if not attributes:
        return 0.0
    # Added one by one: since Python 3.12 `sum` rounds otherwise, and the recorded weights are those of plain additions.
    total = 0.0
    for attribute in attributes:
        total += 1.0 / counts[attribute]
    return total / len(attributes)


def _draw(rng: random.Random, sums: Sequence[float] | np.ndarray) -> int:
    return min(bisect.bisect(sums, rng.uniform(0, float(sums[-1]))), len(sums) - 2)


def _draw_distinct(rng: random.Random, weights: Sequence[float], count: int) -> list[int]:
    """`count` different indexes, repeats drawn again; those that no draw can give come last, in order."""
    sums = running_sums(np.array(weights, dtype=np.float64)).tolist()
    last = len(weights) - 1
    num_drawable = len({min(i + 1, last) for i, weight in enumerate(weights) if weight > 0})
    drawn: dict[int, None] = {}
    while len(drawn) < min(count, num_drawable):  # the original would go on for ever
        drawn[_draw(rng, sums)] = None
    rest = (i for i in range(len(weights)) if i not in drawn)
    return [*drawn, *itertools.islice(rest, count - len(drawn))]
