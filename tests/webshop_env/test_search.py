"""The BM25 index: scores worked out by hand, the recorded rankings of Lucene, files."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from webshop_env.catalog import Catalog, index_document, load_catalog
from webshop_env.errors import ShopGymError
from webshop_env.search import BM25Index, BM25Search, IndexMismatchError, QueryTooLongError, SearchEngine, bm25
from webshop_env.search.bm25 import LENGTHS, byte_to_length, length_to_byte

DOCS = ["red wood table", "red red lamp", "blue wood chair with four legs", ""]
ASINS = ["B3", "B2", "B1", "B0"]


def records(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def catalog(reference_dir: Path) -> Catalog:
    return load_catalog(reference_dir / "webshop-1k", version="v0")


@pytest.fixture(scope="module")
def index(catalog: Catalog) -> BM25Index:
    products = catalog.products
    return BM25Index.build([index_document(product) for product in products.values()], list(products))


def test_lengths_are_exact_below_40_and_keep_four_bits_above() -> None:
    assert [length_to_byte(length) for length in (0, 1, 23, 24, 39, 40, 41, 42)] == [0, 1, 23, 24, 39, 40, 40, 41]
    assert [byte_to_length(byte) for byte in (0, 39, 40, 41, 47, 48, 49)] == [0, 39, 40, 42, 54, 56, 60]
    assert length_to_byte(2**31 - 1) == 255
    for byte in range(256):
        assert length_to_byte(byte_to_length(byte)) == byte
    assert np.all(np.diff(LENGTHS) > 0)


def test_a_score_worked_out_by_hand() -> None:
    # Three documents hold terms, 11 in all ("with" is a stop word). "red" is in two of them, twice in B2.
    index = BM25Index.build(DOCS, ASINS)
    assert (index.num_docs, index.num_terms, index.num_tokens) == (4, 8, 11)
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    norm = 0.9 * (1 - 0.4 + 0.4 * 3 / (11 / 3))
    expected = [("B2", idf * 2 / (2 + norm)), ("B3", idf * 1 / (1 + norm))]
    hits = index.search("Red")
    assert [asin for asin, _ in hits] == ["B2", "B3"]
    assert [score for _, score in hits] == pytest.approx([score for _, score in expected], rel=1e-6)


def test_a_repeated_query_term_counts_as_often_as_it_comes() -> None:
    index = BM25Index.build(DOCS, ASINS)
    (_, once), (_, thrice) = index.search("lamp")[0], index.search("lamp lamps LAMP")[0]
    assert thrice == pytest.approx(3 * once, rel=1e-6)


def test_equal_scores_are_ordered_by_asin_whatever_the_order_of_the_files() -> None:
    asins = [f"B{number:03d}" for number in range(300)]
    for order in (asins, asins[::-1]):
        hits = BM25Index.build(["red table"] * 300, order).search("table")
        assert [asin for asin, _ in hits] == asins[:50]
        assert len({score for _, score in hits}) == 1


def test_the_shortcut_for_many_hits_gives_what_a_full_sort_gives() -> None:
    rng = np.random.default_rng(0)
    docs = [" ".join(rng.choice(["red", "blue", "lamp", "desk"], size=rng.integers(1, 9))) for _ in range(500)]
    index = BM25Index.build(docs, [f"B{number:03d}" for number in range(500)])
    everything = index.search("red lamp", k=1000)
    assert len(everything) > 400
    for k in (1, 7, 50, 100):
        assert index.search("red lamp", k=k) == everything[:k]
    assert everything == sorted(everything, key=lambda hit: (-hit[1], hit[0]))


@pytest.mark.parametrize("query", ["", "  ", "the of and", "unheardof", "!?", "\u200b"])
def test_queries_without_known_terms_find_nothing(query: str) -> None:
    assert BM25Index.build(DOCS, ASINS).search(query) == []


def test_an_index_of_nothing_finds_nothing() -> None:
    assert BM25Index.build([], []).search("red") == []
    assert BM25Index.build([""], ["B1"]).search("red") == []
    assert BM25Index.build(DOCS, ASINS).search("red", k=0) == []


def test_more_than_1024_distinct_terms_are_refused_or_cut() -> None:
    index = BM25Index.build(DOCS, ASINS)
    numbers = " ".join(map(str, range(1023)))
    assert [asin for asin, _ in index.search(f"{numbers} lamp lamps")] == ["B2"]
    too_long = f"{numbers} lamp table"
    with pytest.raises(QueryTooLongError, match="1025 distinct terms, at most 1024"):
        index.search(too_long)
    assert [asin for asin, _ in index.search(too_long, truncate=True)] == ["B2"]
    assert issubclass(QueryTooLongError, ShopGymError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["red"], ["B1", "B2"]), "got 2 and 1"),
        ((["red", "blue"], ["B1", "B1"]), "B1 comes twice"),
    ],
)
def test_documents_and_asins_must_pair_up(arguments: tuple[list[str], list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BM25Index.build(*arguments)


@pytest.mark.parametrize("constants", [{"k1": 0.0}, {"k1": math.nan}, {"b": -0.1}, {"b": 1.1}])
def test_constants_out_of_range_are_refused(constants: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="k1 must be above 0 and b in"):
        BM25Index.build(DOCS, ASINS, **constants)


def test_an_index_comes_back_from_its_file(tmp_path: Path) -> None:
    index = BM25Index.build([*DOCS, "\U0001f44d caf\u00e9"], [*ASINS, "B9"], k1=1.2, b=0.75, catalogue_hash="abc")
    path = tmp_path / "new" / "index.npz"
    index.save(path)
    again = BM25Index.load(path, "abc")
    for query in ("red wood", "legs", "\U0001f44d", "caf\u00e9"):
        assert index.search(query) == again.search(query) != []
    assert (again.num_docs, again.num_terms, again.num_tokens, again.catalogue_hash) == (5, 10, 13, "abc")
    assert [file.name for file in path.parent.iterdir()] == ["index.npz"]


def test_an_index_of_another_catalogue_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    BM25Index.build(DOCS, ASINS, catalogue_hash="a" * 64).save(path)
    with pytest.raises(IndexMismatchError, match=r"from catalogue a{16}, not from b{16}; build it again"):
        BM25Index.load(path, "b" * 64)
    content = path.read_bytes()
    for damaged in (b"", b"{}", b"PK\x03\x04" * 100, content[:100], content[:-1], content + b"more"):
        path.write_bytes(damaged)
        with pytest.raises(IndexMismatchError, match="index: cut off or not a table of this release; build it again"):
            BM25Index.load(path, "a" * 64)
    path.write_bytes(content.replace(b"bm25-index-2", b"bm25-index-9"))
    with pytest.raises(IndexMismatchError, match="holds 'bm25-index-9', not 'bm25-index-2'; build it again"):
        BM25Index.load(path, "a" * 64)
    path.write_bytes(content[64:])  # the end of another, as a disk that lost a part may hold
    with pytest.raises(IndexMismatchError, match="damaged"):
        BM25Index.load(path, "a" * 64)
    with pytest.raises(FileNotFoundError):
        BM25Index.load(tmp_path / "none", "a" * 64)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index"
    index = BM25Index.build(DOCS, ASINS, catalogue_hash="a")
    index.save(path)

    def fail(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        BM25Index.build(["other"], ["B1"], catalogue_hash="a").save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["index"]
    assert BM25Index.load(path, "a").search("red") == index.search("red")


def test_an_open_index_keeps_its_file_when_a_new_one_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "index"
    BM25Index.build(DOCS, ASINS, catalogue_hash="a").save(path)
    opened = BM25Index.load(path, "a")
    BM25Index.build(["red"] * 4, ["C1", "C2", "C3", "C4"], catalogue_hash="a").save(path)
    assert [asin for asin, _ in opened.search("red")] == ["B2", "B3"]
    assert len(BM25Index.load(path, "a").search("red")) == 4


def test_opening_copies_nothing(tmp_path: Path) -> None:
    path = tmp_path / "index"
    BM25Index.build(DOCS, ASINS, catalogue_hash="a").save(path)
    opened = BM25Index.load(path, "a")
    assert len(opened._arrays) == 12
    for name, array in opened._arrays.items():
        assert not array.flags.owndata and not array.flags.writeable, name


def test_documents_may_come_from_generators_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    docs = [" ".join(rng.choice(["red", "blue", "lamp", "desk", "oak"], size=rng.integers(0, 9))) for _ in range(100)]
    asins = [f"B{number:03d}" for number in rng.permutation(100)]
    whole = BM25Index.build(docs, asins)
    monkeypatch.setattr("webshop_env.search.postings.CHUNK", 7)
    pieces = BM25Index.build(iter(docs), (asin for asin in asins))
    assert pieces.catalogue_hash == whole.catalogue_hash
    for name, array in whole._arrays.items():
        np.testing.assert_array_equal(array, pieces._arrays[name], err_msg=name)
    with pytest.raises(ValueError, match="got 99 and 100"):
        BM25Index.build(iter(docs), iter(asins[:99]))


def test_asins_come_back_as_they_were(tmp_path: Path) -> None:
    asins = ["", "B\0", "B\0\0", "\ud800", "\u00c4\U0001f44d", "B."]
    index = BM25Index.build(["red"] * len(asins), asins, catalogue_hash="a")
    index.save(tmp_path / "index")
    for engine in (index, BM25Index.load(tmp_path / "index", "a")):
        assert [asin for asin, _ in engine.search("red")] == sorted(asins)


def test_terms_with_equal_checksums_are_told_apart() -> None:
    assert zlib.crc32(b"plumless") == zlib.crc32(b"buckeroo")  # found by others; both are their own stems
    index = BM25Index.build(["plumless", "buckeroo", "buckeroo"], ["B1", "B2", "B3"])
    assert index.num_terms == 2
    assert [asin for asin, _ in index.search("plumless")] == ["B1"]
    assert [asin for asin, _ in index.search("buckeroo")] == ["B2", "B3"]


@pytest.fixture
def pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has small indexes searched as large ones are."""
    monkeypatch.setattr(bm25, "PRUNED_DOCS", 0)
    monkeypatch.setattr(bm25, "_GROUP_SIZE", 3)


def random_documents(rng: np.random.Generator, num_docs: int) -> list[str]:
    """Frequent and rare words, long and short documents, and many that are equal."""
    words = np.array([f"w{number}" for number in range(400)])
    shares = 1 / np.arange(1, 401) ** 1.1
    sizes = np.minimum(rng.geometric(0.08, num_docs), 200) - 1
    docs = [" ".join(rng.choice(words, size=size, p=shares / shares.sum())) for size in sizes]
    return [doc if rng.random() < 0.8 else docs[rng.integers(20)] for doc in docs]


@pytest.mark.parametrize("seed", range(4))
def test_pruned_search_finds_exactly_what_scoring_everything_finds(seed: int, pruned: None) -> None:
    rng = np.random.default_rng(seed)
    docs = random_documents(rng, 1500)
    k1, b = [(0.9, 0.4), (1.2, 1.0), (0.01, 0.0), (50.0, 0.9)][seed]
    index = BM25Index.build(docs, [f"B{number:04d}" for number in rng.permutation(1500)], k1=k1, b=b)
    assert 3 < len(index._dense_rows) < index.num_terms / 2
    num_pruned = 0
    for size in (*range(1, 13), 16, 17, 40, 300):
        for _ in range(8):
            words = rng.integers(0, rng.choice([5, 60, 450]), size=size)
            weights = {}
            for word in dict.fromkeys(words.tolist()):
                term_id = index._term_id(f"w{word}")
                if term_id is not None:
                    weights[term_id] = np.float32(rng.choice([1, 1, 2, 1000])) * index._idfs[term_id]
            if not weights:
                continue
            everything, scores = index._score_all(weights)
            for k in (1, 10, 50):
                hits, best_scores = index._score_best(weights, k)
                needed = everything[scores >= np.sort(scores)[::-1][:k][-1]]
                assert set(needed) <= set(hits)
                np.testing.assert_array_equal(best_scores, scores[np.searchsorted(everything, hits)])
                assert np.all(np.diff(hits) > 0)
                num_pruned += len(hits) < len(everything)
    assert num_pruned > 100


def test_pruned_search_gives_the_recorded_rankings(reference_dir: Path, pruned: None, catalog: Catalog) -> None:
    products = catalog.products
    index = BM25Index.build([index_document(product) for product in products.values()], list(products))
    assert len(index._dense_rows) > 100
    num_equal = 0
    for record in records(reference_dir / "golden" / "search.jsonl.gz"):
        if "error" not in record:
            expected = [(asin, score) for (asin, _), score in zip(record["hits"], record["raw_scores"], strict=True)]
            assert index.search(record["query"]) == expected, record["query"][:200]
            num_equal += 1
    assert num_equal == 162


def test_threads_and_searches_one_after_another_do_not_disturb_each_other(
    pruned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bm25, "_BLOCK_SIZE", 100)
    rng = np.random.default_rng(5)
    index = BM25Index.build(random_documents(rng, 1000), [f"B{number:04d}" for number in range(1000)])
    queries = [" ".join(f"w{word}" for word in rng.integers(0, 60, size)) for size in rng.integers(1, 25, 200)]
    alone = [index.search(query) for query in queries]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(index.search, queries)) == alone
    assert [index.search(query) for query in reversed(queries)] == alone[::-1]


def test_many_equal_documents_are_found_by_asin_when_pruned(pruned: None) -> None:
    index = BM25Index.build(["red table"] * 5000, [f"B{number:04d}" for number in range(5000)][::-1])
    assert [asin for asin, _ in index.search("red tables")] == [f"B{number:04d}" for number in range(50)]
    assert index.search("unheardof the") == []


def test_without_a_name_the_catalogue_is_named_by_its_content() -> None:
    hashes = {
        BM25Index.build(docs, asins).catalogue_hash
        for docs, asins in ((DOCS, ASINS), (DOCS[::-1], ASINS), (["ab", "c"], ["x", "y"]), (["a", "bc"], ["x", "y"]))
    }
    assert len(hashes) == 4


def test_the_engine_gives_asins_only() -> None:
    index = BM25Index.build(DOCS, ASINS)
    engine = BM25Search(index)
    assert isinstance(engine, SearchEngine)
    assert engine.search("wood", k=1) == ("B3",)
    assert engine.catalogue_hash == index.catalogue_hash
    long_query = "lamp " + " ".join(map(str, range(1100)))
    with pytest.raises(QueryTooLongError):
        engine.search(long_query)
    assert BM25Search(index, truncate_long_queries=True).search(long_query) == ("B2",)


def test_the_collection_has_the_recorded_size(index: BM25Index) -> None:
    assert (index.num_docs, index.num_terms, index.num_tokens, index.num_postings) == (1000, 12_074, 107_608, 68_475)


def test_recorded_length_bytes_are_equal(reference_dir: Path) -> None:
    documents = records(reference_dir / "golden" / "doc_tokens.jsonl.gz")
    assert len(documents) == 500
    for record in documents:
        assert length_to_byte(record["n_tokens"]) == record["norm_byte"], record["asin"]


def test_recorded_rankings_and_scores_are_equal(reference_dir: Path, index: BM25Index) -> None:
    num_equal = num_refused = 0
    for record in records(reference_dir / "golden" / "search.jsonl.gz"):
        if "error" in record:
            with pytest.raises(QueryTooLongError):
                index.search(record["query"])
            num_refused += 1
            continue
        expected = [(asin, score) for (asin, _), score in zip(record["hits"], record["raw_scores"], strict=True)]
        assert index.search(record["query"]) == expected, record["query"][:200]
        assert len(index.search(record["query"], k=1000)) == record["total_hits"]
        num_equal += 1
    assert (num_equal, num_refused) == (162, 1)
