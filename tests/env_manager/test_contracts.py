"""The embedded environments, and the manager in this process, keep their contracts."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
from contracts import check_env, check_manager

import webshop_env  # noqa: F401  (registers the shops)
from env_manager import EnvConfig, EnvManager, Observations
from env_manager.frozen_lake import TextFrozenLake

MAX_STEPS = 7


def frozen_lake() -> gymnasium.Env:
    return TextFrozenLake(gymnasium.make("FrozenLake-v1", render_mode="ansi", is_slippery=True))


@pytest.mark.parametrize("seed", range(3))
def test_a_frozen_lake_is_a_text_environment(seed: int) -> None:
    check_env(frozen_lake, seed=seed)


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("seed", range(3))
def test_a_shop_is_a_text_environment(version: str, seed: int) -> None:
    check_env(lambda: gymnasium.make(f"WebShop-{version}"), seed=seed, offers_hold=version != "v0")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("env_name", "config"),
    [
        ("WebShop-v0", {}),
        ("WebShop-v1", {}),
        ("WebShop-v1", {"prompt": "compact", "memory": "full"}),
        ("FrozenLake-v1", {}),
        ("FrozenLake-v1", {"history_length": 0, "success_reward": 10.0}),
    ],
)
def test_managers_in_this_process_keep_their_contract(env_name: str, config: dict[str, Any], seed: int) -> None:
    settings = EnvConfig(**{"prompt": "no_think", "max_steps": MAX_STEPS, **config})
    check_manager(
        lambda num_envs: EnvManager(env_name, num_envs, settings),
        [1500, 1501, 3],
        max_steps=MAX_STEPS,
        seed=seed,
    )


class Forgetful(gymnasium.Wrapper):
    """A lake that tells how many episodes it has had: one depends on those before it."""

    num_episodes = 0

    def reset(self, **how: Any) -> tuple[str, dict[str, Any]]:
        self.num_episodes += 1
        page, info = self.env.reset(**how)
        return page + "F" * self.num_episodes, info


class Chatty(EnvManager):
    """Asks finished slots too."""

    def _observations(self) -> Observations:
        observations = super()._observations()
        observations.prompts = [prompt or "Again?" for prompt in observations.prompts]
        return observations


def test_contracts_can_be_broken() -> None:
    with pytest.raises(AssertionError, match="those before it"):
        check_env(lambda: Forgetful(frozen_lake()))
    with pytest.raises(AssertionError):
        config = EnvConfig(prompt="no_think", max_steps=MAX_STEPS)
        check_manager(lambda num_envs: Chatty("FrozenLake-v1", num_envs, config), [1, 2], max_steps=MAX_STEPS)
