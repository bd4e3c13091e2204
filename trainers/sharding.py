"""How a model is spread over the ranks with FSDP2, what it computes in, and where its weights wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from trainers.ranks import Ranks
from trainers.settings import ActorFsdpSettings, ComputeType
from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from trainers.scoring import TokenScorer


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingConfig:
    """How a policy's weights are kept."""

    dtype: ComputeType = ActorFsdpSettings.dtype
    """What layers compute in: bfloat16, float32, or auto (bfloat16 on a GPU). Weights are float32 in any case."""
    param_offload: bool = ActorFsdpSettings.param_offload
    """Keep weights, and with them gradients and optimizer state, on the CPU; a layer visits the GPU when it is used."""


Backend = str | Callable[..., Any]
"""Of `torch.compile`: what makes kernels of a graph."""
WHOLE_COPY_FRAC = 0.125
"""Share of a GPU's memory that a whole copy of a model in bfloat16 may take between two passes, or of its gradients."""
Pass = TypeVar("Pass")


def shard(scorer: TokenScorer, ranks: Ranks, config: ShardingConfig) -> TokenScorer:
    """Applies FSDP2 in place: each transformer layer is a unit, the rest (embeddings, norm, output) is the root's.

    A single rank whose weights lie where they are used has nothing to send: all is the root's, which spares the work
    that every unit makes in every pass (half of it, where a model is small and the host cannot launch it fast enough).
    That takes whole copies of weights and gradients, so a model that is large beside its GPU keeps its units.
    """
    precision, offload = mixed_precision(config.dtype, ranks.device), OffloadPolicy()
    if config.param_offload:
        offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    else:  # with offloading, layers go to the GPU one by one
        scorer.to(ranks.device)
    # A copy and its gradients in bfloat16, and these in float32.
    num_bytes = (2 + 2 + 4) * sum(parameter.numel() for parameter in scorer.parameters())
    is_large = 0 < WHOLE_COPY_FRAC * memory_of(ranks.device) < num_bytes
    for layer in layers(scorer.policy) if ranks.world > 1 or config.param_offload or is_large else ():
        fully_shard(layer, mesh=ranks.mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(scorer, mesh=ranks.mesh, mp_policy=precision, offload_policy=offload)
    return scorer


def reshard(scorer: TokenScorer) -> None:
    """Puts the sharded parameters back where a pass left whole copies: FSDP2 keeps those of the root after forward."""
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered_once(scorer: TokenScorer, ranks: Ranks) -> Iterator[None]:
    """For passes between which no weight changes: weights are gathered (and, where they wait on the CPU, sent) for the
    first of them alone, if a whole copy of the model is small beside the memory of every GPU.

    All ranks must come here.
    """
    num_bytes = 2 * sum(parameter.numel() for parameter in scorer.parameters())
    units = [module for module in scorer.modules() if isinstance(module, FSDPModule)]
    is_small = ranks.all_of(num_bytes <= WHOLE_COPY_FRAC * memory_of(ranks.device))

    def drop_after_pass(is_dropped: bool) -> None:
        for unit in units if is_small else ():
            unit.set_reshard_after_backward(is_dropped, recurse=False)
            if unit is not scorer:  # FSDP2 keeps what is the root's after a forward pass in any case
                unit.set_reshard_after_forward(is_dropped, recurse=False)

    drop_after_pass(False)
    try:
        yield
    finally:
        drop_after_pass(True)
        if is_small:
            reshard(scorer)


def reduced_at_the_end(scorer: TokenScorer, ranks: Ranks, passes: Sequence[Pass]) -> Iterator[Pass]:
    """Passes whose gradients are one sum: each rank gets its share of it after the last backward pass.

    Until then a rank keeps the sum whole, in float32, where it is small beside the memory of every GPU; where it is
    not, the ranks exchange their parts after each pass. All ranks must come here, with as many passes.
    """
    num_bytes = 4 * sum(parameter.numel() for parameter in scorer.parameters() if parameter.requires_grad)
    is_small = ranks.all_of(num_bytes <= WHOLE_COPY_FRAC * memory_of(ranks.device))
    for number, item in enumerate(passes, start=1):
        if is_small and isinstance(scorer, FSDPModule):
            scorer.set_requires_gradient_sync(number == len(passes))
        yield item


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU; 0 of anything else."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def mixed_precision(dtype: ComputeType, device: torch.device) -> MixedPrecisionPolicy:
    """bfloat16 copies of float32 weights for the passes, with gradients added up in float32; or float32 throughout."""
    if dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda"):
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer layers of a model, as transformers names their classes; empty where it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_layers(model: PreTrainedModel, *, backend: Backend = "inductor") -> None:
    """Makes each layer run as kernels that torch compiles for it at its first passes: once for all layers and lengths.

    Comes before `checkpoint_layers`: what is computed again is then compiled too.

    Args:
        model: Is changed in place.
        backend: Of `torch.compile`.

    Raises:
        ShopGymError: The model does not say which of its modules are layers.
    """
    for layer in _named_layers(model, setting="actor_rollout_ref.actor.use_torch_compile", to="compile"):
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def require_compiler(device: torch.device, *, backend: Backend = "inductor") -> None:
    """Refuses to compile layers where nothing can be compiled, before anything was played.

    Args:
        device: What the passes run on.
        backend: Of `torch.compile`.

    Raises:
        ShopGymError: torch finds no C++ compiler (or, for a GPU, no Triton).
    """
    try:
        torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.zeros(2, device=device))
    except RuntimeError as error:
        why = " ".join(str(error).partition("\n\n")[0].split())
        raise ShopGymError(
            f"actor_rollout_ref.actor.use_torch_compile: torch can compile nothing for {device.type} here ({why}); "
            "install a C++ compiler, or leave it out"
        ) from error


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Makes each layer keep its input alone and compute the rest again in the backward pass.

    transformers does that in training mode only, which would also turn dropout on: log-probs must not be noisy.

    Raises:
        ShopGymError: The model does not say which of its modules are layers.
    """
    setting = "actor_rollout_ref.model.enable_gradient_checkpointing"
    for layer in _named_layers(model, setting=setting, to="compute again"):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _named_layers(model: PreTrainedModel, *, setting: str, to: str) -> list[nn.Module]:
    found = layers(model)
    if not found:
        raise ShopGymError(f"{setting}: {type(model).__name__} names no layers to {to}; leave it out")
    return found


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded; every rank must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A whole tensor sharded, placed and typed as a parameter is."""
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device, parameter.dtype, copy=True)
    value = value.to(parameter.device_mesh.device_type, parameter.dtype)
    # Offloaded parameters lie on the CPU, while their mesh is one of GPUs.
    return distribute_tensor(value, parameter.device_mesh, parameter.placements).to(parameter.device)
