"""Environments of one's own."""

from __future__ import annotations

from typing import Any

import gymnasium

from env_manager import EnvManager, EnvSpec, PageView
from env_manager.registry import won_by_reward
from env_manager.vector import Absent, make_vector_env
from webshop_env.spaces import TextSpace


class OwnEnv(gymnasium.Env):
    """Gives what the tests below set; "nogo" is refused, "end" ends with a score where the seed is no 0."""

    observation_space, action_space = TextSpace(), TextSpace()
    reward: Any = 0.0
    begun: Any = ("page", {})
    taken: Any = None

    def __init__(self, size: int = 3) -> None:
        self.size = size

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._seed = seed
        return self.begun

    def step(self, action: str) -> Any:
        info: dict[str, Any] = {"action_possible": False} if action == "nogo" else {}
        if action == "end" and self._seed:
            info["task_score"] = 0.5
        return self.taken or ("page", self.reward, action == "end", False, info)


gymnasium.register(id="Own-v0", entry_point=OwnEnv)


def view(page: str, info: dict[str, Any]) -> PageView:
    return PageView(task="Go.", anchor=page, pieces=(page,), admissible=("go", "end"))


def own(num_envs: int = 1, **spec: Any) -> EnvManager:
    return EnvManager(EnvSpec(**{"env_id": "Own-v0", "full_view": view, "won": won_by_reward, **spec}), num_envs)


def say(*actions: str) -> list[str]:
    return [f"<action>{action}</action>" for action in actions]


def test_what_a_slot_is_told_does_not_depend_on_its_neighbours() -> None:
    manager = own(2)
    manager.reset([0, 1])
    result = manager.step(say("go", "nogo"))
    assert result.action_possible.tolist() == [True, False]
    assert manager.page(0) == ("page", {})
    assert manager.step(say("end", "end")).task_score.tolist() == [0.0, 0.5]


def test_columns_of_infos_say_where_a_key_is_missing() -> None:
    env = make_vector_env("Own-v0", 2)
    env.reset(seed=0)
    *_, infos = env.step(["go", "nogo"])
    assert infos["action_possible"].tolist() == [Absent, False]
