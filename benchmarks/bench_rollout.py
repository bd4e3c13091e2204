"""What does a rollout cost besides generation? Seconds for prompts, tokenization, stepping and making rows.

    python benchmarks/bench_rollout.py                              on the embedded catalogue
    python benchmarks/bench_rollout.py --data embedded DIR          there and on a catalogue in WebShop's format
    python benchmarks/bench_rollout.py --policy vllm --no-script    the embedded policy alone, written by vLLM

A scripted policy plays 16 groups of 8 episodes of 15 steps each: any action of the page but the purchase, drawn by the
step's own random numbers, with the embedded policy's tokenizer. Then the embedded policy itself plays the same number
of episodes as the default training run would, to see which share of its time is not generation, and how many of its
tokens were a choice: with vLLM only these cost a pass of the model.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import numpy as np
import torch
from machine import RESULTS, describe_machine, run_script, write_result

from env_manager import EnvConfig, EnvManager
from rollout import CollectorConfig, Generation, GenerationRequest, SamplingParams, StepBatch, TrajectoryCollector
from rollout.constrained import ActionGrammar
from rollout.engines.prompts import PromptEncoder
from rollout.engines.vllm import VLLMConfig, VLLMEngine
from rollout.engines.vllm_install import installed_vllm
from rollout.noise import uniforms
from trainers.engines import open_fixed_engine
from trainers.goals import fixed_goals
from trainers.models import compute_dtype, load_model, load_tokenizer
from trainers.ranks import set_threads, start_ranks, stop_ranks
from trainers.settings import resolve
from trainers.worlds import make_grammar, manager_for
from webshop_env.shop import Shop, open_shop

NUM_GROUPS, GROUP_SIZE, NUM_STEPS = 16, 8, 15
PARTS = ("prompts_s", "tokenization_s", "stepping_s", "flattening_s")
MAX_PROMPT_TOKENS = 4096


class DrawnActions:
    """Writes any action that the page offers, but never buys; its prompts are tokenised in earnest."""

    def __init__(self, queries: Sequence[str]) -> None:
        self.weight_version = 0
        self.encode_s = 0.0
        """Time spent on tokenization of prompts so far."""
        self.answer_cpu_s = 0.0
        """CPU time spent on replies so far."""
        self._tokenizer = load_tokenizer("embedded")
        self._queries = queries
        self._prompts = PromptEncoder(self._tokenizer)

    def encode(self, prompt: str) -> np.ndarray:
        began = perf_counter()
        encoded = self._prompts.encode(prompt)
        self.encode_s += perf_counter() - began
        return encoded

    def encode_all(self, prompts: Sequence[str]) -> list[np.ndarray]:
        began = perf_counter()
        encoded = self._prompts.encode_all(prompts)
        self.encode_s += perf_counter() - began
        return encoded

    def count_tokens(self, prompt: str) -> int:
        return len(self.encode(prompt))

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        began = process_time()
        answers = [self._answer(request) for request in requests]
        self.answer_cpu_s += process_time() - began
        return answers

    def _answer(self, request: GenerationRequest) -> Generation:
        which, what = uniforms(request.noise, 2)
        actions = [action for action in request.admissible or () if action != "click[buy now]"]
        action = actions[int(which * len(actions))]
        if action.startswith("search["):
            action = f"search[{self._queries[int(what * len(self._queries))]}]"
        text = f"<think>This looks right.</think><action>{action}</action>"
        ids = np.asarray(self._tokenizer(text)["input_ids"], dtype=np.int32)
        return Generation(ids, np.zeros(len(ids), np.float32), text, is_cut=False)


def scripted_rollouts(shop: Shop, name: str, prompt: str, *, repeats: int) -> dict[str, Any]:
    """Times of `repeats` rollouts, after one that is not counted."""
    policy = DrawnActions(sorted({product.query for product in shop.products.values()}))
    config = EnvConfig(
        prompt=prompt,
        max_steps=NUM_STEPS,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        count_tokens=policy.count_tokens,
        encode_ahead=policy.encode_all,
    )
    manager = EnvManager("WebShop-v1", NUM_GROUPS * GROUP_SIZE, config, {"shop": shop})
    collector = TrajectoryCollector(manager, CollectorConfig(constrained=True))
    goals = fixed_goals(shop, "train", NUM_GROUPS)
    rows = []
    for update in range(repeats + 1):
        encode_s, cpu_s = policy.encode_s, process_time() - policy.answer_cpu_s
        batch = collector.collect(goals, policy, SamplingParams(), group_size=GROUP_SIZE, update=update, seed=0)
        encode_s, cpu_s = policy.encode_s - encode_s, process_time() - policy.answer_cpu_s - cpu_s
        spent = collector.statistics
        assert len(batch) == NUM_GROUPS * GROUP_SIZE * NUM_STEPS, "an episode ended early"
        parts = (spent["time/prompt_s"] - encode_s, encode_s, spent["time/env_s"], spent["time/flatten_s"])
        rows.append([*parts, sum(parts), cpu_s])
    columns = np.asarray(rows[1:]).T
    return {
        "catalogue": name,
        "template": prompt,
        "num_products": len(shop.products),
        "prompt_length_tokens": round(collector.statistics["rollout/prompt_length_tokens"], 1),
        **{
            name: {"mean": round(float(column.mean()), 3), "std": round(float(column.std()), 3)}
            for name, column in zip((*PARTS, "all_s", "all_cpu_s"), columns, strict=True)
        },
    }


def policy_rollout(name: str) -> dict[str, Any]:
    """One rollout of the default run with an engine, after a small one that warms up."""
    settings, _, _ = resolve([])
    tokenizer = load_tokenizer("embedded")
    grammar = make_grammar(tokenizer, settings.env, settings.data)
    ranks = start_ranks()
    config = None
    if name == "vllm":
        config = VLLMConfig(
            max_model_len=settings.data.max_prompt_length + settings.data.max_response_length,
            max_num_seqs=NUM_GROUPS * GROUP_SIZE,
            free_cache_engine=False,
            seeded_replies=False,
        )
    model = load_model("embedded", dtype=compute_dtype(ranks.device))
    engine = open_fixed_engine(config, ranks, "embedded", model, tokenizer, grammar)
    manager = manager_for(engine, settings.env, settings.data, NUM_GROUPS * GROUP_SIZE)
    collector = TrajectoryCollector(manager, CollectorConfig(constrained=True))
    sampling = SamplingParams(temperature=1.0, max_tokens=settings.data.max_response_length)
    goals = fixed_goals(open_shop(), "train", NUM_GROUPS)
    for update, played in enumerate((goals[:1], goals)):
        passes_before = engine.num_passes if isinstance(engine, VLLMEngine) else 0
        batch = collector.collect(played, engine, sampling, group_size=GROUP_SIZE, update=update, seed=0)
    spent = {key: value for key, value in collector.statistics.items() if key.startswith("time/")}
    total, generation = sum(spent.values()), spent["time/generate_s"]
    num_passes = engine.num_passes - passes_before if isinstance(engine, VLLMEngine) else None
    engine.close()
    stop_ranks()
    return {
        "engine": name,
        "num_steps": int(collector.statistics["rollout/num_steps"]),
        "total_s": round(total, 3),
        "besides_generation_s": round(total - generation, 3),
        "besides_generation_percent": round(100 * (total - generation) / total, 2),
        "lock_step_frac": round(collector.statistics["rollout/lock_step_frac"], 3),
        **choices(batch, grammar),
        "num_passes": num_passes,
    }


def choices(batch: StepBatch, grammar: ActionGrammar) -> dict[str, int]:
    """How many tokens of the replies were a choice, and how many the longest episode would write one after another."""
    rows = zip(batch.admissible, batch.reply_ids, strict=True)
    num_choices = np.asarray([sum(len(ids) > 1 for ids in grammar.allowed_ids(*row)) for row in rows])
    num_tokens = np.asarray([len(reply) for reply in batch.reply_ids])
    _, episode = np.unique(batch.episode_id, return_inverse=True)
    return {
        "num_tokens": int(num_tokens.sum()),
        "num_choices": int(num_choices.sum()),
        "longest_episode_tokens": int(np.bincount(episode, weights=num_tokens).max()),
        "longest_episode_choices": int(np.bincount(episode, weights=num_choices).max()),
    }


def print_tables(result: dict[str, Any]) -> None:
    """As Markdown, for `benchmarks/README.md`."""
    if result["scripted"]:
        heads = (
            "catalogue, template",
            "prompt (tokens)",
            "prompts (s)",
            "tokenization (s)",
            "stepping (s)",
            "rows (s)",
        )
        print(f"| {' | '.join(heads)} | all (s) | all (CPU s) |\n|{' --- |' * 8}")
    for row in result["scripted"]:
        cells = " | ".join(f"{row[name]['mean']:.2f}" for name in PARTS)
        every = row["all_s"]
        print(
            f"| {row['catalogue']} ({row['num_products']:,} products), {row['template']} "
            f"| {row['prompt_length_tokens']:.0f} | {cells} "
            f"| {every['mean']:.2f} ± {every['std']:.2f} | {row['all_cpu_s']['mean']:.2f} |"
        )
    if result["embedded_policy"]:
        row = result["embedded_policy"]
        heads = ("steps", "rollout (s)", "besides generation (s)", "share (%)", "tokens", "choices", "passes")
        print(f"\n| embedded policy, 128 episodes | {' | '.join(heads)} | longest episode (tokens, choices) |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        print(
            f"| {row['engine']} | {row['num_steps']} | {row['total_s']:.2f} "
            f"| {row['besides_generation_s']:.2f} | {row['besides_generation_percent']:.1f} "
            f"| {row['num_tokens']:,} | {row['num_choices']:,} | {row['num_passes'] or '-'} "
            f"| {row['longest_episode_tokens']}, {row['longest_episode_choices']} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["embedded"], help="catalogue directories, or `embedded`")
    parser.add_argument("--templates", nargs="+", default=["compact", "think"], help="prompt templates")
    parser.add_argument("--repeats", type=int, default=5, help="rollouts that are timed")
    parser.add_argument("--policy", choices=["hf", "vllm", "none"], default="hf", help="engine of the embedded policy")
    parser.add_argument("--no-script", action="store_true", help="leave the scripted policy out")
    parser.add_argument("--out", type=Path, help="JSON; results/bench_rollout.json or bench_rollout_vllm.json")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    set_threads()
    packages = ["numpy", "torch", "transformers", "tokenizers"]
    if options.policy == "vllm":
        packages.append(installed_vllm("cuda" if torch.cuda.is_available() else "cpu")[0])
    machine = describe_machine(*packages)
    machine["hardware"]["torch_threads"] = torch.get_num_threads()
    shops = [open_shop(None if data == "embedded" else data) for data in options.data]
    result = {
        **machine,
        "config": {
            "num_groups": NUM_GROUPS,
            "group_size": GROUP_SIZE,
            "num_steps": NUM_STEPS,
            "max_prompt_tokens": MAX_PROMPT_TOKENS,
            "repeats": options.repeats,
        },
        "scripted": [
            scripted_rollouts(shop, Path(data).name, template, repeats=options.repeats)
            for data, shop in zip(options.data, shops, strict=True)
            for template in options.templates
            if not options.no_script
        ],
        "embedded_policy": None if options.policy == "none" else policy_rollout(options.policy),
    }
    print_tables(result)
    name = "bench_rollout_vllm" if options.policy == "vllm" else "bench_rollout"
    write_result(result, options.out or RESULTS / f"{name}.json")


if __name__ == "__main__":
    run_script(main)
