"""A real Lucene index finds what the embedded BM25 finds, in the same order, and refuses what is not its own."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium
import pytest
from extra import require_extra

from webshop_env import open_shop
from webshop_env.catalog import index_document
from webshop_env.errors import ShopGymError
from webshop_env.policies import OraclePolicy
from webshop_env.search import BM25Index, BM25Search, IndexMismatchError, QueryTooLongError, SearchEngine
from webshop_env.search.pyserini import PyseriniSearch

require_extra("pyserini", "pyserini", "jnius")

DOCS = ["red wood table", "red red lamp", "blue wood chair with four legs", "", "red red lamp"]
ASINS = ["B3", "B2", "B1", "B0", "A9"]
NUMBERS = " ".join(map(str, range(1023)))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> PyseriniSearch:
    directory = tmp_path_factory.mktemp("lucene") / "small"
    PyseriniSearch.build(directory, DOCS, ASINS, catalogue_hash="one")
    return PyseriniSearch.load(directory, "one", truncate_long_queries=True)


@pytest.fixture(scope="module")
def small_bm25() -> BM25Search:
    return BM25Search(BM25Index.build(DOCS, ASINS, catalogue_hash="one"), truncate_long_queries=True)


def test_every_recorded_search_gives_the_recorded_hits_with_their_scores(reference_dir: Path) -> None:
    data_dir = reference_dir / "webshop-1k"
    lucene, bm25 = open_shop(data_dir, version="v0", search="pyserini"), open_shop(data_dir, version="v0")
    docs = [index_document(product) for product in lucene.products.values()]
    engine = PyseriniSearch.open(docs, list(lucene.products), catalogue_hash=lucene.catalogue_hash)
    num_lists = 0
    with gzip.open(reference_dir / "golden" / "search.jsonl.gz", "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            query = record["query"]
            if "error" in record:
                with pytest.raises(QueryTooLongError, match="more than 1024 distinct terms"):
                    lucene.search([query])
                continue
            expected = [(asin, score) for asin, score in record["hits"]]
            assert engine.search_with_scores(query) == expected, query
            assert lucene.search([query]) == bm25.search([query]) == tuple(asin for asin, _ in expected), query
            num_lists += 1
    assert num_lists >= 162


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_instructions_of_the_embedded_catalogue_give_the_same_lists(version: str) -> None:
    lucene, bm25 = open_shop(version=version, search="pyserini"), open_shop(version=version)
    queries = [goal.instruction_text for goal in random.Random(0).sample(bm25.goals, 200)]
    assert lucene is not bm25 and lucene.describe()["search"] == "pyserini"
    for query in queries:
        assert lucene.search([query]) == bm25.search([query]) != (), query


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_an_episode_is_the_same_whichever_engine_searches(version: str) -> None:
    lucene = gymnasium.make(f"WebShop-{version}", search="pyserini", max_steps=15)
    bm25 = gymnasium.make(f"WebShop-{version}", max_steps=15)
    policy = OraclePolicy(bm25.unwrapped.shop)
    for goal_index in (0, 5, 99):
        options = {"goal_index": goal_index}
        seen, info = bm25.reset(seed=3, options=options)
        assert lucene.reset(seed=3, options=options) == (seen, info)
        is_over = False
        while not is_over:
            action = policy.act(seen, info)
            seen, reward, terminated, truncated, info = bm25.step(action)
            assert lucene.step(action) == (seen, reward, terminated, truncated, info)
            is_over = terminated or truncated
        assert info["won"]


@pytest.mark.parametrize(
    "query",
    [
        "red", "LAMP lamps", "wood's", "", " ", "the of", "unheardof", "?*~^[]{}\"'", "+red -lamp", "title:red AND (",
        "red 😀 café", "red\ud800lamp", "red\0lamp", "x" * 10_000, f"{NUMBERS} lamp", f"{NUMBERS} lamp table red lamp",
        f"red red {NUMBERS} lamp chair",
    ],
)  # fmt: skip
def test_odd_queries_find_what_bm25_finds(small: PyseriniSearch, small_bm25: BM25Search, query: str) -> None:
    for k in (1, 2, 50):
        assert small.search(query, k) == small_bm25.search(query, k)


def test_it_is_a_search_engine_that_breaks_ties_by_asin(small: PyseriniSearch) -> None:
    assert isinstance(small, SearchEngine) and small.catalogue_hash == "one"
    assert small.search("red lamp") == ("A9", "B2", "B3")
    assert small.search("red lamp", k=0) == ()


def test_threads_can_share_it(small: PyseriniSearch, small_bm25: BM25Search) -> None:
    queries = ["red", "lamp", "wood chair", "blue table"] * 25
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(small.search, queries)) == [small_bm25.search(query) for query in queries]


def test_a_long_query_is_refused_unless_it_may_be_cut(small: PyseriniSearch) -> None:
    strict = PyseriniSearch.load(small.directory, "one")
    assert strict.search(f"{NUMBERS} lamp") == ("A9", "B2")
    with pytest.raises(QueryTooLongError):
        strict.search(f"{NUMBERS} lamp table")


def test_the_index_of_another_catalogue_is_refused(small: PyseriniSearch) -> None:
    with pytest.raises(IndexMismatchError, match="built from catalogue one, but the shop's is two"):
        PyseriniSearch.load(small.directory, "two")


def test_an_index_is_built_once_and_lies_in_the_cache_under_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOPGYM_CACHE", str(tmp_path))
    first = PyseriniSearch.open(DOCS, ASINS, catalogue_hash="one")
    assert first.directory.parent == tmp_path / "one" / "lucene"
    files = {path: path.stat().st_mtime_ns for path in first.directory.rglob("*")}
    second = PyseriniSearch.open(DOCS, ASINS, catalogue_hash="one")
    assert second.directory == first.directory
    assert {path: path.stat().st_mtime_ns for path in first.directory.rglob("*")} == files
    # The same files read in another way are other texts, and have an index of their own.
    assert PyseriniSearch.open(DOCS[:2], ASINS[:2], catalogue_hash="one").directory != first.directory
    # One that was put there by mistake is refused.
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(IndexMismatchError, match="catalogue one"):
        PyseriniSearch.open(DOCS, ASINS, catalogue_hash="two")


def test_the_first_of_two_writers_wins_and_nothing_is_left_over(tmp_path: Path) -> None:
    PyseriniSearch.build(tmp_path / "index", DOCS, ASINS, catalogue_hash="one")
    PyseriniSearch.build(tmp_path / "index", DOCS[:1], ASINS[:1], catalogue_hash="one")
    assert PyseriniSearch.load(tmp_path / "index", "one").search("lamp") == ("A9", "B2")
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        PyseriniSearch.build(tmp_path / "index", ["red", 7], ["B1", "B2"], catalogue_hash="one")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="got 1 and 2"):
        PyseriniSearch.build(tmp_path / "index", ["red", "blue"], ["B1"], catalogue_hash="one")
    assert not list(tmp_path.iterdir())


def test_a_damaged_index_is_one_clear_line(small: PyseriniSearch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(small.directory, broken)
    next((broken / "index").glob("segments_*")).unlink()
    with pytest.raises(IndexMismatchError, match=r"broken: Lucene cannot read it .*; delete it"):
        PyseriniSearch.load(broken, "one")
    (broken / "catalogue.json").write_text('{"format": "other", "catalogue_hash": "one"}')
    with pytest.raises(IndexMismatchError, match="format other is not shopgym-lucene-1"):
        PyseriniSearch.load(broken, "one")
    for text in ("", "[]", "{}"):
        (broken / "catalogue.json").write_text(text)
        with pytest.raises(IndexMismatchError, match="not a search index"):
            PyseriniSearch.load(broken, "one")


def test_a_cache_that_cannot_be_written_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOPGYM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ShopGymError, match="set SHOPGYM_CACHE to a writable directory"):
        PyseriniSearch.open(DOCS, ASINS, catalogue_hash="one")


def test_a_forked_process_is_told_so_instead_of_hanging(small: PyseriniSearch) -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            small.search("red")
        except RuntimeError as error:
            os.write(write_end, str(error).encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with os.fdopen(read_end) as reader:
        assert "does not survive a fork" in reader.read()


def test_a_process_stays_quiet_and_light_and_pyserini_itself_reads_the_index(tmp_path: Path) -> None:
    code = f"""
import os, sys
from webshop_env.search.pyserini import PyseriniSearch
before = dict(os.environ)
engine = PyseriniSearch.open({DOCS!r}, {ASINS!r}, catalogue_hash="one")
hits = engine.search_with_scores("red lamp")
assert dict(os.environ) == before and not {{"torch", "openai"}} & set(sys.modules)
print(hits)
sys.stdout.flush(); sys.stderr.write("---"); sys.stderr.flush()
os.environ["OPENAI_API_KEY"] = "unused"  # asked for at import
from pyserini.search.lucene import LuceneSearcher
searcher = LuceneSearcher(str(engine.directory / "index"))
print([(hit.docid, hit.score) for hit in searcher.search("red lamp", 50)])
"""
    environment = os.environ | {"SHOPGYM_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("---"), done.stderr
    ours, theirs = done.stdout.splitlines()
    assert ours == theirs and "'A9'" in ours
