"""The promises of the layout: which package may import which, and what the base install needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["webshop_env", "env_manager", "rollout", "trainers"]
HEAVY = {"torch", "transformers", "tokenizers", "spacy", "ray", "vllm", "flask"}


def imported_names(path: Path) -> list[tuple[int, str]]:
    """Line and first part of every absolute import in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((node.lineno, (node.module or "").split(".")[0]))
    return found


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_one_way(package: str) -> None:
    later = set(ORDER[ORDER.index(package) + 1 :])
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} holds no Python file"
    for path in files:
        for line, name in imported_names(path):
            assert name not in later, f"{path.name}:{line} imports {name}, which is built on {package}"


def test_the_environments_import_nothing_heavy() -> None:
    code = (
        "import sys, webshop_env, gymnasium\n"
        "env = gymnasium.make('WebShop-v1'); env.reset(seed=0); env.step('search[shoes]')\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["trainers.gigpo_fsdp", "trainers.sft", "data.prepare"])
def test_commands_of_training_say_what_is_missing_in_one_line(module: str) -> None:
    code = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['yaml'] = None\n"
        f"sys.argv = ['{module.replace('.', '/')}.py']; runpy.run_module('{module}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == "error: training needs yaml, torch: pip install 'shopgym[train]'\n"


def test_no_file_of_trainers_hides_a_module() -> None:
    # Running a script in trainers/ puts that folder first on sys.path.
    names = {path.stem for path in (ROOT / "trainers").glob("*.py")} - {"__init__"}
    assert not names & set(sys.stdlib_module_names)
    assert not names & HEAVY
