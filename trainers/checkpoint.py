"""Checkpoints: all that a run needs to go on, complete or not there.

    <run>/checkpoints/update_000010/policy/                 Hugging Face directory, float32: also the export
                                    optimizer.safetensors   moments of AdamW, full tensors by parameter name
                                    state.json              position in the data, metrics so far, hashes

Full tensors make a checkpoint independent of the number of ranks. Sampling noise and goal order are functions of
the seed and the number of the update: there is no random state to save.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainers.actor import Actor
from trainers.evaluation import read_evaluation
from trainers.files import atomic_directory
from trainers.models import save_policy
from trainers.sharding import full, like
from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEPT = 2
"""Checkpoints of a run that stay on the disk."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointError(ShopGymError):
    """A checkpoint that is not there, or belongs to something else."""


@dataclass(kw_only=True)
class RunState:
    """Where a run stands, besides weights and optimizer."""

    updates_done: int = 0
    """Updates learnt from; also the position in the goal order, and the engine's weight version."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl so far."""
    first_evaluation: dict[str, Any] | None = None
    """The validation before the first update, goal by goal."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Environment, prompt template and catalogue that the run is about."""


def save_checkpoint(
    run_dir: Path,
    actor: Actor,
    state: RunState,
    *,
    tokenizer: PreTrainedTokenizerBase,
    made: Mapping[str, Any],
) -> Path:
    """Writes a checkpoint; every rank must call it, the first one writes.

    A kill at any moment leaves the last complete checkpoint. Older ones than the last two are removed, and with them
    what an earlier kill left half written or half removed.
    """
    weights = actor.full_state_dict()
    moments = _full_moments(actor)
    target = run_dir / "checkpoints" / f"update_{state.updates_done:06d}"
    if actor.ranks.is_first and not target.is_dir():
        from safetensors.torch import save_file

        for pattern in (".update_*", ".old-*"):
            for left_over in target.parent.glob(pattern):
                shutil.rmtree(left_over)
        with atomic_directory(target) as scratch:
            config = actor.scorer.policy.config
            save_policy(scratch / "policy", config=config, state_dict=weights, tokenizer=tokenizer, made=made)
            save_file(moments, scratch / "optimizer.safetensors")
            (scratch / "state.json").write_text(json.dumps(asdict(state)), encoding="utf-8")
        for old in sorted((run_dir / "checkpoints").glob("update_*"))[:-KEPT]:
            hidden = old.with_name(f".old-{old.name}")
            os.rename(old, hidden)  # a directory under its own name is always complete
            shutil.rmtree(hidden)
    actor.ranks.barrier()
    return target


def set_later_aside(run_dir: Path, updates_done: int) -> list[Path]:
    """Takes what a run did after an update out of its way, before it goes on from there, perhaps otherwise.

    Later checkpoints would pass for the newest, and later validations for the result. They are moved into
    `superseded/` of the run directory, the latest first, so that a kill in between leaves a run that can be resumed.

    Returns:
        Where they lie now; what had the same name there is replaced.
    """
    later = [
        path
        for folder in ("checkpoints", "validations")
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


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint at a path: itself, or the latest of a run directory; None for a run that has none yet.

    Raises:
        CheckpointError: The path is neither.
    """
    if (path / "state.json").is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"trainer.resume_from: {path} does not exist; give a run directory or a checkpoint")
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
        if not isinstance(state.updates_done, int):
            raise TypeError(f"updates_done is {state.updates_done!r}")
        if not (isinstance(state.metrics, list) and isinstance(state.hashes, dict)):
            raise TypeError("metrics must be a list, hashes an object")
        if state.first_evaluation is not None:
            read_evaluation(state.first_evaluation)
    except (OSError, TypeError, ValueError) as error:
        raise _unreadable(checkpoint, error) from None
    for name, value in state.hashes.items():
        if name in hashes and hashes[name] != value:
            raise CheckpointError(
                f"{checkpoint} was made with {name.replace('_', ' ')} {value}, this run has {hashes[name]}: "
                "they must be the same to go on"
            )
    return state


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Full weights by name, float32; copies of tied weights are left out."""
    return _load_tensors(checkpoint, "policy/model.safetensors")


def refuse_other_shapes(checkpoint: Path, weights: Mapping[str, torch.Tensor], actor: Actor) -> None:
    """Stops before weights of another model are loaded.

    Raises:
        CheckpointError: A weight of the actor is not there, or has another shape.
    """
    for name, parameter in actor.named_weights():
        if name not in weights or weights[name].shape != parameter.shape:
            raise CheckpointError(
                f"{checkpoint} is of another model than actor_rollout_ref.model.path: {name} does not fit"
            )


def load_optimizer(checkpoint: Path, actor: Actor) -> None:
    """Puts the moments of AdamW back, sharded as the actor is now."""
    moments = _load_tensors(checkpoint, "optimizer.safetensors")
    for name, parameter in actor.named_weights():
        if f"step.{name}" in moments:
            actor.optimizer.state[parameter] = {"step": moments[f"step.{name}"].clone()} | {
                key: like(parameter, moments[f"{key}.{name}"]) for key in _MOMENTS
            }


def _load_tensors(checkpoint: Path, name: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(checkpoint / name)
    except (OSError, SafetensorError) as error:
        raise _unreadable(checkpoint, f"{name}: {error}") from None


def _unreadable(checkpoint: Path, why: object) -> CheckpointError:
    return CheckpointError(f"{checkpoint} cannot be read ({why}); go on from an earlier checkpoint")


def _full_moments(actor: Actor) -> dict[str, torch.Tensor]:
    moments: dict[str, torch.Tensor] = {}
    for name, parameter in actor.named_weights():
        state = actor.optimizer.state.get(parameter)
        if state:
            moments[f"step.{name}"] = torch.as_tensor(state["step"]).cpu().clone()
            for key in _MOMENTS:
                moments[f"{key}.{name}"] = full(state[key]).cpu().contiguous()
    return moments
