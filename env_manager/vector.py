"""Gymnasium's in-process vector environment, with slots that can rest."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from env_manager.plugins import import_plugin
from env_manager.types import one_line
from webshop_env.errors import ShopGymError

_WRONG_SETTINGS = re.compile(r"unexpected keyword argument|missing \d+ required")
"""What Python says of a call that does not fit a constructor."""
_PARTS = {
    "reset": ("observation", "info"),
    "step": ("observation", "reward", "terminated", "truncated", "info"),
}


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
            begun = _given(env, "reset", seed=seeds[slot], options=own or None)
            self._observations[slot], self._infos[slot] = begun
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
            env = self._envs[slot]
            taken = _given(env, "step", action)
            self._observations[slot], reward, terminations[slot], truncations[slot], self._infos[slot] = taken
            rewards[slot] = finite_number(reward, f"{_name(env)}: the reward of {one_line(action)}")
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


def finite_number(value: Any, what: str) -> float:
    """A number that an environment gave, as a float.

    Raises:
        ShopGymError: It is none, or not finite; learning from it would spoil the weights much later.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ShopGymError(f"{what} must be a finite number, got {one_line(value)}")
    return number


def _name(env: gymnasium.Env) -> str:
    return env.spec.id if env.spec else type(env.unwrapped).__name__


def _given(env: gymnasium.Env, method: str, *arguments: Any, **settings: Any) -> tuple[Any, ...]:
    """What an environment's `reset` or `step` returns, in the form that Gymnasium asks for."""
    must = f"{method} must return the tuple ({', '.join(_PARTS[method])}) with a dict as info"
    try:
        given = getattr(env, method)(*arguments, **settings)
    except (AssertionError, ValueError) as error:
        if not _is_of_gymnasium(error):
            raise
        raise ShopGymError(f"{_name(env)}: {must} ({error})") from error
    if not isinstance(given, tuple) or len(given) != len(_PARTS[method]) or not isinstance(given[-1], dict):
        raise ShopGymError(f"{_name(env)}: {must}, got {one_line(given)}")
    return given


def _is_of_gymnasium(error: Exception) -> bool:
    """Whether the wrappers that Gymnasium puts around every environment raised it, not somebody's environment."""
    (*_, (frame, _)) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).startswith(("gymnasium.wrappers.", "gymnasium.utils."))


def make_vector_env(
    env_id: str,
    num_envs: int,
    *,
    wrappers: Sequence[Any] = (),
    env_kwargs: Mapping[str, Any] | None = None,
) -> gymnasium.vector.VectorEnv:
    """The id's own vector environment where it has one, else one in this process; never reset behind one's back.

    Raises:
        ShopGymError: Nothing is registered as `env_id`, it takes no wrappers, or no such settings.
    """
    kwargs = dict(env_kwargs or {})
    bare_id = import_plugin(env_id, setting="EnvSpec.env_id")
    try:
        # A spec instead of the id: an id of an earlier version (v0) would be warned about, though it is meant.
        spec = gymnasium.spec(bare_id)
    except gymnasium.error.Error as error:
        why = " ".join(str(error).split())
        raise ShopGymError(
            f"EnvSpec.env_id: Gymnasium does not know {env_id!r} ({why}); register it, or write module:Id with the "
            "module that registers it"
        ) from None
    if spec.vector_entry_point is not None and wrappers:
        raise ShopGymError(
            f"EnvSpec.wrappers: {env_id} has a vector environment of its own, which takes none; register an id of "
            "yours whose entry_point makes the wrapped environment, and name that in EnvSpec.env_id"
        )
    if spec.vector_entry_point is not None:
        how: dict[str, Any] = {"vectorization_mode": "vector_entry_point"}
    else:
        vector_kwargs = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
        how = {"vectorization_mode": "sync", "wrappers": list(wrappers), "vector_kwargs": vector_kwargs}
    try:
        vector = gymnasium.make_vec(spec, num_envs=num_envs, **how, **kwargs)
    except TypeError as error:
        if not _WRONG_SETTINGS.search(str(error)):
            raise
        why = " ".join(str(error).split(" was raised from ")[0].split())
        raise ShopGymError(
            f"{env_id} does not take the settings {', '.join(kwargs) or '(none)'} of EnvSpec.env_kwargs and "
            f"max_steps_kwarg: {why}"
        ) from error
    if spec.vector_entry_point is not None:
        return vector
    if not isinstance(vector, gymnasium.vector.SyncVectorEnv):
        raise TypeError(f"make_vec gave a {type(vector).__name__} where a SyncVectorEnv was asked for")
    return RestingSyncVectorEnv(vector)
