"""WebShop-v0 is the published benchmark, and the tool that says so would notice if it were not."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import pytest

from webshop_env import conformance
from webshop_env.conformance import _CHECKS, main, read_records, replay
from webshop_env.shop import EMBEDDED_CATALOGUE
from webshop_env.text_env import WebShopTextEnv


def test_v0_replays_every_recording_of_the_original(reference_dir):
    report = replay(reference_dir / "golden", reference_dir / "webshop-1k")
    assert report.num_records["sessions"] > 1500 and report.num_records["human sessions"] > 30
    assert report.num_records["search"] > 100 and report.num_records["reward"] > 900
    assert report.differences == []
    # Nothing is sampled or left out: every file was replayed, and of those with one kind of record, every line.
    names = {path.name.removesuffix(".jsonl.gz") for path in (reference_dir / "golden").glob("*.jsonl.gz")}
    assert names == set(_CHECKS) and report.skipped == []
    for name in ("goals", "prices", "search", "doc_tokens", "reward", "projection"):
        assert report.num_records[name] == len(read_records(reference_dir / "golden" / f"{name}.jsonl.gz"))
    sessions = read_records(reference_dir / "golden" / "sessions.jsonl.gz")
    assert report.num_records["sessions"] == sum(1 + len(session["steps"]) for session in sessions)


def test_a_changed_recording_is_noticed_and_shown(reference_dir, tmp_path, capsys):
    with gzip.open(reference_dir / "golden" / "sessions.jsonl.gz", "rt") as lines:
        first = next(lines)
    with gzip.open(tmp_path / "sessions.jsonl.gz", "wt") as copy:
        copy.write(first.replace("Page 1 (Total", "Page 1 (total"))
    data = reference_dir / "webshop-1k"
    report = replay(tmp_path, data)
    assert {difference.field for difference in report.differences} == {"obs_text", "obs_rich", "returned"}
    assert main([str(tmp_path), "--data", str(data), "--show", "1"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("expected") == 1 and "Page 1 (total" in shown and "Page 1 (Total" in shown


def test_what_cannot_be_replayed_is_one_clear_line(tmp_path, capsys):
    assert main([str(tmp_path / "none"), "--data", str(tmp_path)]) == 2
    assert main([str(tmp_path), "--data", str(tmp_path)]) == 2
    (tmp_path / "sessions.jsonl.gz").write_text("no gzip")
    assert main([str(tmp_path), "--data", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    for line, part in zip(lines, ("no such directory", "none of goals, prices", "not a gzip'd file"), strict=True):
        assert part in line


def test_a_recorded_filter_is_replayed_by_what_it_kept(reference_dir, tmp_path):
    data = reference_dir / "webshop-1k"
    env = WebShopTextEnv(version="v0", data_dir=data, filter_goals=lambda place, goal: place % 700 == 3)
    kept = [[goal.asin, goal.options, goal.price_upper, goal.instruction_text] for goal in env.shop.goals]
    assert len(kept) == 10
    record = {"kind": "filter_goals", "preseed": 0, "goals": kept, "first_session": env.first_draw[1]}
    for goals, num_differences in ((kept, 0), (kept[::-1], 1)):
        with gzip.open(tmp_path / "construct.jsonl.gz", "wt") as lines:
            lines.write(json.dumps(record | {"goals": goals}) + "\n")
        report = replay(tmp_path, data)
        assert len(report.differences) == num_differences and report.skipped == []


PAGE = {"obs_text": "", "available_actions": {}, "url": ""}
SESSION = {"kind": "session", "session": 0, "instruction_text": "", "reset": PAGE, "steps": None}
REWARD = {"kind": "x", "asin": "B0PA24VA31", "options": {}, "price": 1.0, "goal_index": 0}


@pytest.mark.parametrize(
    ("name", "record", "what"),
    [
        ("goals", {"index": None}, "TypeError"),
        ("construct", {"kind": "construct", "n_goals": 1, "first_reset": {}}, "KeyError: 'session'"),
        ("construct", {"kind": "x"}, "unknown kind 'x'"),
        ("reward", REWARD | {"asin": "x"}, "KeyError: 'x'"),
        ("reward", REWARD | {"options": []}, "AttributeError"),
        ("reward", REWARD | {"goal_index": 10**9}, "goal_index must be in 0 to"),
        ("projection", {"text": None, "action": "", "valid": True}, "AttributeError"),
        ("human_mode", SESSION, "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_value_of_the_wrong_kind_names_file_and_line(tmp_path, capsys, name, record, what):
    path = tmp_path / f"{name}.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(record).encode()))
    assert main([str(tmp_path), "--data", str(EMBEDDED_CATALOGUE)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: line 1: ") and what in error and error.count("\n") == 1


def test_a_bug_before_the_first_record_is_not_blamed_on_the_recording(tmp_path, monkeypatch):
    (tmp_path / "search.jsonl.gz").write_bytes(gzip.compress(b'{"query": "lamp", "hits": []}'))
    monkeypatch.setattr(conformance, "open_shop", lambda *_, **__: {}["a bug"])
    with pytest.raises(KeyError, match="a bug"):
        replay(tmp_path, EMBEDDED_CATALOGUE)


WHOLE = gzip.compress(b'{"query": "lamp"}\n' * 100)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "holds no record"),
        (gzip.compress(b""), "holds no record"),
        (WHOLE[:10] + bytes([7]) + WHOLE[11:], "not a gzip'd file of JSON lines: Error -3 while decompressing"),
        (gzip.compress(b"{}\n" + b"[" * 100_000), "line 2: not JSON"),
    ],
    ids=["no bytes", "no lines", "damaged", "nested"],
)
def test_a_file_that_is_no_recording_is_one_clear_line(tmp_path, capsys, content, what):
    path = tmp_path / "search.jsonl.gz"
    path.write_bytes(content)
    assert main([str(tmp_path), "--data", str(EMBEDDED_CATALOGUE)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: {what}") and error.count("\n") == 1


def test_a_number_of_differences_to_show_is_none_below_0(tmp_path, capsys):
    assert main([str(tmp_path), "--data", str(tmp_path), "--show", "-1"]) == 2
    assert capsys.readouterr().err == "error: --show must be a whole number of at least 0, got -1\n"


def test_ctrl_c_is_one_word(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(conformance, "replay", interrupted)
    try:
        assert main([str(tmp_path), "--data", str(tmp_path)]) == 130
    except KeyboardInterrupt:  # it would end pytest
        pytest.fail("a traceback")
    assert capsys.readouterr() == ("", "stopped\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_the_exit_code_does_not_depend_on_who_reads(tmp_path, unbuffered):
    (tmp_path / "search.jsonl.gz").write_bytes(gzip.compress(b'{"query": "lamp", "hits": []}'))
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "webshop_env.conformance", str(tmp_path), "--data", str(EMBEDDED_CATALOGUE)],
            stdout=writing,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
