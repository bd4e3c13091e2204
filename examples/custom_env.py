"""How do I bring an environment of my own? A Gymnasium text environment, a view of its pages, a success rule.

Run: python examples/custom_env.py
Train in it: PYTHONPATH=examples python trainers/gigpo_fsdp.py recipe=frozenlake env.env_name=custom_env:Guess-v0 ...
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium

from env_manager import EnvConfig, EnvManager, EnvSpec, PageView, register_env
from env_manager.registry import won_by_reward
from webshop_env.spaces import TextSpace


class GuessEnv(gymnasium.Env):
    """Guess a number from 1 to 9; the goal index, the seed of the reset, hides it."""

    observation_space, action_space = TextSpace(), TextSpace()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.hidden, self.low, self.high = int(self.np_random.integers(1, 10)), 1, 9
        return self._page(), self._info("")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action not in self._actions():
            return self._page(), 0.0, False, False, self._info(f"{action[:20]!r} is not offered")
        guess = int(action.removeprefix("guess "))
        self.low, self.high = (guess + 1, self.high) if guess < self.hidden else (self.low, max(guess - 1, self.hidden))
        return self._page(), float(guess == self.hidden), guess == self.hidden, False, self._info("")

    def _page(self) -> str:
        return f"It is from {self.low} to {self.high}."

    def _actions(self) -> tuple[str, ...]:
        return tuple(f"guess {number}" for number in range(self.low, self.high + 1))

    def _info(self, reason: str) -> dict[str, Any]:
        return {"available_actions": self._actions(), "action_possible": not reason, "reason": reason}


def view(page: str, info: dict[str, Any]) -> PageView:
    return PageView(task="Find the number.", anchor=page, pieces=(page,), admissible=info["available_actions"])


gymnasium.register(id="Guess-v0", entry_point=GuessEnv)
register_env(EnvSpec(env_id="Guess-v0", full_view=view, won=won_by_reward, template="no_think"))

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    manager = EnvManager("Guess-v0", 4, EnvConfig(max_steps=9))
    observations = manager.reset([7, 8], group_size=2)
    print(observations.prompts[0])
    while observations.is_live.any():
        result = manager.step([f"<action>{a[len(a) // 2]}</action>" for a in observations.admissible if a])
        print(result.slots, result.actions, result.won)
        observations = result.observations
