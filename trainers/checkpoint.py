"""Checkpoints: all that a run needs to go on, complete or not there.

    <run>/checkpoints/update_000010/state.json              position in the data, metrics so far, hashes
    full       policy/                  Hugging Face directory, float32: also the export
               optimizer.safetensors    moments of AdamW, full tensors by parameter name
    with LoRA  adapter/                 what peft loads onto the policy that the run began with
               optimizer.safetensors    its moments
    sharded    shards/                  weights and moments as torch.distributed.checkpoint keeps them
               policy/                  all of a Hugging Face directory but the weights (`trainers/export.py` adds them)

None of them depends on the number of ranks. Sampling noise and goal order are functions of the seed and the number of
the update: there is no random state to save.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainers import lora
from trainers.actor import Actor
from trainers.errors import CheckpointError, TrainingError, unreadable
from trainers.evaluation import read_evaluation
from trainers.files import WriteError, write_together
from trainers.models import save_policy, save_surroundings
from trainers.settings import CheckpointFormat, TrainerSettings
from trainers.sharding import full, like
from trainers.shards import MOMENTS, SHARDS, load_shards, refuse_other_shapes, save_shards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POLICY, ADAPTER = "policy", "adapter"
"""Folders of a checkpoint."""


@dataclass(kw_only=True)
class RunState:
    """Where a run stands, besides weights and optimizer."""

    updates_done: int = 0
    """Updates learnt from; also the engine's weight version."""
    goals_played: int | None = None
    """Place in the goal order at which the next update begins; None in checkpoints of before, which do not say it."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl so far."""
    first_evaluation: dict[str, Any] | None = None
    """The validation before the first update, goal by goal."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Environment, prompt template and catalogue that the run is about."""
    num_nan_steps: int = 0
    """The actor's, when the checkpoint was written: optimizer steps skipped since the last one that was taken."""


def save_checkpoint(
    run_dir: Path,
    actor: Actor,
    state: RunState,
    *,
    tokenizer: PreTrainedTokenizerBase,
    made: Mapping[str, Any],
    checkpoint_format: CheckpointFormat = TrainerSettings.checkpoint_format,
    max_to_keep: int | None = TrainerSettings.max_actor_ckpt_to_keep,
) -> Path:
    """Writes a checkpoint; every rank must call it.

    A kill at any moment leaves the last complete checkpoint. Older ones than the last `max_to_keep` (None keeps all)
    are removed, and with them what an earlier kill left half written or half removed.

    Raises:
        TrainingError: On every rank, if one could not write; nothing of the checkpoint is left then.
    """
    ranks, target = actor.ranks, run_dir / "checkpoints" / f"update_{state.updates_done:06d}"
    if ranks.any_of(ranks.is_first and target.is_dir()):
        return target
    if ranks.is_first:
        for pattern in (".update_*", ".old-*"):
            for left_over in target.parent.glob(pattern):
                shutil.rmtree(left_over)

    def write(folder: Path) -> None:
        write_learner = save_shards if checkpoint_format == "sharded" else _save_whole
        write_learner(folder, actor, tokenizer=tokenizer, made=made)
        if ranks.is_first:
            saved = asdict(replace(state, num_nan_steps=actor.num_nan_steps))
            (folder / "state.json").write_text(json.dumps(saved), encoding="utf-8")

    try:
        write_together(target, ranks, write)
    except WriteError as error:
        last = find_checkpoint(run_dir) if run_dir.is_dir() else None
        raise TrainingError(
            f"{target} could not be written ({error}): nothing of it is left. "
            + (f"The last good checkpoint is {last}" if last else "There is no earlier checkpoint")
        ) from error
    if ranks.is_first and max_to_keep is not None:
        for old in sorted(target.parent.glob("update_*"))[:-max_to_keep]:
            hidden = old.with_name(f".old-{old.name}")
            os.rename(old, hidden)  # a directory under its own name is always complete
            shutil.rmtree(hidden)
    ranks.barrier()
    return target


def restore(checkpoint: Path, actor: Actor) -> None:
    """Makes an actor stand where that of a checkpoint stood, sharded as it is now; every rank must call it.

    Raises:
        CheckpointError: It is of another model, cannot be read, or holds another adapter than the run has.
    """
    actor.num_nan_steps = read_state(checkpoint, hashes={}).num_nan_steps
    if (checkpoint / SHARDS).is_dir():
        load_shards(checkpoint, actor)
        return
    config, weights = lora.adapter_config(actor.scorer.policy), load_weights(checkpoint)
    if config is not None and (checkpoint / ADAPTER).is_dir():
        lora.refuse_other_scale(checkpoint, read_adapter_config(checkpoint), config)
    refuse_other_shapes(checkpoint, {name: tensor.shape for name, tensor in weights.items()}, actor)
    actor.load_trained_weights(weights)
    _load_optimizer(checkpoint, actor)


def set_later_aside(run_dir: Path, updates_done: int) -> list[Path]:
    """Takes what a run did after an update out of its way, before it goes on from there, perhaps otherwise.

    Later checkpoints would pass for the newest, and later validations and rollouts for the result. They are moved into
    `superseded/` of the run directory, the latest first, so that a kill in between leaves a run that can be resumed.

    Returns:
        Where they lie now; what had the same name there is replaced.
    """
    later = [
        path
        for folder in ("checkpoints", "validations", "rollouts")
        for path in (run_dir / folder).glob("update_*")
        if (number := path.stem.removeprefix("update_")).isdigit() and int(number) > updates_done
    ]
    moved = []
    for path in sorted(later, key=lambda path: path.stem, reverse=True):
        target = run_dir / "superseded" / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
        moved.append(target)
    return moved


def find_checkpoint(path: Path, *, setting: str = "trainer.resume_from") -> Path | None:
    """The checkpoint at a path: itself, or the latest of a run directory; None for a run that has none yet.

    Args:
        path: What the caller gave.
        setting: The name under which it was given.

    Raises:
        CheckpointError: The path is neither.
    """
    if (path / "state.json").is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{setting}: {path} does not exist; give a run directory or a checkpoint")
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    found = sorted(p for p in folder.glob("update_*") if (p / "state.json").is_file())
    return found[-1] if found else None


def read_state(checkpoint: Path, *, hashes: Mapping[str, str]) -> RunState:
    """Where the run of a checkpoint stood.

    Args:
        checkpoint: Its directory.
        hashes: What the run that wants to go on is about.

    Raises:
        CheckpointError: The checkpoint is about another environment, prompt template or catalogue.
    """
    try:
        state = RunState(**json.loads((checkpoint / "state.json").read_text(encoding="utf-8")))
        for name in ("updates_done", "num_nan_steps"):
            if not isinstance(getattr(state, name), int):
                raise TypeError(f"{name} is {getattr(state, name)!r}")
        if not isinstance(state.goals_played, int | None):
            raise TypeError(f"goals_played is {state.goals_played!r}")
        if not (isinstance(state.metrics, list) and isinstance(state.hashes, dict)):
            raise TypeError("metrics must be a list, hashes an object")
        if state.first_evaluation is not None:
            read_evaluation(state.first_evaluation)
    except (OSError, TypeError, ValueError) as error:
        raise unreadable(checkpoint, error) from None
    for name, value in state.hashes.items():
        if name in hashes and hashes[name] != value:
            raise CheckpointError(
                f"{checkpoint} was made with {name.replace('_', ' ')} {value}, this run has {hashes[name]}: "
                "they must be the same to go on"
            )
    return state


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Full tensors, float32, of what was trained, by name; copies of tied weights are left out."""
    if (checkpoint / ADAPTER).is_dir():
        return lora.inner_names(_load_tensors(checkpoint, f"{ADAPTER}/{lora.WEIGHTS}"))
    return _load_tensors(checkpoint, f"{POLICY}/model.safetensors")


def read_adapter_config(checkpoint: Path) -> dict[str, Any]:
    """What peft keeps beside an adapter: its rank, alpha and the policy that it began with."""
    return read_object(
        checkpoint, f"{ADAPTER}/adapter_config.json", needs=("r", "lora_alpha", "base_model_name_or_path")
    )


def read_object(checkpoint: Path, name: str, *, needs: Iterable[str] = ()) -> dict[str, Any]:
    """A JSON file of a checkpoint that holds an object, with at least the keys in `needs`.

    Raises:
        CheckpointError: It is not there, or is something else.
    """
    try:
        found = json.loads((checkpoint / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(checkpoint, f"{name}: {error}") from None
    if not isinstance(found, dict):
        raise unreadable(checkpoint, f"{name}: not an object")
    for key in needs:
        if key not in found:
            raise unreadable(checkpoint, f"{name}: no {key}")
    return found


def _load_optimizer(checkpoint: Path, actor: Actor) -> None:
    """Puts the moments of AdamW back, sharded as the actor is now."""
    moments = _load_tensors(checkpoint, "optimizer.safetensors")
    for name, parameter in actor.trained_weights():
        if f"step.{name}" in moments:
            actor.optimizer.state[parameter] = {"step": moments[f"step.{name}"].to(actor.counts_on, copy=True)} | {
                key: like(parameter, moments[f"{key}.{name}"]) for key in MOMENTS
            }


def _save_whole(folder: Path, actor: Actor, *, tokenizer: PreTrainedTokenizerBase, made: Mapping[str, Any]) -> None:
    """Gathers one tensor after the other on the CPU of the first rank, which writes them."""
    from safetensors.torch import save_file

    config = lora.adapter_config(actor.scorer.policy)
    source = actor.full_weights() if config is None else actor.trained_weights()
    weights = _on_first_rank(actor, source)
    moments = _on_first_rank(actor, _moments(actor))
    if not actor.ranks.is_first:
        return
    save_file(moments, folder / "optimizer.safetensors")
    if config is None:
        model_config = actor.scorer.policy.config
        save_policy(folder / POLICY, config=model_config, state_dict=weights, tokenizer=tokenizer, made=made)
    else:
        lora.save_adapter(folder / ADAPTER, config, weights)
        save_surroundings(folder / ADAPTER, tokenizer=tokenizer, made=made)


def _on_first_rank(actor: Actor, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    kept = {}
    for name, tensor in tensors:
        whole = full(tensor.detach())  # all ranks together, one tensor at a time
        if actor.ranks.is_first:
            kept[name] = whole.cpu().contiguous()
    return kept


def _moments(actor: Actor) -> Iterator[tuple[str, torch.Tensor]]:
    for name, state in actor.optimizer_state().items():
        yield f"step.{name}", torch.as_tensor(state["step"]).clone()
        for key in MOMENTS:
            yield f"{key}.{name}", state[key]


def _load_tensors(checkpoint: Path, name: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(checkpoint / name)
    except (OSError, SafetensorError) as error:
        raise unreadable(checkpoint, f"{name}: {error}") from None
