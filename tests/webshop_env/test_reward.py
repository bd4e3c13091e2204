"""v0 scores as recorded; v1 scores what was meant, worked out by hand."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from webshop_env.goals import NO_CAP_USD
from webshop_env.nouns import NameNouns
from webshop_env.reward import COLOURS, same_value, score_v0, score_v1
from webshop_env.shop import Shop, open_shop
from webshop_env.types import Goal, Product

NOUNS = NameNouns(
    {
        "Red Mug": ("red", "mug"),
        "Blue Mug": ("blue", "mug"),
        "Garden Chair": ("garden", "chair"),
        "Mug " * 11: ("mug",) * 11,
        "": (),
    }
)


def product(**changes: Any) -> Product:
    plain = Product(
        asin="B01",
        title="Red Mug",
        description="",
        bullet_points=(),
        prices=(10.0,),
        price_tag="$10.0",
        category="garden",
        query="mugs",
        product_category="Home › Mugs",
        options={},
        attributes=("tea safe",),
        main_image="",
    )
    return replace(plain, **changes)


def goal(**changes: Any) -> Goal:
    plain = Goal(
        goal_id="0" * 16,
        goal_index=0,
        asin="B99",
        instruction_text="",
        attributes=(),
        options={},
        price_upper=20.0,
        name="Red Mug",
        category="garden",
        query="mugs",
        product_category="Home › Mugs",
        weight=1.0,
    )
    return replace(plain, **changes)


def v1(bought: Product, wanted: Goal, options: dict[str, str], price_usd: float = 10.0) -> tuple[float, dict[str, Any]]:
    return score_v1(bought, wanted, options, price_usd=price_usd, nouns=NOUNS)


def num_options_met(wanted: Any, bought: dict[str, str], offered: dict[str, tuple[str, ...]] | None = None) -> int:
    _, parts = v1(product(options=offered or {}), goal(options=wanted), bought)
    return round(parts["r_option"] * len(wanted))


def recorded_goal(line: dict[str, Any], goals: tuple[Goal, ...]) -> Goal:
    if "goal_index" in line:
        return goals[line["goal_index"]]
    record = dict(line["goal"])
    options = record.pop("goal_options")
    record["attributes"] = tuple(record["attributes"])
    return Goal(goal_id="", goal_index=-1, options=options if isinstance(options, dict) else tuple(options), **record)


def test_v0_scores_and_parts_are_the_recorded_ones(reference_dir: Path):
    pytest.importorskip("spacy", reason="made-up names in the recordings need shopgym[nouns]")
    shop = open_shop(reference_dir / "webshop-1k", version="v0")
    with gzip.open(reference_dir / "golden" / "reward.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    num_compared = 0
    for line in lines:
        wanted = recorded_goal(line, shop.goals)
        score, parts = shop.score(wanted, line["asin"], line["options"], price_usd=line["price"])
        if "error" in line:
            assert wanted.price_upper <= 0 and parts["r_price"] is False and 0.0 <= score < 1.0
            continue
        assert (score, parts) == (line["reward"], line["info"])
        assert round(parts["r_att"] * len(wanted.attributes)) == line["num_attr_matches"]
        assert round(parts.get("r_option", 0.0) * len(wanted.options)) == line["num_option_matches"]
        num_compared += 1
    assert num_compared > 900


def test_the_colours_are_the_published_ones_in_their_order(reference_dir: Path):
    assert list(COLOURS) == json.loads((reference_dir / "golden" / "colours.json").read_text())


def test_v0_and_v1_share_the_formula():
    # Type 1.0 x (1 of 2 attributes + 1 of 1 options + price) / 4.
    bought, wanted = product(), goal(attributes=("tea safe", "xyz"), options={"size": "large"})
    for score in (score_v0, score_v1):
        value, parts = score(bought, wanted, {"size": "large"}, price_usd=10.0, nouns=NOUNS)
        assert value == 0.75
        assert (parts["r_att"], parts["w_att"], parts["r_option"], parts["w_option"]) == (0.5, 0.5, 1.0, 0.25)
        assert (parts["r_price"], parts["w_price"], parts["r_type"]) == (True, 0.25, 1.0)


def test_the_type_factor_falls_with_the_common_nouns():
    def factor(title: str, query: str = "mugs", path: str = "Home › Mugs") -> float:
        return v1(product(title=title, query=query, product_category=path), goal(), {})[1]["r_type"]

    assert factor("Red Mug") == 1.0
    assert factor("Blue Mug", "cups", "Home") == 1.0  # half of the wanted nouns
    assert factor("Garden Chair") == 0.0  # no common noun, whatever the query label says


VALUES_THAT_DIFFER = [
    ("large", "x-large"),
    ("large", "xx-large"),
    ("3x-large", "2x-large"),
    ("10", "10.5"),
    ("pack of 1", "pack of 2"),
    ("4 ounce (pack of 1)", "4 ounce (pack of 12)"),
    ("28x30", "30x28"),
    ("dark blue", "light blue"),
    ("blue", "dark blue"),
    ("navy blue", "blue"),
    ("red", "tapered"),
    ("tan", "titanium"),
    ("black", "black/white"),
    ("8 inch", "8 pack"),
    ("10", "10 wide"),
    ("😀", "😁"),
    ("lined blackout curtain", "unlined blackout curtain"),
    ("regular fit jeans", "irregular fit jeans"),
    ("left handed golf club", "right handed golf club"),
    ("with lid", "without lid"),
    ("women 8 | men 6", "women 6 | men 8"),
    ("12 ounce", "12 pound"),
]


@pytest.mark.parametrize(("wanted", "bought"), VALUES_THAT_DIFFER)
def test_v1_tells_values_apart(wanted: str, bought: str):
    assert not same_value(wanted, bought) and not same_value(bought, wanted)
    assert num_options_met({"option": wanted}, {"option": bought}) == 0


@pytest.mark.parametrize(
    ("wanted", "bought"),
    [
        ("x-large", "XL"),
        ("3xl", "xxx-large"),
        ("s", "Small"),
        ("grey", "gray"),
        ("12 months", "12 month"),
        ("10 inches", "10 inch"),
        ("men's 9", "mens 9"),
        ("heavy duty", "heavyduty"),
        ("cotton, striped", "striped cotton"),
        ("s | m", "S/M"),
        ("4 Ounce  (Pack of 1)", "4 ounce (pack of 1)"),
        ("😀", "😀"),
        ('15"', '15"'),
        ("50% / 50%", "50% | 50%"),
        ("<b>", "<B>"),
        ("café", "cafe\u0301"),
        ("x" * 300, "x" * 300),
    ],
)
def test_v1_sees_through_spelling(wanted: str, bought: str):
    assert same_value(wanted, bought) and same_value(bought, wanted)


def test_v1_options_belong_to_their_names():
    wanted = {"top": "small", "bottom": "large"}
    assert num_options_met(wanted, {"top": "small", "bottom": "large"}) == 2
    assert num_options_met(wanted, {"top": "large", "bottom": "small"}) == 0
    assert num_options_met({"flavor name": "vanilla"}, {"Flavour": "Vanilla"}) == 1
    assert num_options_met(("small", "red"), {"size": "small", "color": "blue"}) == 1


def test_v1_takes_the_wanted_value_itself_where_it_is_offered():
    offered = {"style": ("projector 2200 new", "projector 2200 newer")}
    wanted = {"style": "projector 2200 new"}
    assert num_options_met(wanted, {"style": "projector 2200 newer"}, offered) == 0
    assert num_options_met(wanted, {"style": "projector 2200 new"}, offered) == 1


@pytest.mark.parametrize(
    ("wanted", "offered", "is_met"),
    [
        ("machine wash", "machine washable", True),
        ("machine washable", "machine wash", True),
        ("machine wash", "machine wash cold", True),
        ("men", "women", False),
        ("toxic", "non toxic", False),
        ("gluten free", "sugar free", False),
        ("pack of 1", "pack of 2", False),
        ("machine wash", "machine", False),
    ],
)
def test_v1_compares_attributes_by_words(wanted: str, offered: str, is_met: bool):
    _, parts = v1(product(attributes=(offered,)), goal(attributes=(wanted,)), {})
    assert parts["r_att"] == (1.0 if is_met else 0.0)


@pytest.mark.parametrize(
    ("attribute", "text", "is_met"),
    [
        ("men", "Shirt for women", False),
        ("men", "Shirt for Men, tall", True),
        ("machine wash", "It is machine-washable.", True),
        ("long sleeve", "Two long sleeves", True),
        ("c++", "Learn C++ now", True),
        ("  ", "any text", False),
    ],
)
def test_v1_finds_attributes_in_texts_as_whole_words(attribute: str, text: str, is_met: bool):
    for field in ({"title": "Red Mug", "description": text}, {"bullet_points": ("Other", text)}):
        _, parts = v1(product(attributes=(), **field), goal(attributes=(attribute,)), {})
        assert parts["r_att"] == (1.0 if is_met else 0.0)


def test_v0_finds_men_in_women_as_published():
    bought = product(description="Shirt for women")
    _, parts = score_v0(bought, goal(attributes=("men",)), {}, price_usd=10.0, nouns=NOUNS)
    assert parts["r_att"] == 1.0


def test_no_attributes_no_options_and_odd_caps_have_values():
    wanted = goal(price_upper=NO_CAP_USD)
    assert v1(product(), wanted, {})[0] == 1.0
    assert v1(product(), wanted, {}, math.nan)[0] == 1.0  # nothing was asked of the price
    assert v1(product(), goal(), {}, math.nan)[0] == 0.0  # an unknown price keeps no cap
    assert v1(product(), goal(price_upper=0.0), {}, 10.0)[0] == 0.0
    assert v1(product(), goal(price_upper=0.0), {}, 0.0)[0] == 1.0
    parts = v1(product(), wanted, {})[1]
    assert (parts["r_att"], parts["w_att"], parts["r_option"], parts["w_option"]) == (1.0, 0.0, 1.0, 0.0)
    value, parts = score_v0(product(), goal(price_upper=0.0), {}, price_usd=0.0, nouns=NOUNS)
    assert value == 0.0 and parts["r_price"] is False


def test_the_own_product_is_of_its_own_type_and_has_its_attributes():
    title = "Mug " * 11  # title score 1 / 11, below a tenth
    own = product(asin="B99", title=title, attributes=())
    wanted = goal(name=title, attributes=("hand made",))
    assert v1(own, wanted, {})[0] == 1.0
    assert v1(replace(own, asin="B01"), wanted, {})[1]["r_type"] == 0.1


def assert_own_products_score_1(shop: Shop) -> None:
    for wanted in shop.goals:
        options = wanted.options
        if not isinstance(options, dict):
            offered = shop.products[wanted.asin].options
            options = {name: value for value in options for name, values in offered.items() if value in values}
        score, parts = shop.score(wanted, wanted.asin, options)
        assert score == 1.0 and parts["r_price"] is True and parts["r_option"] == parts["r_att"] == 1.0


@pytest.mark.parametrize(("goals", "num_goals"), [("synthetic", 6910), ("human", 13)])
def test_the_own_product_with_the_own_options_scores_exactly_1(reference_dir: Path, goals: str, num_goals: int):
    shop = open_shop(reference_dir / "webshop-1k", goals=goals)
    assert_own_products_score_1(shop)
    assert len(shop.goals) == num_goals


@pytest.mark.parametrize("goals", ["synthetic", "human"])
def test_the_own_product_scores_exactly_1_in_the_embedded_catalogue(goals: str):
    shop = open_shop(goals=goals)
    assert_own_products_score_1(shop)
    assert len(shop.goals) > 0


def test_one_other_option_of_the_own_product_is_no_full_score_in_v1(reference_dir: Path):
    shop = open_shop(reference_dir / "webshop-1k")
    num_tried = 0
    for wanted in shop.goals[::7]:
        for name, value in wanted.options.items():
            other = next((v for v in shop.products[wanted.asin].options[name] if v != value), None)
            if other is not None:
                assert shop.score(wanted, wanted.asin, {**wanted.options, name: other})[0] < 1.0
                num_tried += 1
    assert num_tried > 1000
