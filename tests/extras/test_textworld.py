"""Games of the textworld package are played and trained in like any other environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from contracts import check_env, check_manager
from extra import require_extra

from env_manager import EnvConfig, EnvManager
from env_manager.text_world import TextWorldGame

require_extra("textworld", "textworld")

ROOT = Path(__file__).resolve().parents[2]
SEED = 1
WAY_TO_WIN = ("go south", "go east", "close bureau")


@pytest.fixture(scope="module", autouse=True)
def shared_games(tmp_path_factory: pytest.TempPathFactory):
    """Games are compiled once for the module: each takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        if "SHOPGYM_CACHE" not in os.environ:
            patch.setenv("SHOPGYM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


def test_a_game_is_a_text_environment() -> None:
    check_env(TextWorldGame, seed=SEED)


def test_a_manager_of_games_keeps_its_contract() -> None:
    config = EnvConfig(prompt="no_think", max_steps=5)
    check_manager(lambda num_envs: EnvManager("TextWorld-v0", num_envs, config), [SEED, 2], max_steps=5)


def test_the_shortest_way_wins() -> None:
    env = TextWorldGame()
    observation, info = env.reset(seed=SEED)
    assert observation.startswith("-= Cookhouse =-") and "close the bureau" in info["instruction_text"]
    for number, command in enumerate(WAY_TO_WIN):
        assert command in info["available_actions"]
        observation, reward, terminated, truncated, info = env.step(command)
        is_last = number == 2
        assert (reward, terminated, truncated, info["won"]) == (float(is_last), is_last, False, is_last)
        assert info["task_score"] == float(is_last)
    _, reward, terminated, _, info = env.step("look")
    assert (reward, terminated, info["reason"]) == (0.0, True, "the game is over")
    env.close()


def test_what_the_game_answers_is_on_the_page_but_not_in_the_anchor() -> None:
    manager = EnvManager("TextWorld-v0", 1, EnvConfig(prompt="no_think"))
    before = manager.reset([SEED])
    result = manager.step(["<action>examine keycard</action>"])
    assert "You now see: The metal of the keycard is rusty.\n-= Cookhouse =-\n" in result.observations.prompts[0]
    assert result.observations.anchors == before.anchors
    result = manager.step(["<action>take keycard</action>"])
    assert result.observations.anchors != before.anchors, "what is carried is part of it"
    manager.close()


def test_a_seed_is_a_game_and_games_differ() -> None:
    first, second = TextWorldGame(num_rooms=2, quest_length=2), TextWorldGame(num_rooms=2, quest_length=2)
    seen = {seed: first.reset(seed=seed) for seed in (3, 4)}
    assert seen[3] != seen[4]
    assert second.reset(seed=3) == seen[3]
    first.close()
    second.close()


def test_gymnasium_makes_it_by_its_id() -> None:
    env = gymnasium.make("env_manager.text_world:TextWorld-v0", num_rooms=2, quest_length=2)
    observation, info = env.reset(seed=3)
    assert observation and info["available_actions"]
    env.close()


def test_it_is_trained_in_by_the_command_that_trains_in_shops(tmp_path: Path) -> None:
    import textworld
    from taught_policy import make_taught_policy

    from trainers.goals import GoalOrder
    from trainers.worlds import SeedWorld

    order = GoalOrder(SeedWorld("TextWorld-v0").split("train"), 1, seed=0)
    ways = {}
    for update in (0, 1):
        seed = int(order.batch(update)[0])
        game = TextWorldGame()
        game.reset(seed=seed)
        solved = textworld.start(str(game.path), textworld.EnvInfos(policy_commands=True))
        ways[seed] = tuple(solved.reset().policy_commands)
        solved.close()
        game.close()
    policy = make_taught_policy(tmp_path / "policy", "TextWorld-v0", ways, until=0.1)
    command = [
        *(sys.executable, "trainers/gigpo_fsdp.py", "recipe=frozenlake", "env.env_name=TextWorld-v0"),
        *(f"actor_rollout_ref.model.path={policy}", f"trainer.output_dir={tmp_path / 'run'}", "env.max_steps=4"),
        *("trainer.total_updates=2", "trainer.logger=[console]", "data.train_batch_size=1", "data.val_batch_size=1"),
        *("env.rollout.n=8", "data.max_prompt_length=1000", "data.max_response_length=64"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "rollout/num_episodes" in line]
    assert [line["rollout/num_episodes"] for line in updates] == [8.0, 8.0]
    assert any(0 < line["rollout/success_frac"] < 1 and line["actor/grad_norm"] > 1e-3 for line in updates)
    assert all(line["actor/engine_gap_max_nats"] < 1e-4 for line in updates if "actor/loss" in line)
