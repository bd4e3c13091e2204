"""Makes a Hugging Face directory, which transformers and vLLM load, of any checkpoint of a run.

python trainers/export.py checkpoint=outputs/tiny output_dir=my_policy
python trainers/export.py checkpoint=outputs/tiny/checkpoints/update_000010 output_dir=my_policy dtype=bfloat16
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from trainers import lora
from trainers.checkpoint import ADAPTER, POLICY, find_checkpoint, load_weights
from trainers.command import settings_of
from trainers.errors import CheckpointError
from trainers.files import atomic_directory, require_writable
from trainers.models import PROVENANCE, load_model, load_tokenizer, save_policy
from trainers.settings import SettingsError, setting
from trainers.shards import SHARDS, read_weights


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    checkpoint: str = setting("", "run directory, of which the latest is taken, or checkpoint")
    output_dir: str = setting("", "directory to make; must not exist")
    dtype: str = setting("float32", "type of the weights", only=("float32", "bfloat16"))


def export(checkpoint: Path, target: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Writes the policy of a checkpoint: sharded weights put together, an adapter merged into the policy it began with.

    Args:
        checkpoint: Its directory.
        target: Is made, complete or not at all.
        dtype: Of the weights.

    Raises:
        CheckpointError: The checkpoint lacks something.
    """
    from transformers import AutoConfig

    if (checkpoint / ADAPTER).is_dir():
        folder, source = checkpoint / ADAPTER, _base_of(checkpoint / ADAPTER)
        model = load_model(source)
        config, weights = model.config, with_adapter(model.state_dict(), checkpoint)
    else:
        folder = checkpoint / POLICY
        source, config = str(folder), AutoConfig.from_pretrained(folder)
        weights = read_weights(checkpoint) if (checkpoint / SHARDS).is_dir() else load_weights(checkpoint)
    with atomic_directory(target) as scratch:
        save_policy(
            scratch,
            config=config,
            state_dict=weights,
            tokenizer=load_tokenizer(source),
            made=json.loads((folder / PROVENANCE).read_text(encoding="utf-8")),
            dtype=dtype,
        )


def with_adapter(weights: dict[str, torch.Tensor], checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights of the policy that an adapter was trained on, with the adapter added."""
    config = json.loads((checkpoint / ADAPTER / "adapter_config.json").read_text(encoding="utf-8"))
    adapter, changed = load_weights(checkpoint), dict(weights)
    for name in adapter:
        if name.endswith(lora.DOWN):
            stem = name.removesuffix(lora.DOWN)
            parts = {f"{stem}{lora.BASE}weight": weights[f"{stem}.weight"], **adapter}
            changed[f"{stem}.weight"] = lora.merged(
                f"{stem}{lora.BASE}weight", parts, scale=config["lora_alpha"] / config["r"]
            )
    return changed


def _base_of(adapter: Path) -> str:
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    return str(config["base_model_name_or_path"])


def main(arguments: list[str]) -> None:
    """Command line."""
    resolved = settings_of(arguments, ExportSettings, __doc__)
    if resolved is None:
        return
    settings, _ = resolved
    for name in ("checkpoint", "output_dir"):
        if not getattr(settings, name):
            raise SettingsError(f"{name} is needed: python trainers/export.py checkpoint=DIR output_dir=DIR")
    checkpoint, target = find_checkpoint(Path(settings.checkpoint).expanduser()), Path(settings.output_dir).expanduser()
    if checkpoint is None:
        raise CheckpointError(f"checkpoint: {settings.checkpoint} holds no checkpoint yet")
    if target.exists():
        raise SettingsError(f"output_dir: {target} exists; name another")
    require_writable(target.parent, setting="output_dir")
    export(checkpoint, target, dtype=getattr(torch, settings.dtype))
    print(f"{checkpoint} -> {target}")


if __name__ == "__main__":
    from trainers.command import run_command

    run_command(main)
