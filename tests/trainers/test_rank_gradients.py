"""The gradient of a mini-batch is the same on one process and on two, which hold uneven numbers of its rows.

Run as a script, on any number of processes, this file writes the gradients down.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from small_rows import rows

from rollout.types import ragged
from trainers import sharding
from trainers.actor import Actor, ActorConfig, UpdateTotals
from trainers.losses import LossConfig
from trainers.models import make_small_policy, train_tokenizer
from trainers.ranks import joined_ranks, leave_process, start_ranks

ROOT = Path(__file__).resolve().parents[2]


def gradients() -> dict[str, torch.Tensor]:
    """Of seven rows of unlike lengths, with every term of the loss, for each way to average tokens; summed up on each
    rank before they are exchanged, too."""
    found = summed("", memory_bytes=0)
    return found | summed("whole ", memory_bytes=10**9)


def summed(name: str, *, memory_bytes: int) -> dict[str, torch.Tensor]:
    tokenizer = train_tokenizer(["click[buy now] search[red mug]"] * 5, 300)
    rng, batch = np.random.default_rng(0), rows(0, num=7)
    batch.reply_ids = ragged([rng.integers(2, 200, length).astype(np.int32) for length in (1, 9, 3, 3, 6, 2, 4)])
    for column in ("rollout_log_probs", "old_log_probs", "ref_log_probs"):
        setattr(batch, column, ragged([-5 - rng.random(len(row), dtype=np.float32) for row in batch.reply_ids]))
    found, of_machine = {}, sharding.memory_of
    sharding.memory_of = lambda device: memory_bytes
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        loss = LossConfig(loss_agg_mode=mode, entropy_coeff=0.1, kl_loss_coef=0.5, tis_imp_ratio_cap=1.5)
        model = make_small_policy(tokenizer, hidden=32, layers=2, heads=2).requires_grad_(True)
        actor = Actor(model, start_ranks("cpu"), ActorConfig(micro_batch_size=2, loss=loss), pad_id=0)
        actor.accumulate_gradients(batch, UpdateTotals())
        for weight, parameter in actor.scorer.named_parameters():
            found[f"{name}{mode} {weight}"] = parameter.grad.full_tensor().clone()
    sharding.memory_of = of_machine
    return found


def test_gradients_do_not_depend_on_the_number_of_ranks(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    done = subprocess.run(
        [sys.executable, *launcher, __file__, str(tmp_path / "gradients.pt")],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two, one = torch.load(tmp_path / "gradients.pt"), gradients()
    assert one.keys() == two.keys()
    assert max(float(grad.abs().max()) for grad in one.values()) > 1e-2
    for name, grad in one.items():
        assert torch.allclose(two[name], grad, atol=1e-6, rtol=1e-5), name
        assert torch.allclose(two[name.removeprefix("whole ")], grad, atol=1e-6, rtol=1e-5), name


if __name__ == "__main__":
    written = gradients()
    with joined_ranks("cpu") as ranks:
        if ranks.is_first:
            torch.save(written, sys.argv[1])
    leave_process()
