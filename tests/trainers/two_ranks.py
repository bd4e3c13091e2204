"""Run by torchrun on two ranks: what `test_two_ranks.py` compares with one rank. Arguments: a folder to work in.

The first rank writes `found.json` and `found.npz`; each rank's share of an answer is gathered there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from small_rows import rows

from env_manager import EnvConfig, EnvManager
from rollout import SamplingParams, StepBatch, TrajectoryCollector
from rollout.engines.scripted import ScriptedPolicy
from trainers.actor import Actor, ActorConfig, NotFinite
from trainers.checkpoint import RunState, restore, save_checkpoint
from trainers.errors import TrainingError
from trainers.files import WriteError, write_together
from trainers.losses import LossConfig
from trainers.models import load_model, load_tokenizer
from trainers.ranks import Ranks, leave_process, start_ranks, stop_ranks
from trainers.rollouts import collect_over_ranks
from trainers.sharding import ShardingConfig
from webshop_env.errors import ShopGymError

UNEVEN = (1, 3, 2, 7)
"""Rows of mini-batches; with micro-batches of one row, ranks have 0 to 4 passes."""


def new_actor(folder: Path, ranks: Ranks, **changes) -> Actor:
    fields = {"lr": 1e-2, "micro_batch_size": 1, "max_nan_steps": 2, "loss": LossConfig(use_kl_loss=False)}
    config = ActorConfig(**(fields | changes))
    model = load_model(str(folder / "policy")).requires_grad_(True)
    return Actor(model, ranks, config, pad_id=0)


def learn_unevenly(actor: Actor) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for seed, num in enumerate(UNEVEN):
        metrics = actor.update(rows(seed, num))
    return metrics


def spoilt(num: int) -> StepBatch:
    """Rows of which the last one's advantage is no number; the one rank that gets it sees it first."""
    batch = rows(0, num)
    batch.advantage[-1] = np.nan
    return batch


def weights(actor: Actor) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in actor.full_state_dict().items()}


def play_where_the_second_breaks(ranks: Ranks) -> StepBatch:
    manager = EnvManager("FrozenLake-v1", 1, EnvConfig(prompt="no_think", max_steps=2))
    if ranks.rank == 1:

        def broken(actions: object) -> None:
            raise ShopGymError("the ice is thin")

        manager.vector_env.step = broken
    policy = ScriptedPolicy(lambda prompt, admissible: "<action>left</action>")
    collector = TrajectoryCollector(manager)
    params = SamplingParams(max_tokens=64)
    return collect_over_ranks(collector, policy, np.arange(2), params, ranks, group_size=1, update=0, seed=0)


def main(folder: Path) -> None:
    ranks = start_ranks()
    arrays: dict[str, dict[str, np.ndarray]] = {}
    found: dict[str, object] = {"world": ranks.world}

    actor = new_actor(folder, ranks)
    found["log_probs"] = ranks.gather(np.concatenate(list(actor.log_probs(rows(5, 1)))).tolist())
    found["metrics"] = ranks.gather(learn_unevenly(actor))
    arrays["uneven"] = weights(actor)

    offloaded = new_actor(folder, ranks, sharding=ShardingConfig(param_offload=True), optimizer_offload=True)
    learn_unevenly(offloaded)
    arrays["offloaded"] = weights(offloaded)

    found["skipped"] = ranks.gather(actor.update(spoilt(2))["actor/skipped_steps"])
    found["stopped"] = ranks.gather(message(NotFinite, lambda: actor.update(spoilt(2))))
    arrays["after_skips"] = weights(actor)

    tokenizer = load_tokenizer(str(folder / "policy"))
    for checkpoint_format in ("full", "sharded"):
        actor = new_actor(folder, ranks)
        learn_unevenly(actor)
        run_dir = folder / f"two_{checkpoint_format}"

        def save(learner: Actor, updates: int, run_dir: Path = run_dir, kind: str = checkpoint_format) -> None:
            save_checkpoint(
                run_dir, learner, RunState(updates_done=updates), tokenizer=tokenizer, made={}, checkpoint_format=kind
            )

        save(actor, 1)
        resumed = new_actor(folder, ranks)
        restore(folder / f"one_{checkpoint_format}" / "checkpoints" / "update_000001", resumed)
        resumed.update(rows(9))
        arrays[f"resumed_{checkpoint_format}"] = weights(resumed)
        found[f"unwritable_{checkpoint_format}"] = ranks.gather(
            message(TrainingError, lambda save=save, actor=actor: save(actor, 2, run_dir=Path("/dev/null/run")))
        )

    def fail_on_the_second(scratch: Path) -> None:
        (scratch / f"rank_{ranks.rank}").write_text("here")
        if ranks.rank == 1:
            raise OSError(28, "No space left on device")

    found["write_error"] = ranks.gather(
        message(WriteError, lambda: write_together(folder / "together" / "target", ranks, fail_on_the_second))
    )
    found["broken_environment"] = ranks.gather(message(ShopGymError, lambda: play_where_the_second_breaks(ranks)))
    write_together(folder / "together" / "whole", ranks, lambda scratch: (scratch / f"rank_{ranks.rank}").touch())
    if ranks.is_first:
        (folder / "found.json").write_text(json.dumps(found))
        np.savez(
            folder / "found.npz",
            **{f"{what}/{name}": array for what, named in arrays.items() for name, array in named.items()},
        )
    ranks.barrier()
    stop_ranks()
    leave_process()


def message(kind: type[Exception], action: Callable[[], object]) -> str:
    """What the expected error says; another passes, none is told."""
    try:
        action()
    except kind as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
