"""Why a purchase scored what it did, wish by wish: what the score page shows.

Nothing is judged here a second time. Each wish is asked alone of the score itself, as a goal that wants nothing else,
so that this report cannot disagree with the score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from webshop_env.goals import NO_CAP_USD
from webshop_env.reward import count_attributes
from webshop_env.shop import Shop
from webshop_env.types import Goal, Product


@dataclass(frozen=True, slots=True)
class Wish:
    """One thing that the goal asks for."""

    text: str
    is_met: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReport:
    """A purchase beside what was wanted. Score = `type_factor` x met wishes / all wishes."""

    score: float
    type_factor: float
    """1, 0.5, 0.1 or 0: whether it is the kind of thing that was wanted."""
    type_reasons: tuple[str, ...]
    attributes: tuple[Wish, ...]
    options: tuple[Wish, ...]
    price: Wish
    bought: Product
    wanted: Product | None
    """What the goal was written for; None where the catalogue no longer holds it."""

    @property
    def wishes(self) -> tuple[Wish, ...]:
        return (*self.attributes, *self.options, self.price)

    @property
    def num_met(self) -> int:
        return sum(wish.is_met for wish in self.wishes)


def explain(shop: Shop, goal: Goal, asin: str, options: Mapping[str, str]) -> ScoreReport:
    """The score of buying a product with the selected options (name -> value) for a goal, wish by wish.

    Raises:
        ShopGymError: No product has that asin.
    """
    price_usd = shop.price_of(asin)
    score, breakdown = shop.score(goal, asin, options)
    product = shop.products[asin]
    return ScoreReport(
        score=score,
        type_factor=breakdown["r_type"],
        type_reasons=_type_reasons(product, goal, breakdown),
        attributes=tuple(_attribute(shop, goal, product, attribute) for attribute in goal.attributes),
        options=tuple(_option(shop, goal, asin, options, name, value) for name, value in _wanted_options(goal)),
        price=_price(goal, product, price_usd, is_met=bool(breakdown["r_price"])),
        bought=product,
        wanted=shop.products.get(goal.asin),
    )


def _wanted_options(goal: Goal) -> list[tuple[str | None, str]]:
    if isinstance(goal.options, dict):
        return list(goal.options.items())
    return [(None, value) for value in goal.options]


def _type_reasons(product: Product, goal: Goal, breakdown: Mapping[str, Any]) -> tuple[str, ...]:
    share = breakdown["title_score"]
    reasons = [
        f"it is listed under “{product.query}”, as wanted"
        if breakdown["query_match"]
        else f"it is listed under “{product.query}”, wanted is “{goal.query}”",
        "at least two of its categories are the wanted ones"
        if breakdown["category_match"]
        else "fewer than two of its categories are the wanted ones",
        f"its title has {share:.0%} of the nouns of the wanted product's",
    ]
    if product.asin == goal.asin:
        reasons.insert(0, "it is the very product that the goal was written for")
    return tuple(reasons)


def _attribute(shop: Shop, goal: Goal, product: Product, attribute: str) -> Wish:
    alone = replace(goal, attributes=(attribute,), options={})
    is_met = shop.score(alone, product.asin, {})[1]["r_att"] == 1.0
    if not is_met:
        return Wish(attribute, False, "found neither among its attributes nor in its texts")
    nothing = replace(product, attributes=(), title="", bullet_points=(), description="")
    places = {
        "it is one of its attributes": replace(nothing, attributes=product.attributes),
        "its title says so": replace(nothing, title=product.title),
        "its features say so": replace(nothing, bullet_points=product.bullet_points),
        "its description says so": replace(nothing, description=product.description),
    }
    for why, part in places.items():
        if count_attributes(part, alone, shop.version):
            return Wish(attribute, True, why)
    return Wish(attribute, True, "it is the product that the goal was written for")


def _option(shop: Shop, goal: Goal, asin: str, options: Mapping[str, str], name: str | None, value: str) -> Wish:
    alone = replace(goal, attributes=(), options=(value,) if name is None else {name: value})
    text = value if name is None else f"{name}: {value}"

    def is_met(bought: Mapping[str, str]) -> bool:
        return bool(shop.score(alone, asin, bought)[1]["r_option"] == 1.0)

    if is_met(options):
        by = next((f"{n}: {v}" for n, v in options.items() if is_met({n: v})), "")
        return Wish(text, True, f"you chose {by}" if by else "what you chose means the same")
    if name is not None and name in options:
        return Wish(text, False, f"you chose {options[name]}")
    if not options:
        return Wish(text, False, "no option was chosen")
    return Wish(text, False, "not among what you chose: " + ", ".join(f"{n}: {v}" for n, v in options.items()))


def _price(goal: Goal, product: Product, price_usd: float, *, is_met: bool) -> Wish:
    has_cap = goal.price_upper != NO_CAP_USD
    text = f"price lower than ${goal.price_upper:.2f}" if has_cap else "any price"
    if math.isnan(price_usd):
        return Wish(text, is_met, "its price is not known")
    counted = f"${price_usd:.2f}"
    shown = f" (shown as {product.price_tag})" if product.price_tag and len(product.prices) > 1 else ""
    return Wish(text, is_met, f"it costs {counted}{shown}")
