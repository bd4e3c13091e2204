"""A compiled catalogue is the catalogue: the same products, goals, prices and scores, or a refusal that says why."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd_shop import row, write_odd_catalogue

from webshop_env import compiled, shop, table_file
from webshop_env.catalog import Catalog, Version, find_files, index_document, load_catalog
from webshop_env.compiled import open_catalog, products_file, read_compiled, write_products
from webshop_env.datatools.build import build_catalogue
from webshop_env.goals import GoalList, build_goals, split_indexes
from webshop_env.shop import EMBEDDED_CATALOGUE, Shop, goals_file, open_shop
from webshop_env.table_file import TableError, TableFile, write_table

ROOT = Path(__file__).resolve().parents[2]
LONE_SURROGATE = "\ud83d mug"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOPGYM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["embedded", "webshop-1k", "odd", "odder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "embedded":
        return EMBEDDED_CATALOGUE
    if request.param == "webshop-1k":
        return (request.getfixturevalue("reference_dir") / "webshop-1k").resolve()
    (tmp_path / "shop").mkdir()
    return (write_odd_catalogue if request.param == "odd" else write_odder_catalogue)(tmp_path / "shop")


def write_odder_catalogue(folder: Path) -> Path:
    """Rows that are repaired or skipped, texts that no UTF-8 has, and instructions of both kinds."""
    rows = [
        row("b000000001", LONE_SURROGATE, {"Größe": ["S", "M", "L"], "Empty": [], "Farbe": ["rot", "blau"]}),
        row("B000000001", "Twin"),
        row("B000000002", "Mug", {"Size": ["S", "M"]}, pricing="$" + "9" * 400 + "$3"),
        row("ÄÖÜ🙂", "Line\nfeed \u2028 tab\t NUL\0", pricing="$20 - $10", small_description=None, images=None),
        "no row",
        row("", "Nameless"),
        row("A\0", "Name ends with NUL"),
        row("A", None, pricing=None),
    ]
    wish = {"attributes": ["a", "b"], "instruction": "Find a mug", "instruction_attributes": ["a"]}
    wishes: dict[str, Any] = {name: wish for name in ("b000000001", "B000000002", "ÄÖÜ🙂", "stranger")}
    wishes["A"] = {"attributes": ["a"]}
    said = [
        {"instruction": f"mug {i}.", "instruction_attributes": ["a"] * i, "instruction_options": ["s"]}
        for i in (0, 1, 1)
    ]
    (folder / "items_shuffle.json").write_text(json.dumps(rows))
    (folder / "items_ins_v2.json").write_text(json.dumps(wishes))
    (folder / "items_human_ins.json").write_text(json.dumps({"b000000001": said, "A\0": said, "A": []}))
    (folder / "name_nouns.json").write_text(json.dumps({r["asin"]: ["mug"] for r in rows if isinstance(r, dict)}))
    return folder


def compile_catalog(folder: Path, version: Version, num_products: int | None = None) -> Catalog:
    files = find_files(folder)
    catalogue_hash = files.hash(num_products)
    path = products_file(catalogue_hash, version)
    write_products(path, files, version, num_products=num_products, catalogue_hash=catalogue_hash)
    return read_compiled(files, path, version, catalogue_hash)


def goals_of(catalog: Catalog, kind: Any, **drawing: Any) -> GoalList:
    path = goals_file(catalog, kind)
    build_goals(catalog, kind, **drawing).write(path)
    return GoalList.read(path, catalog, kind)


def assert_same_goals(ours: GoalList, theirs: GoalList) -> None:
    assert ours.goals == tuple(theirs.goals) and theirs.goals == tuple(ours.goals)
    np.testing.assert_array_equal(ours.prices, theirs.prices)
    assert (ours.rng_state, ours.num_whole) == (theirs.rng_state, theirs.num_whole)
    np.testing.assert_array_equal(ours.running_weights, theirs.running_weights)
    for split_by in ("goal", "product", "product:3"):
        one, other = split_indexes(ours, split_by), split_indexes(theirs, split_by)
        assert one.keys() == other.keys()
        for name, indexes in one.items():
            assert indexes.dtype == np.int32 and not indexes.flags.writeable
            np.testing.assert_array_equal(indexes, other[name])
    for index, goal in enumerate(theirs.goals):
        assert ours.place_of(goal.goal_id) == index


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_a_compiled_catalogue_is_the_one_in_memory(folder: Path, version: Version):
    ours, theirs = compile_catalog(folder, version), load_catalog(folder, version=version)
    assert list(ours.products) == list(theirs.products) and ours.asins == theirs.asins
    for name in ("products", "rows", "instructions", "human_instructions", "asin_in_files"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert list(one.items()) == list(other.items()) and len(one) == len(other), name
        assert all(asin in one for asin in other) and all((asin in one) == (asin in other) for asin in ours.products)
    assert [list(p.options.items()) for p in ours.products.values()] == [
        list(p.options.items()) for p in theirs.products.values()
    ]
    np.testing.assert_array_equal(ours.prices, theirs.prices)
    for product, (low, high) in zip(theirs.products.values(), ours.prices.tolist(), strict=True):
        assert product.prices == tuple(price for price in (low, high) if not math.isnan(price))
    assert ours.warnings == theirs.warnings and ours.warning_counts == theirs.warning_counts
    assert (ours.directory, ours.version, ours.catalogue_hash) == (theirs.directory, version, theirs.catalogue_hash)
    assert dict(ours.nouns.items()) == dict(theirs.nouns.items())
    assert ours.nouns.describe() == theirs.nouns.describe()
    assert list(map(index_document, ours.products.values())) == list(map(index_document, theirs.products.values()))


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("kind", ["synthetic", "human"])
def test_compiled_goals_are_those_in_memory(folder: Path, version: Version, kind: Any):
    ours, theirs = compile_catalog(folder, version), load_catalog(folder, version=version)
    assert_same_goals(goals_of(ours, kind), build_goals(theirs, kind))
    if version == "v0":
        drawing: dict[str, Any] = {"preseed": 3, "variant": "verl"}
        assert_same_goals(build_goals(ours, kind, **drawing), build_goals(theirs, kind, **drawing))
    some: dict[str, Any] = {
        "limit_goals": 7,
        "filter_goals": lambda index, goal: index % 3 == 1 and goal.goal_index == index,
    }
    assert_same_goals(build_goals(ours, kind, **some), build_goals(theirs, kind, **some))


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_scores_and_draws_are_those_in_memory(folder: Path, version: Version):
    arguments = {"split_by": "goal", "search": "bm25", "goals": "synthetic", "preseed": 0, "variant": None}
    catalog = load_catalog(folder, version=version)
    theirs = Shop(catalog, build_goals(catalog), arguments)
    build_catalogue(folder, say=lambda line: None, versions=(version,), with_nouns=False)
    ours = open_shop(folder, version=version)
    assert ours._catalog.compiled_file is not None and ours.describe() == theirs.describe()
    rng = random.Random(0)
    for _ in range(200):
        goal, asin = rng.choice(theirs.goals), rng.choice(list(theirs.products))
        same = goal.options if isinstance(goal.options, dict) else {}
        for bought, options in ((asin, {}), (asin, same), (goal.asin, same), (goal.asin, {})):
            assert ours.score(ours.goals[goal.goal_index], bought, options) == theirs.score(goal, bought, options)
    one, other = ours.new_rng(), theirs.new_rng()
    assert [ours.draw_goal(one) for _ in range(50)] == [theirs.draw_goal(other) for _ in range(50)]
    assert ours.search(["mug"]) == theirs.search(["mug"])
    assert ours.longest_task() == max((goal.instruction_text for goal in theirs.goals), key=len)


def test_what_is_not_for_sale_is_not_found(tmp_path: Path):
    catalog = compile_catalog(write_odder_catalogue(tmp_path), "v0")
    for stranger in ("", "B", "B0000000020", "b000000002", "stranger", 7, None):
        assert stranger not in catalog.products and catalog.products.get(stranger) is None  # type: ignore[call-overload]
        with pytest.raises(KeyError):
            catalog.rows[stranger]  # type: ignore[index]
    assert catalog.products["A"].title == "A" and catalog.products["A\0"].title == "Name ends with NUL"
    assert "A" not in catalog.instructions and "B000000002" in catalog.instructions
    with pytest.raises(TypeError):
        [] in catalog.products  # noqa: B015
    with pytest.raises(TypeError):
        catalog.products["A"] = None  # type: ignore[index]


def test_two_texts_of_one_hash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "_hash64", lambda text: len(text))
    catalog = compile_catalog(write_odd_catalogue(tmp_path), "v1")
    theirs = load_catalog(tmp_path)
    assert dict(catalog.products) == dict(theirs.products) and "B999999999" not in catalog.products
    assert dict(catalog.nouns.items()) == dict(theirs.nouns.items()) and catalog.nouns.of("Odd Mug") == ("mug",)


def test_columns_are_mapped_and_cannot_be_written(tmp_path: Path):
    catalog = compile_catalog(write_odd_catalogue(tmp_path), "v1")
    goal_list = goals_of(catalog, "synthetic")
    for column in (goal_list.prices, goal_list.columns.ids, goal_list.running_weights):
        assert not column.flags.writeable and not column.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


# the cache


def test_shops_of_some_size_are_compiled_once_and_found_again(monkeypatch: pytest.MonkeyPatch):
    first = open_catalog(EMBEDDED_CATALOGUE)
    assert first.compiled_file is not None and first.compiled_file.is_file()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the catalogue is read although it is compiled")

    monkeypatch.setattr(compiled, "write_products", refuse)
    monkeypatch.setattr(compiled, "load_catalog", refuse)
    assert open_catalog(EMBEDDED_CATALOGUE).compiled_file == first.compiled_file


def test_small_ones_are_read_and_compiled_only_when_asked_for(tmp_path: Path):
    (tmp_path / "shop").mkdir()
    folder = write_odd_catalogue(tmp_path / "shop")
    assert open_catalog(folder).compiled_file is None
    build_catalogue(folder, say=lambda line: None)
    assert all(open_catalog(folder, version=version).compiled_file is not None for version in ("v0", "v1"))
    assert open_catalog(folder, num_products=3).compiled_file is None


def test_a_large_one_is_read_and_the_user_told_what_to_do(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(compiled, "MOST_BYTES", 1000)
    with caplog.at_level(logging.WARNING):
        assert open_catalog(EMBEDDED_CATALOGUE).compiled_file is None
    assert len(caplog.messages) == 1 and f"python -m data.build {EMBEDDED_CATALOGUE}" in caplog.messages[0]


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOPGYM_CACHE", str(tmp_path / "file"))
    shop._catalog.cache_clear()
    shop._open.cache_clear()
    opened = open_shop()
    assert opened._catalog.compiled_file is None and len(opened.goals) == 5802 and opened.search(["shoes"])
    assert not caplog.messages


def test_a_cache_that_cannot_be_entered_costs_only_time(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    real = os.stat

    def stat(path, *args, **kwargs):  # as for another user's directory; root may enter all
        if str(path).startswith(f"{cache}{os.sep}"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    shop._catalog.cache_clear()
    shop._open.cache_clear()
    opened = open_shop()
    assert len(opened.goals) == 5802 and opened.search(["shoes"])
    assert not caplog.messages


def test_a_changed_file_is_noticed_even_with_the_old_size_and_time(tmp_path: Path):
    (tmp_path / "shop").mkdir()
    folder = write_odd_catalogue(tmp_path / "shop")
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    build_catalogue(folder, say=lambda line: None)
    before = open_catalog(folder)
    path = folder / "items_shuffle.json"
    path.write_text(path.read_text().replace("Plain Mug", "Plane Mug"))
    os.utime(path, (1e9, 1e9))
    after = open_catalog(folder)
    assert after.catalogue_hash != before.catalogue_hash and after.compiled_file is None
    assert (before.products["B000000001"].title, after.products["B000000001"].title) == ("Plain Mug", "Plane Mug")


def test_a_changed_noun_file_is_noticed(tmp_path: Path):
    (tmp_path / "shop").mkdir()
    folder = write_odd_catalogue(tmp_path / "shop")
    build_catalogue(folder, say=lambda line: None)
    assert open_catalog(folder).nouns.of("Plain Mug") == ("mug",)
    path = folder / "name_nouns.json"
    path.write_text(path.read_text().replace('"B000000001": ["mug"]', '"B000000001": ["cup"]'))
    assert open_catalog(folder).compiled_file is not None
    assert open_catalog(folder).nouns.of("Plain Mug") == ("cup",)


@pytest.mark.parametrize("name", ["products", "goals"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-1], "cut off or not a table of this release"),
        (lambda content: content[: len(content) // 2], "cut off or not a table of this release"),
        (lambda content: b"", "cut off or not a table of this release"),
        (lambda content: b"something else entirely", "cut off or not a table of this release"),
        (lambda content: content[-2000:], "damaged"),
    ],
)
def test_what_is_damaged_is_refused_with_the_reason_and_shops_do_without(name: str, damage, reason: str, caplog):
    build_catalogue(EMBEDDED_CATALOGUE, say=lambda line: None, versions=("v1",))
    catalog = open_catalog(EMBEDDED_CATALOGUE)
    assert catalog.compiled_file is not None
    path = catalog.compiled_file if name == "products" else goals_file(catalog, "synthetic")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with pytest.raises(TableError, match=reason) as caught:
        TableFile(path, "products-2" if name == "products" else "goals-2", catalog.catalogue_hash)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    shop._catalog.cache_clear()
    shop._open.cache_clear()
    assert len(open_shop().goals) == 5802
    assert [message for message in caplog.messages if reason in message]
    assert path.read_bytes() == whole, "it has been made anew"


def test_a_foreign_file_is_refused(tmp_path: Path):
    (tmp_path / "shop").mkdir()
    files = find_files(write_odd_catalogue(tmp_path / "shop"))
    catalog = compile_catalog(files.directory, "v1")
    path = catalog.compiled_file
    assert path is not None
    with pytest.raises(TableError, match=r"made from catalogue [0-9a-f]{16}, not from 0000"):
        TableFile(path, "products-2", "0" * 64)
    with pytest.raises(TableError, match="holds 'products-2', not 'goals-2'"):
        GoalList.read(path, catalog, "synthetic")


def test_an_open_table_outlives_its_file(tmp_path: Path):
    (tmp_path / "shop").mkdir()
    catalog = compile_catalog(write_odd_catalogue(tmp_path / "shop"), "v1")
    theirs = load_catalog(tmp_path / "shop")
    shutil.rmtree(os.environ["SHOPGYM_CACHE"])
    assert dict(catalog.products) == dict(theirs.products)


def test_an_interrupted_build_leaves_nothing_that_could_be_taken_for_whole(tmp_path: Path, cache: Path):
    code = (
        "import os, sys, webshop_env.compiled as c; from webshop_env.catalog import find_files;"
        "files = find_files(sys.argv[1]); hash_ = files.hash(None);"
        "c.write_products(c.products_file(hash_, 'v1'), files, 'v1', num_products=None, catalogue_hash=hash_,"
        "on_bytes=lambda done: os.kill(os.getpid(), 9))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(EMBEDDED_CATALOGUE)], cwd=ROOT)
    assert done.returncode == -9
    left = [path.name for path in cache.rglob("*") if path.is_file() and path.parent.name != "hashes"]
    assert len(left) == 1 and left[0].endswith(".tmp")
    path = open_catalog(EMBEDDED_CATALOGUE).compiled_file
    assert path is not None and not list(path.parent.glob(".*")), "what was left is gone"
    with pytest.raises(ZeroDivisionError), write_table(path, "products-2", "0" * 64) as table:
        table.put_texts("records", (b"x" * (1 // i) for i in (1, 0)))
    assert not list(path.parent.glob(".*")) and TableFile(path, "products-2", find_files(EMBEDDED_CATALOGUE).hash(None))


def test_two_writers_of_one_table_do_not_take_each_others_files_for_orphans(tmp_path: Path, monkeypatch):
    path, real_mkstemp, tries = tmp_path / "t.table", tempfile.mkstemp, []

    def mkstemp_and_another_writer(**options: str) -> tuple[int, str]:
        made = real_mkstemp(**options)
        tries.append(made[1])
        if len(tries) == 1:  # between its making and its lock
            table_file._remove_orphans(path)
        return made

    monkeypatch.setattr(table_file.tempfile, "mkstemp", mkstemp_and_another_writer)
    real_replace = os.replace

    def replace_after_another_writer(source: str, target: Path) -> None:
        table_file._remove_orphans(path)  # between its end and its name
        real_replace(source, target)

    monkeypatch.setattr(table_file.os, "replace", replace_after_another_writer)
    with write_table(path, "some", "0" * 64) as table:
        table.put_texts("records", [b"x"])
    assert len(tries) == 2 and TableFile(path, "some", "0" * 64)
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_when_a_table_has_just_got_its_name_is_ctrl_c(tmp_path: Path, monkeypatch):
    real_replace = os.replace

    def replace_then_stop(source: str, target: Path) -> None:
        real_replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(table_file.os, "replace", replace_then_stop)
    with pytest.raises(KeyboardInterrupt), write_table(tmp_path / "t.table", "some", "0" * 64) as table:
        table.put_texts("records", [b"x"])


def test_a_build_tells_what_it_did_and_makes_only_what_is_missing(tmp_path: Path):
    (tmp_path / "shop").mkdir()
    folder = write_odder_catalogue(tmp_path / "shop")
    lines: list[str] = []
    build_catalogue(folder, say=lines.append, versions=("v1",))
    assert [line.split(", /")[0] for line in lines] == [
        "products v1: built, 5 products",
        "synthetic goals v1: built, 9 goals",
        "human goals v1: built, 4 goals",
        "nouns: present, in name_nouns.json",
        "search index v1: built, 5 documents",
    ]
    catalog = open_catalog(folder)
    goals_file(catalog, "human").write_bytes(b"")
    lines.clear()
    build_catalogue(folder, say=lines.append)
    built = [line.split(":")[0] for line in lines if ": built" in line]
    assert built == ["products v0", "synthetic goals v0", "human goals v0", "human goals v1", "search index v0"]
    assert any("human.table: cut off" in line for line in lines)
