"""Environments that are no shops are trained by the same command as shops are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from env_manager import EnvConfig, EnvManager
from trainers.models import make_small_policy, save_policy, train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 2


def make_policy(directory: Path, env_name: str) -> Path:
    """A random policy with a tokenizer that knows the words of the environment's first pages."""
    manager = EnvManager(env_name, 4, EnvConfig(prompt="no_think"))
    pages = manager.reset([1500, 1501], group_size=2)
    tokenizer = train_tokenizer([*pages.prompts, *(f"<action>{a}</action>" for a in pages.admissible[0])], 500)
    model = make_small_policy(tokenizer, hidden=32, layers=2, heads=2)
    made = {"environment": env_name, "prompt_template_hash": manager.prompt_hash}
    save_policy(directory, config=model.config, state_dict=model.state_dict(), tokenizer=tokenizer, made=made)
    manager.close()
    return directory


def train(env_name: str, directory: Path, *words: str, path: str = "") -> list[dict[str, float]]:
    """Lines of metrics of a short run of the FrozenLake recipe on the named environment."""
    policy = make_policy(directory / "policy", env_name)
    command = [
        *(sys.executable, "trainers/gigpo_fsdp.py", "recipe=frozenlake", f"env.env_name={env_name}"),
        *(f"actor_rollout_ref.model.path={policy}", f"trainer.output_dir={directory / 'run'}"),
        *(f"trainer.total_updates={UPDATES}", "trainer.logger=[console]", "env.rollout.n=4"),
        *("data.train_batch_size=2", "data.val_batch_size=3", "actor_rollout_ref.actor.optim.lr=0.001"),
        *words,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), path)))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_frozen_lake_is_trained_in(tmp_path: Path) -> None:
    lines = train("FrozenLake-v1", tmp_path, "env.max_steps=20", "env.memory=full", "env.memory_tokens=60")
    updates = [line for line in lines if "actor/loss" in line]
    assert [line["rollout/num_episodes"] for line in updates] == [8.0] * UPDATES
    assert all(line["actor/engine_gap_max_nats"] < 1e-4 for line in updates)
    # Holes end an episode, so that steps differ in number: there is something to learn from, or the lake was crossed.
    assert all(1 < line["rollout/episode_length_steps"] < 20 for line in updates)
    validations = [line for line in lines if "validation/success_frac" in line]
    assert [line["validation/num_goals"] for line in validations] == [3.0, 3.0]
