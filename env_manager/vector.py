"""Gymnasium's in-process vector environment, with slots that can rest."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np


class Absent:
    """Stands in a column of infos for a slot whose environment gave no such key; a class is itself in every process."""


class RestingSyncVectorEnv(gymnasium.vector.VectorWrapper):
    """Steps only the slots that get an action; `None` leaves a slot as it is.

    Gymnasium's `SyncVectorEnv` steps every slot in every call, also those whose episode is over. This is the
    contract of the shop's own vector environment, for environments that have none: observations as a tuple, infos as
    a dict of object arrays that hold the latest value of every slot, or `Absent`; `info_of` reads them.
    """

    def __init__(self, env: gymnasium.vector.SyncVectorEnv) -> None:
        super().__init__(env)
        self._envs = env.envs
        self._observations: list[Any] = [None] * self.num_envs
        self._infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, np.ndarray]]:
        """Resets every slot; an option that is a list of B values gives each slot its own."""
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        for slot, env in enumerate(self._envs):
            own = {key: values[slot] for key, values in (options or {}).items()}
            self._observations[slot], self._infos[slot] = env.reset(seed=seeds[slot], options=own or None)
        return tuple(self._observations), self._collected_infos()

    def step(
        self, actions: Sequence[Any | None]
    ) -> tuple[tuple[Any, ...], np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminations = np.zeros(self.num_envs, dtype=bool)
        truncations = np.zeros(self.num_envs, dtype=bool)
        for slot, action in enumerate(actions):
            if action is None:
                continue
            observation, reward, terminated, truncated, info = self._envs[slot].step(action)
            self._observations[slot], self._infos[slot] = observation, info
            rewards[slot], terminations[slot], truncations[slot] = reward, terminated, truncated
        return tuple(self._observations), rewards, terminations, truncations, self._collected_infos()

    def _collected_infos(self) -> dict[str, np.ndarray]:
        keys = dict.fromkeys(key for info in self._infos for key in info)
        collected: dict[str, np.ndarray] = {}
        for key in keys:
            column = np.empty(self.num_envs, dtype=object)
            for slot, info in enumerate(self._infos):
                column[slot] = info.get(key, Absent)
            collected[key] = column
        return collected


def info_of(infos: Mapping[str, Any], slot: int) -> dict[str, Any]:
    """The info of one slot out of a vector environment's dict of arrays, with the keys that its environment gave."""
    own = {key: values[slot] for key, values in infos.items() if not key.startswith("_")}
    return {key: value for key, value in own.items() if value is not Absent}


def make_vector_env(
    env_id: str,
    num_envs: int,
    *,
    wrappers: Sequence[Any] = (),
    env_kwargs: Mapping[str, Any] | None = None,
) -> gymnasium.vector.VectorEnv:
    """The id's own vector environment where it has one, else one in this process; never reset behind one's back."""
    kwargs = dict(env_kwargs or {})
    module, colon, bare_id = env_id.partition(":")
    if colon:
        importlib.import_module(module)
        env_id = bare_id
    # A spec instead of the id: an id of an earlier version (v0) would be warned about, though it is meant.
    spec = gymnasium.spec(env_id)
    if spec.vector_entry_point is not None:
        return gymnasium.make_vec(spec, num_envs=num_envs, vectorization_mode="vector_entry_point", **kwargs)
    vector = gymnasium.make_vec(
        spec,
        num_envs=num_envs,
        vectorization_mode="sync",
        wrappers=list(wrappers),
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED},
        **kwargs,
    )
    if not isinstance(vector, gymnasium.vector.SyncVectorEnv):
        raise TypeError(f"make_vec gave a {type(vector).__name__} where a SyncVectorEnv was asked for")
    return RestingSyncVectorEnv(vector)
