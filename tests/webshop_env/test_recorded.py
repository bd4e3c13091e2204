"""The embedded catalogue's own recorded episodes, for everybody who has no recordings of the original."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from record_episodes import RECORDED, as_lines

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_episodes_are_the_recorded_ones_byte_for_byte(version: str):
    recorded = (RECORDED / f"{version}.jsonl").read_text(encoding="ascii")
    for got, expected in zip(as_lines(version).splitlines(), recorded.splitlines(), strict=True):
        if got != expected:  # A whole line says little: show the first step that differs.
            assert json.loads(got)["steps"] == json.loads(expected)["steps"]
        assert got == expected


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_the_recordings_hold_every_kind_of_page_and_of_end(version: str):
    lines = (RECORDED / f"{version}.jsonl").read_text(encoding="ascii").splitlines()
    episodes = [json.loads(line) for line in lines]
    steps = [step for episode in episodes for step in episode["steps"]]
    assert {episode["policy"] for episode in episodes} == {"oracle", "random", "odd", "drawn"}
    assert {episode["goals"] for episode in episodes} == {"synthetic", "human"}
    for part in ("/search_results/", "/item_page/", "/item_sub_page/", "/done/"):
        assert any(part in step["url"] for step in steps), part
    assert any(step["truncated"] for step in steps) and any(step["reason"] for step in steps)
    wins = [e["steps"][-1]["reward"] == 1.0 for e in episodes if (e["policy"], e["goals"]) == ("oracle", "synthetic")]
    assert wins == [True] * 3 if version == "v1" else any(wins)


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_no_process_has_episodes_of_its_own(hash_seed: str):
    """Other hash seeds, and global generators that raise when anyone reads, writes or seeds them."""
    code = """
import random, sys
sys.path[:0] = sys.argv[1:]
import numpy as np
import record_episodes, webshop_env
states = random.getstate(), np.random.get_state()

def poison(*args, **kwargs):
    raise AssertionError("global random state was touched")

for module in (random, np.random):
    for name in ("seed", "random", "uniform", "choice", "choices", "sample", "shuffle", "randint", "getrandbits",
                 "rand", "randn", "permutation", "setstate", "set_state", "getstate", "get_state"):
        if hasattr(module, name):
            setattr(module, "was_" + name, getattr(module, name))
            setattr(module, name, poison)
for version in ("v0", "v1"):
    recorded = (record_episodes.RECORDED / f"{version}.jsonl").read_text()
    assert record_episodes.as_lines(version) == recorded, version
assert random.was_getstate() == states[0]
after = np.random.was_get_state()
assert all(np.array_equal(x, y) for x, y in zip(after, states[1], strict=True))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(ROOT / "tests" / "webshop_env")],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
