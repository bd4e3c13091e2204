"""The benchmark of search runs, on a small catalogue, and tells of all that it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from webshop_env.shop import EMBEDDED_CATALOGUE

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_benchmark_runs_on_the_embedded_catalogue(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    small = ("--num-queries", "5", "--repeats", "1", "--no-lucene")
    command = [sys.executable, "benchmarks/bench_search.py", str(EMBEDDED_CATALOGUE), *small, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads(out.read_text())["catalogues"]
    assert figures["num_products"] == 1000 and figures["num_postings"] > figures["num_terms"] > 500
    assert figures.keys() >= {"build_s", "build_peak_mb", "open_ms", "resident_mb"}
    assert set(figures["queries"]) == {"words of a title", "instructions", "common words"}
    for times in figures["queries"].values():
        assert times["num_queries"] > 0 and 0 < times["ours_p50_ms"] <= times["ours_p99_ms"]
    assert "| catalogue | products |" in done.stdout and "| 1,000 | instructions |" in done.stdout
