"""How the data commands end: by a full disk, an early reader or Ctrl-C, never with a traceback or half a catalogue."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data import files, generate, generate_large
from webshop_env.cache import write_whole
from webshop_env.datatools import build
from webshop_env.datatools.build import BUILD
from webshop_env.datatools.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
GENERATORS = pytest.mark.parametrize(
    ("main", "options"),
    [(generate.main, ["--products", "300", "--no-nouns"]), (generate_large.main, ["--products", "300"])],
    ids=["embedded", "large"],
)
COMMANDS = {
    "help": ["webshop_env.cli", "--help"],
    "describe": ["webshop_env.cli", "describe"],
    "check": ["webshop_env.cli", "data", "check"],
    "build": ["webshop_env.cli", "data", "build", "--no-nouns"],
    "generate": ["data.generate", "--no-nouns", "--products", "30", "--out", "OUT"],
    "generate_large": ["data.generate_large", "--products", "30", "--out", "OUT"],
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOPGYM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file can be longer than 20 KiB; to a writer it looks like a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 10, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def start(command: list[str], out: Path, **pipes: object) -> subprocess.Popen[bytes]:
    words = [str(out) if word == "OUT" else word for word in command]
    return subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stderr=subprocess.PIPE, **pipes)


@GENERATORS
def test_a_full_disk_leaves_nothing(main, options, tmp_path, small_disk, capsys):
    assert main(["--out", str(tmp_path / "a" / "b"), *options]) == 2
    err = capsys.readouterr().err
    assert err == f"error: --out {tmp_path / 'a' / 'b'}: cannot be written (File too large); name another\n"
    assert list(tmp_path.iterdir()) == []


@GENERATORS
def test_a_folder_in_a_files_place_leaves_nothing(main, options, tmp_path, capsys):
    (tmp_path / "manifest.json").mkdir()
    assert main(["--out", str(tmp_path), *options]) == 2
    err = capsys.readouterr().err
    assert "manifest.json is a folder there" in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_files_of_before_stay_when_new_ones_fail(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(RuntimeError), files.new_files(tmp_path, ["a", "b"]) as scratch:
        (scratch / "a").write_text("new")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_a_file_of_the_cache_is_whole_or_not_there(tmp_path, small_disk):
    with pytest.raises(OSError, match="File too large"):
        write_whole(tmp_path / "nouns.json", "x" * (30 << 10))
    assert list(tmp_path.iterdir()) == []
    write_whole(tmp_path / "nouns.json", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["nouns.json"]


def test_ctrl_c_when_a_file_of_the_cache_has_just_got_its_name_is_ctrl_c(tmp_path, monkeypatch):
    real_replace = os.replace

    def replace_then_stop(source: str, target: Path) -> None:
        real_replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr("webshop_env.cache.os.replace", replace_then_stop)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "nouns.json", "x")


def test_a_full_disk_under_the_cache_is_named(cache, small_disk, capsys):
    assert BUILD.main(["--no-nouns"]) == 2
    err = capsys.readouterr().err
    assert err == f"error: {cache}: cannot be written (File too large); set SHOPGYM_CACHE to a writable directory\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_has_seen_enough_is_no_error(name, unbuffered, tmp_path, cache):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with start(COMMANDS[name], tmp_path / "out", stdout=subprocess.PIPE, env=environment) as running:
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 0
    if name == "build":
        assert list(cache.glob("*/bm25-v1.index")), "the work goes on without its reader"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it stands for a full disk")
@pytest.mark.parametrize("name", ["describe", "build"])
def test_an_output_that_cannot_be_written_is_named(name, tmp_path):
    with Path("/dev/full").open("wb") as full, start(COMMANDS[name], tmp_path / "out", stdout=full) as running:
        err = running.stderr.read().decode()
    assert err == "error: standard output: cannot be written (No space left on device); send it elsewhere\n"
    assert running.returncode == 2


def test_progress_goes_on_when_nobody_looks(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as gone, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", gone)
        with Progress("label", 10) as progress:
            progress._next_s = 0.0
            progress(5)
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # what is in its buffer goes there


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("main", "options", "module", "step"),
    [
        (generate.main, ["--products", "30", "--no-nouns", "--out"], generate, "to_json_lines"),
        (generate_large.main, ["--products", "30", "--out"], generate_large._Draft, "human"),
        (BUILD.main, ["--no-nouns"], build, "write_products"),
    ],
    ids=["embedded", "large", "build"],
)
def test_ctrl_c_is_one_word_and_leaves_nothing(main, options, module, step, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, step, stop)
    out = [str(tmp_path / "out")] if options[-1] == "--out" else []
    try:
        code = main([*options, *out])
    except KeyboardInterrupt:  # would end pytest, too
        code = None
    assert (code, capsys.readouterr().err) == (130, "stopped\n")
    assert not (tmp_path / "out").exists() and not list(tmp_path.rglob("*.t*"))


def test_ctrl_c_in_a_process_of_its_own(tmp_path):
    command = ["data.generate_large", "--products", "1000000", "--out", "OUT"]
    with start(command, tmp_path / "out", stdout=subprocess.PIPE) as running:
        until = time.monotonic() + 60
        while not list(tmp_path.glob("out/.new-*/items_shuffle_*")) and time.monotonic() < until:
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        assert running.stderr.read() == b"stopped\n"
    assert running.returncode == 130 and not (tmp_path / "out").exists()
