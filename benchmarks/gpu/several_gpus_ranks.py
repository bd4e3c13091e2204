"""What the ranks of `several_gpus.py` do, which starts them: python several_gpus_ranks.py QUESTION JSON-OF-ARGUMENTS.

The first rank writes the answer as JSON to the file that the arguments call `answer`. `train key=value ...` is the
training command, with advantages that are drawn: a random policy earns nothing, and there would be nothing to learn.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from rollout.types import StepBatch, ragged
from trainers.actor import Actor, ActorConfig
from trainers.checkpoint import RunState, restore, save_checkpoint
from trainers.command import run_command
from trainers.losses import LossConfig
from trainers.models import load_model, load_tokenizer
from trainers.ranks import Ranks, joined_ranks, leave_process
from trainers.sharding import ShardingConfig, checkpoint_layers

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where bench_vllm.py is

from bench_vllm import make_policy, rows_of

LEARNING_RATE = 1e-4
"""Large enough for an optimizer step to show in the next loss."""
AS_PUBLISHED = {"mini_batch_size": 32, "micro_batch_size": 8, "max_tokens": 36_864}
SMALL = {"mini_batch_size": 10_000, "micro_batch_size": 2, "sharding": ShardingConfig(dtype="float32")}
"""Micro-batches so small that ranks have unlike numbers of them; float32, so that equal means equal."""


def policy(arguments: Mapping[str, Any]) -> None:
    """Random weights of a shape."""
    make_policy(Path(arguments["folder"]), arguments["shape"])


def train(words: list[str]) -> None:
    """The training command; after the advantages were computed, others take their place."""
    from trainers import gigpo_fsdp

    compute = gigpo_fsdp.with_advantages

    def drawn(batch: StepBatch, config: Any) -> StepBatch:
        batch, rng = compute(batch, config), np.random.default_rng(len(batch))
        return replace(batch, advantage=rng.normal(size=len(batch)).astype(np.float32))

    gigpo_fsdp.with_advantages = drawn
    run_command(lambda _: gigpo_fsdp.main(words))


def losses(arguments: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The same updates by one rank, by one rank with other micro-batches (what bfloat16 alone does), and by all.

    Every rank is that one rank, each on its own GPU, so that none waits for another.
    """
    num_rows, longest = arguments["num_rows"], arguments["longest"]
    updates = [made_up_rows(seed, num_rows, longest, arguments["vocab_size"]) for seed in range(arguments["updates"])]
    answer: dict[str, Any] = {"num_rows": num_rows, "tokens": [num_tokens(rows) for rows in updates]}
    before: list[StepBatch] = []
    for name, place, changes in (
        ("one_rank", alone(ranks), {}),
        ("one_rank_otherwise", alone(ranks), {"micro_batch_size": 3, "log_prob_micro_batch_size": 5}),
        ("all_ranks", ranks, {}),
    ):
        actor = open_actor(arguments["policy"], place, **(AS_PUBLISHED | changes))
        steps = []
        for number, rows in enumerate(updates):
            scored = actor.log_probs(rows)
            if name == "one_rank":  # the others get its log-probs as old ones, and as the reference's with some noise
                noise = np.random.default_rng(number)
                near = [row + noise.normal(0, 0.05, len(row)).astype(np.float32) for row in scored]
                before.append(replace(rows, old_log_probs=scored, ref_log_probs=ragged(near)))
            steps.append(step(actor, before[number], number))
            gap = np.concatenate(list(scored)) - np.concatenate(list(before[number].old_log_probs))
            steps[-1]["log_prob_gap_max_nats"] = float(np.abs(gap).max())
            say(ranks, f"losses: {name}, update {number}: {steps[-1]}")
        answer[name] = steps
        del actor
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return answer


def uneven(arguments: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Updates on fewer rows than ranks, and on numbers that ranks do not divide, by one rank and by all."""
    numbers = sorted({1, max(1, ranks.world - 1), ranks.world + 1, 2 * ranks.world + 1, 7, 13})
    answer: dict[str, Any] = {"rows": numbers}
    for name, place in (("one_rank", alone(ranks)), ("all_ranks", ranks)):
        actor = open_actor(arguments["policy"], place, **SMALL)
        answer[name] = []
        for number in numbers:
            rows = made_up_rows(number, number, 200, arguments["vocab_size"])
            answer[name].append(step(actor, replace(rows, old_log_probs=actor.log_probs(rows)), number))
            say(ranks, f"uneven: {name}, {number} rows: {answer[name][-1]}")
    return answer


def save(arguments: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """One update, a checkpoint in either format, two updates more."""
    actor = open_actor(arguments["policy"], ranks, **SMALL)
    learn_again(actor, arguments, [0])
    for kind in ("sharded", "full"):
        save_checkpoint(
            Path(arguments["folder"]) / kind,
            actor,
            RunState(updates_done=1),
            tokenizer=load_tokenizer(arguments["policy"]),
            made={},
            checkpoint_format=kind,
        )
    return {"ranks": ranks.world, "updates": learn_again(actor, arguments, [1, 2])}


def resume(arguments: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The two updates after a checkpoint of either format."""
    answer: dict[str, Any] = {"ranks": ranks.world}
    for kind in ("sharded", "full"):
        actor = open_actor(arguments["policy"], ranks, **SMALL)
        restore(Path(arguments["folder"]) / kind / "checkpoints" / "update_000001", actor)
        answer[kind] = learn_again(actor, arguments, [1, 2])
    return answer


def learn_again(actor: Actor, arguments: Mapping[str, Any], numbers: list[int]) -> list[dict[str, float]]:
    """Updates on rows that their number names; the loss of the second tells whether the moments were right."""
    found = []
    for number in numbers:
        rows = made_up_rows(number, 21, 200, arguments["vocab_size"])
        found.append(step(actor, replace(rows, old_log_probs=actor.log_probs(rows)), number))
    return found


def step(actor: Actor, rows: StepBatch, number: int) -> dict[str, float]:
    metrics = actor.update(rows, update=number)
    return {name: metrics[f"actor/{name}"] for name in ("loss", "grad_norm", "optimizer_steps", "entropy_nats")}


def open_actor(path: str, ranks: Ranks, **changes: Any) -> Actor:
    model = load_model(path)
    checkpoint_layers(model)
    fields: dict[str, Any] = {"lr": LEARNING_RATE} | changes
    if "sharding" in changes:
        fields["loss"] = LossConfig(use_kl_loss=False)
    return Actor(model, ranks, ActorConfig(**fields), pad_id=0)


def alone(ranks: Ranks) -> Ranks:
    """This rank as if there were no other."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world, 1), mesh_dim_names=("all", "alone"))["alone"]
    return Ranks(0, 1, ranks.device, mesh)


def made_up_rows(seed: int, num: int, longest: int, vocab_size: int) -> StepBatch:
    """Rows of random tokens with the lengths of a shop's: prompts of a quarter to all of the room, replies of half a
    tenth to a fifth of it."""
    rng = np.random.default_rng((11, seed))

    def texts(shortest: float, most: float) -> np.ndarray:
        lengths = rng.integers(max(1, int(longest * shortest)), int(longest * most) + 1, num)
        return ragged([rng.integers(0, vocab_size, length).astype(np.int32) for length in lengths])

    prompts, replies = texts(0.2, 0.8), texts(0.02, 0.2)
    return replace(
        rows_of(prompts, replies, ragged([np.zeros(len(reply), np.float32) for reply in replies])),
        row_weight=np.ones(num, np.float32),
        advantage=rng.normal(size=num).astype(np.float32),
    )


def num_tokens(rows: StepBatch) -> int:
    return sum(len(row) for column in (rows.prompt_ids, rows.reply_ids) for row in column)


def say(ranks: Ranks, text: str) -> None:
    if ranks.is_first:
        print(text, flush=True)


QUESTIONS = {"losses": losses, "uneven": uneven, "save": save, "resume": resume}


def main(question: str, arguments: Mapping[str, Any]) -> None:
    if question == "policy":
        policy(arguments)
        return
    with joined_ranks(arguments["device"]) as ranks:
        say(ranks, f"{question} on {ranks.world} ranks, {ranks.device.type}")
        answer = QUESTIONS[question](arguments, ranks)
        if ranks.is_first:
            Path(arguments["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    leave_process()


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2:])
    else:
        main(sys.argv[1], json.loads(sys.argv[2]))
