"""Keys of the published scripts: what each becomes here, and what its user is told about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALIASES: dict[str, tuple[str, ...]] = {
    "trainer.total_epochs": ("trainer.total_updates",),
    "trainer.total_training_steps": ("trainer.total_updates",),
    "trainer.resume_from_path": ("trainer.resume_from",),
    "resume": ("trainer.resume_from",),
    "actor_rollout_ref.actor.clip_ratio": (
        "actor_rollout_ref.actor.clip_ratio_low",
        "actor_rollout_ref.actor.clip_ratio_high",
    ),
    "env.webshop.human_goals": ("env.webshop.goals",),
}
"""Other names of keys."""

NOT_NEEDED: dict[str, str] = {
    "data.filter_overlong_prompts": "prompts are made to fit",
    "data.return_raw_chat": "a prompt is one user message, always",
    "env.webshop.use_small": "env.webshop.data_dir names the catalogue",
    "trainer.critic_warmup": "GiGPO has no critic",
}
"""Keys that are taken and do nothing, with the reason."""

TRUNCATION = "data.truncation"
TRUNCATION_MEANING = "error is checked at start: the template and the longest task must fit; other values do nothing"
STRATEGY = "actor_rollout_ref.actor.strategy"


def translate(values: Mapping[str, Any], notes: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings under the names that this package has for them.

    Args:
        values: Dotted key -> value, keys of either kind.
        notes: Gets a line for each key that means something else here, or nothing.

    Returns:
        Own key -> value, later ones winning; and own key -> the published key that it came from.
    """
    result: dict[str, Any] = {}
    origins: dict[str, str] = {}
    has_steps = values.get("trainer.total_training_steps") is not None
    for key, value in values.items():
        if key in NOT_NEEDED:
            notes.append(f"{key} does nothing here: {NOT_NEEDED[key]}")
        elif key == TRUNCATION:
            notes.append(_truncation_note(value))
        elif key == "trainer.total_training_steps" and value is None:
            continue  # the published default: total_epochs decides
        elif key == "trainer.total_epochs" and has_steps:
            notes.append(f"{key}={value} does nothing here: trainer.total_training_steps is given too")
        else:
            for own, meant in _own(key, value, notes).items():
                result[own] = meant
                origins.pop(own, None)
                if own != key:
                    origins[own] = key
    return result, origins


def _own(key: str, value: Any, notes: list[str]) -> dict[str, Any]:
    """What one key sets, with a note where the value changes its meaning on the way."""
    if key == "trainer.total_epochs":
        notes.append(
            f"{key}={value} is taken as trainer.total_updates={value}: a published epoch is one batch of goals"
        )
    if key == "env.env_name" and value == "Webshop":
        notes.append(f"{key}=Webshop is taken as WebShop-v0 with env.variant=verl: its order of goals, its prices")
        return {"env.env_name": "WebShop-v0", "env.variant": "verl"}
    if key == "env.env_name" and isinstance(value, str) and value.startswith("webshop_env:"):
        return {key: value.removeprefix("webshop_env:")}  # Gymnasium's way to name the shop's ids
    if key == STRATEGY and value == "fsdp":
        notes.append(f"{key}=fsdp is taken as fsdp2: torch's newer way to shard the same weights")
        return {STRATEGY: "fsdp2"}
    if key == "env.webshop.human_goals" and isinstance(value, bool):
        value = "human" if value else "synthetic"
    return dict.fromkeys(ALIASES.get(key, (key,)), value)


def _truncation_note(value: Any) -> str:
    how = "a prompt over its limit loses history first, then page, never the task or the format"
    if value == "error":
        return f"{TRUNCATION}=error is checked at start: the template and the longest task must fit; {how}"
    return f"{TRUNCATION}={value} does nothing here: {how}"
