"""The examples, run as a reader would; the endpoint is a small HTTP server of the tests."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from endpoint import Endpoint, serving

from rollout import load_batch

ROOT = Path(__file__).resolve().parents[2]


def run_example(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables,
    )


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as server:
        yield server


def test_a_function_shops_and_its_rollout_is_saved(tmp_path) -> None:
    done = run_example("scripted_agent", str(tmp_path / "r.parquet"))
    assert done.returncode == 0, done.stderr
    assert "won, score 1.000" in done.stdout
    batch = load_batch(tmp_path / "r.parquet")
    assert f"{len(batch)} steps saved" in done.stdout
    assert batch.action_possible.all() and batch.terminated.all()


def test_a_model_behind_an_endpoint_plays(endpoint, tmp_path) -> None:
    done = run_example(
        "openai_agent", "--base-url", endpoint.base_url, "--model", "shopper", "--goals", "6",
        "--out", str(tmp_path / "r.parquet"), OPENAI_API_KEY="sk-test",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    batch = load_batch(tmp_path / "r.parquet")
    assert "<think>let me see — yes</think>" in done.stdout
    assert batch.format_valid.all() and batch.won.any()
    assert len(endpoint.seen) == len(batch) + 1, "the refused request was sent again"
    assert endpoint.keys == {"Bearer sk-test"}
    assert {(body["temperature"], body["max_tokens"]) for body in endpoint.seen} == {(0.4, 512)}
    # Each step of an episode has its own seed.
    assert len({body["seed"] for body in endpoint.seen}) == len(batch)


def test_what_the_endpoint_refuses_is_said_in_one_line(endpoint) -> None:
    done = run_example("openai_agent", "--base-url", endpoint.base_url, "--model", "other", "--goals", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert 'HTTP 404: {"error": "no model other"}' in done.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("one_episode", ["abc"], "argument goal_index: invalid int value: 'abc'"),
        ("one_episode", ["999999"], "error: goal_index must be in 0 to"),
        ("one_episode", ["-1"], "error: goal_index must be in 0 to"),
        ("scripted_agent", ["FILE/r.parquet"], "FILE/r.parquet cannot be written"),
        ("openai_agent", ["--out", "FILE/r.parquet"], "error: --out: FILE cannot be written"),
        ("openai_agent", ["--out", "."], "error: --out: . is a directory; name a file"),
        *(
            ("openai_agent", [option, word], f"argument {option}: must be a {kind}, got {word}")
            for option, word, kind in (
                ("--parallel", "0", "whole number of at least 1"),
                ("--goals", "0", "whole number of at least 1"),
                ("--max-tokens", "0", "whole number of at least 1"),
                ("--max-tokens", "-5", "whole number of at least 1"),
                ("--temperature", "nan", "number of at least 0"),
                ("--temperature", "-1", "number of at least 0"),
            )
        ),
    ],
)
def test_a_callers_mistake_is_told_before_anything_is_asked(
    name, arguments, message, endpoint, tmp_path, monkeypatch, capsys
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    if name == "openai_agent":
        arguments = ["--base-url", endpoint.base_url, "--model", "shopper", *arguments]
    monkeypatch.setattr(sys, "argv", [name, *(word.replace("FILE", str(file)) for word in arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message.replace("FILE", str(file)) in said.splitlines()[-1]
    assert not endpoint.seen and [path.name for path in tmp_path.iterdir()] == ["file"]
