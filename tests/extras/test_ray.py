"""Environments in Ray's actors are those of the local backend, whatever befalls the actors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from extra import require_extra

from env_manager import EnvConfig, EnvManager
from env_manager.frozen_lake import TextFrozenLake
from env_manager.ray_backend import RayVectorEnv
from env_manager.vector import make_vector_env
from webshop_env import compiled, open_shop
from webshop_env.compiled import write_products
from webshop_env.errors import ShopGymError
from webshop_env.policies import OraclePolicy
from webshop_env.shop import EMBEDDED_CATALOGUE, index_file

require_extra("ray", "ray")

import ray  # noqa: E402  (after the skip)

NUM = 8
ROOT = Path(__file__).resolve().parents[2]
GOALS = {"goal_index": np.arange(20, 20 + NUM, dtype=np.int32)}
LAKE = {"render_mode": "ansi", "is_slippery": False}


@pytest.fixture(scope="module", autouse=True)
def small_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOPGYM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            "local",
            num_cpus=2,
            object_store_memory=100_000_000,
            include_dashboard=False,
            ignore_reinit_error=True,
            log_to_driver=False,
        )
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import a test
        yield
        ray.shutdown()


@pytest.fixture
def sharded() -> Iterator[Callable[..., RayVectorEnv]]:
    """Makes environments in actors of four, and ends them."""
    made: list[RayVectorEnv] = []

    def make(env_id: str, **settings: Any) -> RayVectorEnv:
        made.append(RayVectorEnv(env_id, NUM, slots_per_worker=4, **settings))
        return made[-1]

    yield make
    for env in made:
        env.close()


class Trap(gymnasium.Wrapper):
    """A lake where "spring" goes wrong: as often as the file says."""

    def __init__(self, env: gymnasium.Env, *, file: Path) -> None:
        super().__init__(env)
        self._file = file

    def step(self, action: str) -> Any:
        if action == "spring" and (left := int(self._file.read_text())):
            self._file.write_text(str(left - 1))
            raise ZeroDivisionError("the trap has sprung")
        return self.env.step(action)


class ShowsItsProcess(gymnasium.Wrapper):
    """A lake that does not show the same in another process."""

    def step(self, action: str) -> Any:
        lake, *rest = self.env.step(action)
        return (lake + f"\n{os.getpid()}" if action == "show" else lake, *rest)


def assert_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """Outcomes of a reset or a step, infos last."""
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(one, other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
    assert list(ours[-1]) == list(theirs[-1])
    for key, column in theirs[-1].items():
        assert ours[-1][key].dtype == column.dtype and ours[-1][key].tolist() == column.tolist(), key


def play_together(ours: RayVectorEnv, version: str, at_step: dict[int, Callable[[], None]]) -> int:
    """The oracle's whole episodes in both backends, which must agree all along; returns how many steps they took."""
    shop = open_shop(version=version)
    local = gymnasium.make_vec(f"WebShop-{version}", NUM, shop=shop, max_steps=15)
    policy = OraclePolicy(shop)
    here, there = local.reset(options=GOALS), ours.reset(options=GOALS)
    assert_same(there, here)
    seen, infos = here
    is_over, num_steps = np.zeros(NUM, dtype=bool), 0
    while not is_over.all():
        if num_steps in at_step:
            at_step[num_steps]()
        actions = [
            None if is_over[s] else policy.act(seen[s], {key: values[s] for key, values in infos.items()})
            for s in range(NUM)
        ]
        outcome = local.step(actions)
        assert_same(ours.step(actions), outcome)
        seen, _, terminated, truncated, infos = outcome
        is_over = terminated | truncated
        num_steps += 1
    assert infos["won"].all()
    return num_steps


def is_gone(pid: int, *, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_whole_episodes_are_those_of_the_local_backend(sharded: Callable[..., RayVectorEnv], version: str) -> None:
    env = sharded(f"webshop_env:WebShop-{version}", env_kwargs={"shop": open_shop(version=version), "max_steps": 15})
    assert play_together(env, version, {}) >= 4
    pids = env.worker_pids()
    assert len(set(pids)) == 2 and os.getpid() not in pids
    assert env.num_restarts == 0
    env.close()
    assert all(is_gone(pid) for pid in pids)


def test_a_killed_actor_and_a_hanging_one_change_nothing(sharded: Callable[..., RayVectorEnv]) -> None:
    env = sharded("webshop_env:WebShop-v1", timeout_s=8.0)
    env.reset(options=GOALS)
    first, second = env.worker_pids()

    def kill() -> None:
        os.kill(first, signal.SIGKILL)

    def hang() -> None:
        os.kill(second, signal.SIGSTOP)

    assert play_together(env, "v1", {2: kill, 3: hang}) >= 4
    assert env.num_restarts == 2
    assert is_gone(first) and is_gone(second), "who hangs is ended"
    assert not {first, second} & set(env.worker_pids())


def test_an_actor_that_dies_between_episodes_is_replaced(sharded: Callable[..., RayVectorEnv]) -> None:
    env = sharded("webshop_env:WebShop-v1")
    before = env.reset(options=GOALS)
    os.kill(env.worker_pids()[1], signal.SIGKILL)
    assert_same(env.reset(options=GOALS), before)
    assert env.num_restarts == 1


def test_an_actor_that_raises_once_is_started_anew(sharded: Callable[..., RayVectorEnv], tmp_path: Path) -> None:
    file = tmp_path / "left"
    file.write_text("0")
    wrappers = (TextFrozenLake, partial(Trap, file=file))
    local = make_vector_env("FrozenLake-v1", NUM, wrappers=wrappers, env_kwargs=LAKE)
    env = sharded("FrozenLake-v1", wrappers=wrappers, env_kwargs=LAKE)
    seeds = list(range(NUM))
    assert_same(env.reset(seed=seeds), local.reset(seed=seeds))
    assert_same(env.step(["right"] * NUM), local.step(["right"] * NUM))
    # Only one actor reads the file: two at once could both find the trap set.
    actions = ["spring", "right", "down", "left", "up", "right", "right", "left"]
    outcome = local.step(actions)
    file.write_text("1")
    assert_same(env.step(actions), outcome)
    assert env.num_restarts == 1 and file.read_text() == "0"
    assert_same(env.step(["right"] * NUM), local.step(["right"] * NUM))


def test_what_raises_every_time_fails_alone_and_until_the_next_reset(
    sharded: Callable[..., RayVectorEnv], tmp_path: Path
) -> None:
    file = tmp_path / "left"
    file.write_text("1000")
    env = sharded("FrozenLake-v1", wrappers=(TextFrozenLake, partial(Trap, file=file)), env_kwargs=LAKE)
    env.reset(seed=0)
    before, *_ = env.step(["right"] * NUM)
    actions = ["spring", "down", None, "down", "down", "down", "down", "down"]
    lakes, rewards, terminated, truncated, infos = env.step(actions)
    assert infos["failed"].tolist() == truncated.tolist() == [True] * 4 + [False] * 4
    assert lakes[:4] == before[:4] and terminated.tolist() == [False] * 4 + [True] * 4, "the others are in a hole"
    assert env.num_restarts == 2 and env.worker_pids()[0] is None
    # A failed episode stays as it is, and costs nothing more.
    again, rewards, terminated, truncated, infos = env.step(["right"] * 4 + [None] * 4)
    assert again == lakes and not rewards.any() and truncated.tolist() == infos["failed"].tolist()
    assert env.num_restarts == 2
    _, infos = env.reset(seed=0)
    assert "failed" not in infos
    lakes, *_, infos = env.step(["right"] * NUM)
    assert lakes == before and "failed" not in infos


def test_an_episode_whose_replay_shows_something_else_has_failed(sharded: Callable[..., RayVectorEnv]) -> None:
    env = sharded("FrozenLake-v1", wrappers=(TextFrozenLake, ShowsItsProcess), env_kwargs=LAKE)
    local = make_vector_env("FrozenLake-v1", NUM, wrappers=(TextFrozenLake,), env_kwargs=LAKE)
    env.reset(seed=0), local.reset(seed=0)
    env.step(["right"] * NUM), local.step(["right"] * NUM)
    shown, *_, infos = env.step([None, "show", None, None, "show", None, None, None])
    assert "failed" not in infos and shown[1].endswith(str(env.worker_pids()[0]))
    os.kill(env.worker_pids()[0], signal.SIGKILL)
    lakes, _, _, truncated, infos = env.step(["right"] * NUM)
    assert infos["failed"].tolist() == truncated.tolist() == [s == 1 for s in range(NUM)]
    assert lakes[1] == shown[1] and infos["reason"][1] == "there is no move 'show'; the moves are left, down, right, up"
    expected, *_ = local.step(["right"] * NUM)
    assert lakes[:1] + lakes[2:] == expected[:1] + expected[2:], "its neighbours went on"


def test_the_manager_tells_which_episodes_failed(tmp_path: Path) -> None:
    def make(env_id: str, num_envs: int, **settings: Any) -> RayVectorEnv:
        return RayVectorEnv(env_id, num_envs, slots_per_worker=1, **settings)

    manager = EnvManager("WebShop-v1", 2, EnvConfig(prompt="compact"), make_envs=make)
    manager.reset([3, 4])
    result = manager.step(["<action>search[red mug]</action>"] * 2)
    assert not result.failed.any()
    shard = manager.vector_env._shards[0]
    shard._arguments = (*shard._arguments[:-1], {"data_dir": str(tmp_path)})  # nothing can be started there
    os.kill(manager.vector_env.worker_pids()[0], signal.SIGKILL)
    result = manager.step(["<action>click[next >]</action>"] * 2)
    assert result.failed.tolist() == result.truncated.tolist() == [True, False]
    assert result.observations.is_live.tolist() == [False, True] and result.reward[0] == 0
    with pytest.raises(RuntimeError, match=r"environments 0 to 0 could not be reset: .*items_shuffle"):
        manager.reset([3, 4])
    manager.close()


def test_a_callers_mistake_is_that_of_the_local_backend_and_costs_no_episode(
    sharded: Callable[..., RayVectorEnv],
) -> None:
    with pytest.raises(ShopGymError, match="did you mean max_steps"):
        sharded("webshop_env:WebShop-v1", env_kwargs={"max_step": 3})
    env = sharded("webshop_env:WebShop-v1")
    with pytest.raises(ShopGymError, match="call reset before step"):
        env.step([None] * NUM)
    with pytest.raises(ShopGymError, match=r"^goal_index must be in 0 to "):
        env.reset(options={"goal_index": [1, 2, 3, 4, 5, 6, 7, 10**6]})
    with pytest.raises(ShopGymError, match="goal_index needs one entry for each of the 8 slots"):
        env.reset(options={"goal_index": [1, 2]})
    before, _ = env.reset(options=GOALS)
    with pytest.raises(ShopGymError, match=r"^an action is a text"):
        env.step(["search[red mug]", 7, *[None] * 6])
    assert env.num_restarts == 0
    after, *_, infos = env.step([None, "search[red mug]", *[None] * 6])
    assert after[0] == before[0] and after[1] != before[1], "the step that was refused has not been taken"
    assert "failed" not in infos


def test_the_catalogue_is_compiled_once_and_the_actors_map_it(
    sharded: Callable[..., RayVectorEnv], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EMBEDDED_CATALOGUE, tmp_path / "shop")
    rows = json.loads((tmp_path / "shop" / "items_shuffle_1000.json").read_text())
    (tmp_path / "shop" / "items_shuffle_1000.json").write_text(json.dumps(rows[:900]))
    made: list[os.stat_result] = []

    def write(path: Path, *args: Any, **settings: Any) -> None:
        write_products(path, *args, **settings)
        made.append(path.stat())

    monkeypatch.setattr(compiled, "write_products", write)
    env = sharded("webshop_env:WebShop-v1", env_kwargs={"data_dir": str(tmp_path / "shop")})
    env.reset(seed=0)
    env.step(["search[red mug]"] * NUM)

    def files_of(worker: Any) -> list[tuple[int, int]]:
        catalog = worker._env.unwrapped.shop._catalog
        return [(path.stat().st_ino, path.stat().st_mtime_ns) for path in (catalog.compiled_file, index_file(catalog))]

    in_actors = ray.get([shard._actor.__ray_call__.remote(files_of) for shard in env._shards])
    index_of_driver = index_file(open_shop(tmp_path / "shop")._catalog).stat()
    here = [(made[0].st_ino, made[0].st_mtime_ns), (index_of_driver.st_ino, index_of_driver.st_mtime_ns)]
    assert len(made) == 1 and in_actors == [here, here], "no actor has made anything anew"


def test_more_cpus_than_there_are_is_one_clear_line() -> None:
    with pytest.raises(ShopGymError, match=r"env\.resources_per_worker\.num_cpus=3 is more than the 2 CPUs"):
        RayVectorEnv("webshop_env:WebShop-v1", 2, num_cpus=3)


def test_a_process_with_a_hanging_actor_ends_by_itself_and_leaves_nothing() -> None:
    code = """
import os, signal
from env_manager.ray_backend import RayVectorEnv
env = RayVectorEnv("webshop_env:WebShop-v1", 2, slots_per_worker=1)
env.reset(seed=0)
os.kill(env.worker_pids()[1], signal.SIGSTOP)
print(*env.worker_pids())
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=90)
    assert done.returncode == 0, done.stderr
    assert all(is_gone(int(pid)) for pid in done.stdout.split())


def test_the_settings_of_training_choose_it() -> None:
    from trainers.settings import DataSettings, EnvSettings, WorkerSettings
    from trainers.worlds import make_manager

    workers = WorkerSettings(num_cpus=0.2, timeout_s=5.0)
    env = EnvSettings(backend="ray", prompt="compact", resources_per_worker=workers)
    ours = make_manager(env, DataSettings(), 2, count_tokens=None)
    assert isinstance(ours.vector_env, RayVectorEnv) and ours.vector_env.timeout_s == 5.0
    theirs = make_manager(EnvSettings(prompt="compact"), DataSettings(), 2, count_tokens=None)
    assert ours.reset([3, 4]).prompts == theirs.reset([3, 4]).prompts
    reply = "<action>search[red mug]</action>"
    assert ours.step([reply] * 2).observations.prompts == theirs.step([reply] * 2).observations.prompts
    ours.close()


@pytest.mark.timeout(450)  # of two runs
def test_a_training_update_in_rays_actors_is_the_local_one(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="training needs shopgym[train]")
    common = (
        *("trainer.total_updates=1", "data.train_batch_size=4", "env.rollout.n=4", "trainer.logger=[console]"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1"),
    )
    lines = {}
    for backend in ("local", "ray"):
        out = tmp_path / backend
        command = (sys.executable, "trainers/gigpo_fsdp.py", f"env.backend={backend}", f"trainer.output_dir={out}")
        done = subprocess.run([*command, *common], cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        lines[backend] = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert lines["local"]["rollout/num_episodes"] == 16 and lines["local"]["actor/grad_norm"] > 0
    for name, value in lines["local"].items():
        assert name.startswith(("time/", "memory/")) or lines["ray"][name] == value, name
