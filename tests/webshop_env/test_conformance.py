"""WebShop-v0 is the published benchmark, and the tool that says so would notice if it were not."""

from __future__ import annotations

import gzip
import json

from webshop_env.conformance import _CHECKS, main, read_records, replay
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
