"""Environments that are no shops are trained in by the same command as shops are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from taught_policy import make_taught_policy

ROOT = Path(__file__).resolve().parents[2]
SAFE_PATH = ("down", "down", "right", "right", "down", "right")


def test_a_frozen_lake_is_trained_in(tmp_path: Path) -> None:
    policy = make_taught_policy(tmp_path / "policy", "FrozenLake-v1", {0: SAFE_PATH}, until=0.1)
    command = [
        *(sys.executable, "trainers/gigpo_fsdp.py", "recipe=frozenlake", "trainer.logger=[console]"),
        *(f"actor_rollout_ref.model.path={policy}", f"trainer.output_dir={tmp_path / 'run'}"),
        *("trainer.total_updates=2", "env.rollout.n=8", "data.train_batch_size=2", "data.val_batch_size=20"),
        *("env.memory=full", "env.memory_tokens=60", "actor_rollout_ref.actor.optim.lr=0.0003"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "rollout/num_episodes" in line]
    assert [line["rollout/num_episodes"] for line in updates] == [16.0, 16.0]
    assert any(0 < line["rollout/success_frac"] < 1 and line["actor/grad_norm"] > 1e-3 for line in updates)
    assert all(line["actor/engine_gap_max_nats"] < 1e-4 for line in updates if "actor/loss" in line)
    validations = [line for line in lines if "validation/success_frac" in line]
    assert [line["validation/num_goals"] for line in validations] == [20.0, 20.0]
