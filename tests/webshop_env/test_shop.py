"""Opening shops: one object for one set of arguments, clear refusals, shared search."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from webshop_env.errors import CatalogError, ShopGymError
from webshop_env.search import QueryTooLongError
from webshop_env.shop import open_shop

SIZES = ("S", "M", "L")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Four mugs in three sizes, three of which have an instruction: nine goals."""
    products, instructions, nouns = [], {}, {}
    for number, colour in enumerate(["red", "blue", "green", "black"]):
        asin = f"B0{number}"
        products.append(
            {
                "asin": asin,
                "name": f"{colour} mug",
                "full_description": f"A {colour} mug.",
                "small_description": [],
                "pricing": f"${10 + number}.5",
                "images": ["a.jpg"],
                "category": "garden",
                "query": "mugs",
                "product_category": "Home › Mugs",
                "customization_options": {"Size": [{"value": size} for size in SIZES]},
            }
        )
        instructions[asin] = {"attributes": ["tea safe"]}
        if number < 3:
            instructions[asin] |= {"instruction": f"Find me a {colour} mug", "instruction_attributes": ["tea safe"]}
        nouns[asin] = [colour, "mug"]
    for name, table in (("items_shuffle", products), ("items_ins_v2", instructions), ("name_nouns", nouns)):
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    return tmp_path


def test_the_same_arguments_give_the_same_shop_and_copies_are_it(data_dir: Path):
    shop = open_shop(data_dir)
    assert open_shop(str(data_dir), version="v1") is shop
    assert copy.deepcopy(shop) is shop and pickle.loads(pickle.dumps(shop)) is shop
    assert open_shop(data_dir, version="v0") is not shop


def test_goals_are_found_by_index_and_id(data_dir: Path):
    shop = open_shop(data_dir)
    assert len(shop.goals) == 9
    for index, goal in enumerate(shop.goals):
        assert shop.goal_by_id(goal.goal_id) == goal
        assert shop.goal_at(index) == shop.goal_at(np.int64(index)) == goal
    for bad in (9, -1, np.int32(9), True, np.True_, 1.0, np.float64(1), "1", None, int, np.array([1, 2])):
        with pytest.raises(ShopGymError, match="goal_index must be"):
            shop.goal_at(bad)
    with pytest.raises(ShopGymError, match="no goal has goal_id 'abc'"):
        shop.goal_by_id("abc")


def test_an_iterator_visits_each_goal_once_for_any_number_of_shards(data_dir: Path):
    shop = open_shop(data_dir)
    assert [goal.goal_index for goal in shop.iter_goals()] == list(range(9))
    for num_shards in (1, 2, 4, 20):
        parts = [list(shop.iter_goals("train", num_shards=num_shards, shard=i)) for i in range(num_shards)]
        visited = sorted(goal.goal_index for part in parts for goal in part)
        assert visited == shop.split("train").tolist()
    with pytest.raises(ShopGymError, match="shard must be"):
        shop.iter_goals(num_shards=2, shard=2)


def test_splits_are_read_only_and_an_unknown_one_is_named(data_dir: Path):
    shop = open_shop(data_dir)
    with pytest.raises(ValueError, match="read-only"):
        shop.split("all")[0] = 5
    with pytest.raises(ShopGymError, match="train, eval, test, all, got 'valid'"):
        shop.split("valid")


def test_a_purchase_is_scored_with_the_shown_price(data_dir: Path):
    shop = open_shop(data_dir)
    goal = shop.goals[0]
    assert shop.price_of("B03") == 13.5
    assert shop.score(goal, goal.asin, goal.options)[0] == 1.0
    # Another mug in the right size: attribute, option and price are right, and half of the nouns are.
    other = next(asin for asin in shop.products if asin != goal.asin)
    score, parts = shop.score(goal, other, goal.options)
    assert parts["title_score"] == 0.5 and score == 1.0
    with pytest.raises(ShopGymError, match="no product has asin 'B77'"):
        shop.score(goal, "B77", {})


def test_search_ranks_and_both_versions_say_what_a_too_long_query_does(data_dir: Path):
    shop = open_shop(data_dir)
    assert shop.search(("green", "mug"))[0] == "B02"
    assert set(shop.search(["mug"])) == set(shop.products)
    assert shop.search(()) == shop.search(("!?",)) == ()
    long_query = ["blue", *(f"word{i}" for i in range(2000))]
    assert shop.search(long_query) == ("B01",)
    with pytest.raises(QueryTooLongError, match="1024"):
        open_shop(data_dir, version="v0").search(long_query)


def test_wrong_settings_are_refused_with_what_is_allowed(data_dir: Path):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"version": "v2"}, "version must be one of 'v0', 'v1', got 'v2'"),
        ({"goals": "robot"}, "goals must be one of"),
        ({"search": "grep"}, "search must be one of"),
        ({"version": "v0", "variant": "x"}, "variant must be one of"),
        ({"preseed": 3}, "preseed and variant belong to version v0"),
        ({"variant": "verl"}, "preseed and variant belong to version v0"),
        ({"split_by": "moon"}, "split_by must be"),
        ({"goals": "human"}, "none of its 0 human goals"),
        ({"num_products": 0}, "num_products must be a whole number of at least 1"),
        ({"filter_goals": lambda index, goal: False}, "none of its 9 synthetic goals is left"),
    ]
    for settings, message in cases:
        with pytest.raises(ShopGymError, match=message):
            open_shop(data_dir, **settings)


def test_without_nouns_and_without_a_tagger_opening_says_what_to_install(data_dir: Path, monkeypatch):
    (data_dir / "name_nouns.json").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CatalogError, match=r"'red mug', and spaCy .* install shopgym\[nouns\]"):
        open_shop(data_dir)


def test_without_a_noun_file_names_are_tagged_when_needed(data_dir: Path):
    pytest.importorskip("spacy", reason="needs shopgym[nouns]")
    (data_dir / "name_nouns.json").unlink()
    shop = open_shop(data_dir)
    installed = importlib.metadata.version("spacy")
    assert shop.describe()["nouns"] == {"source": "spaCy, not loaded yet", "tagger": f"spaCy {installed}"}
    assert shop.score(shop.goals[0], shop.goals[0].asin, shop.goals[0].options)[1]["title_score"] == 1.0
    tagger = shop.describe()["nouns"]["tagger"]
    assert tagger.startswith(f"spaCy {installed}, en_core_web_sm") and tagger.endswith(" 3.8.0")


def test_a_malformed_noun_file_is_named(data_dir: Path):
    (data_dir / "name_nouns.json").write_text('{"B00": 5}')
    with pytest.raises(CatalogError, match=r"name_nouns\.json: not an object of asin -> list"):
        open_shop(data_dir)


def test_describe_is_json_and_counts(data_dir: Path):
    described = open_shop(data_dir).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["num_products"] == 4 and described["num_goals"] == 9
    assert described["num_products_with_goals"] == 3
    assert described["split_sizes"] == {"train": 7, "eval": 1, "test": 1, "all": 9}
    assert len(described["catalogue_hash"]) == 64
    assert open_shop(data_dir, version="v0").describe()["preseed"] == 0


def test_a_warm_score_costs_microseconds(reference_dir: Path):
    import timeit

    shop = open_shop(reference_dir / "webshop-1k")
    goal = shop.goals[0]
    shop.score(goal, goal.asin, goal.options)
    seconds = min(timeit.repeat(lambda: shop.score(goal, goal.asin, goal.options), number=200, repeat=5)) / 200
    assert seconds < 200e-6


def test_a_home_directory_may_be_written_short(data_dir: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(data_dir))
    assert open_shop("~") is open_shop(data_dir)
