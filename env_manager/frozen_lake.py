"""Gymnasium's FrozenLake as a text environment: proof that nothing above is about shops."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gymnasium

from env_manager.types import PageView

MOVES = ("left", "down", "right", "up")
"""Index in this tuple = FrozenLake's number of the move."""
TASK = (
    "Cross the frozen lake from the start S to the goal G over frozen tiles F without falling into a hole H. "
    "The tile in brackets is where you stand."
)
_COLOURED = re.compile(r"\x1b\[41m(.)\x1b\[0m")


class TextFrozenLake(gymnasium.Wrapper):
    """Takes "left", "down", "right", "up" and shows the lake as text; anything else changes nothing."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Text(max_length=4096, charset="SFHG[]\n")
        self.action_space = gymnasium.spaces.Text(max_length=4096)
        self._observation = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        self._observation = self._lake()
        return self._observation, self._info(is_possible=True, won=False, action="")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action not in MOVES:
            return self._observation, 0.0, False, False, self._info(is_possible=False, won=False, action=action)
        _, reward, terminated, truncated, _ = self.env.step(MOVES.index(action))
        self._observation = self._lake()
        info = self._info(is_possible=True, won=bool(terminated and float(reward) > 0), action=action)
        return self._observation, float(reward), bool(terminated), bool(truncated), info

    def _lake(self) -> str:
        lines = [line for line in str(self.env.render()).splitlines() if line.strip() and not line.startswith("  (")]
        return "\n".join(_COLOURED.sub(r"[\1]", line) for line in lines)

    def _info(self, *, is_possible: bool, won: bool, action: str) -> dict[str, Any]:
        return {
            "available_actions": MOVES,
            "action_possible": is_possible,
            "reason": "" if is_possible else f"there is no move {action[:40]!r}; the moves are {', '.join(MOVES)}",
            "won": won,
            "task_score": float(won),
        }


def view(observation: str, info: Mapping[str, Any]) -> PageView:
    """The lake, line by line; there is nothing shorter to show."""
    return PageView(
        task=TASK, anchor=observation, pieces=tuple(observation.split("\n")), admissible=info["available_actions"]
    )
