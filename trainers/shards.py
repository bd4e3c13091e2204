"""Weights and moments as `torch.distributed.checkpoint` keeps them: each rank writes and reads its own part.

No rank ever holds the whole of anything, and any number of ranks reads what another number wrote.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainers.actor import model_name
from trainers.errors import CheckpointError, unreadable
from trainers.models import save_surroundings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainers.actor import Actor

SHARDS = "shards"
"""Folder of a checkpoint."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, besides its count of steps."""


def save_shards(folder: Path, actor: Actor, *, tokenizer: PreTrainedTokenizerBase, made: Mapping[str, Any]) -> None:
    """Writes this rank's part, and on the first rank what a policy needs besides its weights."""
    state = {f"weight.{name}": parameter.detach() for name, parameter in actor.trained_weights()}
    for name, moments in actor.optimizer_state().items():
        state |= {f"{key}.{name}": torch.as_tensor(value) for key, value in moments.items()}
    _together(lambda: dcp.save(state, checkpoint_id=folder / SHARDS))
    if actor.ranks.is_first:
        config = actor.scorer.policy.config
        save_surroundings(folder / "policy", config=config, tokenizer=tokenizer, made=made)


def load_shards(checkpoint: Path, actor: Actor) -> None:
    """Reads this rank's part of weights and moments into an actor.

    Raises:
        CheckpointError: It is of another model, or cannot be read.
    """
    shapes = shapes_of(checkpoint)
    stored = {name.removeprefix("weight."): shape for name, shape in shapes.items() if name.startswith("weight.")}
    refuse_other_shapes(checkpoint, stored, actor)
    state: dict[str, torch.Tensor] = {}
    for name, parameter in actor.trained_weights():
        state[f"weight.{name}"] = parameter.detach()
        if f"step.{name}" in shapes:
            moments = {key: torch.zeros_like(parameter.detach()) for key in MOMENTS}
            actor.optimizer.state[parameter] = {"step": torch.zeros((), device=actor.counts_on), **moments}
            state |= {f"{key}.{name}": value for key, value in actor.optimizer.state[parameter].items()}
    try:
        _together(lambda: dcp.load(state, checkpoint_id=checkpoint / SHARDS))
    except OSError as error:
        raise unreadable(checkpoint, error) from error


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All weights of a sharded checkpoint, whole, by name; one process reads them, without a process group.

    Raises:
        CheckpointError: It cannot be read.
    """
    state = {name: torch.empty(shape) for name, shape in shapes_of(checkpoint).items() if name.startswith("weight.")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is what we ask for
        try:
            _together(lambda: dcp.load(state, checkpoint_id=checkpoint / SHARDS, no_dist=True))
        except OSError as error:
            raise unreadable(checkpoint, error) from error
    return {name.removeprefix("weight."): tensor for name, tensor in state.items()}


def shapes_of(checkpoint: Path) -> dict[str, torch.Size]:
    """Shapes of all tensors by name, from the index of the shards alone.

    Raises:
        CheckpointError: The index cannot be read.
    """
    try:
        metadata = dcp.FileSystemReader(checkpoint / SHARDS).read_metadata()
    except Exception as error:  # a pickle: anything may be wrong with it
        raise unreadable(checkpoint, error) from error
    return {
        name: entry.size
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def refuse_other_shapes(checkpoint: Path, shapes: Mapping[str, torch.Size], actor: Actor) -> None:
    """Stops before weights of another model are loaded.

    Raises:
        CheckpointError: A weight that the actor trains is not there, or has another shape, or one is there that the
            actor has not.
    """
    trained = {name: parameter.shape for name, parameter in actor.trained_weights()}
    wrong = [name for name, shape in trained.items() if shapes.get(name) != shape]
    # The model's own names too: a checkpoint of all weights may hold copies of tied ones, and buffers.
    wrong += sorted(set(shapes) - set(trained) - {model_name(name) for name in actor.scorer.state_dict()})
    if wrong:
        raise CheckpointError(
            f"{checkpoint} is of another model than actor_rollout_ref.model.path, or has other adapters than "
            f"actor_rollout_ref.model.lora_rank and .target_modules ask for: {wrong[0]} does not fit"
        )


def _together(action: Any) -> None:
    """Raises the first rank's plain error in the place of torch's collection of all of them with their traces."""
    try:
        action()
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise OSError((str(first).splitlines() or [type(first).__name__])[0]) from error
