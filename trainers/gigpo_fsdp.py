"""Trains a policy in a shop, or any other registered environment, with GiGPO, on one process or under torchrun.

python trainers/gigpo_fsdp.py                                  the default run: minutes on 2 CPU cores
python trainers/gigpo_fsdp.py recipe=NAME key=value ...        another recipe, other settings
python trainers/gigpo_fsdp.py trainer.resume_from=outputs/tiny goes on where a run stopped
torchrun --nproc-per-node 2 trainers/gigpo_fsdp.py ...         the same on two ranks
python trainers/gigpo_fsdp.py trainer.launcher=ray trainer.n_gpus_per_node=2 ...   the same in Ray's workers
python trainers/gigpo_fsdp.py --explain [key=value ...]        every setting, its value, source and meaning
"""

from __future__ import annotations

import os
import shlex

if __name__ == "__main__":  # before torch: threads that wait by spinning starve each other on busy cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import yaml

from rollout.engines.prompts import writable
from rollout.filters import FilterConfig, collect_until_groups_differ
from rollout.flatten import concatenate
from rollout.report import sample_report
from rollout.statistics import batch_statistics, with_statistics
from rollout.types import SamplingParams, StepBatch
from trainers.advantages import AdvantageConfig, with_advantages
from trainers.checkpoint import find_checkpoint, save_checkpoint
from trainers.command import settings_of
from trainers.directory import only_writer, shared_directory
from trainers.display import draw_curve
from trainers.errors import TrainingError
from trainers.evaluation import (
    Evaluation,
    evaluate,
    load_evaluation,
    paired_differences,
    pairing_notes,
    read_evaluation,
    save_evaluation,
    setup_of,
)
from trainers.faults import told_in_one_line
from trainers.files import write_atomically
from trainers.goals import goal_notes, validation_source
from trainers.launch import launch_with_ray
from trainers.memory import little_garbage_collection
from trainers.ranks import joined_ranks, set_threads
from trainers.rollout_files import can_do_without, keep_rows, write_rows
from trainers.rollouts import collect_over_ranks, failed_episodes, unwritable_actions
from trainers.row_modes import RowConfig, with_row_mode
from trainers.run import Run, open_run, rollout_sampling
from trainers.settings import Settings, flatten
from trainers.worlds import world_notes


@little_garbage_collection()
def train(run: Run) -> Evaluation | None:
    """The algorithm, one update a pass; returns the validation after the last one.

    None where validations are off, and where the run was asked to stop.
    """
    settings, log, state = run.settings, run.log, run.state
    sampling = rollout_sampling(settings)
    if settings.trainer.val_before_train and state.updates_done == 0 and state.first_evaluation is None:
        state.first_evaluation = asdict(validate(run))
    validates, last = settings.trainer.test_freq > 0, None
    for update in run.interrupts.until_asked(range(state.updates_done, settings.trainer.total_updates)):
        with log.phase("collect", update):
            batch, metrics = collect(run, update, sampling)
            run.engine.sleep()  # until it gets new weights its memory is the actor's
        with log.phase("old_log_probs", update):
            batch = run.actor.with_old_log_probs(batch, always=settings.algorithm.use_kl_in_reward)
        if run.reference is not None:
            with log.phase("reference", update):
                batch = run.reference.with_log_probs(batch)
        batch = with_advantages(batch, AdvantageConfig.of(settings))
        keep_rows(run, update, batch)
        with log.phase("learn", update):
            metrics |= learn(run, update, batch)
        with log.phase("load", update):
            run.engine.load_weights(run.actor.full_weights(run.engine.dtype), version=update + 1)
        state.updates_done = update + 1
        log.log(state.updates_done, with_statistics(batch, metrics) | run.engine.pop_seconds())
        is_last = state.updates_done == settings.trainer.total_updates
        if validates and (is_last or is_due(state.updates_done, settings.trainer.test_freq)):
            last = validate(run)
        if is_last or is_due(state.updates_done, settings.trainer.save_freq):
            save(run)
    if run.interrupts.is_asked:
        save(run)
        return None
    return last or (last_validation(run) if validates else None)


def collect(run: Run, update: int, sampling: SamplingParams) -> tuple[StepBatch, dict[str, float]]:
    """The rows of an update on every rank, and figures of how they came about (times are those of this rank).

    Where not all rows that were played are learnt from as they are, the figures tell of those that were played.
    """
    settings = run.settings
    filters = settings.algorithm.filter_groups
    played: list[StepBatch] = []

    def play(attempt: int) -> StepBatch:
        rows = collect_over_ranks(
            run.collector,
            run.engine,
            run.goals.batch(update, attempt),
            sampling,
            run.ranks,
            group_size=settings.env.rollout.n,
            update=update,
            seed=settings.trainer.seed,
            first_group=attempt * settings.goals_of_a_try,
            weight_version=update,
        )
        played.append(rows)
        return rows

    config = FilterConfig(
        enable=filters.enable, max_num_gen_batches=filters.max_num_gen_batches, outcome=filters.outcome
    )
    batch, figures = collect_until_groups_differ(play, config, num_groups=settings.data.train_batch_size)
    batch, changed = with_row_mode(
        batch, RowConfig.of(settings, num_ranks=run.ranks.world), seed=settings.trainer.seed, update=update
    )
    if filters.enable or settings.data.row_mode != "pad":
        figures |= batch_statistics(concatenate(played))
    lost = failed_episodes(run.collector, run.ranks) | unwritable_actions(run.grammar, run.ranks)
    return batch, figures | changed | lost | run.collector.pop_seconds()


def learn(run: Run, update: int, batch: StepBatch) -> dict[str, float]:
    """Trains on the rows, unless there is nothing to learn: every advantage is 0.

    What else is in the loss (KL, entropy) and the optimizer's momentum would move the policy on no evidence then.
    """
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
    constrained = run.settings.actor_rollout_ref.rollout.constrained
    with run.log.phase("validate", done):
        evaluation = evaluate(
            run.validator,
            run.engine,
            run.validation_goals,
            sampling,
            run.ranks,
            seed=run.settings.trainer.seed,
            world=run.world,
            goal_list=run.goal_list,
            split=validation_source(run.settings.env, run.settings.data),
            setup=setup_of(run.settings.env, run.settings.data, constrained=constrained),
            name=f"{run.settings.actor_rollout_ref.model.path} after {done} updates",
            on_rows=lambda rows: write_sample(run, rows),
            weight_version=done,
        )
    if lost := len(evaluation.lost_goals):
        run.log.say(
            f"warning: {lost} of {len(run.validation_goals)} validation goals lost their environments: left out"
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
    """Keeps the episodes of a validation beside its results: all of them as rows, some of them as text."""
    if run.ranks.is_first:
        text = sample_report(rows, decode=lambda ids: str(run.tokenizer.decode(ids, skip_special_tokens=True)))
        with can_do_without(run):
            write_atomically(validation_file(run).with_suffix(".txt"), writable(text))
            write_rows(run, rows, validation_file(run).with_suffix(".parquet"))


def save(run: Run) -> Path:
    """Writes a checkpoint of the run as it stands.

    Raises:
        TrainingError: The weights are no numbers any more; earlier checkpoints stay.
    """
    with run.log.phase("save", run.state.updates_done):
        if run.ranks.any_of(not run.actor.is_finite()):
            last = find_checkpoint(run.directory)
            raise TrainingError(
                f"after update {run.state.updates_done} some weights are no numbers: they are not saved. "
                + (f"Go on with trainer.resume_from={last}" if last else "Start again")
                + ", with a lower actor_rollout_ref.actor.optim.lr or .weight_decay, say"
            )
        run.state.metrics = run.log.lines
        run.state.goals_played = run.goals.place(run.state.updates_done)
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
            checkpoint_format=run.settings.trainer.checkpoint_format,
            max_to_keep=run.settings.trainer.max_actor_ckpt_to_keep,
        )


def introduce(run: Run, notes: list[str]) -> None:
    """The first words: what to know before long work begins, all settings, and where a resumed run stands."""
    settings, say, done = run.settings, run.log.say, run.state.updates_done
    notes = notes + world_notes(run.world) + goal_notes(run.goals, run.validation_goals, settings)
    for note in notes + run.notes + run.engine.notes:
        say(f"note: {note}")
    say(yaml.safe_dump(flatten(settings), sort_keys=False, allow_unicode=True).rstrip())
    if done:
        say(f"going on after update {done}")
        if done >= settings.trainer.total_updates:
            say(f"nothing left to do: trainer.total_updates is {settings.trainer.total_updates}")


def report(run: Run, last: Evaluation | None) -> None:
    """The last words: what was reached, how sure that is, and where everything lies."""
    say = run.log.say
    first = read_evaluation(run.state.first_evaluation) if run.state.first_evaluation else None
    for name, evaluation in (("before", first), ("after", last)):
        if evaluation is not None:
            say(f"{name:6} success {evaluation.success}  score {evaluation.score}")
    if first is not None and last is not None:
        for note in pairing_notes(first, last):
            say(f"note: {note}")
        for name, difference in paired_differences(first, last).items():
            say(f"paired difference of {name}: {difference}")
    directory = run.directory
    say(f"run directory  {directory}")
    picture = directory / "curve.png"
    if run.ranks.is_first and run.log.lines:  # validations, which draw it too, may be off or long ago
        draw_curve(directory / "metrics.jsonl", picture)
    if picture.is_file():
        say(f"curve          {picture}")
    checkpoint = find_checkpoint(directory)
    if checkpoint is not None:
        if (checkpoint / "policy" / "model.safetensors").is_file():
            say(f"checkpoint     {checkpoint} (its policy/ loads with transformers)")
        else:
            say(f"checkpoint     {checkpoint}")
            say(f"for others     python trainers/export.py checkpoint={shlex.quote(str(checkpoint))} out=DIRECTORY")
        done, total = run.state.updates_done, run.settings.trainer.total_updates
        more = "" if done < total else f" trainer.total_updates={done + 10}"
        say(f"go on with     python trainers/gigpo_fsdp.py trainer.resume_from={shlex.quote(str(directory))}{more}")


def main(arguments: list[str]) -> None:
    """Command line."""
    resolved = settings_of(arguments, Settings, __doc__)
    if resolved is None:
        return
    if resolved[0].trainer.launcher == "ray":
        launch_with_ray(*resolved)
    else:
        train_on_ranks(*resolved)


def train_on_ranks(settings: Settings, notes: list[str], is_asked_to_end: Callable[[], bool] = bool) -> None:
    """The whole run, as one of its ranks; `is_asked_to_end` tells of a wish that no signal brings here."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # unsaid, each program that is started brings a warning
    set_threads()
    with joined_ranks() as ranks, ExitStack() as held:
        with told_in_one_line(settings, ranks):
            if settings.trainer.resume_from:  # before its checkpoints are looked at
                held.enter_context(only_writer(shared_directory(settings, ranks), ranks))
            run = open_run(settings, ranks, held)
        run.interrupts.is_asked_elsewhere = is_asked_to_end
        try:
            introduce(run, notes)
            with told_in_one_line(settings, ranks, run), run.interrupts:
                report(run, train(run))
        finally:
            run.log.close()
            run.engine.close()


if __name__ == "__main__":
    from trainers.command import run_command

    run_command(main)
