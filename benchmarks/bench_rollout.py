"""What does a rollout cost besides generation? Seconds for prompts, tokenization, stepping and making rows.

    python benchmarks/bench_rollout.py                              on the embedded catalogue
    python benchmarks/bench_rollout.py --data embedded DIR          there and on a catalogue in WebShop's format

A scripted policy plays 16 groups of 8 episodes of 15 steps each: any action of the page but the purchase, drawn by the
step's own random numbers, with the embedded policy's tokenizer. Then the embedded policy itself plays the same number
of episodes as the default training run would, to see which share of its time is not generation.
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
from rollout import CollectorConfig, Generation, GenerationRequest, SamplingParams, TrajectoryCollector
from rollout.engines.hf import HFEngine
from rollout.engines.prompts import PromptEncoder
from rollout.noise import uniforms
from trainers.goals import fixed_goals
from trainers.models import load_model, load_tokenizer
from trainers.ranks import set_threads
from trainers.settings import resolve
from trainers.worlds import make_grammar, make_manager
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
        prompt=prompt, max_steps=NUM_STEPS, max_prompt_tokens=MAX_PROMPT_TOKENS, count_tokens=policy.count_tokens
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


def policy_rollout() -> dict[str, Any]:
    """One rollout of the default run, after a small one that warms up."""
    settings, _, _ = resolve([])
    tokenizer = load_tokenizer("embedded")
    grammar = make_grammar(tokenizer, settings.env, settings.data)
    engine = HFEngine(load_model("embedded"), tokenizer, grammar=grammar, copy_model=False)
    manager = make_manager(
        settings.env,
        settings.data,
        NUM_GROUPS * GROUP_SIZE,
        count_tokens=engine.count_tokens,
        encode_ahead=engine.encode_all,
    )
    collector = TrajectoryCollector(manager, CollectorConfig(constrained=True))
    sampling = SamplingParams(temperature=1.0, max_tokens=settings.data.max_response_length)
    goals = fixed_goals(open_shop(), "train", NUM_GROUPS)
    for update, played in enumerate((goals[:1], goals)):
        collector.collect(played, engine, sampling, group_size=GROUP_SIZE, update=update, seed=0)
    spent = {key: value for key, value in collector.statistics.items() if key.startswith("time/")}
    total, generation = sum(spent.values()), spent["time/generate_s"]
    return {
        "num_steps": int(collector.statistics["rollout/num_steps"]),
        "total_s": round(total, 3),
        "besides_generation_s": round(total - generation, 3),
        "besides_generation_percent": round(100 * (total - generation) / total, 2),
        "lock_step_frac": round(collector.statistics["rollout/lock_step_frac"], 3),
    }


def print_tables(result: dict[str, Any]) -> None:
    """As Markdown, for `benchmarks/README.md`."""
    heads = ("catalogue, template", "prompt (tokens)", "prompts (s)", "tokenization (s)", "stepping (s)", "rows (s)")
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
        print("\n| embedded policy, 128 episodes | steps | rollout (s) | besides generation (s) | share (%) |")
        print("| --- | --- | --- | --- | --- |")
        print(
            f"| compact, constrained | {row['num_steps']} | {row['total_s']:.2f} "
            f"| {row['besides_generation_s']:.2f} | {row['besides_generation_percent']:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["embedded"], help="catalogue directories, or `embedded`")
    parser.add_argument("--templates", nargs="+", default=["compact", "think"], help="prompt templates")
    parser.add_argument("--repeats", type=int, default=5, help="rollouts that are timed")
    parser.add_argument("--no-policy", action="store_true", help="leave the embedded policy out")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_rollout.json")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    set_threads()
    machine = describe_machine("numpy", "torch", "transformers", "tokenizers")
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
        ],
        "embedded_policy": None if options.no_policy else policy_rollout(),
    }
    print_tables(result)
    write_result(result, options.out)


if __name__ == "__main__":
    run_script(main)
