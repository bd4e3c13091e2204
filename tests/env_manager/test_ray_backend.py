"""What the Ray backend does where there is no Ray; with one, see tests/extras/test_ray.py."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from env_manager.ray_backend import RayVectorEnv, _Shard
from env_manager.vector import Absent, info_of
from webshop_env.errors import ShopGymError


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as the import system marks what cannot be imported
    with pytest.raises(ShopGymError, match=r"^env\.backend=ray needs Ray: pip install 'shopgym\[ray\]'$"):
        RayVectorEnv("webshop_env:WebShop-v1", 2)


def two_shards() -> RayVectorEnv:
    """Two slots in shards of their own, as they stand between two calls; the second has no info yet."""
    env = RayVectorEnv.__new__(RayVectorEnv)
    env._shards = [_Shard(slot, slot + 1, None, (), 1.0) for slot in (0, 1)]
    env._shards[0].infos = {"task_score": np.asarray([0.5], dtype=object)}
    return env


def test_a_slot_has_no_key_that_only_another_shard_has() -> None:
    infos = two_shards()._infos()
    assert [info_of(infos, slot) for slot in (0, 1)] == [{"task_score": 0.5}, {}]
    assert infos["task_score"].tolist() == [0.5, Absent]


def test_an_episode_that_failed_says_why() -> None:
    env = two_shards()
    env._shards[1]._fail([0], "ZeroDivisionError: sprung")
    infos = env._infos()
    assert info_of(infos, 1) == {"failed": True, "failure": "ZeroDivisionError: sprung"}
    assert info_of(infos, 0) == {"task_score": 0.5, "failed": False}
