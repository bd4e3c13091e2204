"""Environments sharded over Ray actors that may die: their episodes are brought back, or marked failed."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from env_manager.vector import Absent, info_of, make_vector_env
from webshop_env.errors import ShopGymError

# Dimensions: B slots in all; a shard has the slots first … last - 1 of them.

SLOTS_PER_WORKER = 16
"""Fewer in an actor are not worth its process."""
MAX_RESTARTS = 2
"""Restarts of an actor within one call, before its episodes are given up."""
START_TIMEOUT_S = 600.0
"""A process has to start and to open its shop."""
OBJECT_STORE_BYTES = 100_000_000
"""Of a Ray that is started here; pages are small and mostly go past the store."""

_LOG = logging.getLogger(__name__)


class RayVectorEnv(gymnasium.vector.VectorEnv):
    """A vector environment like the local one of the same id, with its slots in actors.

    An actor that dies, raises, or does not answer in time is started anew; the episodes of its slots are replayed from
    their reset options and actions, and what they show is compared with what they showed. An episode that shows
    something else, or whose actor dies again and again, has failed: it is truncated, its last page stays, and
    `info["failed"]` is True and `info["failure"]` says why until the next reset (the keys are only there while a slot
    has failed). Such an episode says nothing about the policy: leave it out. In v0, what `<r>` draws after a restart is
    not what it would have been.

    Args:
        env_id: As for `make_vector_env`.
        num_envs: B, at least 1.
        wrappers: As for `make_vector_env`.
        env_kwargs: Constructor settings; each actor gets a copy, and an open shop is opened again there.
        num_cpus: CPU share of an actor.
        timeout_s: Seconds that a reset or a step of a shard may take.
        slots_per_worker: Slots from which on another actor is worth its process.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012  (as Gymnasium declares it)

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        *,
        wrappers: Sequence[Any] = (),
        env_kwargs: Mapping[str, Any] | None = None,
        num_cpus: float = 0.1,
        timeout_s: float = 60.0,
        slots_per_worker: int = SLOTS_PER_WORKER,
    ) -> None:
        self._shards: list[_Shard] = []
        ray = _import_ray()
        # One environment here: its spaces, and what is wrong with the settings, said before anything is started.
        probe = make_vector_env(env_id, 1, wrappers=wrappers, env_kwargs=env_kwargs)
        self.single_observation_space = probe.single_observation_space
        self.single_action_space = probe.single_action_space
        probe.close()
        self.num_envs = int(num_envs)
        self.observation_space = gymnasium.spaces.Tuple([self.single_observation_space] * self.num_envs)
        self.action_space = gymnasium.spaces.Tuple([self.single_action_space] * self.num_envs)
        self.timeout_s = timeout_s
        _connect(ray)
        num_shards = _num_shards(ray, self.num_envs, num_cpus, slots_per_worker)
        bounds = [self.num_envs * i // num_shards for i in range(num_shards + 1)]
        actor_class = ray.remote(num_cpus=num_cpus, max_restarts=0, max_task_retries=0)(_Worker)
        spec = gymnasium.spec(env_id.rpartition(":")[2])
        for first, last in pairwise(bounds):
            arguments = (spec, env_id, last - first, tuple(wrappers), dict(env_kwargs or {}))
            self._shards.append(_Shard(first, last, actor_class, arguments, timeout_s))
        for shard in self._shards:
            shard.launch()

    @property
    def num_restarts(self) -> int:
        """Actors started anew since construction."""
        return sum(shard.num_restarts for shard in self._shards)

    def worker_pids(self) -> list[int | None]:
        """Process of each actor, on its own machine; None where there is none now."""
        return [shard.pid for shard in self._shards]

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Starts an episode in every slot.

        Args:
            seed: One number s seeds slot i with s + i; or one for each slot.
            options: Each a list of B values, one for each slot.

        Raises:
            ShopGymError: The environment refuses the options, or they are not B long.
            RuntimeError: An actor could not be brought to reset its slots.
        """
        if "reset_mask" in (options or {}):
            raise ShopGymError("the ray backend resets all slots at once; reset_mask is for the local one")
        if isinstance(seed, int | np.integer):
            seeds: list[Any] = [int(seed) + i for i in range(self.num_envs)]
        else:
            seeds = [None] * self.num_envs if seed is None else list(seed)
        for name, values in {"seed": seeds, **(options or {})}.items():
            if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != self.num_envs:
                raise ShopGymError(f"reset: {name} needs one entry for each of the {self.num_envs} slots")
        begun = []
        for shard in self._shards:
            own = {key: values[shard.first : shard.last] for key, values in (options or {}).items()}
            begun.append(_Begin(seeds[shard.first : shard.last], own or None))
            shard.send("reset", begun[-1].seeds, begun[-1].options)
        deadline = time.monotonic() + self.timeout_s
        for shard, begin in zip(self._shards, begun, strict=True):
            shard.receive_reset(begin, deadline)
        return self._observations(), self._infos()

    def step(
        self, actions: Sequence[Any | None]
    ) -> tuple[tuple[Any, ...], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Takes one action in every slot that has one; None leaves a slot as it is, and so does a failed episode.

        Returns:
            Observations (B), rewards float64 [B], terminations bool [B], truncations bool [B], infos.
        """
        if any(shard.begin is None for shard in self._shards):
            raise ShopGymError("call reset before step")
        if isinstance(actions, str) or not hasattr(actions, "__len__") or len(actions) != self.num_envs:
            raise ShopGymError(f"step takes a list of {self.num_envs} actions, one for each slot, got {actions!r}")
        rows = [shard.row_of(actions[shard.first : shard.last]) for shard in self._shards]
        sent = [(shard, row) for shard, row in zip(self._shards, rows, strict=True) if _is_any(row)]
        for shard, row in sent:
            shard.send("step", row)
        deadline = time.monotonic() + self.timeout_s
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        for shard, row in sent:
            rewards[shard.first : shard.last] = shard.receive_step(row, deadline)
        terminations = np.concatenate([shard.terminations for shard in self._shards])
        truncations = np.concatenate([shard.truncations for shard in self._shards])
        return self._observations(), rewards, terminations, truncations, self._infos()

    def close_extras(self, **kwargs: Any) -> None:
        """Ends the actors, whatever they are doing; Ray itself goes on for whoever else uses it."""
        for shard in self._shards:
            shard.stop()

    def _observations(self) -> tuple[Any, ...]:
        return tuple(observation for shard in self._shards for observation in shard.observations)

    def _infos(self) -> dict[str, Any]:
        infos = {}
        for key in dict.fromkeys(key for shard in self._shards for key in shard.infos):
            columns = [_column(shard.infos, key, shard.last - shard.first) for shard in self._shards]
            infos[key] = np.concatenate(columns)
        failed = np.concatenate([shard.failed for shard in self._shards])
        if failed.any():
            infos["failed"] = failed
            infos["failure"] = np.concatenate([shard.failures for shard in self._shards])
        return infos


class _Worker:
    """What runs in an actor: the local vector environment of some slots."""

    def __init__(
        self, spec: Any, env_id: str, num_envs: int, wrappers: Sequence[Any], env_kwargs: Mapping[str, Any]
    ) -> None:
        gymnasium.registry.setdefault(spec.id, spec)  # an id of the user's script is not known here
        self._env = make_vector_env(env_id, num_envs, wrappers=wrappers, env_kwargs=env_kwargs)

    def pid(self) -> int:
        return os.getpid()

    def reset(self, seeds: list[Any], options: dict[str, Any] | None) -> Any:
        return self._env.reset(seed=seeds, options=options)  # type: ignore[arg-type]  # a seed per slot is taken too

    def step(self, actions: list[Any]) -> Any:
        return self._env.step(actions)


class _LostError(Exception):
    """The actor is gone, raised, or does not answer: nothing is known of its state."""


@dataclass(frozen=True, slots=True)
class _Begin:
    seeds: list[Any]
    options: dict[str, Any] | None


class _Shard:
    """Some slots in an actor of their own, how they stand, and what brings them back."""

    def __init__(self, first: int, last: int, actor_class: Any, arguments: tuple[Any, ...], timeout_s: float) -> None:
        self.first, self.last = first, last
        self.begin: _Begin | None = None
        self.observations: list[Any] = []
        self.infos: dict[str, np.ndarray] = {}
        num = last - first
        self.terminations, self.truncations, self.failed = (np.zeros(num, dtype=bool) for _ in range(3))
        self.failures = np.full(num, Absent, dtype=object)
        self.pid: int | None = None
        self.num_restarts = 0
        self._actor_class, self._arguments, self._timeout_s = actor_class, arguments, timeout_s
        self._actor: Any = None
        self._pid_ref: Any = None
        self._answer: Any = None
        # The actor may be ahead of what is recorded here: it was asked, and the answer has not been taken.
        self._is_open = False
        self._rows: list[list[Any]] = []
        self._seen: list[dict[int, tuple[Any, ...]]] = []

    def launch(self) -> None:
        """Begins to start an actor; `_ready` waits for it."""
        self._actor = self._actor_class.remote(*self._arguments)
        self._pid_ref, self.pid = self._actor.pid.remote(), None

    def stop(self) -> None:
        """Ends the actor without a word to it: it may be hanging."""
        actor, self._actor, self.pid, self._answer, self._is_open = self._actor, None, None, None, False
        if actor is not None and (ray := _import_ray()).is_initialized():
            ray.kill(actor, no_restart=True)

    def row_of(self, actions: Sequence[Any]) -> list[Any]:
        """The actions as the actor gets them: none for what has failed."""
        return [None if failed else action for action, failed in zip(actions, self.failed, strict=True)]

    def send(self, method: str, *arguments: Any) -> None:
        """Asks the actor without waiting for the answer; one that is not to be trusted gives none."""
        self._answer = None
        if self._actor is None or (self._is_open and method == "step"):
            return
        self._is_open = True
        try:
            self._ready()
        except _LostError:
            return
        self._answer = getattr(self._actor, method).remote(*arguments)

    def receive_reset(self, begin: _Begin, deadline: float) -> None:
        """Takes the answer to a reset, restarting where none comes."""
        try:
            observations, infos = self._get(self._answer, deadline)
        except _LostError as error:
            observations, infos = self._again(begin, error)
        self._is_open, self._answer = False, None
        self.begin, self._rows, self._seen = begin, [], []
        for flags in (self.terminations, self.truncations, self.failed):
            flags[:] = False
        self.failures[:] = Absent
        self.observations, self.infos = list(observations), infos
        num = len(self.observations)
        zeros = np.zeros(num)
        self._seen.append(_records(range(num), observations, zeros, zeros, zeros, infos))

    def receive_step(self, row: list[Any], deadline: float) -> np.ndarray:
        """Takes the answer to a step, bringing the episodes back where none comes.

        Returns:
            Rewards, float64.
        """
        try:
            outcome = self._get(self._answer, deadline)
        except _LostError as error:
            outcome = self._recovered(row, error)
        self._is_open, self._answer = False, None
        if outcome is None:
            return np.zeros(len(row))
        observations, rewards, terminations, truncations, infos = outcome
        row = self.row_of(row)  # what failed in a replay has not taken its action
        slots = [slot for slot, action in enumerate(row) if action is not None]
        for slot in slots:
            self.observations[slot] = observations[slot]
            self.terminations[slot], self.truncations[slot] = terminations[slot], truncations[slot]
        if self.failed.any():
            infos = {
                key: np.where(self.failed, _column(self.infos, key, len(row)), _column(infos, key, len(row)))
                for key in self.infos | infos
            }
        self.infos = infos
        self._rows.append(row)
        self._seen.append(_records(slots, *outcome))
        return np.where(self.failed, 0.0, rewards)

    def _ready(self) -> None:
        if self.pid is None:
            self.pid = self._get(self._pid_ref, time.monotonic() + START_TIMEOUT_S)

    def _get(self, ref: Any, deadline: float) -> Any:
        if ref is None:
            raise _LostError("it was stopped after an error")
        ray = _import_ray()
        try:
            return ray.get(ref, timeout=max(0.1, deadline - time.monotonic()))
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, ShopGymError):  # A caller's mistake, as it would be with the local backend.
                raise cause from None
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise _LostError("it did not answer in time") from error
            lines = [line for line in str(cause or error).splitlines() if line.strip()] or [""]
            raise _LostError(f"{type(cause or error).__name__}: {lines[-1].strip()[:300]}") from error

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._get(getattr(self._actor, method).remote(*arguments), time.monotonic() + self._timeout_s)

    def _restart(self, error: Exception) -> None:
        _LOG.warning("the environments %d to %d are started anew: %s", self.first, self.last - 1, error)
        self.stop()
        self.num_restarts += 1
        self.launch()
        self._ready()

    def _again(self, begin: _Begin, error: Exception) -> Any:
        for _ in range(MAX_RESTARTS):
            try:
                self._restart(error)
                return self._call("reset", begin.seeds, begin.options)
            except _LostError as another:
                error = another
        raise RuntimeError(f"the environments {self.first} to {self.last - 1} could not be reset: {error}") from error

    def _recovered(self, row: list[Any], error: Exception) -> Any:
        """What the step gives in a new actor, after all steps before it; None when the episodes were given up."""
        for _ in range(MAX_RESTARTS):
            try:
                self._restart(error)
                self._replay()
                return self._call("step", self.row_of(row))
            except _LostError as another:
                error = another
        self.stop()
        over = self.terminations | self.truncations
        self._fail([slot for slot, action in enumerate(row) if action is not None or not over[slot]], str(error))
        return None

    def _replay(self) -> None:
        assert self.begin is not None
        observations, infos = self._call("reset", self.begin.seeds, self.begin.options)
        zeros = np.zeros(len(self.failed))
        self._compare(self._seen[0], (observations, zeros, zeros, zeros, infos))
        for row, seen in zip(self._rows, self._seen[1:], strict=True):
            if _is_any(left := self.row_of(row)):
                self._compare(seen, self._call("step", left))

    def _compare(self, seen: dict[int, tuple[Any, ...]], outcome: tuple[Any, ...]) -> None:
        slots = [slot for slot in seen if not self.failed[slot]]
        again = _records(slots, *outcome)
        other = [slot for slot in slots if not _is_same(seen[slot], again[slot])]
        if other:
            self._fail(other, "its replay showed something else")

    def _fail(self, slots: list[int], reason: str) -> None:
        for slot in slots:
            _LOG.warning("the episode in environment %d has failed: %s", self.first + slot, reason)
            self.failed[slot], self.failures[slot] = True, reason
            self.truncations[slot] = not self.terminations[slot]


def _column(infos: Mapping[str, np.ndarray], key: str, num: int) -> np.ndarray:
    """What a shard's slots gave under a key, whether any of them did or not."""
    return infos[key] if key in infos else np.full(num, Absent, dtype=object)


def _records(
    slots: Sequence[int], observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: dict[str, Any]
) -> dict[int, tuple[Any, ...]]:
    """What each of some slots showed."""
    return {
        slot: (
            observations[slot],
            float(rewards[slot]),
            bool(terminations[slot]),
            bool(truncations[slot]),
            info_of(infos, slot),
        )
        for slot in slots
    }


def _is_same(one: Any, other: Any) -> bool:
    """Equal all the way down; arrays by their entries, and NaN to itself."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.shape(one) == np.shape(other) and all(map(_is_same, np.ravel(one).tolist(), np.ravel(other).tolist()))
    return bool(one == other or (one != one and other != other))


def _is_any(row: Sequence[Any]) -> bool:
    return any(action is not None for action in row)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ShopGymError("env.backend=ray needs Ray: pip install 'shopgym[ray]'") from error
    return ray


def _connect(ray: Any) -> None:
    """Joins the cluster of RAY_ADDRESS, else starts a small Ray here; it ends with this process."""
    if ray.is_initialized():
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)


def _num_shards(ray: Any, num_envs: int, num_cpus: float, slots_per_worker: int) -> int:
    """As many as there are CPUs for, but none for a handful of slots."""
    total = ray.cluster_resources().get("CPU", 0.0)
    if num_cpus > total:
        raise ShopGymError(f"env.resources_per_worker.num_cpus={num_cpus} is more than the {total:g} CPUs that Ray has")
    num_free = int(ray.available_resources().get("CPU", 0.0) / num_cpus + 1e-9)
    return max(1, min(math.ceil(num_envs / slots_per_worker), num_free, num_envs))
