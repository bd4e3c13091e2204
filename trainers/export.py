"""Makes a Hugging Face directory, which transformers and vLLM load, of any checkpoint of a run.

python trainers/export.py checkpoint=outputs/tiny out=my_policy
python trainers/export.py checkpoint=outputs/tiny/checkpoints/update_000010 out=my_policy dtype=bfloat16
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainers import lora
from trainers.checkpoint import ADAPTER, POLICY, find_checkpoint, load_weights, read_adapter_config, read_object
from trainers.command import settings_of
from trainers.errors import CheckpointError, faults_told, unreadable
from trainers.files import atomic_directory, require_writable
from trainers.models import PROVENANCE, load_model, load_tokenizer, save_policy, weights_hash
from trainers.settings import SettingsError, setting
from trainers.shards import SHARDS, read_weights


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    checkpoint: str = setting("", "run directory, of which the latest is taken, or checkpoint")
    out: str = setting("", "directory to make; must not exist")
    dtype: str = setting("float32", "type of the weights", only=("float32", "bfloat16"))


def export(checkpoint: Path, target: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Writes the policy of a checkpoint: sharded weights put together, an adapter merged into the policy it began with.

    Args:
        checkpoint: Its directory.
        target: Is made, complete or not at all.
        dtype: Of the weights.

    Raises:
        CheckpointError: The checkpoint lacks something, or its adapter was trained on other weights than now lie there.
    """
    has_adapter = (checkpoint / ADAPTER).is_dir()
    made = read_object(checkpoint, f"{ADAPTER if has_adapter else POLICY}/{PROVENANCE}")
    if has_adapter:
        source = str(read_adapter_config(checkpoint)["base_model_name_or_path"])
        model = load_model(source)
        config, base = model.config, model.state_dict()
        _refuse_other_base(checkpoint, source, found=weights_hash(base), trained_on=made.get("start_policy_hash"))
        weights = with_adapter(base, checkpoint)
    else:
        source, config = str(checkpoint / POLICY), _config_of(checkpoint)
        weights = read_weights(checkpoint) if (checkpoint / SHARDS).is_dir() else load_weights(checkpoint)
    with atomic_directory(target) as scratch:
        save_policy(
            scratch,
            config=config,
            state_dict=weights,
            tokenizer=load_tokenizer(source),
            made=made,
            dtype=dtype,
        )


def with_adapter(weights: dict[str, torch.Tensor], checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights of the policy that an adapter was trained on, with the adapter added."""
    config = read_adapter_config(checkpoint)
    adapter, changed = load_weights(checkpoint), dict(weights)
    for name in adapter:
        if name.endswith(lora.DOWN):
            stem = name.removesuffix(lora.DOWN)
            if f"{stem}.weight" not in weights or stem + lora.UP not in adapter:
                raise unreadable(checkpoint, f"{ADAPTER}: {stem} is not whole")
            parts = {f"{stem}{lora.BASE}weight": weights[f"{stem}.weight"], **adapter}
            changed[f"{stem}.weight"] = lora.merged(
                f"{stem}{lora.BASE}weight", parts, scale=config["lora_alpha"] / config["r"]
            )
    return changed


def _refuse_other_base(checkpoint: Path, source: str, *, found: str, trained_on: str | None) -> None:
    """Stops before an adapter is merged into a policy that has changed since; None is a run that did not say."""
    if trained_on not in (None, found):
        raise CheckpointError(
            f"{checkpoint}: its adapter was trained on a policy of hash {trained_on}, that in {source} has {found}: "
            "put the policy back that the run began with"
        )


def _config_of(checkpoint: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(checkpoint / POLICY)
    except (OSError, ValueError) as error:
        raise unreadable(checkpoint, f"{POLICY}/config.json: {(str(error).splitlines() or [''])[0]}") from None


def main(arguments: list[str]) -> None:
    """Command line."""
    resolved = settings_of(arguments, ExportSettings, __doc__)
    if resolved is None:
        return
    settings, _ = resolved
    for name in ("checkpoint", "out"):
        if not getattr(settings, name):
            raise SettingsError(f"{name} is needed: python trainers/export.py checkpoint=DIR out=DIR")
    checkpoint = find_checkpoint(Path(settings.checkpoint).expanduser(), setting="checkpoint")
    target = Path(settings.out).expanduser()
    if checkpoint is None:
        raise CheckpointError(f"checkpoint: {settings.checkpoint} holds no checkpoint yet")
    if target.exists():
        raise SettingsError(f"out: {target} exists; name another")
    require_writable(target.parent, setting="out")
    with faults_told("the machine", "take a machine with more of it"):
        export(checkpoint, target, dtype=getattr(torch, settings.dtype))
    print(f"{checkpoint} -> {target}")


if __name__ == "__main__":
    from trainers.command import run_command

    run_command(main)
