"""Large made-up catalogues: equal bytes for equal seeds, prefixes, and statistics of real products."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data.generate_large import LARGE_VERSION, LargeCatalogue, main, make_asin
from data.language import Language
from webshop_env.catalog import Catalog, index_document, load_catalog
from webshop_env.search import analyze
from webshop_env.shop import open_shop

NUM_PRODUCTS = 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("large") / "new"
    assert main(["--out", str(out), "--products", str(NUM_PRODUCTS)]) == 0
    return out


@pytest.fixture(scope="module")
def catalog(folder: Path) -> Catalog:
    return load_catalog(folder)


def test_the_files_are_whole_and_the_loader_takes_every_row(folder: Path, catalog: Catalog):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["large_version"], manifest["products"]) == (LARGE_VERSION, NUM_PRODUCTS)
    assert {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"} == {
        name: facts["bytes"] for name, facts in manifest["files"].items()
    }
    assert len(catalog.products) == NUM_PRODUCTS
    assert not any(warning.is_skipped for warning in catalog.warnings)
    assert 0.35 < len(catalog.instructions) / NUM_PRODUCTS < 0.5
    assert sum(map(len, catalog.human_instructions.values())) > 5


def test_equal_seeds_give_equal_products_and_smaller_catalogues_are_beginnings():
    ours = list(LargeCatalogue(0).records(2100))  # more than a chunk
    assert list(LargeCatalogue(0).records(5)) == ours[:5]
    assert ours[0][0]["name"] != next(LargeCatalogue(1).records(1))[0]["name"]
    assert len({product["asin"] for product, _, _ in ours}) == 2100


def test_asins_are_ten_characters_and_all_different():
    asins = {make_asin(number) for number in (*range(50_000), 1_180_000, 36**8 - 1)}
    assert len(asins) == 50_002 and {len(asin) for asin in asins} == {10}


def test_documents_and_words_are_distributed_as_in_the_real_set(catalog: Catalog, reference_dir: Path):
    real, made = (
        _statistics(load_catalog(reference_dir / "webshop-1k", version="v1"), 1000),
        _statistics(catalog, 1000),
    )
    for name, tolerance in {"mean_length": 0.1, "mean_distinct": 0.1, "num_terms": 0.15, "ascii_frac": 0.1}.items():
        assert made[name] == pytest.approx(real[name], rel=tolerance), name
    # Products that hold the term of rank 3, 11, 51, 201, 501, 1001, 2001.
    assert made["shares"] == pytest.approx(real["shares"], rel=0.3)


def _statistics(catalog: Catalog, num_products: int) -> dict:
    documents = [index_document(product) for product in list(catalog.products.values())[:num_products]]
    terms = [analyze(document) for document in documents]
    counts = Counter(term for document in terms for term in set(document))
    ranked = sorted(counts.values(), reverse=True)
    return {
        "mean_length": np.mean([len(document) for document in terms]),
        "mean_distinct": np.mean([len(set(document)) for document in terms]),
        "num_terms": len(counts),
        "ascii_frac": np.mean([document.isascii() for document in documents]),
        "shares": [ranked[rank - 1] for rank in (3, 11, 51, 201, 501, 1001, 2001)],
    }


def test_the_vocabulary_of_a_million_products_has_more_than_200000_words():
    language = Language(np.full(100, 100))
    num_words = round(language.fresh_frac * 100 * 1_180_000 / 40)  # a fortieth of them, to be quick
    rng = np.random.default_rng(0)
    words = language.draw(rng.random(num_words), rng.random(num_words), np.zeros(num_words, dtype=np.int64))
    # A power law with exponent 1.8: 40 times the draws meet 40 ** (1 / 1.8) = 7.8 times the words.
    assert len(np.unique(words)) * 40 ** (1 / 1.8) > 300_000
    spelt = [language.spell(word) for word in range(0, 200_000, 3)]
    assert len(set(spelt)) == len(spelt)


def test_a_shop_opens_on_it(folder: Path, catalog: Catalog, tmp_path: Path):
    nouns = {asin: product.title.lower().split()[:3] for asin, product in catalog.products.items()}
    for path in folder.glob("items_*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "name_nouns.json").write_text(json.dumps(nouns))
    shop = open_shop(tmp_path)
    goal = shop.goals[0]
    assert goal.asin in shop.search([shop.products[goal.asin].title])
    assert shop.score(goal, goal.asin, dict(goal.options))[0] == 1.0


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--products", "0"], "--products must be at least 1"), (["--products", "5", "--seed", "-1"], "--seed must be")],
)
def test_a_callers_mistake_is_one_line(argv: list[str], message: str, tmp_path: Path, capsys):
    assert main(["--out", str(tmp_path / "out"), *argv]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
