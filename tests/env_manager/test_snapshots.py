"""Whole prompts, kept as files: whoever changes one sees what policies will be shown.

After a change that is meant: `python tests/env_manager/test_snapshots.py` writes them anew, and `git diff` shows what
changed. Policies were trained on these prompts; the embedded one refuses others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import webshop_env  # noqa: F401  (registers the shops)
from env_manager import EnvConfig, EnvManager

SNAPSHOTS = Path(__file__).parent / "snapshots"
GOAL = 1500
SHOPPING = (
    "search[quick drying henley shirt sun protection button closure]",
    "click[b0ti85pu41]",
    "click[purple]",
    "click[description]",
    "click[nothing]",
)


def count_words(text: str) -> int:
    return len(text.split())


TIGHT = {"count_tokens": count_words, "max_prompt_tokens": 150}
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    f"{version}_{template}": (f"WebShop-{version}", SHOPPING, {"prompt": template})
    for version in ("v0", "v1")
    for template in ("think", "no_think", "compact")
} | {
    "v1_think_150_words": ("WebShop-v1", SHOPPING, {"prompt": "think", **TIGHT}),
    "v1_no_think_full_memory": ("WebShop-v1", SHOPPING[:3], {"prompt": "no_think", "memory": "full"}),
    "lake_no_think": ("FrozenLake-v1", ("down", "jump", "right"), {"prompt": "no_think"}),
}
"""Environment, actions and settings by the name of the file."""


def shown(name: str) -> str:
    """Every prompt of the episode, each under a line that says which step it is and whether it was cut."""
    env_name, actions, config = CASES[name]
    manager = EnvManager(env_name, 1, EnvConfig(**config))
    parts = []
    observations = manager.reset([GOAL])
    for number, action in enumerate((*actions, ""), start=1):
        cut = ", cut" if observations.prompt_is_cut[0] else ""
        parts.append(f"======== step {number}{cut}\n{observations.prompts[0]}\n")
        if action:
            observations = manager.step([f"<action>{action}</action>"]).observations
    manager.close()
    return "".join(parts)


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_those_on_file(name: str) -> None:
    assert shown(name) == (SNAPSHOTS / f"{name}.txt").read_text(encoding="utf-8")


def test_every_file_belongs_to_a_case() -> None:
    assert sorted(path.stem for path in SNAPSHOTS.iterdir()) == sorted(CASES)


def test_a_tight_prompt_keeps_task_selections_and_format() -> None:
    task = shown("v1_think").split("Your assignment: ")[1].split("\n")[0]
    prompts = shown("v1_think_150_words").split("======== step ")[1:]
    assert all(", cut" in prompt.split("\n")[0] for prompt in prompts[1:3])
    for prompt in prompts:
        assert f"Your assignment: {task}\n" in prompt
        assert prompt.endswith("taken from the list above, inside <action> </action>.\n")
        assert count_words(prompt.partition("\n")[2]) <= 150
    assert "'Selected: color: purple'" in prompts[3]


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for case in CASES:
        (SNAPSHOTS / f"{case}.txt").write_text(shown(case), encoding="utf-8")
