"""Benchmarks run at a small size: their tables come out and their figures are those of something that happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_benchmark(tmp_path: Path, script: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a benchmark prints and what it writes."""
    out = tmp_path / "result.json"
    command = (sys.executable, f"benchmarks/{script}", *arguments, "--out", str(out))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(out.read_text())


def test_environments(tmp_path: Path) -> None:
    printed, result = run_benchmark(tmp_path, "bench_env.py", "--small")
    assert "| WebShop-v1, warm |" in printed and "| the original | 44.3 |" in printed
    for version in ("v0", "v1"):
        measured = result["steps"][version]
        assert measured["num_sessions"] == 10 and measured["num_steps"] > 40
        assert measured["warm"]["ms"].keys() >= {"search", "item or option", "buy", "reset"}
        assert measured["warm"]["steps_per_s"] > 44.3, "slower than the original"
    assert [row["num_envs"] for row in result["memory"]] == [1, 64]
    assert len(result["workers"]["pss_bytes"]) == 2


def test_advantages(tmp_path: Path) -> None:
    arguments = ("--rows", "120", "300", "--groups", "1", "--repeats", "2")
    printed, result = run_benchmark(tmp_path, "bench_advantages.py", *arguments)
    assert "| gigpo | 300 |" in printed and "| reinforce++ | 120 |" in printed
    assert [row["num_rows"] for row in result["times"]] == [120, 300] * 4
    assert all(row["s"]["mean"] > 0 for row in result["times"])
    assert 1 < result["similarity"]["num_clusters"] <= result["similarity"]["num_pages"] <= 120
