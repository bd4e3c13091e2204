"""Every example answers its question when it is run, and can be used by the trainer as its head says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from contracts import check_env, check_manager

from env_manager import EnvConfig, EnvManager
from env_manager.memory import MemoryEntry, MemoryLimits, make_memory

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(*words: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(EXAMPLES))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def refused(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.splitlines()[-1]


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def test_each_example_is_short_and_says_how_to_run_it() -> None:
    for path in EXAMPLES.glob("custom_*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 65, path.name
        assert text.splitlines()[0].endswith("?") or "? " in text.splitlines()[0]
        assert f"Run: python examples/{path.name}" in text


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_each_example_has_help_and_refuses_what_it_does_not_know(path: Path, tmp_path: Path) -> None:
    assert run(str(path), "--help").startswith(f"usage: {path.name}")
    assert not (ROOT / "--help").exists()
    needed = ["--base-url", "http://127.0.0.1:9/v1", "--model", "none"] if path.stem == "openai_agent" else []
    assert "unrecognized arguments: --goal-indexes" in refused(str(path), *needed, "--goal-indexes", "3")


@pytest.mark.parametrize("number", ["6000", "999999"])
def test_more_goals_than_there_are_is_said_at_once_with_the_options_name(number: str) -> None:
    words = ["--base-url", "http://127.0.0.1:9/v1", "--model", "none", "--goals", number]
    line = refused("examples/openai_agent.py", *words)
    assert line == f"error: --goals must be at most 5802, the goals of the shop, got {number}"


def test_a_reader_that_has_seen_enough_does_not_cost_the_rollout(tmp_path: Path) -> None:
    command = [sys.executable, "examples/scripted_agent.py", str(tmp_path / "rollout.parquet")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as playing:
        playing.stdout.close()
        assert playing.stderr.read() == b""
    assert playing.returncode == 0 and (tmp_path / "rollout.parquet").exists()


def test_a_memory_of_ones_own_shortens_what_is_past() -> None:
    printed = run("examples/custom_memory.py")
    lines = [line for line in printed.splitlines() if line.startswith("[Observation")]
    assert len(lines) == 4
    assert lines[1] == "[Observation 2: ''Back to Search' [SEP] 'Page 1 …', Action 2: 'click[b0ti85pu41]']"
    assert "'Price: $27.49'" in lines[3] and " …" not in lines[3], "the last step is shown in full"


def test_settings_choose_the_memory_by_its_name(on_path: None) -> None:
    memory = make_memory("custom_memory:summary", MemoryLimits(length=2))
    for number in (1, 2):
        memory.store(MemoryEntry(number, "one two three", "go"))
    assert memory.fetch() == [MemoryEntry(1, "one two …", "go"), MemoryEntry(2, "one two three", "go")]


def test_an_environment_of_ones_own_is_played() -> None:
    printed = run("examples/custom_env.py")
    assert "You now see: It is from 1 to 9.\n" in printed
    assert printed.splitlines()[-1].endswith("[ True  True  True  True]")


def test_it_keeps_the_contract_of_environments_and_managers(on_path: None) -> None:
    import custom_env

    check_env(custom_env.GuessEnv)
    config = EnvConfig(prompt="no_think", max_steps=5)
    check_manager(lambda num_envs: EnvManager("custom_env:Guess-v0", num_envs, config), [7, 8, 9], max_steps=5)


def test_it_is_trained_in_by_its_name(tmp_path: Path, on_path: None) -> None:
    from trainers.models import make_small_policy, save_policy, train_tokenizer

    name = "custom_env:Guess-v0"
    pages = EnvManager(name, 4).reset([1500, 1501, 1502, 1503])
    tokenizer = train_tokenizer([*pages.prompts, *(f"<action>{a}</action>" for a in pages.admissible[0])], 400)
    model = make_small_policy(tokenizer, hidden=32, layers=2, heads=2)
    policy, run_directory = tmp_path / "policy", tmp_path / "run"
    save_policy(policy, config=model.config, state_dict=model.state_dict(), tokenizer=tokenizer, made={})
    run(
        *("trainers/gigpo_fsdp.py", "recipe=frozenlake", f"env.env_name={name}", "env.memory=custom_memory:summary"),
        *(f"actor_rollout_ref.model.path={policy}", f"trainer.output_dir={run_directory}", "trainer.total_updates=1"),
        *("trainer.logger=[console]", "data.train_batch_size=2", "data.val_batch_size=2", "env.rollout.n=4"),
    )
    lines = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    # Guesses narrow the numbers down: every episode ends with the right one.
    assert [line["rollout/success_frac"] for line in lines if "rollout/num_episodes" in line] == [1.0]
