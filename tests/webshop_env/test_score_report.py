"""What the score page says of each wish adds up to the score."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from webshop_env import open_shop
from webshop_env.score_report import explain


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("goals", ["synthetic", "human"])
def test_met_wishes_make_the_score(version, goals):
    shop = open_shop(version=version, goals=goals)
    rng = random.Random(3)
    seen = set()
    for _ in range(120):
        goal = rng.choice(shop.goals)
        asin = goal.asin if rng.random() < 0.4 else rng.choice(list(shop.products))
        options = {name: rng.choice(values) for name, values in shop.products[asin].options.items() if values}
        report = explain(shop, goal, asin, options)
        expected, _ = shop.score(goal, asin, options)
        assert report.score == expected
        assert report.type_factor * report.num_met / len(report.wishes) == pytest.approx(expected, abs=1e-12)
        assert all(wish.why for wish in report.wishes) and report.type_reasons
        seen |= {(wish.is_met, wish.why.split()[0]) for wish in report.wishes}
    assert len(seen) >= 6, "met and unmet, for several reasons"


def test_reasons_name_what_was_chosen_and_where_an_attribute_stands():
    shop = open_shop()
    goal = next(goal for goal in shop.goals if isinstance(goal.options, dict) and len(goal.options) == 2)
    product = shop.products[goal.asin]
    name, wanted = next(iter(goal.options.items()))
    other = next(value for value in product.options[name] if value != wanted)
    report = explain(shop, goal, goal.asin, dict(goal.options))
    assert report.score == 1.0 and report.options[0].why == f"you chose {name}: {wanted}"
    wrong = explain(shop, goal, goal.asin, {**goal.options, name: other})
    assert (wrong.options[0].is_met, wrong.options[0].why) == (False, f"you chose {other}")
    assert explain(shop, goal, goal.asin, {}).options[0].why == "no option was chosen"
    assert report.type_reasons[0] == "it is the very product that the goal was written for"
    in_title = replace(goal, attributes=(product.title.split()[1].lower(), "no such thing at all"))
    wishes = explain(shop, replace(in_title, asin=""), goal.asin, {}).attributes
    assert [wish.is_met for wish in wishes] == [True, False]
    assert wishes[1].why == "found neither among its attributes nor in its texts"


def test_the_price_says_what_it_was_compared_with():
    shop = open_shop()
    goal = next(goal for goal in shop.goals if goal.price_upper < 900)
    price = explain(shop, goal, goal.asin, {}).price
    assert price.is_met and price.why == f"it costs ${shop.price_of(goal.asin):.2f}"
    dear = explain(shop, replace(goal, price_upper=0.5), goal.asin, {}).price
    assert (dear.is_met, dear.text) == (False, "price lower than $0.50")
    assert explain(shop, replace(goal, price_upper=1_000_000.0), goal.asin, {}).price.text == "any price"
