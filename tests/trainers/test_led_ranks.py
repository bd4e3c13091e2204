"""Ranks that share an engine: all play as one process does, with as many engines as there are leaders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from led_ranks import Part, play, rows_of

from trainers.ranks import start_ranks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_four_ranks_with_two_engines_play_what_one_process_plays(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    done = subprocess.run(
        [*command, str(HERE / "led_ranks.py"), str(tmp_path / "found.json")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE))), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["rows"]) == ["0,1,2", "1", "0,1,2,3"]
    for goals, rows in found["rows"].items():
        assert rows == rows_of(play(Part(), start_ranks("cpu"), [int(goal) for goal in goals.split(",")]))
    for leader, follower, other_leader, other_follower in found["calls"]:
        assert leader == follower > other_leader == other_follower > 0, "a group goes to the first engine, none waits"
    assert found["refusals"] == ["a prompt is too long"] * 4, "every rank says why, those that follow too"
    assert found["after"] == found["rows"]["1"], "and all are where they were"
