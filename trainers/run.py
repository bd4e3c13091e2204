"""Everything that the main loop works with, made from settings or from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.collector import CollectorConfig, TrajectoryCollector
from rollout.types import SamplingParams
from trainers.actor import Actor, ActorConfig, Reference, WithoutAdapter
from trainers.boards import open_boards, require_boards
from trainers.checkpoint import RunState, find_checkpoint, read_state, restore
from trainers.directory import (
    change_notes,
    from_anywhere,
    new_directory,
    run_directory,
    settings_before,
    shared_directory,
    take_directory,
)
from trainers.display import RunLog
from trainers.engines import open_engine, ranks_per_engine
from trainers.evaluation import GoalList, goal_list_of, read_evaluation, require_same_goals
from trainers.files import require_writable
from trainers.goals import GoalOrder, goals_hash, training_goals, validation_goals
from trainers.interrupts import Interrupts
from trainers.lora import add_adapter
from trainers.memory import memory_in_use
from trainers.models import load_model, load_tokenizer, locate, refuse_other_prompts, weights_hash
from trainers.packing import pack_sequences
from trainers.ranks import Ranks
from trainers.row_modes import RowConfig
from trainers.scoring import require_plain_logits
from trainers.settings import Settings, SettingsError
from trainers.sharding import ShardingConfig, checkpoint_layers, compile_layers, require_compiler
from trainers.worlds import drawing_seed, make_grammar, manager_for, open_world, prompt_hash, require_positions

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rollout.constrained import ActionGrammar
    from rollout.types import Engine
    from trainers.worlds import World

VALIDATION_ENVS = 128
"""Validation episodes that an engine's rank plays at once."""


@dataclass
class Run:
    """Everything that the main loop works with."""

    settings: Settings
    ranks: Ranks
    directory: Path
    world: World
    tokenizer: PreTrainedTokenizerBase
    grammar: ActionGrammar | None
    goals: GoalOrder
    collector: TrajectoryCollector
    engine: Engine
    actor: Actor
    reference: Reference | WithoutAdapter | None
    state: RunState
    log: RunLog
    interrupts: Interrupts
    validator: TrajectoryCollector
    validation_goals: np.ndarray
    goal_list: GoalList
    notes: list[str]
    """What to tell about how it goes on."""


def open_run(settings: Settings, ranks: Ranks, held: ExitStack | None = None) -> Run:
    """Makes or resumes everything, in an order in which mistakes show before anything is written.

    Args:
        settings: All of them.
        ranks: Who works together.
        held: Keeps the lock of a new run's directory, where nobody else can write there meanwhile; None for a caller
            whose directory is nobody else's. That of a resumed run is locked before its checkpoints are looked at.
    """
    check_ranks(settings, ranks)
    require_boards(settings.trainer.logger, is_first=ranks.is_first)
    RowConfig.of(settings, num_ranks=ranks.world)
    place = "trainer.resume_from" if settings.trainer.resume_from else "trainer.output_dir"
    require_writable(run_directory(settings), setting=place)
    if settings.actor_rollout_ref.actor.use_torch_compile:
        require_compiler(ranks.device)
    before = settings_before(settings, ranks)
    resumed, model_path = settings.trainer.resume_from, settings.actor_rollout_ref.model.path
    checkpoint = find_checkpoint(Path(resumed).expanduser()) if resumed else None
    world = open_world(settings.env)
    goals = training_goals(world, settings)
    fixed = validation_goals(world, settings)
    tokenizer = load_tokenizer(model_path)
    refuse_other_prompts(model_path, prompt_template_hash=prompt_hash(settings.env), environment=settings.env.env_name)
    grammar = None
    if settings.actor_rollout_ref.rollout.constrained:
        grammar = make_grammar(tokenizer, settings.env, settings.data)
    policy = policy_to_train(settings)
    require_positions(policy.config, settings.data)
    hashes = {
        "environment": settings.env.env_name,
        "prompt_template_hash": prompt_hash(settings.env),
        "catalogue_hash": world.catalogue_hash,
        "start_policy_hash": weights_hash(policy.state_dict()),
        "train_goals": goals_hash(goals.goals),
    }
    if drawing_seed(settings.env) is not None:
        hashes["environment_seed"] = str(drawing_seed(settings.env))
    state = read_state(checkpoint, hashes=hashes) if checkpoint else RunState(hashes=hashes)
    goals.go_on(state.updates_done, goals_played(state, before, settings))
    goal_list = goal_list_of(settings.env, world.catalogue_hash)
    if state.first_evaluation:
        refuse_other_validations(state.first_evaluation, goal_list, fixed)
    with ExitStack() as undo:  # what was opened is closed again if something later cannot be
        engine = open_engine(settings, ranks, policy, tokenizer, grammar)
        undo.callback(engine.close)
        num_engines = ranks.world // ranks_per_engine(settings)
        num_groups = -(-settings.goals_of_a_try // num_engines)
        collector = make_collector(settings, engine, num_groups * settings.env.rollout.n)
        validator = make_collector(settings, engine, min(VALIDATION_ENVS, -(-len(fixed) // num_engines)))
        actor, reference = open_learners(settings, ranks, policy, tokenizer, grammar)
        if checkpoint:
            restore(checkpoint, actor)
        engine.load_weights(actor.full_weights(engine.dtype), version=state.updates_done)
        engine.pop_seconds()  # no update's
        if resumed or held is None:
            directory = shared_directory(settings, ranks)
        else:
            directory = new_directory(settings, ranks, held, undo)
        boards = open_boards(settings, directory, state.metrics) if ranks.is_first else []
        for board in boards:
            undo.callback(board.close)
        if ranks.is_first:
            take_directory(directory, settings, state)
        run = Run(
            settings=settings,
            ranks=ranks,
            directory=directory,
            world=world,
            tokenizer=tokenizer,
            grammar=grammar,
            goals=goals,
            collector=collector,
            engine=engine,
            actor=actor,
            reference=reference,
            state=state,
            log=RunLog(
                directory,
                total_updates=settings.trainer.total_updates,
                lines=state.metrics,
                is_first=ranks.is_first,
                memory=lambda: memory_in_use(ranks.device),
                console="console" in settings.trainer.logger,
                boards=boards,
            ),
            interrupts=Interrupts(ranks),
            validator=validator,
            validation_goals=fixed,
            goal_list=goal_list,
            notes=change_notes(before, settings, state.updates_done),
        )
        undo.pop_all()  # from here on they are the run's
    return run


def goals_played(state: RunState, before: Mapping[str, Any], settings: Settings) -> int:
    """Where in the goal order a run goes on; one that does not say it had the batch size of `before` all along."""
    if state.goals_played is not None:
        return state.goals_played
    return state.updates_done * int(before.get("data.train_batch_size", settings.data.train_batch_size))


def make_collector(settings: Settings, engine: Engine, num_envs: int) -> TrajectoryCollector:
    """Plays so many environments at once with prompts that the engine's tokenizer measures."""
    manager = manager_for(engine, settings.env, settings.data, num_envs)
    return TrajectoryCollector(manager, CollectorConfig(constrained=settings.actor_rollout_ref.rollout.constrained))


def open_learners(
    settings: Settings,
    ranks: Ranks,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    grammar: ActionGrammar | None,
) -> tuple[Actor, Reference | WithoutAdapter | None]:
    """The policy that learns, sharded, and the frozen one where the loss or the reward needs it."""
    shared: dict[str, Any] = {
        "pad_id": int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id),
        "temperature": settings.actor_rollout_ref.rollout.temperature,
        "grammar": grammar,
    }
    config, model = ActorConfig.of(settings), settings.actor_rollout_ref.model
    if model.lora_rank:
        add_adapter(policy, model, base=str(from_anywhere(locate(model.path))), seed=settings.trainer.seed)
    actor = Actor(policy, ranks, config, **shared)
    if not (config.loss.use_kl_loss or settings.algorithm.use_kl_in_reward):
        return actor, None
    max_rows = settings.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
    if model.lora_rank:
        return actor, WithoutAdapter(actor, max_rows=max_rows)
    frozen = load_model(model.path)
    prepare(frozen, settings)
    reference = Reference(
        frozen,
        ranks,
        max_rows=max_rows,
        max_tokens=config.max_tokens,
        sharding=ShardingConfig(
            dtype=config.sharding.dtype, param_offload=settings.actor_rollout_ref.ref.fsdp_config.param_offload
        ),
        **shared,
    )
    return actor, reference


def policy_to_train(settings: Settings) -> PreTrainedModel:
    """The actor's model, full precision, compiled and with gradient checkpointing where the settings ask for it."""
    model = load_model(settings.actor_rollout_ref.model.path)
    require_plain_logits(model)
    prepare(model, settings)
    if settings.actor_rollout_ref.model.enable_gradient_checkpointing:
        checkpoint_layers(model)
    return model


def prepare(model: PreTrainedModel, settings: Settings) -> None:
    """What actor and reference have in common: packed rows and compiled layers, where the settings ask for them."""
    if settings.actor_rollout_ref.model.use_remove_padding:
        pack_sequences(model)
    if settings.actor_rollout_ref.actor.use_torch_compile:
        compile_layers(model)


def check_ranks(settings: Settings, ranks: Ranks) -> None:
    """Refuses a run on another number of ranks, or ranks of a machine, than the settings ask for."""
    wanted, machines = settings.trainer.n_gpus_per_node, settings.trainer.nnodes
    if wanted is None and ranks.world % machines:
        raise SettingsError(
            f"trainer.nnodes={machines} machines cannot share the {ranks.world} ranks that there are: "
            f"start torchrun with --nnodes {machines} on each of them, or leave it out"
        )
    if wanted is not None and wanted * machines != ranks.world:
        raise SettingsError(
            f"trainer.n_gpus_per_node={wanted} and trainer.nnodes={machines} ask for "
            f"{wanted * machines} ranks, there are {ranks.world}: start with torchrun --nproc-per-node {wanted}"
            + (f" --nnodes {machines} on each machine" if machines > 1 else "")
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world // machines))
    if (wanted is not None or machines > 1) and here * machines != ranks.world:
        raise SettingsError(
            f"trainer.nnodes={machines}: this machine has {here} of the {ranks.world} ranks, it should have "
            f"{ranks.world // machines}: start torchrun with --nnodes {machines} on each of them"
        )
    num_parts, here = ranks_per_engine(settings), ranks.world // machines
    if here % num_parts:
        raise SettingsError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={num_parts} ranks for each engine do not divide the "
            f"{here} {'rank' if here == 1 else 'ranks'} of a machine: set it to 1, or take more ranks"
        )


def refuse_other_validations(first: dict[str, Any], goal_list: GoalList, goals: np.ndarray) -> None:
    """Stops a run that goes on before it plays validations that its first one cannot be compared with.

    Raises:
        SettingsError: The settings that choose the goals have changed.
    """
    try:
        require_same_goals(read_evaluation(first), goal_list=goal_list, goal_index=goals.tolist())
    except SettingsError as error:
        raise SettingsError(
            f"trainer.resume_from: {error}; leave data.val_batch_size, data.val_files and the environment as they were"
        ) from None


def rollout_sampling(settings: Settings) -> SamplingParams:
    """How training replies are drawn."""
    return SamplingParams(
        temperature=settings.actor_rollout_ref.rollout.temperature, max_tokens=settings.data.max_response_length
    )
