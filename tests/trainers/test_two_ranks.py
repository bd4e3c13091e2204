"""Two ranks with unequal work, faults of one of them, and each other's checkpoints, against one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from small_rows import rows
from two_ranks import learn_unevenly, new_actor, weights

from trainers.checkpoint import RunState, restore, save_checkpoint
from trainers.models import make_small_policy, save_policy, train_tokenizer
from trainers.ranks import start_ranks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass
class Outcome:
    folder: Path
    found: dict
    arrays: dict[str, np.ndarray]
    one_rank: dict[str, np.ndarray]
    resumed: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Outcome:
    """What two ranks found, and what one rank makes of the same rows."""
    folder = tmp_path_factory.mktemp("two_ranks")
    tokenizer = train_tokenizer(["click[buy now] search[red mug]"] * 5, 300)
    model = make_small_policy(tokenizer, hidden=16, layers=2, heads=2)
    save_policy(folder / "policy", config=model.config, state_dict=model.state_dict(), tokenizer=tokenizer, made={})
    actor = new_actor(folder, start_ranks())
    learn_unevenly(actor)
    for kind in ("full", "sharded"):
        state = RunState(updates_done=1)
        save_checkpoint(folder / f"one_{kind}", actor, state, tokenizer=tokenizer, made={}, checkpoint_format=kind)
    one_rank = weights(actor)
    actor.update(rows(9))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    paths = os.pathsep.join(map(str, (ROOT, HERE, HERE.parent)))
    done = subprocess.run(
        [*command, str(HERE / "two_ranks.py"), str(folder)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "found.json").read_text())
    assert found["world"] == 2
    return Outcome(folder, found, dict(np.load(folder / "found.npz")), one_rank, weights(actor))


def require_close(outcome: Outcome, what: str, expected: dict[str, np.ndarray]) -> None:
    """Up to rounding, but for the biases of keys: they shift all scores alike, and AdamW learns from noise alone."""
    for name, array in expected.items():
        if not name.endswith("k_proj.bias"):
            assert np.abs(outcome.arrays[f"{what}/{name}"] - array).max() < 1e-5, name


def test_ranks_with_few_rows_or_none_wait_for_nobody_and_learn_the_same(outcome):
    require_close(outcome, "uneven", outcome.one_rank)
    expected = np.concatenate(list(new_actor(outcome.folder, start_ranks()).log_probs(rows(5, 1))))
    for log_probs in outcome.found["log_probs"]:
        assert log_probs == pytest.approx(expected.tolist(), abs=1e-5)
    first, second = outcome.found["metrics"]
    assert first == second
    assert first["actor/optimizer_steps"] == 1


def test_offloaded_ranks_learn_the_same(outcome):
    require_close(outcome, "offloaded", outcome.one_rank)


def test_a_loss_that_is_no_number_on_one_rank_is_skipped_on_both(outcome):
    assert outcome.found["skipped"] == [1.0, 1.0]
    assert outcome.found["stopped"] == ["2 optimizer steps in a row had a loss or a gradient that is not finite"] * 2
    require_close(outcome, "after_skips", outcome.one_rank)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_two_ranks_go_on_from_the_checkpoint_of_one(outcome, kind):
    require_close(outcome, f"resumed_{kind}", outcome.resumed)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_one_rank_goes_on_from_the_checkpoint_of_two(outcome, kind):
    actor = new_actor(outcome.folder, start_ranks())
    restore(outcome.folder / f"two_{kind}" / "checkpoints" / "update_000001", actor)
    actor.update(rows(9))
    got = weights(actor)
    for name, expected in outcome.resumed.items():
        if not name.endswith("k_proj.bias"):
            assert np.abs(got[name] - expected).max() < 1e-5, name


def test_each_rank_writes_its_own_shards(outcome):
    shards = outcome.folder / "two_sharded" / "checkpoints" / "update_000001" / "shards"
    assert sorted(path.name for path in shards.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_save_that_fails_on_one_rank_fails_on_both_with_its_reason(outcome, kind):
    first, second = outcome.found[f"unwritable_{kind}"]
    assert first == second
    assert "could not be written (rank 0: NotADirectoryError" in first


def test_an_environment_that_breaks_on_one_rank_is_told_by_both(outcome):
    assert outcome.found["broken_environment"] == ["the ice is thin"] * 2


def test_what_one_rank_cannot_write_is_not_left_half_written(outcome):
    assert outcome.found["write_error"] == ["rank 1: OSError: [Errno 28] No space left on device"] * 2
    (whole,) = (outcome.folder / "together").iterdir()
    assert sorted(path.name for path in whole.iterdir()) == ["rank_0", "rank_1"]
