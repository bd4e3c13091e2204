"""LoRA: small matrices beside frozen weights are all that is trained, kept in checkpoints and optimised.

The layers are those of `peft` (extra `lora`), put into the model in place: what it computes without them is the policy
at the start of the run, so that the reference needs no weights of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainers.errors import CheckpointError
from trainers.settings import ModelSettings, SettingsError
from trainers.sharding import full

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_NAME = "default"
"""peft's name for the only adapter of a model."""
WEIGHTS = "adapter_model.safetensors"
BASE, DOWN, UP = ".base_layer.", f".lora_A.{ADAPTER_NAME}.weight", f".lora_B.{ADAPTER_NAME}.weight"


def add_adapter(model: PreTrainedModel, settings: ModelSettings, *, base: str, seed: int) -> None:
    """Freezes a model and puts adapters beside its layers; what it computes stays the same until they are trained.

    Args:
        model: Is changed in place.
        settings: Rank, alpha, and the modules that get an adapter.
        base: Where the model came from, for those who load the adapter.
        seed: Of the adapters' initial weights; global random state is left as it was.

    Raises:
        SettingsError: peft is not installed, or the model has no such modules, or some are no plain linear layers.
    """
    if importlib.util.find_spec("peft") is None:
        raise SettingsError("actor_rollout_ref.model.lora_rank needs peft: pip install 'shopgym[lora]'")
    from peft import LoraConfig, inject_adapter_in_model

    targets = settings.target_modules
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # peft divides it by r, a fraction is fine
        lora_dropout=0.0,  # log-probs must not be noisy
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model, adapter_name=ADAPTER_NAME)
    except ValueError as error:
        raise SettingsError(
            f"actor_rollout_ref.model.target_modules={list(targets)}: {str(error).splitlines()[0]}; name linear layers "
            "of the model, or all-linear"
        ) from error
    _refuse_other_layers(model, targets)


def _refuse_other_layers(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Stops where an adapter is not the product of two matrices that `merged` adds to a weight."""
    changed = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    kinds = {name: type(module.get_base_layer()) for name, module in changed.items()}
    wrong = [name for name, kind in kinds.items() if kind is not nn.Linear]
    wrong += [name for name, module in changed.items() if module is model.get_output_embeddings()]
    wrong += [name for name, weight in model.named_parameters() if weight.requires_grad and not is_adapter_weight(name)]
    if wrong:
        raise SettingsError(
            f"actor_rollout_ref.model.target_modules={list(targets)}: adapters stand beside plain linear layers only, "
            f"and not beside the output layer; in {type(model).__name__} {wrong[0]} is another; name other layers"
        )


def adapter_config(model: nn.Module) -> Any:
    """peft's configuration of the adapter inside a model; None where there is none."""
    return getattr(model, "peft_config", {}).get(ADAPTER_NAME)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """The model as it was before the adapter, for the block."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    # Not with enable_adapters(): that changes what requires gradients, which FSDP2 takes for settled.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_adapter_weight(name: str) -> bool:
    """Whether a weight belongs to the adapter, by its name in a model that has one."""
    return name.endswith((DOWN, UP))


def plain_name(name: str) -> str:
    """Name of a frozen weight in a model without adapters."""
    return name.replace(BASE, ".")


def merged(name: str, weights: Mapping[str, torch.Tensor], *, scale: float) -> torch.Tensor:
    """A frozen weight with its adapter added, W + scale B A; every rank must ask for it where weights are sharded.

    Args:
        name: Of the frozen weight in the model that has adapters.
        weights: All of that model's weights.
        scale: alpha / rank.
    """
    weight, stem = full(weights[name].detach()), name.removesuffix("base_layer.weight").removesuffix(".")
    if not name.endswith(f"{BASE}weight") or stem + DOWN not in weights:
        return weight
    down, up = full(weights[stem + DOWN].detach()), full(weights[stem + UP].detach())
    return weight + scale * (up @ down)


def save_adapter(directory: Path, config: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Writes what `peft.PeftModel.from_pretrained(base, directory)` loads.

    Args:
        directory: Is created.
        config: peft's configuration.
        weights: Full tensors of the adapter by their names in the model.
    """
    from safetensors.torch import save_file

    names = {f"base_model.model.{name}".replace(f".{ADAPTER_NAME}.", "."): tensor for name, tensor in weights.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in names.items()}, directory / WEIGHTS)
    config.save_pretrained(directory)


def refuse_other_scale(checkpoint: Path, stored: Mapping[str, Any], config: Any) -> None:
    """Stops before an adapter goes on with another weight beside its layers than it was trained with.

    Args:
        checkpoint: Where the adapter lies.
        stored: Its `adapter_config.json`.
        config: peft's configuration of the adapter that takes its weights.

    Raises:
        CheckpointError: Rank or alpha differ.
    """
    for name, setting in (("r", "lora_rank"), ("lora_alpha", "lora_alpha")):
        if stored[name] != getattr(config, name):
            raise CheckpointError(
                f"{checkpoint} holds an adapter of {setting} {stored[name]}, this run has {getattr(config, name)}: "
                f"go on with actor_rollout_ref.model.{setting}={stored[name]}"
            )


def inner_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an adapter's file by their names in the model; undoes the naming of `save_adapter`."""
    return {
        name.removeprefix("base_model.model.").removesuffix(".weight") + f".{ADAPTER_NAME}.weight": tensor
        for name, tensor in weights.items()
    }
