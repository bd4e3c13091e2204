"""Goals of a catalogue in their published order, and the cuts that keep training and test goals apart."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from webshop_env.catalog import Catalog, shown_price
from webshop_env.errors import ShopGymError
from webshop_env.types import Goal, Product

GoalKind = Literal["synthetic", "human"]
Variant = Literal["verl"] | None

SPLIT_SEED = 233
"""Seed of the published shuffle, which fixes the order of goals and so the splits."""
NO_CAP_USD = 1_000_000.0
"""`price_upper` of a goal whose instruction names no price."""
SPLITS = ("train", "eval", "test", "all")

_CAPS_USD = tuple(10.0 * i for i in range(1, 100))
_FIRST_EVAL, _FIRST_TRAIN = 500, 1500
_MIN_GOALS_FOR_PUBLISHED_CUT = 3000
_MAX_GOALS_PER_PRODUCT = 6


@dataclass(frozen=True, eq=False)
class GoalList:
    """The goals of a shop, with what was drawn on the way to them."""

    goals: tuple[Goal, ...]
    """In their order; `goals[i].goal_index == i`."""
    prices: dict[str, float]
    """By asin: the price that the score uses, in US dollars; NaN when none is known (v1)."""
    rng_state: tuple[Any, ...]
    """State of the private generator after all draws; v0's sessions go on from it."""
    whole_indexes: tuple[int, ...]
    """Place of each goal in the list before `filter_goals` and `limit_goals`; splits are cut there."""
    num_whole: int
    """Length of that list."""


def build_goals(
    catalog: Catalog,
    kind: GoalKind = "synthetic",
    *,
    preseed: int = 0,
    variant: Variant = None,
    limit_goals: int | None = None,
    filter_goals: Callable[[int, Goal], bool] | None = None,
) -> GoalList:
    """All goals of a catalogue, in the order that every published number uses.

    Args:
        catalog: Its version decides how prices and caps come about: v0 draws them, v1 computes them.
        kind: "synthetic", every combination of the options of a product with an instruction; or "human".
        preseed: Seed of v0's private generator; v1 does not look at it.
        variant: "verl" shuffles with `preseed` instead of 233, as verl-agent's copy does (v0 only).
        limit_goals: Keep this many, drawn by weight; None or -1 keeps all.
        filter_goals: Called with (place in the whole list, goal); what it refuses is left out.
    """
    rng = random.Random(preseed)
    is_v0 = catalog.version == "v0"
    prices = _drawn_prices(catalog, rng) if is_v0 else {a: shown_price(p.prices) for a, p in catalog.products.items()}
    make = _synthetic_goals if kind == "synthetic" else _human_goals
    goals = make(catalog, prices, rng if is_v0 else None)
    rng.seed(preseed if variant == "verl" else SPLIT_SEED)
    rng.shuffle(goals)
    num_whole = len(goals)

    kept = list(range(num_whole))
    if filter_goals is not None:
        kept = [i for i in kept if filter_goals(i, replace(goals[i], goal_index=i))]
    if limit_goals is not None and -1 < limit_goals < len(kept):
        drawn = _draw_distinct(rng, [goals[i].weight for i in kept], limit_goals)
        kept = [kept[i] for i in drawn]
    return GoalList(
        goals=tuple(replace(goals[whole], goal_index=i) for i, whole in enumerate(kept)),
        prices=prices,
        rng_state=rng.getstate(),
        whole_indexes=tuple(kept),
        num_whole=num_whole,
    )


def running_weights(goals: Sequence[Goal]) -> list[float]:
    """Sums of weights for `draw_goal`, with the leading 0 that the original has."""
    return _running_sums([goal.weight for goal in goals])


def draw_goal(rng: random.Random, goals: Sequence[Goal], sums: Sequence[float] | None = None) -> int:
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


def price_text(price_upper: float) -> str:
    """The end of an instruction, such as ", and price lower than 40.00 dollars"; empty without a cap."""
    return "" if price_upper == NO_CAP_USD else f", and price lower than {price_upper:.2f} dollars"


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
    goals = goal_list.goals
    if split_by == "goal":
        ranges = splits(goal_list.num_whole)
        members = {
            name: [i for i, whole in enumerate(goal_list.whole_indexes) if whole in ranges[name]] for name in ranges
        }
    else:
        members = _by_product(goals, _product_cut(split_by))
    indexes = {name: np.array(members[name], dtype=np.int32) for name in ("train", "eval", "test")}
    indexes["all"] = np.arange(len(goals), dtype=np.int32)
    for array in indexes.values():
        array.flags.writeable = False
    return indexes


def _product_cut(split_by: str) -> int:
    name, _, number = str(split_by).partition(":")
    if name != "product" or not (number.isdigit() or not number):
        raise ShopGymError(f"split_by must be 'goal', 'product' or 'product:NUMBER', got {split_by!r}")
    return int(number or 0)


def _by_product(goals: Sequence[Goal], cut: int) -> dict[str, list[int]]:
    asins = {goal.asin for goal in goals}
    ordered = sorted(asins, key=lambda asin: hashlib.sha256(f"{cut}:{asin}".encode(errors="replace")).digest())
    num_test = max(round(0.2 * len(ordered)), min(1, len(ordered) // 2))
    num_eval = max(round(0.1 * len(ordered)), min(1, len(ordered) // 3))
    split_of = dict.fromkeys(ordered, "train")
    split_of.update(dict.fromkeys(ordered[:num_test], "test"))
    split_of.update(dict.fromkeys(ordered[num_test : num_test + num_eval], "eval"))
    members: dict[str, list[int]] = {"train": [], "eval": [], "test": []}
    taken: Counter[str] = Counter()
    for goal in goals:
        split = split_of[goal.asin]
        taken[goal.asin] += 1
        if split == "train" or taken[goal.asin] <= _MAX_GOALS_PER_PRODUCT:
            members[split].append(goal.goal_index)
    return members


def _drawn_prices(catalog: Catalog, rng: random.Random) -> dict[str, float]:
    return {
        asin: product.prices[0] if len(product.prices) == 1 else rng.uniform(*product.prices)
        for asin, product in catalog.products.items()
    }


def _drawn_cap(rng: random.Random, price_usd: float) -> float:
    candidates = cap_candidates(price_usd)
    return max(rng.sample(candidates, 2)) if len(candidates) >= 2 else NO_CAP_USD


def _synthetic_goals(catalog: Catalog, prices: Mapping[str, float], rng: random.Random | None) -> list[Goal]:
    """In product order. With a generator one cap is drawn for each product, without one each goal's is computed."""
    goals: list[Goal] = []
    counts: Counter[str] = Counter()
    ordinals: Counter[str] = Counter()
    for asin, instruction in catalog.instructions.items():
        product = catalog.products[asin]
        drawn_cap = _drawn_cap(rng, prices[asin]) if rng else None
        names = sorted(product.options)
        num_before = len(goals)
        for combination in itertools.product(*(product.options[name] for name in names)):
            options = dict(zip(names, combination, strict=True))
            wish = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = instruction.text + (f" with {wish}" if wish else "")
            goal_id = _goal_id(asin, text, sorted(options.items()), ordinals)
            cap = price_cap(goal_id, prices[asin]) if drawn_cap is None else drawn_cap
            goals.append(_goal(product, goal_id, text, instruction.attributes, options, cap))
        for attribute in instruction.attributes:
            counts[attribute] += len(goals) - num_before
    return [replace(goal, weight=_weight(goal.attributes, counts)) for goal in goals]


def _human_goals(catalog: Catalog, prices: Mapping[str, float], rng: random.Random | None) -> list[Goal]:
    goals: list[Goal] = []
    ordinals: Counter[str] = Counter()
    for asin, instructions in catalog.human_instructions.items():
        for instruction in instructions:
            if not instruction.attributes:
                continue
            goal_id = _goal_id(asin, instruction.text, sorted(instruction.options), ordinals)
            cap = _drawn_cap(rng, prices[asin]) if rng else price_cap(goal_id, prices[asin])
            product = catalog.products[asin]
            goals.append(_goal(product, goal_id, instruction.text, instruction.attributes, instruction.options, cap))
    return goals


def _goal(
    product: Product,
    goal_id: str,
    text: str,
    attributes: tuple[str, ...],
    options: dict[str, str] | tuple[str, ...],
    cap: float,
) -> Goal:
    return Goal(
        goal_id=goal_id,
        goal_index=-1,
        asin=product.asin,
        instruction_text=text + price_text(cap),
        attributes=attributes,
        options=options,
        price_upper=cap,
        name=product.title,
        category=product.category,
        query=product.query,
        product_category=product.product_category,
        weight=1.0,
    )


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


def _running_sums(weights: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(weights, initial=0.0))


def _draw(rng: random.Random, sums: Sequence[float]) -> int:
    return min(bisect.bisect(sums, rng.uniform(0, sums[-1])), len(sums) - 2)


def _draw_distinct(rng: random.Random, weights: Sequence[float], count: int) -> list[int]:
    """`count` different indexes, repeats drawn again; those that no draw can give come last, in order."""
    sums = _running_sums(weights)
    last = len(weights) - 1
    num_drawable = len({min(i + 1, last) for i, weight in enumerate(weights) if weight > 0})
    drawn: dict[int, None] = {}
    while len(drawn) < min(count, num_drawable):  # the original would go on for ever
        drawn[_draw(rng, sums)] = None
    rest = (i for i in range(len(weights)) if i not in drawn)
    return [*drawn, *itertools.islice(rest, count - len(drawn))]
