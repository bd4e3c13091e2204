"""The data commands: reports, builds that are used, and fetches from a real server that misbehaves in real ways."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from odd_shop import row, write_odd_catalogue

from webshop_env import nouns, shop
from webshop_env.catalog import load_catalog, noun_cache_file
from webshop_env.cli import main as shopgym
from webshop_env.datatools.build import BUILD
from webshop_env.datatools.check import CHECK, check_catalogue
from webshop_env.datatools.fetch import FETCH, LOCK_NAME, SOURCES, read_sources
from webshop_env.errors import ShopGymError
from webshop_env.search import BM25Index
from webshop_env.shop import index_file, open_shop


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOPGYM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop").mkdir()
    return write_odd_catalogue(tmp_path / "shop")


# check


def test_check_counts_rows_repairs_skips_goals_and_splits(folder: Path):
    rows = json.loads((folder / "items_shuffle.json").read_text())
    rows += [
        row("b000000007", "Late Mug", pricing="EUR 5"),
        row("B000000001", "Twin Mug"),
        "no row",
        row("", "Nameless"),
    ]
    (folder / "items_shuffle.json").write_text(json.dumps(rows))
    report = check_catalogue(folder)
    assert (report["num_rows"], report["num_products"]) == (27, 24)
    assert (report["num_rows_skipped"], report["num_rows_repaired"]) == (3, 1)
    assert report["warnings"] == {"asin": 1, "duplicate asin": 1, "lower-case asin": 1, "price": 1, "row": 1}
    assert report["num_without_price"] == 2
    # 2 x 2 plain, 2 x 2 twins, 6 buttons, 12 odd values.
    assert report["goals"]["synthetic"]["num_goals"] == 26
    assert report["goals"]["synthetic"]["splits"]["goal"] == {"train": 19, "eval": 5, "test": 2, "all": 26}
    assert report["goals"]["human"]["num_goals"] == 0
    assert report["catalogue_hash"] == load_catalog(folder).catalogue_hash
    assert json.loads(json.dumps(report)) == report


def test_check_prints_the_report_and_says_which_rows_are_odd(folder: Path, capsys):
    rows = [row("b000000007", "Late Mug", pricing="EUR 5"), row("B000000007", "Twin"), row("B000000008", "Mug")]
    (folder / "items_shuffle.json").write_text(json.dumps(rows))
    assert CHECK.main([str(folder), "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "3: 2 products, 1 skipped, 1 repaired" in shown and "0 synthetic, of 0 products" in shown
    assert "row 0 B000000007: lower-case asin: 'b000000007' is sold as 'B000000007' [repaired]" in shown
    assert "and 2 more" in shown and "2 product names are in no noun file" in shown
    assert CHECK.main([str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_rows"] == 3


def test_check_shows_each_kind_of_odd_row_however_many_there_are_of_one(folder: Path, capsys):
    rows = [row(f"B0000001{i:02}", "Mug", images=[]) for i in range(30)]
    rows += [row("B000000201", "Mug", pricing="EUR 5"), row("B000000202", None), row("B000000201", "Twin")]
    (folder / "items_shuffle.json").write_text(json.dumps(rows))
    assert CHECK.main([str(folder)]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    row ")]
    assert [line.split()[1] for line in shown] == [*map(str, range(17)), "30", "31", "32"]
    assert CHECK.main([str(folder), "--show", "2"]) == 0
    assert "    row 0 B000000100: images: there is no picture [repaired]\n    row 30" in capsys.readouterr().out


def test_check_counts_instructions_for_what_is_not_for_sale(folder: Path, capsys):
    assert check_catalogue(folder)["goals"]["human"]["num_asins_unknown"] == 0
    human = [{"instruction": "a mug", "instruction_attributes": ["tea safe"], "instruction_options": []}]
    (folder / "items_human_ins.json").write_text(json.dumps({"B000000001": human, "GONE1": human, "GONE2": human}))
    assert CHECK.main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("  goals     1 human, of 1 products")
    assert lines[place + 1] == "            instructions for 2 asins that are not for sale here"


def test_the_installed_command_is_the_same(folder: Path, capsys):
    assert shopgym(["data", "check"]) == 0
    assert "1000: 1000 products, 0 skipped, 0 repaired" in capsys.readouterr().out
    assert shopgym(["data", "check", str(folder)]) == 0
    assert shopgym(["describe"]) == 0
    capsys.readouterr()
    assert shopgym(["data"]) == shopgym([]) == 0
    assert "{check,fetch,build}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["check", "/nowhere"], "/nowhere: no such directory"),
        (["build", "/nowhere"], "/nowhere: no such directory"),
        (["check", "--show", "-1"], "--show must be at least 0, got -1"),
        (["check", "--products", "0"], "num_products must be at least 1, got 0"),
        (["fetch", "x", "--set", "tiny"], "sources.json: no set 'tiny'; there are full, small"),
        (["fetch", "x", "--sources", "/nowhere.json"], "/nowhere.json: cannot be read"),
        (["describe", "--data-dir", "/nowhere"], "/nowhere: no such directory"),
    ],
)
def test_a_callers_mistake_is_one_line_and_exit_code_2(argv: list[str], message: str, capsys):
    assert shopgym(argv if argv[0] == "describe" else ["data", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1


# build


def test_build_makes_the_index_once_and_shops_use_it(folder: Path, capsys, monkeypatch):
    before = open_shop(folder).search(["mug", "odd"])
    assert BUILD.main([str(folder)]) == 0
    assert capsys.readouterr().out.count("built") == 8  # in each version products, two kinds of goals, an index
    assert BUILD.main([str(folder)]) == 0
    assert capsys.readouterr().out.count("present") == 9
    for version in ("v0", "v1"):
        assert index_file(load_catalog(folder, version=version)).exists()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the index is built although it is there")

    monkeypatch.setattr(BM25Index, "build", refuse)
    shop._build_engine.cache_clear()
    shop._catalog.cache_clear()
    shop._open.cache_clear()
    assert open_shop(folder).search(["mug", "odd"]) == before


def test_build_replaces_an_index_that_is_damaged_and_shops_do_without(folder: Path, capsys):
    path = index_file(load_catalog(folder))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not an index")
    assert open_shop(folder).search(["plain"]) == ("B000000001",)
    assert BUILD.main([str(folder)]) == 0
    assert "search index v1: built, 23 documents" in capsys.readouterr().out
    assert BM25Index.load(path, load_catalog(folder).catalogue_hash).num_docs == 23


def test_build_tags_the_names_that_no_file_holds(folder: Path, capsys):
    pytest.importorskip("spacy", reason="needs shopgym[nouns]")
    table = json.loads((folder / "name_nouns.json").read_text())
    del table["B000000002"], table["B000000003"]
    table["B000000001"] = ["cup"]
    (folder / "name_nouns.json").write_text(json.dumps(table))
    assert BUILD.main([str(folder)]) == 0
    assert "nouns: built for 2 names" in capsys.readouterr().out
    catalog = load_catalog(folder)
    stored = json.loads(noun_cache_file(catalog.catalogue_hash).read_text())
    assert stored.keys() == {nouns.TAGGER_KEY, "B000000002", "B000000003"}
    assert stored[nouns.TAGGER_KEY].startswith("spaCy 3.8.")
    assert not list(catalog.nouns.missing(product.title for product in catalog.products.values()))
    assert catalog.nouns.of("Twin Mug") == ("twin", "mug") and catalog.nouns.of("Plain Mug") == ("cup",)


def test_a_damaged_noun_file_in_the_cache_is_no_obstacle_and_the_catalogues_own_is(folder: Path, caplog, capsys):
    path = noun_cache_file(load_catalog(folder).catalogue_hash)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"B0')
    assert BUILD.main([str(folder)]) == 0
    assert f"{path}: damaged, its nouns are not used" in caplog.text
    assert load_catalog(folder).nouns.of("Twin Mug") and str(path) not in load_catalog(folder).nouns.source
    (folder / "name_nouns.json").write_text('{"B0')
    capsys.readouterr()
    assert BUILD.main([str(folder)]) == 2
    assert "name_nouns.json: not an object of asin -> list of nouns" in capsys.readouterr().err


def test_build_without_a_tagger_or_a_writable_cache_says_so(folder: Path, tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOPGYM_CACHE", str(tmp_path / "file"))
    assert BUILD.main([str(folder)]) == 2
    assert "set SHOPGYM_CACHE to a writable directory" in capsys.readouterr().err
    monkeypatch.setenv("SHOPGYM_CACHE", str(tmp_path / "cache"))
    (folder / "name_nouns.json").unlink()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert BUILD.main([str(folder)]) == 2
    assert "install shopgym[nouns]" in capsys.readouterr().err


def test_another_release_of_the_model_is_refused(folder: Path, monkeypatch, capsys):
    spacy = pytest.importorskip("spacy", reason="needs shopgym[nouns]")
    older = spacy.blank("en")
    older.meta["version"] = "3.7.1"
    monkeypatch.setattr(spacy, "load", lambda *args, **kwargs: older)
    (folder / "name_nouns.json").unlink()
    assert BUILD.main([str(folder)]) == 2
    assert "release 3.7.1, while scores are pinned to 3.8" in capsys.readouterr().err


# fetch


class Files(BaseHTTPRequestHandler):
    """Serves one JSON file with ranges; the server object says what goes wrong."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        content, etag = server.content, server.etag
        if self.path == "/page":
            self._send(200, b"<html>Quota exceeded</html>", {"Content-Type": "text/html; charset=utf-8"})
        elif self.path == "/text":
            self._send(200, b"sorry", {})
        elif self.path != "/items.json":
            self._send(404, b"", {})
        else:
            wanted = self.headers.get("Range")
            headers = {"ETag": etag} if etag else {}
            if wanted and self.headers.get("If-Range") == etag:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                self._send(206, content[start:], headers)
            else:
                self._send(200, content, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        limit = self.server.breaks_after  # type: ignore[attr-defined]
        self.wfile.write(body[:limit])

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    server.requests, server.etag, server.breaks_after = [], '"one"', None
    server.content = json.dumps([{"asin": f"B{i:09}"} for i in range(2000)]).encode()
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(tmp_path: Path, server: Any, path: str = "/items.json", **facts: Any) -> int:
    url = f"http://127.0.0.1:{server.server_port}{path}"
    record = {"name": "items_shuffle.json", "url": url, "bytes": None, "sha256": None, **facts}
    (tmp_path / "sources.json").write_text(json.dumps({"sets": {"full": [record]}}))
    return FETCH.main([str(tmp_path / "data"), "--sources", str(tmp_path / "sources.json")])


def test_fetch_records_what_it_got_and_then_holds_the_file_to_it(tmp_path: Path, server: Any, capsys):
    assert fetch(tmp_path, server) == 0
    path, lock_path = tmp_path / "data" / "items_shuffle.json", tmp_path / "data" / LOCK_NAME
    sha256 = hashlib.sha256(server.content).hexdigest()
    assert path.read_bytes() == server.content
    lock = json.loads(lock_path.read_text())["items_shuffle.json"]
    assert (lock["bytes"], lock["sha256"]) == (len(server.content), sha256)
    assert sorted(p.name for p in path.parent.iterdir()) == [LOCK_NAME, "items_shuffle.json"]
    assert fetch(tmp_path, server) == 0
    assert "present" in capsys.readouterr().out and len(server.requests) == 1
    path.write_bytes(server.content[:-1] + b" ")
    assert fetch(tmp_path, server) == 2
    assert f"is not the {sha256} of {LOCK_NAME}" in capsys.readouterr().err
    path.unlink()
    server.content = b"[1]"
    assert fetch(tmp_path, server) == 2
    assert f"bytes 3 is not the {lock['bytes']} of {LOCK_NAME}" in capsys.readouterr().err and not path.exists()


def test_fetch_goes_on_where_it_stopped(tmp_path: Path, server: Any, capsys):
    server.breaks_after = 5000
    assert fetch(tmp_path, server) == 2
    assert "stopped sending" in capsys.readouterr().err
    assert (tmp_path / "data" / "items_shuffle.json.part").stat().st_size == 5000
    server.breaks_after = None
    assert fetch(tmp_path, server) == 0
    assert "goes on after 5,000 bytes" in capsys.readouterr().out
    assert server.requests[1] == ("/items.json", "bytes=5000-")
    assert (tmp_path / "data" / "items_shuffle.json").read_bytes() == server.content


@pytest.mark.parametrize("etag", ['"two"', None])
def test_fetch_starts_again_when_the_file_has_changed(tmp_path: Path, server: Any, etag: str | None):
    server.breaks_after = 5000
    assert fetch(tmp_path, server) == 2
    server.breaks_after, server.etag, server.content = None, etag, b"[" + b" " * 9000 + b"]"
    assert fetch(tmp_path, server) == 0
    assert (tmp_path / "data" / "items_shuffle.json").read_bytes() == server.content


@pytest.mark.parametrize(
    ("path", "facts", "message"),
    [
        ("/page", {}, "sent a web page instead of the file"),
        ("/text", {}, "is not JSON"),
        ("/none", {}, "answered 404"),
        ("/items.json", {"bytes": 7}, "is not the 7 of the list of sources"),
        ("/items.json", {"sha256": "ab"}, "is not the ab of the list of sources"),
        ("/items.json", {"name": "../items.json"}, "is not a file name"),
        ("/items.json", {"name": "items\0.json"}, "is not a file name"),
        ("/items.json", {"url": "file:///etc/passwd"}, "must begin with http"),
        ("/items.json", {"url": "http://[::1/x"}, "is none (Invalid IPv6 URL)"),
        ("/items.json", {"url": "http://host:99999/x"}, "is none (Port out of range"),
        ("/items.json", {"url": f"http://{'a' * 70}.com/x"}, "is none"),
        ("/items.json", {"url": "http:///x"}, "names no host"),
        ("/items.json", {"url": "http://host/\u00e9"}, "written as %XX"),
    ],
)
def test_fetch_refuses_what_is_not_the_file(tmp_path: Path, server: Any, path: str, facts: Any, message: str, capsys):
    assert fetch(tmp_path, server, path, **facts) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "data" / "items_shuffle.json").exists() and not list(tmp_path.glob("data/*.part"))


def test_fetch_without_a_network_names_the_address_and_the_place(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as unused:  # nobody listens there
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/items.json"
        record = {"name": "items_shuffle.json", "url": url}
        (tmp_path / "sources.json").write_text(json.dumps({"sets": {"full": [record]}}))
        assert FETCH.main([str(tmp_path / "data"), "--sources", str(tmp_path / "sources.json")]) == 2
    err = capsys.readouterr().err
    assert "cannot be reached" in err and url in err and str(tmp_path / "data" / "items_shuffle.json") in err


def test_the_public_list_is_well_formed_and_its_recorded_facts_are_right(reference_dir: Path):
    for name in ("small", "full"):
        sources = read_sources(SOURCES, name)
        assert [source.name.split("_")[1].removesuffix(".json") for source in sources] == ["shuffle", "ins", "human"]
    known = next(source for source in read_sources(SOURCES, "small") if source.sha256)
    content = (reference_dir / "webshop-1k" / known.name).read_bytes()
    assert (known.num_bytes, known.sha256) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"sets": {"full": [{"name": "a.json"}]}}', "no json", pytest.param("[" * 200_000, id="deep")]
)
def test_a_malformed_list_of_sources_is_one_line(tmp_path: Path, text: str):
    (tmp_path / "sources.json").write_text(text)
    with pytest.raises(ShopGymError, match=r"sources\.json: not a list of sources"):
        read_sources(tmp_path / "sources.json", "full")


@pytest.mark.parametrize("files", [[], {}, {"name": "a.json"}, "a.json", None])
def test_a_set_that_lists_no_file_is_refused(tmp_path: Path, files: Any, capsys):
    (tmp_path / "sources.json").write_text(json.dumps({"sets": {"full": files}}))
    assert FETCH.main([str(tmp_path / "data"), "--sources", str(tmp_path / "sources.json")]) == 2
    assert "set 'full' must be a list of at least one file" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_record_of_fetches_that_cannot_be_read_is_one_line(tmp_path: Path, server: Any, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / LOCK_NAME).write_text("[" * 200_000)
    assert fetch(tmp_path, server) == 2
    err = capsys.readouterr().err
    assert f"{LOCK_NAME}: not JSON" in err and err.count("\n") == 1 and not server.requests


def test_a_fetched_directory_opens(tmp_path: Path, folder: Path, server: Any):
    server.content = (folder / "items_shuffle.json").read_bytes()
    assert fetch(tmp_path, server) == 0
    for name in ("items_ins_v2.json", "name_nouns.json"):
        shutil.copy(folder / name, tmp_path / "data" / name)
    assert len(open_shop(tmp_path / "data").products) == 23
