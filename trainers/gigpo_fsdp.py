"""Trains a policy in a shop, or any other registered environment, with GiGPO, on one process or under torchrun.

python trainers/gigpo_fsdp.py                                  the default run: minutes on 2 CPU cores
python trainers/gigpo_fsdp.py recipe=NAME key=value ...        another recipe, other settings
python trainers/gigpo_fsdp.py trainer.resume_from=outputs/tiny goes on where a run stopped
torchrun --nproc-per-node 2 trainers/gigpo_fsdp.py ...         the same on two ranks
python trainers/gigpo_fsdp.py --explain [key=value ...]        every setting, its value, source and meaning
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before torch: threads that wait by spinning starve each other on busy cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rollout.collector import CollectorConfig, TrajectoryCollector
from rollout.engines.hf import HFEngine
from rollout.filters import FilterConfig, collect_until_groups_differ
from rollout.report import sample_report
from rollout.statistics import batch_statistics
from rollout.types import SamplingParams, StepBatch
from trainers.actor import Actor, ActorConfig, Reference, checkpoint_layers
from trainers.advantages import AdvantageConfig, with_advantages
from trainers.checkpoint import (
    RunState,
    find_checkpoint,
    load_optimizer,
    load_weights,
    read_state,
    refuse_other_shapes,
    save_checkpoint,
    set_later_aside,
)
from trainers.command import settings_of
from trainers.display import RunLog, draw_curve
from trainers.evaluation import (
    Evaluation,
    GoalList,
    collect_over_ranks,
    evaluate,
    goal_list_of,
    load_evaluation,
    paired_differences,
    pairing_notes,
    read_evaluation,
    require_same_goals,
    save_evaluation,
)
from trainers.files import require_writable, write_atomically
from trainers.losses import LossConfig
from trainers.models import compute_dtype, load_model, load_tokenizer, refuse_other_prompts, weights_hash
from trainers.ranks import Ranks, set_threads, start_ranks, stop_ranks
from trainers.scoring import require_plain_logits
from trainers.settings import Settings, SettingsError, flatten
from trainers.worlds import (
    GoalOrder,
    fixed_goals,
    make_grammar,
    make_manager,
    open_world,
    require_positions,
    world_notes,
)

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rollout.constrained import ActionGrammar
    from trainers.worlds import World

VALIDATION_ENVS = 128
"""Validation episodes that a rank plays at once."""


@dataclass
class Run:
    """Everything that the main loop works with."""

    settings: Settings
    ranks: Ranks
    directory: Path
    world: World
    tokenizer: PreTrainedTokenizerBase
    goals: GoalOrder
    collector: TrajectoryCollector
    engine: HFEngine
    actor: Actor
    reference: Reference | None
    state: RunState
    log: RunLog
    validator: TrajectoryCollector
    validation_goals: np.ndarray
    goal_list: GoalList


def train(run: Run) -> Evaluation | None:
    """The algorithm, one update a pass; returns the validation after the last one, None where validations are off."""
    settings, log, state = run.settings, run.log, run.state
    sampling = rollout_sampling(settings)
    if state.updates_done == 0 and settings.trainer.val_before_train:
        state.first_evaluation = asdict(validate(run))
    validates, last = settings.trainer.test_freq > 0, None
    for update in range(state.updates_done, settings.trainer.total_updates):
        with log.phase("collect", update):
            batch, metrics = collect(run, update, sampling)
        with log.phase("old_log_probs", update):
            batch = run.actor.with_old_log_probs(batch)
        if run.reference is not None:
            with log.phase("reference", update):
                batch = run.reference.with_log_probs(batch)
        batch = with_advantages(batch, advantage_config(settings))
        with log.phase("learn", update):
            metrics |= learn(run, update, batch)
        with log.phase("load", update):
            run.engine.load_weights(run.actor.full_state_dict(), version=update + 1)
        state.updates_done = update + 1
        log.log(state.updates_done, batch_statistics(batch) | metrics)
        is_last = state.updates_done == settings.trainer.total_updates
        if validates and (is_last or is_due(state.updates_done, settings.trainer.test_freq)):
            last = validate(run)
        if is_last or is_due(state.updates_done, settings.trainer.save_freq):
            save(run)
    return last or (last_validation(run) if validates else None)


def collect(run: Run, update: int, sampling: SamplingParams) -> tuple[StepBatch, dict[str, float]]:
    """The rows of an update on every rank, and figures of how they came about (times are those of this rank)."""
    settings = run.settings
    filters, num_groups = settings.algorithm.filter_groups, settings.data.train_batch_size

    def play(attempt: int) -> StepBatch:
        return collect_over_ranks(
            run.collector,
            run.engine,
            run.goals.batch(update, attempt),
            sampling,
            run.ranks,
            group_size=settings.env.rollout.n,
            update=update,
            seed=settings.trainer.seed,
            first_group=attempt * num_groups,
        )

    config = FilterConfig(
        enable=filters.enable, max_num_gen_batches=filters.max_num_gen_batches, outcome=filters.outcome
    )
    batch, figures = collect_until_groups_differ(play, config, num_groups=num_groups)
    return batch, figures | run.collector.pop_seconds()


def learn(run: Run, update: int, batch: StepBatch) -> dict[str, float]:
    """Trains on the rows, unless there is nothing to learn: every advantage is 0."""
    is_skipped = batch.advantage is not None and not batch.advantage.any()
    metrics = {} if is_skipped else run.actor.update(batch, seed=run.settings.trainer.seed, update=update)
    return metrics | {"actor/update_skipped": float(is_skipped)}


def is_due(updates_done: int, frequency: int) -> bool:
    """Whether something that happens every so many updates happens now; 0 or less is never."""
    return frequency > 0 and updates_done % frequency == 0


def validate(run: Run) -> Evaluation:
    """Plays the fixed goals once each, logs the figures, keeps the results of each goal and some episodes as text."""
    settings, done = run.settings.actor_rollout_ref.rollout.val_kwargs, run.state.updates_done
    sampling = SamplingParams(
        temperature=settings.temperature if settings.do_sample else 0.0,
        max_tokens=run.settings.data.max_response_length,
    )
    with run.log.phase("validate", done):
        evaluation = evaluate(
            run.validator,
            run.engine,
            run.validation_goals,
            sampling,
            run.ranks,
            seed=run.settings.trainer.seed,
            goal_list=run.goal_list,
            split=validation_split(run.settings),
            on_rows=lambda rows: write_sample(run, rows),
        )
    run.log.log(done, evaluation.metrics())
    if run.ranks.is_first:
        save_evaluation(evaluation, validation_file(run))
        draw_curve(run.directory / "metrics.jsonl", run.directory / "curve.png")
    return evaluation


def last_validation(run: Run) -> Evaluation:
    """The validation of a run that had nothing left to do when it was resumed."""
    saved = validation_file(run)
    return load_evaluation(saved) if saved.is_file() else validate(run)


def validation_file(run: Run) -> Path:
    """Where the results of each goal lie for the updates done so far."""
    return run.directory / "validations" / f"update_{run.state.updates_done:06d}.json"


def write_sample(run: Run, rows: StepBatch) -> None:
    """Tells the best and the worst episode of a validation, and some between them, in a text beside its results."""
    if run.ranks.is_first:
        text = sample_report(rows, decode=lambda ids: str(run.tokenizer.decode(ids, skip_special_tokens=True)))
        write_atomically(validation_file(run).with_suffix(".txt"), text)


def save(run: Run) -> Path:
    """Writes a checkpoint of the run as it stands."""
    with run.log.phase("save", run.state.updates_done):
        run.state.metrics = run.log.lines
        return save_checkpoint(
            run.directory,
            run.actor,
            run.state,
            tokenizer=run.tokenizer,
            made={
                "made_by": "trainers/gigpo_fsdp.py",
                "settings": flatten(run.settings),
                "updates": run.state.updates_done,
                **run.state.hashes,
            },
        )


def open_run(settings: Settings, ranks: Ranks) -> Run:
    """Makes or resumes everything, in an order in which mistakes show before anything is written."""
    check_ranks(settings, ranks)
    place = "trainer.resume_from" if settings.trainer.resume_from else "trainer.output_dir"
    require_writable(run_directory(settings), setting=place)
    model_path = settings.actor_rollout_ref.model.path
    world = open_world(settings.env)
    goals = GoalOrder(world.split("train"), settings.data.train_batch_size, seed=settings.trainer.seed)
    validation_goals = fixed_goals(world, validation_split(settings), settings.data.val_batch_size)
    tokenizer = load_tokenizer(model_path)
    grammar = None
    if settings.actor_rollout_ref.rollout.constrained:
        grammar = make_grammar(tokenizer, settings.env, settings.data)
    engine = HFEngine(
        load_model(model_path, dtype=compute_dtype(ranks.device)),
        tokenizer,
        grammar=grammar,
        copy_model=False,
        device=ranks.device,
    )
    require_positions(engine.model.config, settings.data)
    num_groups = -(-settings.data.train_batch_size // ranks.world)
    collector = make_collector(settings, engine, num_groups * settings.env.rollout.n)
    validator = make_collector(settings, engine, min(VALIDATION_ENVS, -(-len(validation_goals) // ranks.world)))
    prompt_hash = collector.manager.prompt_hash
    refuse_other_prompts(model_path, prompt_template_hash=prompt_hash, environment=settings.env.env_name)
    policy = policy_to_train(settings)
    hashes = {
        "environment": settings.env.env_name,
        "prompt_template_hash": prompt_hash,
        "catalogue_hash": world.catalogue_hash,
        "start_policy_hash": weights_hash(policy.state_dict()),
    }
    resumed = settings.trainer.resume_from
    checkpoint = find_checkpoint(Path(resumed).expanduser()) if resumed else None
    state = read_state(checkpoint, hashes=hashes) if checkpoint else RunState(hashes=hashes)
    goal_list = goal_list_of(settings.env, world.catalogue_hash)
    if state.first_evaluation:
        refuse_other_validations(state.first_evaluation, goal_list, validation_goals)
    actor, reference = open_learners(settings, ranks, policy, tokenizer, grammar)
    if checkpoint:
        weights = load_weights(checkpoint)
        refuse_other_shapes(checkpoint, weights, actor)
        actor.load_full_state_dict(weights)
        load_optimizer(checkpoint, actor)
        engine.load_weights(actor.full_state_dict(), version=state.updates_done)
    directory = take_directory(settings, ranks, state)
    return Run(
        settings=settings,
        ranks=ranks,
        directory=directory,
        world=world,
        tokenizer=tokenizer,
        goals=goals,
        collector=collector,
        engine=engine,
        actor=actor,
        reference=reference,
        state=state,
        log=RunLog(
            directory,
            total_updates=settings.trainer.total_updates,
            loggers=settings.trainer.logger,
            lines=state.metrics,
            is_first=ranks.is_first,
        ),
        validator=validator,
        validation_goals=validation_goals,
        goal_list=goal_list,
    )


def make_collector(settings: Settings, engine: HFEngine, num_envs: int) -> TrajectoryCollector:
    """Plays so many environments at once with prompts that the engine's tokenizer measures."""
    manager = make_manager(settings.env, settings.data, num_envs, count_tokens=engine.count_tokens)
    return TrajectoryCollector(manager, CollectorConfig(constrained=settings.actor_rollout_ref.rollout.constrained))


def open_learners(
    settings: Settings,
    ranks: Ranks,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    grammar: ActionGrammar | None,
) -> tuple[Actor, Reference | None]:
    """The policy that learns, sharded, and the frozen one where the loss needs it."""
    shared: dict[str, Any] = {
        "pad_id": int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id),
        "temperature": settings.actor_rollout_ref.rollout.temperature,
        "grammar": grammar,
    }
    config = actor_config(settings)
    actor = Actor(policy, ranks, config, **shared)
    if not config.loss.use_kl_loss:
        return actor, None
    reference = Reference(
        load_model(settings.actor_rollout_ref.model.path),
        ranks,
        max_rows=settings.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu,
        max_tokens=config.max_tokens,
        **shared,
    )
    return actor, reference


def take_directory(settings: Settings, ranks: Ranks, state: RunState) -> Path:
    """Makes the run directory of all ranks, with the settings inside; the first writing of a run."""
    directory: Path = ranks.gather(run_directory(settings) if ranks.is_first else None)[0]
    if ranks.is_first:
        if settings.trainer.resume_from:
            set_later_aside(directory, state.updates_done)
        saved = flatten(settings) | {"trainer.resume_from": None, "trainer.output_dir": str(directory)}
        for key in ("actor_rollout_ref.model.path", "env.webshop.data_dir"):
            saved[key] = from_anywhere(saved[key])
        write_atomically(directory / "settings.yaml", yaml.safe_dump(saved, sort_keys=False, allow_unicode=True))
    return directory


def from_anywhere(path: str | None) -> str | None:
    """A directory's whole path, so that a run can be resumed from another working directory; else what came."""
    return str(Path(path).expanduser().resolve()) if path and Path(path).expanduser().is_dir() else path


def refuse_other_validations(first: dict[str, Any], goal_list: GoalList, goals: np.ndarray) -> None:
    """Stops a run that goes on before it plays validations that its first one cannot be compared with.

    Raises:
        SettingsError: The settings that choose the goals have changed.
    """
    try:
        require_same_goals(read_evaluation(first), goal_list=goal_list, goal_index=goals.tolist())
    except SettingsError as error:
        raise SettingsError(
            f"trainer.resume_from: {error}; leave data.val_batch_size and the settings of the environment as they were"
        ) from None


def check_ranks(settings: Settings, ranks: Ranks) -> None:
    """Refuses a run on another number of ranks than the settings ask for."""
    wanted = settings.trainer.n_gpus_per_node
    if wanted is None and ranks.world % settings.trainer.nnodes:
        raise SettingsError(
            f"trainer.nnodes={settings.trainer.nnodes} machines cannot share the {ranks.world} ranks that there are: "
            f"start torchrun with --nnodes {settings.trainer.nnodes} on each of them, or leave it out"
        )
    if wanted is not None and wanted * settings.trainer.nnodes != ranks.world:
        raise SettingsError(
            f"trainer.n_gpus_per_node={wanted} and trainer.nnodes={settings.trainer.nnodes} ask for "
            f"{wanted * settings.trainer.nnodes} ranks, there are {ranks.world}: start with "
            f"torchrun --nproc-per-node {wanted}"
        )


def policy_to_train(settings: Settings) -> PreTrainedModel:
    """The actor's model, full precision, with gradient checkpointing where the settings ask for it."""
    model = load_model(settings.actor_rollout_ref.model.path)
    require_plain_logits(model)
    if settings.actor_rollout_ref.model.enable_gradient_checkpointing:
        checkpoint_layers(model)
    return model


def validation_split(settings: Settings) -> str:
    """Goals that validations play: those of `eval`; the published run uses the first goals of the list."""
    return "test" if settings.env.variant == "verl" else "eval"


def rollout_sampling(settings: Settings) -> SamplingParams:
    """How training replies are drawn."""
    return SamplingParams(
        temperature=settings.actor_rollout_ref.rollout.temperature, max_tokens=settings.data.max_response_length
    )


def advantage_config(settings: Settings) -> AdvantageConfig:
    """What `advantages.py` has to know."""
    actor, gigpo = settings.actor_rollout_ref.actor, settings.algorithm.gigpo
    return AdvantageConfig(
        adv_estimator=settings.algorithm.adv_estimator,
        gamma=settings.algorithm.gamma,
        step_advantage_w=gigpo.step_advantage_w,
        mode=gigpo.mode,
        baseline=gigpo.baseline,
        enable_similarity=gigpo.enable_similarity,
        similarity_thresh=gigpo.similarity_thresh,
        invalid_action_penalty_coef=actor.invalid_action_penalty_coef if actor.use_invalid_action_penalty else 0.0,
        penalise_cut=settings.env.projection.penalise_cut,
        strict=settings.env.projection.strict,
    )


def actor_config(settings: Settings) -> ActorConfig:
    """What `actor.py` has to know."""
    actor = settings.actor_rollout_ref.actor
    return ActorConfig(
        lr=actor.optim.lr,
        weight_decay=actor.optim.weight_decay,
        grad_clip=actor.grad_clip,
        mini_batch_size=actor.ppo_mini_batch_size,
        micro_batch_size=actor.ppo_micro_batch_size_per_gpu,
        log_prob_micro_batch_size=settings.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,
        max_tokens=actor.ppo_max_token_len_per_gpu,
        epochs=actor.ppo_epochs,
        loss=LossConfig(
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
            entropy_coeff=actor.entropy_coeff,
            use_kl_loss=actor.use_kl_loss,
            kl_loss_coef=actor.kl_loss_coef,
            kl_loss_type=actor.kl_loss_type,
            loss_agg_mode=actor.loss_agg_mode,
            tis_imp_ratio_cap=actor.tis_imp_ratio_cap,
        ),
    )


def run_directory(settings: Settings) -> Path:
    """Where the run writes: that of the run resumed, the one asked for, or the next free one in outputs/."""
    trainer = settings.trainer
    if trainer.resume_from:
        path = Path(trainer.resume_from).expanduser().resolve()
        return next(p for p in (path, *path.parents) if (p / "settings.yaml").is_file())
    if trainer.output_dir:
        path = Path(trainer.output_dir).expanduser()
        if (path / "settings.yaml").is_file():
            raise SettingsError(
                f"trainer.output_dir: {path} holds a run; go on with trainer.resume_from={path}, or name another"
            )
        return path
    name = trainer.experiment_name or Path(settings.recipe).stem
    path, number = Path("outputs") / name, 1
    while (path / "settings.yaml").is_file():
        number += 1
        path = Path("outputs") / f"{name}-{number}"
    return path


def report(run: Run, last: Evaluation | None) -> None:
    """The last words: what was reached, how sure that is, and where everything lies."""
    say = run.log.say
    first = read_evaluation(run.state.first_evaluation) if run.state.first_evaluation else None
    for name, evaluation in (("before", first), ("after", last)):
        if evaluation is not None:
            say(f"{name:6} success {evaluation.success}  score {evaluation.score}")
    if first is not None and last is not None:
        for note in pairing_notes(first, temperature=last.temperature, seed=last.seed):
            say(f"note: {note}")
        for name, difference in paired_differences(first, last).items():
            say(f"paired difference of {name}: {difference}")
    directory = run.directory
    say(f"run directory  {directory}")
    if (directory / "curve.png").is_file():
        say(f"curve          {directory / 'curve.png'}")
    checkpoint = find_checkpoint(directory)
    if checkpoint is not None:
        say(f"checkpoint     {checkpoint} (its policy/ loads with transformers)")
        more = run.state.updates_done + 10
        say(
            f"go on with     python trainers/gigpo_fsdp.py trainer.resume_from={directory} trainer.total_updates={more}"
        )


def main(arguments: list[str]) -> None:
    """Command line."""
    resolved = settings_of(arguments, Settings, __doc__)
    if resolved is None:
        return
    settings, notes = resolved
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    set_threads()
    ranks = start_ranks()
    try:
        run = open_run(settings, ranks)
        for note in notes + world_notes(run.world):
            run.log.say(f"note: {note}")
        run.log.say(yaml.safe_dump(flatten(settings), sort_keys=False, allow_unicode=True).rstrip())
        if run.state.updates_done:
            run.log.say(f"going on after update {run.state.updates_done}")
            if run.state.updates_done >= settings.trainer.total_updates:
                run.log.say(f"nothing left to do: trainer.total_updates is {settings.trainer.total_updates}")
        try:
            report(run, train(run))
        finally:
            run.log.close()
    finally:
        stop_ranks()


if __name__ == "__main__":
    from trainers.command import run_command

    run_command(main)
