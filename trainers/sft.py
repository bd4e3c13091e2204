"""How small policies start: imitation on train goals, through the prompts that training uses.

    python trainers/sft.py out=outputs/policy goals=1000 epochs=3
    python trainers/sft.py out=outputs/policy source=my_module:MyShopper won_only=true
    python trainers/sft.py out=outputs/policy source=episodes.parquet init=outputs/tiny/checkpoints/update_000030/policy

Plays the oracle, or another source, through the environment manager, or takes the episodes of a rollout's file; trains
a tokenizer on what it saw (unless `init` brings one), makes a small Qwen2 model, and teaches it the replies. Writes a
Hugging Face directory with bf16 weights, which loads wherever a checkpoint's `policy/` does, and beside them how they
were made (`provenance.json`).
"""

# ruff: noqa: RUF009  setting() and group() make dataclass fields

from __future__ import annotations

import os

if __name__ == "__main__":  # before torch: threads that wait by spinning starve each other on busy cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from env_manager import EnvManager
from rollout.collector import CollectorConfig, TrajectoryCollector
from rollout.constrained import ActionGrammar
from rollout.engines.hf import HFEngine
from rollout.types import SamplingParams
from trainers.command import settings_of
from trainers.demonstrations import Demonstrations, demonstrate, encode, is_recorded, make_source, recorded
from trainers.errors import TrainingError, faults_told
from trainers.evaluation import Evaluation, evaluate, goal_list_of, setup_of
from trainers.files import atomic_directory, require_writable
from trainers.goals import goals_to_play, tell_of_fewer, train_goals
from trainers.learning_rate import RateSchedule
from trainers.models import (
    PROVENANCE,
    load_model,
    load_tokenizer,
    make_small_policy,
    provenance,
    save_policy,
    train_tokenizer,
    weights_hash,
    write_provenance,
)
from trainers.ranks import start_ranks, stop_ranks
from trainers.scoring import Collator, Pairs, TokenScorer, micro_batches_for, require_plain_logits
from trainers.settings import (
    LEARNS_FROM_NO_REWARD,
    DataSettings,
    EnvSettings,
    Need,
    SettingsError,
    equal,
    flatten,
    group,
    setting,
)
from trainers.worlds import make_grammar, make_manager, manager_for, open_world, require_positions

NEW = equal("init", None)
NEW_TOKENIZER = equal("tokenizer", None)
PLAYED = Need("a source that plays", lambda values: not is_recorded(values["source"]))
MEASURED = Need("eval_goals above 0", lambda values: values["eval_goals"] > 0)
LOWEST_RATE = 0.1
"""Share of the learning rate that imitation ends at."""
MAX_NAN_STEPS = 5
"""Optimizer steps in a row with a loss or gradient that is not finite, after which imitation stops."""

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trainers.worlds import World


@dataclass(frozen=True, kw_only=True)
class SftSettings:
    """Settings of the command; `env.*` and `data.*` are those of training."""

    NO_USE: ClassVar[Mapping[str, str]] = LEARNS_FROM_NO_REWARD

    recipe: str = setting("tiny", "where env and data settings come from")
    out: str | None = setting(None, "directory to write; must be given")
    source: str = setting(
        "oracle",
        "whose episodes are imitated: oracle, guided (searches as it does, looks before it buys), rule, looking, "
        "reading (also reads the features), module:name for a class of your own that is called with the shop "
        "and has act(observation, info), or a rollout's .parquet file",
    )
    won_only: bool = setting(False, "leave out episodes that were not won")
    min_score: float = setting(0.0, "leave out episodes with a lower task score", at_least=0, at_most=1)
    goals: int = setting(1000, "train goals to play for it, a seeded choice; 0 takes all", at_least=0, needs=[PLAYED])
    episodes_per_goal: int = setting(
        1, "times that each goal is played; more than 1 needs noise", at_least=1, needs=[PLAYED]
    )
    noise: float = setting(
        0.0,
        "share of steps at which a random action is played, so that recovery is seen",
        at_least=0,
        at_most=0.9,
        needs=[PLAYED],
    )
    haste: float = setting(
        0.0,
        "share of item pages at which the demonstrator buys before all options are chosen, so that reward has "
        "something left to teach",
        at_least=0,
        at_most=0.9,
        needs=[PLAYED],
    )
    epochs: float = setting(3.0, "passes over the rows", above=0)
    batch_rows: int = setting(64, "rows of an optimizer step", at_least=1)
    micro_batch_tokens: int = setting(65536, "tokens of one forward and backward pass, at most", at_least=32)
    lr: float = setting(1e-3, "highest learning rate; falls to a tenth along a cosine", above=0)
    warmup_frac: float = setting(0.05, "share of the steps over which it rises", at_least=0, at_most=1)
    weight_decay: float = setting(0.01, "decoupled weight decay", at_least=0)
    grad_clip: float = setting(1.0, "largest gradient norm", above=0)
    masked: bool = setting(True, "learn the choice among admissible actions only, as constrained decoding makes it")
    init: str | None = setting(None, "policy to go on from, with its tokenizer; null makes a new one")
    tokenizer: str | None = setting(
        None, "directory of a tokenizer to use; null trains one on the prompts", needs=[NEW]
    )
    vocab_size: int = setting(2048, "tokens of a new tokenizer", at_least=300, needs=[NEW, NEW_TOKENIZER])
    hidden: int = setting(192, "width of a new model", at_least=16, needs=[NEW])
    layers: int = setting(4, "its depth", at_least=1, needs=[NEW])
    heads: int = setting(6, "its attention heads", at_least=1, needs=[NEW])
    intermediate: int | None = setting(None, "width of its MLP; null is 8/3 of hidden", at_least=16, needs=[NEW])
    max_positions: int = setting(1024, "longest prompt and reply that it can take, tokens", at_least=32, needs=[NEW])
    eval_goals: int = setting(
        300, "eval goals played at the end, or the whole list of data.val_files; 0 plays none", at_least=0
    )
    eval_temperature: float = setting(0.4, "sampling temperature of that", at_least=0, needs=[MEASURED])
    num_envs: int = setting(128, "episodes played at once", at_least=1)
    seed: int = setting(0, "seed of goals, noise, weights and order", at_least=0)
    device: str = setting("auto", "auto, cpu or cuda", only=("auto", "cpu", "cuda"))
    env: EnvSettings = group(EnvSettings)
    data: DataSettings = group(DataSettings)


def imitate(
    model: PreTrainedModel,
    rows: Pairs,
    grammar: ActionGrammar,
    settings: SftSettings,
    device: torch.device,
    pad_id: int,
) -> dict[str, float]:
    """Teaches the model the replies, by cross-entropy on their tokens.

    Steps whose loss or gradient is not finite are left out.

    Returns:
        Loss of the last tenth of the steps, seconds, and counts.

    Raises:
        TrainingError: Too many steps in a row had to be left out, or what comes out is no policy.
    """
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper of Module.to lost its signature
    scorer = TokenScorer(model.requires_grad_(True).train(), temperature=1.0)
    collate = Collator(pad_id, device, grammar if settings.masked else None)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        betas=(0.9, 0.98),
        fused=device.type == "cuda" or None,
    )
    rng = np.random.default_rng(settings.seed)
    lengths = rows.lengths
    num_steps = max(1, math.ceil(settings.epochs * math.ceil(len(rows) / settings.batch_rows)))
    schedule = RateSchedule(
        shape="cosine", num_steps=num_steps, num_rising=int(num_steps * settings.warmup_frac), lowest=LOWEST_RATE
    )
    losses: list[torch.Tensor] = []
    began, num_tokens, step, num_nan_steps = time.perf_counter(), 0, 0, 0
    while step < num_steps:
        order = rng.permutation(len(rows))
        for start in range(0, len(order), settings.batch_rows):
            if step == num_steps:
                break
            chosen = order[start : start + settings.batch_rows]
            for parameters in optimizer.param_groups:
                parameters["lr"] = settings.lr * schedule.share(step)
            optimizer.zero_grad(set_to_none=True)
            loss = torch.zeros((), device=device)
            num_reply_tokens = sum(len(rows.replies[row]) for row in chosen)
            for part in micro_batches_for(
                device,
                lengths[chosen],
                max_rows=len(chosen),
                max_tokens=settings.micro_batch_tokens,
                width=int(model.config.get_text_config().hidden_size),
            ):
                batch = collate(rows, chosen[part])
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                    log_probs, _ = scorer(batch, with_entropy=False)
                share = -log_probs.sum() / num_reply_tokens
                share.backward()
                loss += share.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
            num_tokens += int(lengths[chosen].sum())
            step += 1
            if not (loss + norm).isfinite():
                num_nan_steps += 1
                if num_nan_steps == MAX_NAN_STEPS or step == num_steps:
                    raise _spoilt(f"the last {num_nan_steps} optimizer steps had losses or gradients", settings)
                continue
            optimizer.step()
            num_nan_steps = 0
            losses.append(loss)
            if step % max(1, num_steps // 20) == 0:
                recent = float(torch.stack(losses[-max(1, num_steps // 20) :]).mean())
                rate = num_tokens / (time.perf_counter() - began)
                print(f"step {step}/{num_steps}  loss {recent:.4f}  {rate:,.0f} tokens/s", flush=True)
    model.requires_grad_(False).eval()
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise _spoilt("the model ended with weights", settings)
    last = torch.stack(losses[-max(1, num_steps // 10) :]).mean()
    seconds = round(time.perf_counter() - began, 1)
    return {"loss": round(float(last), 5), "optimizer_steps": num_steps, "seconds": seconds}


def _spoilt(what: str, settings: SftSettings) -> TrainingError:
    return TrainingError(
        f"{what} that are not finite; nothing was written. Start again with a lower lr ({settings.lr:g}), say"
    )


def run(settings: SftSettings, command: str) -> dict[str, Any]:
    """From episodes to directory; returns the provenance that was written."""
    if settings.out is None:
        raise SettingsError("out=DIR is missing: where shall the policy go?")
    out = Path(settings.out).expanduser()
    require_writable(out, setting="out")
    if out.is_dir() and any(out.iterdir()):
        raise SettingsError(f"out: {out} is not empty; name another directory, or delete it")
    if (num_ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise SettingsError(f"imitation runs in one process, not on {num_ranks} ranks: start it with plain python")
    ranks = start_ranks(settings.device)
    device = ranks.device
    world = open_world(settings.env)
    all_goals, source = train_goals(world, settings.env, settings.data)
    if not is_recorded(settings.source):
        tell_of_fewer(all_goals, source, key="goals", num=settings.goals)
    goals = np.random.default_rng(settings.seed).permutation(all_goals)[: settings.goals or None]
    goals = np.tile(goals, settings.episodes_per_goal)
    num_envs = min(settings.num_envs, len(goals))

    tokenizer = _tokenizer(settings, world, goals[: len(all_goals)], num_envs)
    model = _model(settings, tokenizer)
    require_positions(model.config, settings.data)
    grammar = make_grammar(tokenizer, settings.env, settings.data)
    engine = HFEngine(model, tokenizer, grammar=grammar, copy_model=False)
    manager = manager_for(engine, settings.env, settings.data, num_envs)
    began = time.perf_counter()
    if is_recorded(settings.source):
        lesson = recorded(
            settings.source,
            all_goals,
            manager,
            engine,
            won_only=settings.won_only,
            min_score=settings.min_score,
            masked=settings.masked,
            max_tokens=grammar.max_tokens,
        )
    else:
        lesson = encode(_shown(settings, world, manager, goals), engine, grammar)
    rows = lesson.rows
    if not len(rows):
        raise SettingsError(
            f"source: nothing is left to imitate ({lesson}); won_only and min_score decide which episodes, "
            "data.max_response_length how long a reply may be; or take another source"
        )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{lesson} in {time.perf_counter() - began:.0f} s; rows {rows.lengths.mean():.0f} tokens on average, "
        f"{rows.lengths.max()} at most; {num_parameters / 1e6:.2f} M parameters, {len(tokenizer)} tokens, {device}",
        flush=True,
    )
    figures: dict[str, Any] = imitate(model, rows, grammar, settings, device, int(tokenizer.pad_token_id or 0))
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    made = {
        "made_by": command,
        "settings": {key: value for key, value in flatten(settings).items() if key != "out"},
        "environment": settings.env.env_name,
        "prompt_template": settings.env.prompt,
        "prompt_template_hash": manager.prompt_hash,
        "catalogue_hash": world.catalogue_hash,
        "num_parameters": num_parameters,
        "num_rows": len(rows),
        "weights_hash": weights_hash(weights),
        "torch": torch.__version__,
        "device": device.type,
        "figures": figures,
    }
    with atomic_directory(out) as scratch:
        save_policy(
            scratch, config=model.config, state_dict=weights, tokenizer=tokenizer, made=made, dtype=torch.bfloat16
        )
    size = (out / "model.safetensors").stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB of weights, {PROVENANCE} beside them", flush=True)
    if settings.eval_goals:  # minutes, which may be broken off: what was taught is kept by now
        model.load_state_dict(weights)  # what is measured is what is saved
        evaluation = _evaluate(settings, engine, world, ranks, num_envs)
        figures["eval_success"], figures["eval_score"] = str(evaluation.success), str(evaluation.score)
        write_provenance(out, made)
        print(f"eval success {evaluation.success}\neval score   {evaluation.score}")
    return made


def _shown(settings: SftSettings, world: World, manager: EnvManager, goals: np.ndarray) -> Demonstrations:
    """The source's episodes that are good enough."""
    shown = demonstrate(
        manager,
        make_source(settings.source, world, settings.env),
        goals,
        noise=settings.noise,
        haste=settings.haste,
        seed=settings.seed,
    )
    return shown.keep(won_only=settings.won_only, min_score=settings.min_score)


def _tokenizer(settings: SftSettings, world: World, goals: np.ndarray, num_envs: int) -> PreTrainedTokenizerBase:
    if settings.init or settings.tokenizer:
        return load_tokenizer(str(settings.init or settings.tokenizer))
    if is_recorded(settings.source):
        raise SettingsError("source: recorded episodes are tokens; name the policy (init) or tokenizer that wrote them")
    manager = make_manager(settings.env, settings.data, num_envs, count_tokens=None)
    shown = _shown(settings, world, manager, goals)
    replies = (
        f"<think>{thought}</think><action>{action}</action>" if thought else f"<action>{action}</action>"
        for thought, action in zip(shown.thoughts, shown.actions, strict=True)
    )
    return train_tokenizer([*shown.prompts, *replies], settings.vocab_size)


def _model(settings: SftSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    if settings.init:
        model = load_model(settings.init)
        require_plain_logits(model)
        return model
    return make_small_policy(
        tokenizer,
        hidden=settings.hidden,
        layers=settings.layers,
        heads=settings.heads,
        intermediate=settings.intermediate,
        max_positions=settings.max_positions,
        seed=settings.seed,
    )


def _evaluate(settings: SftSettings, engine: HFEngine, world: World, ranks: Any, num_envs: int) -> Evaluation:
    goals, source = goals_to_play(world, settings.env, settings.data, split="eval", num=settings.eval_goals)
    if settings.data.val_files is None:
        tell_of_fewer(goals, f"the {source} split", key="eval_goals", num=settings.eval_goals)
    manager = manager_for(engine, settings.env, settings.data, min(num_envs, len(goals)))
    return evaluate(
        TrajectoryCollector(manager, CollectorConfig(constrained=True)),
        engine,
        goals,
        SamplingParams(temperature=settings.eval_temperature, max_tokens=settings.data.max_response_length),
        ranks,
        seed=settings.seed,
        world=world,
        goal_list=goal_list_of(settings.env, world.catalogue_hash),
        split=source,
        setup=setup_of(settings.env, settings.data, constrained=True),
        name=str(settings.out),
    )


def main(arguments: list[str]) -> None:
    """Command line."""
    resolved = settings_of(arguments, SftSettings, __doc__)
    if resolved is None:
        return
    settings, notes = resolved
    for note in notes:
        print(f"note: {note}")
    if settings.init:
        earlier = provenance(settings.init)
        print(f"going on from {settings.init} ({json.dumps(earlier.get('figures', {}))})")
    # Where the directory was on the machine that made it is nobody's business.
    words = ["out=DIR" if word.startswith("out=") else word for word in arguments]
    less_memory = (
        f"lower micro_batch_tokens ({settings.micro_batch_tokens}), num_envs ({settings.num_envs}) or the size of the "
        "model"
    )
    try:
        with faults_told("the machine", less_memory):
            run(settings, " ".join(["python", "trainers/sft.py", *words]))
    finally:
        stop_ranks()


if __name__ == "__main__":
    from trainers.command import run_command

    run_command(main)
