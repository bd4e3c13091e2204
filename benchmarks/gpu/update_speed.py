"""How fast is one update of the published recipe's shape on one GPU, phase by phase, and what share of its peak?

    python benchmarks/gpu/update_speed.py --data DIR                      whole updates of the trainer, vLLM included
    python benchmarks/gpu/update_speed.py --learn-only                    the actor and the reference, no engine
    python benchmarks/gpu/update_speed.py --learn-only --model smollm2    the small recipe's shape
    python benchmarks/gpu/update_speed.py --learn-only --tiny             a smoke run on a CPU

Weights are random. Episodes are real ones of the recipe's shop: at each step a scripted action is played, the oracle's
or, for a share of the steps (`--wander`), any other of the page, so that most episodes of the published shape use up
their steps, some win, and groups differ. The tokenizer is learnt on their prompts (3.2 characters a token on the
original's products, about what tokenizers of language models need). In whole updates the engine writes each reply and
the trainer learns from what it wrote; the environment alone is told the scripted action. With `--learn-only` replies
are random tokens. Their lengths are drawn around `--reply-tokens`, as a policy that thinks writes them. Where decoding
is constrained, the engine's own actions are played, and without an engine the scripted ones.

Variants are words joined by `+`, each of which changes settings of the recipe (WORDS; `recipe` changes none). FLOPs are
those that the model needs, whatever is computed again: forward 2 n T + 2 V H R + 2 l d sum(L^2), learning three times
that; n weights of the layers, T tokens and R reply tokens of distinct rows, padding not counted, V vocabulary, H width,
l layers, d heads times their width, L tokens of a row. The peak is that of a large product of bfloat16 matrices in the
same process. A `key=value` word goes to the settings of every variant.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # machine.py is beside the other benchmarks

from clock import BusyGauge, Clock
from machine import command_to_keep, describe_machine, place_of_result, run_script
from scripted_play import RandomTokens, Script, ScriptedEngine, StreamingScriptedEngine

from rollout.collector import CollectorConfig, TrajectoryCollector
from rollout.constrained import ActionGrammar
from rollout.engines.prompts import PromptEncoder
from rollout.statistics import with_statistics
from rollout.types import Engine, GenerationRequest, NoiseKey, SamplingParams, StepBatch, StreamingPolicy
from trainers.actor import Actor, ActorConfig, Reference
from trainers.advantages import AdvantageConfig, with_advantages
from trainers.demonstrations import demonstrate
from trainers.gigpo_fsdp import collect, learn
from trainers.memory import little_garbage_collection
from trainers.models import save_policy, train_tokenizer
from trainers.ranks import Ranks, joined_ranks, start_ranks, stop_ranks
from trainers.run import Run, open_run, prepare, rollout_sampling
from trainers.scoring import Collator, MicroBatch, Pairs, distinct_pairs
from trainers.settings import Settings, resolve
from trainers.sharding import checkpoint_layers
from trainers.worlds import make_grammar, make_manager, open_shop_world
from webshop_env.errors import ShopGymError
from webshop_env.policies import OraclePolicy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORDS = {
    "recipe": (),
    "16k": ("tokens=16384",),
    "32k": ("tokens=32768",),
    "64k": ("tokens=65536",),
    "128k": ("tokens=131072",),
    "plain": ("actor_rollout_ref.model.enable_gradient_checkpointing=false",),
    "checkpoint": ("actor_rollout_ref.model.enable_gradient_checkpointing=true",),
    "compile": ("actor_rollout_ref.actor.use_torch_compile=true",),
    "packed": ("actor_rollout_ref.model.use_remove_padding=true",),
    "resident": ("actor_rollout_ref.ref.fsdp_config.param_offload=false",),
    "float32": ("actor_rollout_ref.actor.fsdp_config.dtype=float32",),
}
"""What a word of a variant sets; `tokens=T` is a budget of T tokens for every pass, with any number of rows."""
BUDGET = (
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu={}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=100000",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=100000",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=100000",
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A recipe and the size of its model."""

    recipe: str
    architecture: str
    config: dict[str, Any]
    wander: float
    """Share of the steps at which something else than the oracle's action is played."""
    rows: int
    """Rows of the quick mode that is given none."""
    variants: tuple[str, ...]
    settings: tuple[str, ...] = ()


QWEN = Shape(
    recipe="webshop_qwen2.5_1.5b",
    architecture="qwen2",
    config={
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 32_768,
    },
    wander=0.65,
    rows=128,
    variants=("recipe", "16k+packed+plain+resident", "16k+packed+compile+plain+resident"),
)  # fmt: skip
SMOLLM2 = Shape(
    recipe="webshop_smollm2_135m",
    architecture="llama",
    config={
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49_152, "max_position_embeddings": 8192,
    },
    wander=0.25,
    rows=100_000,
    variants=("recipe", "packed", "packed+compile"),
    settings=(
        "env.reward=score",  # random weights win nothing: there would be no advantage
        *("data.train_batch_size=16", "data.gen_batch_size=null", "env.history_length=6"),  # 128 episodes
    ),
)  # fmt: skip
TINY_CONFIG = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 4_096,
}  # fmt: skip
TINY_SETTINGS = (
    *("data.train_batch_size=2", "env.rollout.n=2", "env.max_steps=6"),
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
)
SHAPES = {"qwen": QWEN, "smollm2": SMOLLM2}


class CountingCollator:
    """A collator, and what it made for the passes of a phase."""

    def __init__(self, collate: Collator) -> None:
        self.collate = collate
        self.passes = self.tokens = self.text_tokens = 0

    def __call__(self, pairs: Pairs, chosen: Sequence[int] | np.ndarray) -> MicroBatch:
        made = self.collate(pairs, chosen)
        self.passes += 1
        self.tokens += made.input_ids.numel()
        self.text_tokens += int(pairs.lengths[chosen].sum())
        return made

    def forget(self) -> None:
        self.collate.forget()


def give_back(device: torch.device) -> None:
    """Memory that nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def say(text: str) -> None:
    print(text, flush=True)


def keep(result: dict[str, Any], out: Path) -> None:
    """Writes what there is so far: a run that is stopped leaves it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def peak_tflops(device: torch.device) -> float:
    """TFLOP/s of a large product: what the card can do at its very best."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best, clock = 0.0, Clock(device)
    for _ in range(6):
        with clock.phase("products"):
            for _ in range(20):
                a @ b
        best = max(best, 20 * 2 * size**3 / clock.seconds["products"] / 1e12)
    return best


def make_model(shape: Shape, device: torch.device) -> Any:
    """Random weights in float32, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config_kind, kind = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[
        shape.architecture
    ]
    config = config_kind(**shape.config, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    with device:
        return kind._from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()


def model_flops(config: dict[str, Any], batch: StepBatch) -> float:
    """Of one forward pass over the distinct rows; see above."""
    pairs = distinct_pairs(batch)
    lengths = pairs.lengths.astype(np.float64)
    num_reply = float(sum(len(reply) for reply in pairs.replies))
    width, inner, depth = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    kv_width = width // config["num_attention_heads"] * config["num_key_value_heads"]
    weights = depth * (2 * width * width + 2 * width * kv_width + 3 * width * inner)
    attention = 2.0 * depth * width * float((lengths**2).sum())
    return 2.0 * weights * float(lengths.sum()) + 2.0 * config["vocab_size"] * width * num_reply + attention


def sizes(batch: StepBatch) -> dict[str, Any]:
    """Rows and tokens, as they are and as the model sees them."""
    pairs = distinct_pairs(batch)
    prompts = np.asarray([len(prompt) for prompt in batch.prompt_ids])
    replies = np.asarray([len(reply) for reply in batch.reply_ids])
    return {
        "rows": len(batch),
        "episodes": len(np.unique(batch.episode_id)),
        "won_frac": round(float(batch.won.mean()), 3),
        "distinct_rows": len(pairs),
        "tokens": int(pairs.lengths.sum()),
        "reply_tokens": int(sum(len(reply) for reply in pairs.replies)),
        "prompt_tokens_mean": round(float(prompts.mean()), 1),
        "prompt_tokens_max": int(prompts.max()),
        "reply_tokens_mean": round(float(replies.mean()), 1),
        "reply_tokens_max": int(replies.max()),
    }


def settings_of_variant(shape: Shape, name: str, extra: Sequence[str]) -> Settings:
    """The recipe's settings with a variant's changes.

    Raises:
        ShopGymError: The variant has a word that means nothing.
    """
    words: list[str] = []
    for word in name.split("+"):
        if word not in WORDS:
            raise ShopGymError(f"--variants: {word!r} in {name!r} means nothing; there are {', '.join(WORDS)}")
        for change in WORDS[word]:
            key, _, value = change.partition("=")
            words += [line.format(value) for line in BUDGET] if key == "tokens" else [change]
    fixed = ("trainer.n_gpus_per_node=null", "actor_rollout_ref.rollout.name=hf")
    settings, _, _ = resolve([f"recipe={shape.recipe}", *fixed, *shape.settings, *words, *extra], Settings)
    return settings


@dataclass(frozen=True, kw_only=True)
class Played:
    """The rows of one update with advantages, and what they were made with."""

    batch: StepBatch
    grammar: ActionGrammar | None
    pad_id: int


def learn_tokenizer(shape: Shape, settings: Settings) -> PreTrainedTokenizerBase:
    """A tokenizer of the prompts that the recipe's goals bring."""
    manager = make_manager(settings.env, settings.data, 32, count_tokens=None)
    shop = open_shop_world(settings.env)
    goals = np.random.default_rng(1).permutation(shop.split("train"))[:32]
    shown = demonstrate(manager, OraclePolicy(shop), goals, noise=shape.wander)
    texts = [*shown.prompts, *(action for page in shown.admissible for action in page)]
    return train_tokenizer(texts, min(shape.config["vocab_size"], 32_768))


def play(shape: Shape, settings: Settings, reply_tokens: float) -> Played:
    """One update's episodes, played with random replies."""
    tokenizer = learn_tokenizer(shape, settings)
    grammar = None
    if settings.actor_rollout_ref.rollout.constrained:
        grammar = make_grammar(tokenizer, settings.env, settings.data)
    shop, group_size = open_shop_world(settings.env), settings.env.rollout.n
    goals = np.random.default_rng(0).permutation(shop.split("train"))[: settings.data.train_batch_size]
    encoder = PromptEncoder(tokenizer)
    manager = make_manager(
        settings.env, settings.data, len(goals) * group_size, count_tokens=lambda text: len(encoder.encode(text))
    )
    script = Script(manager=manager, oracle=OraclePolicy(shop), wander=shape.wander, reply_tokens=reply_tokens)
    policy = RandomTokens(encoder, shape.config["vocab_size"], script, grammar)
    collector = TrajectoryCollector(manager, CollectorConfig(constrained=grammar is not None))
    params = SamplingParams(max_tokens=settings.data.max_response_length)
    batch = collector.collect(goals, policy, params, group_size=group_size, update=0, seed=0)
    batch = with_advantages(batch, AdvantageConfig.of(settings))
    return Played(batch=batch, grammar=grammar, pad_id=int(tokenizer.pad_token_id))


def measure_actor(
    shape: Shape, settings: Settings, played: Played, rows: StepBatch, ranks: Ranks, *, num_updates: int, profile: bool
) -> dict[str, Any]:
    """Times of the passes over some rows with one variant's settings: old log-probs, reference, learning."""
    torch._dynamo.reset()  # as in a process of its own
    began = time.perf_counter()
    config = ActorConfig.of(settings)
    model = make_model(shape, ranks.device)
    frozen = copy.deepcopy(model).cpu() if config.loss.use_kl_loss else None
    prepare(model, settings)
    if frozen is not None:
        prepare(frozen, settings)
    if settings.actor_rollout_ref.model.enable_gradient_checkpointing:
        checkpoint_layers(model)
    shared: dict[str, Any] = {
        "pad_id": played.pad_id,
        "temperature": settings.actor_rollout_ref.rollout.temperature,
        "grammar": played.grammar,
    }
    actor = Actor(model, ranks, config, **shared)
    reference = None
    if frozen is not None:
        ref = settings.actor_rollout_ref.ref
        reference = Reference(
            frozen,
            ranks,
            max_rows=ref.log_prob_micro_batch_size_per_gpu,
            max_tokens=config.max_tokens,
            sharding=replace(config.sharding, param_offload=ref.fsdp_config.param_offload),
            **shared,
        )

    actor.collate = counted = CountingCollator(actor.collate)  # type: ignore[assignment]
    clock, runs, batch = Clock(ranks.device), [], rows
    for number in range(1 + num_updates):
        with clock.phase("old_log_probs"):
            batch = actor.with_old_log_probs(rows)
        if reference is not None:
            with clock.phase("reference"):
                batch = reference.with_log_probs(batch)
        counted.passes = counted.tokens = counted.text_tokens = 0
        with clock.phase("learn"):
            metrics = actor.update(batch, seed=0, update=number)
        if number == 0:  # kernels were chosen or compiled, memory was taken
            first, started_s = dict(clock.seconds), time.perf_counter() - began
        else:
            runs.append(dict(clock.seconds))
    result: dict[str, Any] = {
        "until_warm_s": round(started_s, 2),
        "first_s": rounded(first),
        "runs_s": [rounded(run) for run in runs],
        "s": {phase: round(float(np.mean([run[phase] for run in runs])), 4) for phase in first},
        "peak_gib": rounded(clock.peak_gib),
        "learn_passes": counted.passes,
        "learn_padding_frac": round(1 - counted.text_tokens / counted.tokens, 4),
        "metrics": {name: metrics[name] for name in ("actor/loss", "actor/grad_norm", "actor/optimizer_steps")},
    }
    if profile:
        result["kernels_of_learn"] = kernels_of(lambda: actor.update(batch), ranks.device)
    return result


def kernels_of(work: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """What the device spends its time on, and which share of the time it has nothing to do."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]  # operations of the CPU would slow it down
    clock = Clock(device)
    with torch.profiler.profile(activities=activities) as profiler, clock.phase("all"):
        work()
    by_name = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    found = [
        event
        for event in profiler.key_averages()
        if getattr(event, by_name) > 0 and not getattr(event, "is_user_annotation", False)
    ]
    events = sorted(found, key=lambda event: -getattr(event, by_name))
    total_us = sum(getattr(event, by_name) for event in events)
    return {
        "s": round(clock.seconds["all"], 4),
        "busy_frac": round(total_us / 1e6 / clock.seconds["all"], 4),
        "num_kernels": sum(event.count for event in events),
        "top": [
            {
                "kernel": event.key[:120],
                "ms": round(getattr(event, by_name) / 1e3, 3),
                "frac": round(getattr(event, by_name) / max(total_us, 1e-9), 4),
                "count": event.count,
            }
            for event in events[:15]
        ],
    }


def with_rates(
    measured: dict[str, Any], shape: Shape, rows: StepBatch, everything: StepBatch, peak: float
) -> dict[str, Any]:
    """Tokens a second, TFLOP/s and share of the peak by phase, and what a whole update would take at that rate."""
    of_pass, of_all = model_flops(shape.config, rows), model_flops(shape.config, everything)
    tokens = int(distinct_pairs(rows).lengths.sum())
    rates = {}
    for phase, seconds in measured["s"].items():
        flops = of_pass * (3 if phase == "learn" else 1)
        if seconds > 1e-4:  # with a single optimizer step there is no pass for old log-probs
            rates[phase] = {
                "tokens_per_s": round(tokens / seconds),
                "model_tflop": round(flops / 1e12, 6),
                "tflops": round(flops / seconds / 1e12, 4),
                "peak_frac": round(flops / seconds / 1e12 / peak, 4),
                "whole_update_s": round(seconds * of_all / of_pass, 2),
            }
    return measured | {"rates": rates}


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def print_variant(name: str, measured: dict[str, Any]) -> None:
    """A line for each phase of a variant, and its kernels where they were listed."""
    for phase, rate in measured.get("rates", {}).items():
        say(
            f"| {name} | {phase} | {measured['s'][phase]:.3f} | {rate['tokens_per_s']:,} | {rate['tflops']:.1f} "
            f"| {100 * rate['peak_frac']:.1f} | {measured['peak_gib'].get(phase, 0.0):.1f} "
            f"| {rate['whole_update_s']:.1f} | {measured['first_s'][phase]:.1f} |"
        )
    if "learn_passes" in measured:
        padding = f"{100 * measured['learn_padding_frac']:.0f} % padding"
        say(
            f"  {name}: learns in {measured['learn_passes']} passes, {padding}; warm after {measured['until_warm_s']} s"
        )
    if "error" in measured:
        say(f"| {name} | {measured['error']} |")
    kernels = measured.get("kernels_of_learn")
    if kernels:
        say(f"  {name}: device busy {100 * kernels['busy_frac']:.1f} % of {kernels['s']:.2f} s (profiled)")
        for row in kernels["top"]:
            say(f"  {row['ms']:10.2f} ms {100 * row['frac']:5.1f} % {row['count']:6d} x {row['kernel']}")


HEAD = (
    "| variant | phase | s | tokens/s | TFLOP/s | % of peak | peak GiB | whole update s | first s |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def learn_only(shape: Shape, arguments: argparse.Namespace, extra: Sequence[str], result: dict[str, Any]) -> None:
    """All variants of the actor and the reference on the same rows."""
    ranks = start_ranks("cpu" if arguments.tiny else "auto")
    names = arguments.variants or (["recipe", "16k+plain+packed"] if arguments.tiny else shape.variants)
    variants = {name: settings_of_variant(shape, name, extra) for name in names}
    try:
        result["peak_tflops"] = round(peak_tflops(ranks.device), 2)
        played = play(shape, next(iter(variants.values())), arguments.reply_tokens)
        num_rows = min(arguments.rows or shape.rows, len(played.batch))
        chosen = np.sort(np.random.default_rng(0).permutation(len(played.batch))[:num_rows])
        rows = played.batch.select(chosen)
        result |= {"update": sizes(played.batch), "measured_rows": sizes(rows), "variants": {}}
        say(f"peak {result['peak_tflops']} TFLOP/s; an update: {result['update']}")
        say(f"measured: {result['measured_rows']}\n{HEAD}")
        for name, settings in variants.items():
            try:
                measured = measure_actor(
                    shape, settings, played, rows, ranks, num_updates=arguments.updates, profile=arguments.profile
                )
                measured = with_rates(measured, shape, rows, played.batch, result["peak_tflops"])
            except RuntimeError as error:  # no memory, or no compiler: the other variants may do
                what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                measured = {"error": what, "traceback": traceback.format_exc()[-3000:]}
            result["variants"][name] = measured
            print_variant(name, measured)
            keep(result, arguments.out)
            give_back(ranks.device)
    finally:
        stop_ranks()


def make_policy(shape: Shape, settings: Settings, directory: Path) -> None:
    """A directory with random weights in bfloat16 and the tokenizer of the recipe's prompts."""
    model = make_model(shape, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    tokenizer = learn_tokenizer(shape, settings)
    model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    save_policy(
        directory,
        config=model.config,
        state_dict=model.state_dict(),
        tokenizer=tokenizer,
        made={},
        dtype=torch.bfloat16,
    )


def whole_updates(shape: Shape, arguments: argparse.Namespace, extra: Sequence[str], result: dict[str, Any]) -> None:
    """Updates of the trainer with one variant's settings: one that warms up, and those that are measured."""
    (name,) = arguments.variants or ["recipe"]
    with tempfile.TemporaryDirectory() as scratch, joined_ranks("cpu" if arguments.tiny else "auto") as ranks:
        result["peak_tflops"] = round(peak_tflops(ranks.device), 2)
        say(f"peak {result['peak_tflops']} TFLOP/s; random weights of {shape.config}")
        words = (
            *("trainer.logger=[console]", "trainer.val_before_train=false", "trainer.test_freq=-1"),
            *(f"trainer.output_dir={scratch}/run", f"actor_rollout_ref.model.path={scratch}/policy"),
            *(() if arguments.tiny else ("actor_rollout_ref.rollout.name=vllm",)),
        )
        settings = settings_of_variant(shape, name, [*words, *extra])
        make_policy(shape, settings, Path(scratch) / "policy")
        give_back(ranks.device)
        began = time.perf_counter()
        run = open_run(settings, ranks)
        try:
            result |= {"variant": name, "opened_s": round(time.perf_counter() - began, 1), "updates": []}
            say(f"opened in {result['opened_s']} s")
            scripted = None
            if not settings.actor_rollout_ref.rollout.constrained:
                scripted = script_of(run.engine, run.collector, shape, settings, arguments.reply_tokens)
                run.engine = cast("Engine", scripted)
            with little_garbage_collection():  # as in training
                for update in range(1 + arguments.updates):
                    with BusyGauge(ranks.device) as gauge:
                        measured, batch = measure_update(run, update, shape, result["peak_tflops"], gauge)
                    if scripted is not None:
                        measured["script_s"], scripted.script_s = round(scripted.script_s, 3), 0.0
                    result["updates"].append(measured)
                    print_update(measured, is_warm=update > 0)
                    keep(result, arguments.out)
                if isinstance(run.engine, StreamingPolicy):
                    result["all_prompts_at_once"] = at_once(
                        run.engine, settings, batch, collected_s=measured["metrics"]["time/generate_s"]
                    )
                    say(f"all prompts at once: {result['all_prompts_at_once']}")
        finally:
            run.log.close()
            run.engine.close()


def script_of(
    engine: Engine, collector: TrajectoryCollector, shape: Shape, settings: Settings, reply_tokens: float
) -> ScriptedEngine:
    """The engine, whose replies a script of actions takes the place of."""
    kind = StreamingScriptedEngine if isinstance(engine, StreamingPolicy) else ScriptedEngine
    shop = OraclePolicy(open_shop_world(settings.env))
    script = Script(manager=collector.manager, oracle=shop, wander=shape.wander, reply_tokens=reply_tokens)
    return kind(engine, script)


def measure_update(
    run: Run, update: int, shape: Shape, peak: float, gauge: BusyGauge
) -> tuple[dict[str, Any], StepBatch]:
    """One pass of the main loop, as `gigpo_fsdp.train` makes it, timed by phase with the GPU's work."""
    clock, settings = Clock(run.ranks.device, gauge), run.settings
    began = time.perf_counter()
    with clock.phase("collect"):
        batch, metrics = collect(run, update, rollout_sampling(settings))
        run.engine.sleep()
    with clock.phase("old_log_probs"):
        batch = run.actor.with_old_log_probs(batch)
    if run.reference is not None:
        with clock.phase("reference"):
            batch = run.reference.with_log_probs(batch)
    with clock.phase("advantages"):
        batch = with_advantages(batch, AdvantageConfig.of(settings))
    with clock.phase("learn"):
        metrics |= learn(run, update, batch)
    with clock.phase("load"):
        run.engine.load_weights(run.actor.full_weights(run.engine.dtype), version=update + 1)
    seconds = time.perf_counter() - began
    measured = {
        "s": rounded(clock.seconds),
        "update_s": round(seconds, 3),
        "peak_gib": gauge.pop_memory(),
        "busy_frac": gauge.pop(),
        "size": sizes(batch),
        "metrics": with_statistics(batch, metrics) | run.engine.pop_seconds(),
    }
    passes = {
        phase: clock.seconds[phase] for phase in ("old_log_probs", "reference", "learn") if phase in measured["s"]
    }
    rates = with_rates({"s": passes}, shape, batch, batch, peak)["rates"]
    rates["collect"] = {
        "sampled_tokens_per_s": round(sum(len(reply) for reply in batch.reply_ids) / clock.seconds["collect"]),
        "prompt_tokens_per_s": round(sum(len(prompt) for prompt in batch.prompt_ids) / clock.seconds["collect"]),
    }
    return measured | {"rates": rates}, batch


def at_once(engine: Any, settings: Settings, batch: StepBatch, *, collected_s: float) -> dict[str, float]:
    """How long the engine takes where no prompt waits for an environment: the same prompts, replies as long."""
    requests = [
        GenerationRequest(prompt, NoiseKey(1, 0, int(episode), int(step)), admissible=admissible)
        for prompt, episode, step, admissible in zip(
            batch.prompt_ids, batch.episode_id, batch.step_index, batch.admissible, strict=True
        )
    ]
    engine = getattr(engine, "engine", engine)
    began = time.perf_counter()
    waiting = set()
    for request, reply in zip(requests, batch.reply_ids, strict=True):
        length = settings.data.max_response_length if request.admissible is not None else len(reply)
        waiting |= set(engine.submit([request], replace(rollout_sampling(settings), max_tokens=length)))
    while waiting:
        waiting -= {number for number, _ in engine.poll()}
    seconds = time.perf_counter() - began
    return {"s": round(seconds, 3), "collect_to_this": round(collected_s / seconds, 3)}


def print_update(measured: dict[str, Any], *, is_warm: bool) -> None:
    """The phases of an update as a table."""
    size, metrics = measured["size"], measured["metrics"]
    say(f"\n{'an update' if is_warm else 'the first update'}: {measured['update_s']} s; {size}")
    say("| phase | s | tokens/s | % of peak | GPU busy % | peak GiB |\n| --- | --- | --- | --- | --- | --- |")
    for phase, seconds in measured["s"].items():
        rate = measured["rates"].get(phase, {})
        tokens = rate.get("tokens_per_s") or rate.get("sampled_tokens_per_s")
        share = f"{100 * rate['peak_frac']:.1f}" if "peak_frac" in rate else ""
        busy = f"{100 * measured['busy_frac'][phase]:.0f}" if phase in measured["busy_frac"] else ""
        memory = measured["peak_gib"].get(phase, 0.0)
        say(f"| {phase} | {seconds:.3f} | {f'{tokens:,}' if tokens else ''} | {share} | {busy} | {memory:.1f} |")
    parts = {name: value for name, value in metrics.items() if name.startswith("time/")}
    say("  " + ", ".join(f"{name.removeprefix('time/')} {value:.3f}" for name, value in sorted(parts.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen", help="whose recipe and shape")
    parser.add_argument("--learn-only", action="store_true", help="no engine: the actor on rows with random replies")
    parser.add_argument("--tiny", action="store_true", help="a smoke run on the CPU")
    parser.add_argument("--variants", nargs="+", help="which ones, instead of the shape's own")
    parser.add_argument("--rows", type=int, help="rows of a measured update with --learn-only; the shape's own number")
    parser.add_argument("--updates", type=int, default=1, help="measured updates after the first, which warms up")
    parser.add_argument("--reply-tokens", type=float, help="mean length of a free reply; 130, and 20 with --tiny")
    parser.add_argument("--wander", type=float, help="share of steps off the oracle's way, instead of the shape's own")
    parser.add_argument("--data", help="folder of the original's products; without it the embedded catalogue")
    parser.add_argument("--profile", action="store_true", help="list the kernels of one more update")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("settings", nargs="*", help="key=value, for every variant")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.model]
    arguments.reply_tokens = arguments.reply_tokens or (20.0 if arguments.tiny else 130.0)
    if arguments.wander is not None:
        shape = replace(shape, wander=arguments.wander)
    if arguments.tiny:
        shape = replace(shape, wander=0.3, config=shape.config | TINY_CONFIG, settings=shape.settings + TINY_SETTINGS)
    elif not torch.cuda.is_available():
        parser.error("there is no GPU; --tiny runs without one")
    extra = [*arguments.settings, *([f"env.webshop.data_dir={arguments.data}"] if arguments.data else [])]
    if not arguments.learn_only and len(arguments.variants or ["recipe"]) > 1:
        parser.error("--variants: whole updates take one variant a process")
    name = f"update_speed_{arguments.model}{'_learn' if arguments.learn_only else ''}"
    arguments.out = arguments.out or place_of_result(name, is_small=arguments.tiny)
    result = describe_machine("torch", "transformers")
    if torch.cuda.is_available():
        result["hardware"]["gpu"] = torch.cuda.get_device_name()
    result |= {
        "command": command_to_keep("benchmarks/gpu/update_speed.py", sys.argv[1:]),
        "model": shape.config,
        "recipe": shape.recipe,
        "wander": shape.wander,
        "reply_tokens": arguments.reply_tokens,
        "settings": {name: list(WORDS[name]) for name in WORDS},
    }
    (learn_only if arguments.learn_only else whole_updates)(shape, arguments, extra, result)
    keep(result, arguments.out)
    say(f"\n{arguments.out}")


if __name__ == "__main__":
    run_script(main)
