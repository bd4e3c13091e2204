"""The README is run, not believed: its Python blocks, its file tree, its examples."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)

OWN_GAME = """
import gymnasium

class MyGame(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(max_length=64)
    action_space = gymnasium.spaces.Text(max_length=64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "You stand at a fork.", {}

    def step(self, action):
        return "You are there.", float(action == "left"), True, False, {}

gymnasium.register(id="MyGame-v0", entry_point=MyGame)
"""


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_episode_runs_as_printed(tmp_path: Path) -> None:
    block = next(block for block in BLOCKS if "webshop_env:WebShop-v1" in block)
    printed = run("-c", block, cwd=tmp_path)
    assert "search[<your query>]" in printed


def test_an_own_environment_plugs_in_as_printed(tmp_path: Path) -> None:
    (tmp_path / "my_package.py").write_text(OWN_GAME, encoding="utf-8")
    block = next(block for block in BLOCKS if "register_env" in block)
    use = (
        "\nseen = manager.reset(range(8))\n"
        "result = manager.step(['<action>left</action>', '<action>right</action>'] * 4)\n"
        "print(seen.prompts[0], result.won.tolist())"
    )
    printed = run("-c", block + use, cwd=tmp_path)
    assert "You stand at a fork." in printed
    assert printed.strip().endswith(str([True, False] * 4))


def test_the_file_tree_is_true() -> None:
    tree = README.split("## File tree")[1].split("```text")[1].split("```")[0]
    folder, named = "", set()
    for line in tree.strip().splitlines():
        names = list(itertools.takewhile(re.compile(r".*(/|\.(py|cfg|txt|toml)|Makefile|run)$").match, line.split()))
        if line.startswith(" "):
            named |= {folder + name for name in names}
        else:
            folder = names[0]
            named |= set(names)
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing
    for package in ("webshop_env", "env_manager", "rollout", "trainers"):
        files = {f"{package}/{path.name}" for path in (ROOT / package).glob("*.py") if path.name != "__init__.py"}
        assert files <= named, f"the README's tree does not name {sorted(files - named)}"


def test_the_test_command_is_the_one_that_ci_runs() -> None:
    assert "make test" in README.split("## Test")[1]
    assert re.search(r"^make test\b", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("examples/one_episode.py", "3"), "won: "),
        (("-m", "webshop_env.playback", "run", "examples/scripts/buy_one.json"), "1.0"),
    ],
)
def test_examples_run(command: tuple[str, ...], expected: str) -> None:
    assert expected in run(*command)
