"""Weights & Biases without a network: what a run logs lies in its directory, and a run that goes on stays one run."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from extra import require_extra

from trainers.boards import require_boards
from trainers.settings import SettingsError

require_extra("wandb", "wandb")

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 32768
WHOLE_OR_LAST = (1, 4)


def train(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    command = [sys.executable, "trainers/gigpo_fsdp.py", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=230)


def logged(file: Path) -> list[dict]:
    """The lines of metrics in W&B's own file: records in LevelDB's log format, behind seven bytes of a head."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, lines = file.read_bytes(), 7, b"", []
    while at < len(data):
        left_in_block = BLOCK - at % BLOCK
        if left_in_block < 7:
            at += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in WHOLE_OR_LAST:
            record, parts = Record.FromString(parts), b""
            found = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
            if found:
                lines.append({key: value for key, value in found.items() if not key.startswith("_")})
    return lines


@pytest.mark.timeout(500)  # of two runs
def test_a_run_is_logged_offline_and_goes_on_as_the_same_run(tmp_path):
    run = tmp_path / "run"
    words = [
        *("trainer.logger=[console,wandb]", "trainer.total_updates=1", "trainer.experiment_name=first"),
        *("data.train_batch_size=2", "env.rollout.n=2", "data.val_batch_size=2", "env.max_steps=4"),
    ]
    done = train(*words, f"trainer.output_dir={run}")
    assert done.returncode == 0, done.stderr[-3000:]
    done = train(f"trainer.resume_from={run}", "trainer.total_updates=2")
    assert done.returncode == 0, done.stderr[-3000:]
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert {file.stem for file in files} == {f"run-{(run / 'wandb_run_id.txt').read_text().strip()}"}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line for file in files for line in logged(file)] == metrics
    assert [line["update"] for line in metrics] == [0, 1, 1, 2, 2]


def test_no_account_is_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(SettingsError, match=r"trainer\.logger: wandb: .* set WANDB_MODE=offline") as caught:
        require_boards(("wandb",), is_first=True)
    assert "\n" not in str(caught.value)
