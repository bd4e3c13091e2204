"""Playing a script shows every page and stops at what is not possible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from webshop_env.playback import main

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "scripts" / "buy_one.json"


def test_the_example_buys_the_goal(capsys):
    assert main([str(SCRIPT)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("goal 3 (") and out.rstrip().endswith("sum of rewards 1.0, score 1.0, won True")
    for number, action in enumerate(json.loads(SCRIPT.read_text())["actions"], start=1):
        assert f"[{number}] {action}: reward " in out
    assert "Selected: color: blush; size: 3 x 5 feet" in out


def test_a_bare_list_is_played_on_goal_0(tmp_path, capsys):
    path = tmp_path / "script.json"
    path.write_text('["search[lamp]"]')
    assert main([str(path)]) == 0
    assert "goal 0 (" in capsys.readouterr().out


def test_an_impossible_action_is_one_line_and_code_2(tmp_path, capsys):
    path = tmp_path / "script.json"
    path.write_text('["click[red]"]')
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"error: {path}: action 1, click[red]: this page does not offer click[red]; available: search[<your query>]\n"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("3", "expected a list of actions"),
        ('{"actions": [1]}', "actions must be a list of texts"),
        ('{"actions": [], "goal": 3}', "unknown goal; known: env, goal_index"),
        ('{"actions": [], "env": "CartPole-v1"}', "env must be one of WebShop-v0, WebShop-v1"),
        ('{"actions": [], "goal_index": -4}', "goal_index must be in 0 to"),
        ('{"actions": [], "settings": {"max_step": 3}}', "no setting 'max_step'"),
    ],
)
def test_a_wrong_script_is_one_clear_line(tmp_path, capsys, content, message):
    path = tmp_path / "script.json"
    path.write_text(content)
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_missing_script_is_one_clear_line(tmp_path, capsys):
    assert main([str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
