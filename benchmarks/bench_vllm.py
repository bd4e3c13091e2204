"""What does vLLM beside the actor cost? Tokens a second, weights, sleep and wake, the gap to the trainer.

    python benchmarks/bench_vllm.py               Qwen2.5-1.5B's shape, random weights, a GPU of 80 GB or more
    python benchmarks/bench_vllm.py --tiny        a smoke run, on a CPU as well

Prompts are random ids with a shared beginning, new ones for every repeat; no reply ends early. Between two cycles all
weights change a little, so that a sync that did nothing would show in the gap: after 20 of them they are 1.36 times as
large, the policy is surer of its tokens, and bfloat16 shows more. Whole updates, engine and actor in turn:
`gpu/update_speed.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from machine import describe_machine, place_of_result, run_script, write_result

from rollout import GenerationRequest, NoiseKey, SamplingParams, StepBatch
from rollout.engines.vllm import VLLMConfig, VLLMEngine
from rollout.engines.vllm_install import installed_vllm
from rollout.types import ragged
from trainers.actor import ShardedPolicy
from trainers.memory import memory_in_use
from trainers.mismatch import MismatchTotals
from trainers.models import load_model, load_tokenizer, save_policy
from trainers.ranks import start_ranks, stop_ranks

STAGES = ("sleep", "wake_weights", "sync", "wake_cache")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is."""

    model: dict[str, int]
    num_prompts: int = 128
    prompt_tokens: int = 800
    shared_tokens: int = 200
    new_tokens: int = 128
    repeats: int = 5
    cycles: int = 20
    gpu_memory_utilization: float = 0.5


QWEN = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 32_768,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 2_048, "max_position_embeddings": 4_096,
}  # fmt: skip
FULL = Size(model=QWEN)
TINY = Size(
    model=SMALL,
    num_prompts=8,
    prompt_tokens=80,
    shared_tokens=40,
    new_tokens=8,
    repeats=2,
    cycles=4,
    gpu_memory_utilization=0.2,
)


def make_policy(directory: Path, shape: Mapping[str, int]) -> None:
    """Random weights of a Qwen2 shape in bfloat16, with the embedded policy's tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = load_tokenizer("embedded")
    config = Qwen2Config(
        **shape,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    save_policy(directory, config=config, state_dict=model.state_dict(), tokenizer=tokenizer, made={})


def requests(size: Size, number: int) -> list[GenerationRequest]:
    """Prompts that share their beginning; those of another number share nothing but that."""
    rng = np.random.default_rng((7, number))
    shared = np.random.default_rng(7).integers(0, size.model["vocab_size"], size.shared_tokens)
    rest = rng.integers(0, size.model["vocab_size"], (size.num_prompts, size.prompt_tokens - size.shared_tokens))
    return [
        GenerationRequest(np.concatenate([shared, row]).astype(np.int32), NoiseKey(0, number, i, 0))
        for i, row in enumerate(rest)
    ]


def measure_engine(directory: Path, size: Size) -> dict[str, Any]:
    """Speed, cycles of sleep and new weights, and the gap to the trainer's log-probs."""
    ranks = start_ranks()
    try:
        model = load_model(str(directory))
        began = perf_counter()
        engine = VLLMEngine(
            str(directory),
            load_tokenizer(str(directory)),
            VLLMConfig(
                max_model_len=size.prompt_tokens + size.new_tokens,
                max_num_seqs=size.num_prompts,
                gpu_memory_utilization=size.gpu_memory_utilization,
            ),
            weight_shapes={name: tensor.shape for name, tensor in model.state_dict().items()},
            eos_ids=frozenset(),
            device=ranks.device,
        )
        started_s = perf_counter() - began
        asleep = memory_in_use(ranks.device)
        actor = ShardedPolicy(model, ranks, pad_id=0, temperature=1.0, grammar=None, max_rows=16, max_tokens=36_864)
        engine.load_weights(actor.full_weights(engine.dtype), 0)
        engine.pop_seconds()
        speed = list(generation_speed(engine, size))
        cached_frac = engine.num_cached_prompt_tokens / engine.num_prompt_tokens
        engine.config = dataclasses.replace(engine.config, seeded_replies=False)
        shared_speed = list(generation_speed(engine, size, first=20))
        engine.config = dataclasses.replace(engine.config, seeded_replies=True)
        before = gap(actor, engine, size, number=1_000)
        cycles = list(weight_cycles(actor, engine, size))
        after = gap(actor, engine, size, number=2_000)
        engine.close()
    finally:
        stop_ranks()
    return {
        "started_s": round(started_s, 1),
        "notes": engine.notes,
        "memory_after_start_gib": asleep,
        "generation": {
            "num_prompts": size.num_prompts,
            "prompt_tokens": size.prompt_tokens,
            "shared_tokens": size.shared_tokens,
            "new_tokens": size.new_tokens,
            "first_s": round(speed[0], 3),
            "s": spread(speed[1:]),
            "new_tokens_per_s": round(size.num_prompts * size.new_tokens / float(np.mean(speed[1:])), 1),
            "cached_prompt_frac": round(cached_frac, 3),
            "shared_generator_s": spread(shared_speed[1:]),
            "shared_generator_new_tokens_per_s": round(
                size.num_prompts * size.new_tokens / float(np.mean(shared_speed[1:])), 1
            ),
        },
        "gap_before_cycles": before,
        "gap_after_cycles": after,
        "cycles": {
            **{f"{stage}_s": spread([cycle[f"time/engine_{stage}_s"] for cycle in cycles[1:]]) for stage in STAGES},
            "first": cycles[0],
            "all": cycles,
            "growth_gib": {
                place: round(cycles[-1][place] - cycles[1][place], 3) for place in cycles[1] if place.startswith("gib")
            },
        },
    }


def generation_speed(engine: VLLMEngine, size: Size, *, first: int = 0) -> Iterator[float]:
    """Seconds of one more repeat than asked for; the first one warms up."""
    for number in range(first, first + size.repeats + 1):
        asked = requests(size, number)
        began = perf_counter()
        replies = engine.generate(asked, SamplingParams(max_tokens=size.new_tokens))
        yield perf_counter() - began
        assert all(len(reply.reply_ids) == size.new_tokens for reply in replies), "a reply ended early"


def weight_cycles(actor: ShardedPolicy, engine: VLLMEngine, size: Size) -> Iterator[dict[str, Any]]:
    """Generate, sleep, change all weights, wake with them: times of the stages, and memory asleep and awake."""
    for cycle in range(size.cycles):
        engine.generate(requests(size, 100 + cycle), SamplingParams(max_tokens=max(1, size.new_tokens // 8)))
        engine.sleep()
        asleep = memory_in_use(engine.device)
        with torch.no_grad():
            for _, parameter in actor.trained_weights():
                parameter.mul_(1.0 + 2.0**-6)  # more than bfloat16 rounds away
        engine.load_weights(actor.full_weights(engine.dtype), cycle + 1)
        awake = memory_in_use(engine.device)
        yield {
            **engine.pop_seconds(),
            **{f"gib_asleep_{place}": round(used, 3) for place, used in asleep.items()},
            **{f"gib_awake_{place}": round(used, 3) for place, used in awake.items()},
        }


def gap(actor: ShardedPolicy, engine: VLLMEngine, size: Size, *, number: int) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's (bfloat16 on a GPU, both) on replies to new prompts."""
    asked = requests(size, number)
    replies = engine.generate(asked, SamplingParams(max_tokens=size.new_tokens))
    rows = rows_of(
        *(ragged([request.prompt_ids for request in asked]), ragged([reply.reply_ids for reply in replies])),
        ragged([reply.log_probs for reply in replies]),
    )
    difference = np.concatenate(actor.log_probs(rows)) - np.concatenate(rows.rollout_log_probs)
    totals = MismatchTotals()
    totals.add(torch.from_numpy(difference), torch.ones(len(difference)))
    return {name.removeprefix("actor/"): value for name, value in totals.metrics(actor.ranks).items()}


def rows_of(prompts: np.ndarray, replies: np.ndarray, log_probs: np.ndarray) -> StepBatch:
    """What scoring reads of a batch, each ragged [N]; everything else is 0."""
    columns: dict[str, Any] = {
        field.name: np.zeros(len(prompts))
        for field in dataclasses.fields(StepBatch)
        if field.default is dataclasses.MISSING
    }
    columns |= {
        "prompt_ids": prompts,
        "reply_ids": replies,
        "rollout_log_probs": log_probs,
        "admissible": ragged([None] * len(prompts)),
    }
    return StepBatch(**columns)


def spread(values: list[float]) -> dict[str, float]:
    return {"mean": round(float(np.mean(values)), 4), "std": round(float(np.std(values)), 4)}


def print_tables(result: dict[str, Any]) -> None:
    engine = result["engine"]
    generation, cycles = engine["generation"], engine["cycles"]
    print(
        f"| {generation['num_prompts']} prompts of {generation['prompt_tokens']} tokens | new tokens | s | tokens/s |"
    )
    print("| --- | --- | --- | --- |")
    print(
        f"| a generator for each reply | {generation['new_tokens']} each | {generation['s']['mean']} ± "
        f"{generation['s']['std']} | {generation['new_tokens_per_s']} |\n"
        f"| one for all | {generation['new_tokens']} each | {generation['shared_generator_s']['mean']} ± "
        f"{generation['shared_generator_s']['std']} | {generation['shared_generator_new_tokens_per_s']} |\n"
    )
    print("| stage | s |\n| --- | --- |")
    for stage in STAGES:
        print(f"| {stage} | {cycles[f'{stage}_s']['mean']} ± {cycles[f'{stage}_s']['std']} |")
    print("\n| gap, engine to trainer | mean (nats) | max (nats) | beyond 0.1 (share) |\n| --- | --- | --- | --- |")
    for when in ("before", "after"):
        figures = engine[f"gap_{when}_cycles"]
        mean, largest, large = (figures[f"engine_gap_{name}"] for name in ("mean_nats", "max_nats", "large_frac"))
        print(f"| {when} the cycles | {mean:.2g} | {largest:.2g} | {large:.2g} |")
    print(f"\ngrowth over the cycles (GiB): {cycles['growth_gib']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke run")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    size = TINY if arguments.tiny else FULL
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU; --tiny runs without one")
    vllm_package, _ = installed_vllm("cuda" if torch.cuda.is_available() else "cpu")
    result = describe_machine("torch", "transformers", vllm_package)
    if torch.cuda.is_available():
        result["hardware"]["gpu"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as scratch:
        policy = Path(scratch) / "policy"
        make_policy(policy, size.model)
        result["model"] = size.model
        result["engine"] = measure_engine(policy, size)
    print_tables(result)
    write_result(result, arguments.out or place_of_result("bench_vllm", is_small=arguments.tiny))


if __name__ == "__main__":
    run_script(main)
