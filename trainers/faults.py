"""What stops a run from outside its algorithm, told in one line: no memory, no disk, a loss that is no number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainers.actor import NotFinite
from trainers.checkpoint import find_checkpoint
from trainers.errors import TrainingError, is_disk_full, is_out_of_memory
from trainers.ranks import Ranks
from trainers.settings import Settings, flatten

if TYPE_CHECKING:
    from trainers.run import Run

_MODEL, _ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
_ROLLOUT, _REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_PACKING = f"{_ACTOR}.ppo_max_token_len_per_gpu"
_ROWS = ("data.max_prompt_length", "data.max_response_length")

LOWER: dict[str, tuple[str, ...]] = {
    "collect": ("data.train_batch_size", "data.gen_batch_size", "env.rollout.n", *_ROWS),
    "old_log_probs": (f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", _PACKING),
    "reference": (f"{_REF}.log_prob_micro_batch_size_per_gpu", _PACKING),
    "learn": (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", _PACKING),
    "validate": _ROWS,
}
"""Settings that decide how much memory a phase of the main loop takes, the most telling first."""

TURN_ON: dict[str, tuple[str, ...]] = {
    "open": (f"{_ACTOR}.fsdp_config.param_offload", f"{_REF}.fsdp_config.param_offload"),
    "collect": (f"{_ACTOR}.fsdp_config.param_offload", f"{_REF}.fsdp_config.param_offload"),
    "old_log_probs": (f"{_ACTOR}.fsdp_config.optimizer_offload",),
    "reference": (f"{_REF}.fsdp_config.param_offload",),
    "learn": (f"{_MODEL}.enable_gradient_checkpointing", f"{_ACTOR}.fsdp_config.param_offload"),
    "load": (f"{_ACTOR}.fsdp_config.param_offload",),
    "save": (f"{_ACTOR}.fsdp_config.param_offload",),
    "validate": (f"{_ACTOR}.fsdp_config.param_offload", f"{_REF}.fsdp_config.param_offload"),
}
"""Settings that save memory in a phase, for those whose value is false."""


@contextmanager
def told_in_one_line(settings: Settings, ranks: Ranks, run: Run | None = None) -> Iterator[None]:
    """Turns errors that the machine causes in the block into a `TrainingError`; all others pass.

    Args:
        settings: Of the run.
        ranks: Whose memory it may be.
        run: Knows its phase and its checkpoints; None while it is being opened.
    """
    try:
        yield
    except NotFinite as error:
        raise TrainingError(
            f"{error} (trainer.max_nan_steps); the weights are those before them. {_go_on(run)}, with a lower "
            f"{_ACTOR}.optim.lr, say"
        ) from error
    except (MemoryError, RuntimeError, OSError) as error:
        phase = run.log.current_phase if run else "open"
        if is_out_of_memory(error):
            what = f"rank {ranks.rank} ({ranks.device}) is out of memory: {memory_advice(settings, phase)}"
        elif is_disk_full(error):
            what = f"the disk is full ({error}): make room"
        else:
            raise
        raise TrainingError(f"in the phase {phase} {what}. {_go_on(run)}", on_every_rank=False) from error


def memory_advice(settings: Settings, phase: str) -> str:
    """Which settings make a phase take less memory, with the values that they have."""
    values: dict[str, Any] = flatten(settings)
    parts = []
    lower = [f"{key} ({values[key]})" for key in LOWER.get(phase, ()) if values[key] is not None]
    if lower:
        parts.append(f"lower {', '.join(lower)}")
    turn_on = [f"{key}=true" for key in TURN_ON.get(phase, ()) if not values[key]]
    if turn_on:
        parts.append(f"set {', '.join(turn_on)}")
    return ", or ".join([*parts, "take more ranks"])


def _go_on(run: Run | None) -> str:
    checkpoint = find_checkpoint(run.directory) if run else None
    if checkpoint is None:
        return "No checkpoint was saved yet: start again"
    return f"The last good checkpoint is {checkpoint}: go on with trainer.resume_from={checkpoint}"
