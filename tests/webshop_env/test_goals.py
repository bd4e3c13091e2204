"""Goals in the published order, caps that hang on nothing but the goal, splits that never meet."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from webshop_env.errors import ShopGymError
from webshop_env.goals import NO_CAP_USD, cap_candidates, draw_goal, original_record, price_cap, splits
from webshop_env.shop import Shop, open_shop


def recorded(reference_dir: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(reference_dir / "golden" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def records_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def v0_shop(reference_dir: Path, **kwargs: Any) -> Shop:
    return open_shop(reference_dir / "webshop-1k", version="v0", **kwargs)


def v1_shop(reference_dir: Path, **kwargs: Any) -> Shop:
    return open_shop(reference_dir / "webshop-1k", **kwargs)


def test_v0_prices_and_goals_are_the_recorded_ones(reference_dir):
    shop = v0_shop(reference_dir)
    assert {r["asin"]: r["price"] for r in recorded(reference_dir, "prices")} == {
        asin: shop.price_of(asin) for asin in shop.products
    }
    expected = recorded(reference_dir, "goals")
    assert [{"index": goal.goal_index, **original_record(goal)} for goal in shop.goals] == expected


def test_other_preseeds_draw_the_recorded_prices_and_goals(reference_dir):
    lines = [r for r in recorded(reference_dir, "construct") if r["kind"] in ("construct", "preseed")]
    for line in lines:
        shop = v0_shop(reference_dir, preseed=line["preseed"])
        assert records_hash([original_record(goal) for goal in shop.goals]) == line["goals_sha256"]
        assert records_hash({asin: shop.price_of(asin) for asin in shop.products}) == line["prices_sha256"]
    assert {line["preseed"] for line in lines} >= {0, 1, 2}


def test_the_verl_variant_uses_one_seed_for_all(reference_dir):
    expected = recorded(reference_dir, "verl_goals_seed0")
    shop = v0_shop(reference_dir, variant="verl")
    assert [{"index": goal.goal_index, **original_record(goal)} for goal in shop.goals] == expected
    for line in recorded(reference_dir, "verl_construct"):
        shop = v0_shop(reference_dir, variant="verl", preseed=line["seed"])
        assert records_hash([original_record(goal) for goal in shop.goals]) == line["goals_sha256"]
        rng = shop.new_rng()
        session = "".join(rng.choices(string.ascii_lowercase, k=10))
        assert (session, shop.draw_goal(rng).goal_index) == (line["first_session"], line["first_goal_index"])


def test_human_goals_are_the_recorded_ones(reference_dir):
    shop = v0_shop(reference_dir, goals="human")
    assert [original_record(goal) for goal in shop.goals] == recorded(reference_dir, "human_mode")[0]["goals"]


def test_sessions_without_a_goal_draw_the_recorded_ones(reference_dir):
    shop = v0_shop(reference_dir)
    rng = shop.new_rng()
    lines = recorded(reference_dir, "construct")
    first = next(line["first_reset"] for line in lines if line["kind"] == "construct")
    resets = [first, *sorted((x for x in lines if x["kind"] == "reset_default"), key=lambda x: x["k"])]
    for line in resets:
        session = "".join(rng.choices(string.ascii_lowercase, k=10))
        assert (session, shop.draw_goal(rng).goal_index) == (line["session"], line["goal_index"])
    assert len(resets) == 101


def test_a_limit_keeps_the_recorded_goals_and_their_splits(reference_dir):
    line = next(line for line in recorded(reference_dir, "construct") if line["kind"] == "limit_goals")
    shop = v0_shop(reference_dir, limit_goals=line["limit"])
    assert [[g.asin, g.options, g.price_upper, g.instruction_text] for g in shop.goals] == line["goals"]
    whole = v0_shop(reference_dir)
    for name in ("train", "eval", "test"):
        ids = {whole.goals[i].goal_id for i in whole.split(name)}
        assert {shop.goals[i].goal_id for i in shop.split(name)} <= ids


def test_a_filter_sees_whole_indexes_and_renumbers(reference_dir):
    shop = v0_shop(reference_dir, filter_goals=lambda index, goal: index % 2 == 1 and goal.goal_index == index)
    whole = v0_shop(reference_dir)
    assert [goal.goal_id for goal in shop.goals] == [goal.goal_id for goal in whole.goals[1::2]]
    assert [goal.goal_index for goal in shop.goals] == list(range(3455))
    assert [len(shop.split(name)) for name in ("test", "eval", "train")] == [250, 500, 2705]


def test_v1_goals_are_v0_goals_but_for_caps(reference_dir):
    v0, v1 = v0_shop(reference_dir), v1_shop(reference_dir)
    for old, new in zip(v0.goals, v1.goals, strict=True):
        assert (old.goal_id, old.asin, old.options, old.attributes) == (
            new.goal_id,
            new.asin,
            new.options,
            new.attributes,
        )
        assert old.instruction_text.split(", and price lower")[0] == new.instruction_text.split(", and price lower")[0]
    assert len({goal.goal_id for goal in v1.goals}) == len(v1.goals) == 6910


def test_no_v1_cap_is_below_the_shown_price_and_the_text_says_it(reference_dir):
    shop = v1_shop(reference_dir)
    for goal in shop.goals:
        price = shop.price_of(goal.asin)
        if goal.price_upper == NO_CAP_USD:
            assert not price < 980 and "price lower" not in goal.instruction_text
        else:
            assert price < goal.price_upper <= price + 50
            assert goal.instruction_text.endswith(f", and price lower than {goal.price_upper:.2f} dollars")


def test_v1_caps_are_the_larger_of_two_candidates():
    assert cap_candidates(12.99) == (20.0, 30.0, 40.0, 50.0)
    assert cap_candidates(20.0) == (30.0, 40.0, 50.0, 60.0)
    assert cap_candidates(float("nan")) == ()
    caps = [price_cap(f"{i:016x}", 12.99) for i in range(6000)]
    counts = {cap: caps.count(cap) for cap in set(caps)}
    assert set(counts) == {30.0, 40.0, 50.0}  # one pair of six has 30 as its larger, two have 40, three have 50
    assert abs(counts[30.0] - 1000) < 120 and abs(counts[40.0] - 2000) < 150
    assert price_cap("0" * 16, 975.0) == 990.0
    assert price_cap("0" * 16, 980.0) == price_cap("0" * 16, float("nan")) == NO_CAP_USD


def test_v1_goals_do_not_hang_on_random_state_or_hash_order(reference_dir):
    code = (
        "import sys, random, hashlib, numpy as np; random.seed(int(sys.argv[2])); np.random.seed(int(sys.argv[2]));"
        "from webshop_env.shop import open_shop; before = random.getstate(); shop = open_shop(sys.argv[1]);"
        "assert random.getstate() == before;"
        "print(hashlib.sha256(repr([(g.goal_id, g.instruction_text) for g in shop.goals]).encode()).hexdigest())"
    )
    root = Path(__file__).resolve().parents[2]
    printed = set()
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", code, str(reference_dir / "webshop-1k"), seed]
        printed.add(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)
    here = repr([(goal.goal_id, goal.instruction_text) for goal in v1_shop(reference_dir).goals])
    assert printed == {hashlib.sha256(here.encode()).hexdigest() + "\n"}


def test_draws_skip_goal_0_and_give_the_last_two_shares(reference_dir):
    goals = v1_shop(reference_dir).goals[:3]
    rng = random.Random(0)
    drawn = [draw_goal(rng, goals, [0.0, 1.0, 2.0, 3.0]) for _ in range(300)]
    assert set(drawn) == {1, 2} and 70 < drawn.count(1) < 130
    assert draw_goal(rng, goals[:1]) == 0


def test_the_published_cut_comes_out(reference_dir):
    shop = v1_shop(reference_dir)
    assert shop.split("test").tolist() == list(range(500))
    assert shop.split("eval").tolist() == list(range(500, 1500))
    assert shop.split("train").tolist() == list(range(1500, 6910))
    assert shop.split("all").dtype == np.int32 and len(shop.split("all")) == 6910


@pytest.mark.parametrize("num_goals", [0, 1, 2, 3, 7, 10, 100, 2999, 3000, 6910])
def test_splits_cover_everything_once(num_goals):
    parts = splits(num_goals)
    assert [i for name in ("test", "eval", "train") for i in parts[name]] == list(range(num_goals))
    assert all(len(part) > 0 for part in parts.values()) == (num_goals >= 3)


@pytest.mark.parametrize("split_by", ["product", "product:1"])
def test_a_cut_by_product_shares_no_product(reference_dir, split_by):
    shop = v1_shop(reference_dir, split_by=split_by)
    asins = {name: [shop.goals[i].asin for i in shop.split(name)] for name in ("train", "eval", "test")}
    assert not set(asins["train"]) & set(asins["test"]) and not set(asins["eval"]) & set(asins["test"])
    assert not set(asins["train"]) & set(asins["eval"])
    with_goals = {goal.asin for goal in shop.goals}
    assert len(set(asins["test"])) == round(0.2 * len(with_goals))
    assert max(asins["test"].count(asin) for asin in asins["test"]) <= 6
    assert set().union(*asins.values()) == with_goals


def test_cuts_by_product_differ_by_their_number_and_others_are_refused(reference_dir):
    first, second = (v1_shop(reference_dir, split_by=f"product:{cut}").split("test") for cut in (0, 1))
    assert first.tolist() == v1_shop(reference_dir, split_by="product").split("test").tolist() != second.tolist()
    with pytest.raises(ShopGymError, match="split_by must be"):
        v1_shop(reference_dir, split_by="products")
