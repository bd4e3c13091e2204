"""The manager keeps its contract when its environments live in Ray's actors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from contracts import check_manager
from extra import require_extra

from env_manager import EnvConfig, EnvManager
from env_manager.ray_backend import RayVectorEnv

require_extra("ray", "ray")

import ray  # noqa: E402  (after the skip)

MAX_STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def small_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOPGYM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", num_cpus=2, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.mark.parametrize("env_name", ["FrozenLake-v1", "WebShop-v0", "WebShop-v1"])
def test_a_manager_of_actors_keeps_its_contract(env_name: str) -> None:
    config = EnvConfig(prompt="no_think", max_steps=MAX_STEPS)
    make_envs = partial(RayVectorEnv, slots_per_worker=3)  # two actors with three slots each
    check_manager(
        lambda num_envs: EnvManager(env_name, num_envs, config, make_envs=make_envs),
        [1500, 1501, 3],
        max_steps=MAX_STEPS,
    )
