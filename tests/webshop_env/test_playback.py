"""Playing a script shows every page and stops at what is not possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from webshop_env import WebShopTextEnv, open_shop, playback
from webshop_env.episodes import EpisodeRecorder, read_episodes, write_episodes
from webshop_env.playback import Script, main, record, verify

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "scripts" / "buy_one.json"


def test_the_example_buys_the_goal(capsys):
    assert main(["run", str(SCRIPT)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("goal 3 (") and out.rstrip().endswith("sum of rewards 1.0, score 1.0, won True")
    for number, action in enumerate(json.loads(SCRIPT.read_text())["actions"], start=1):
        assert f"[{number}] {action}: reward " in out
    assert "Selected: color: blush; size: 3 x 5 feet" in out


def test_a_bare_list_is_played_on_goal_0(tmp_path, capsys):
    path = tmp_path / "script.json"
    path.write_text('["search[lamp]"]')
    assert main(["run", str(path)]) == 0
    assert "goal 0 (" in capsys.readouterr().out


def test_an_impossible_action_is_one_line_and_code_2(tmp_path, capsys):
    path = tmp_path / "script.json"
    path.write_text('["click[red]"]')
    assert main(["run", str(path)]) == 2
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
        ('{"actions": [], "settings": {"split_by": []}}', "settings: split_by must be a single value, got []"),
        (
            '{"actions": [], "settings": {"num_prev_obs": 1%s}}' % ("0" * 400),
            "num_prev_obs must be a number from -2^53",
        ),
        ('{"actions": [], "settings": {"success_reward": NaN}}', "success_reward must be a number from -2^53"),
        (r'{"actions": [], "settings": {"data_dir": "\ud800"}}', "data_dir must be a directory's path, got '\\ud800'"),
        (r'{"actions": [], "settings": {"data_dir": "\u0000"}}', "data_dir must be a directory's path, got '\\x00'"),
    ],
)
def test_a_wrong_script_is_one_clear_line(tmp_path, capsys, content, message):
    path = tmp_path / "script.json"
    path.write_text(content)
    assert main(["run", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_missing_script_is_one_clear_line(tmp_path, capsys):
    assert main(["run", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.fixture
def recorded(tmp_path) -> Path:
    """The example as an episode file."""
    path = tmp_path / "episodes.jsonl"
    assert main(["record", str(SCRIPT), "--out", str(path)]) == 0
    return path


def changed(path: Path, change) -> Path:
    """The first episode of a file with something else in it."""
    record = json.loads(path.read_text().splitlines()[0])
    change(record)
    path.write_text(json.dumps(record) + "\n")
    return path


def test_what_was_recorded_is_verified_played_and_shown(recorded, capsys):
    assert main(["verify", str(recorded)]) == 0
    assert "1 episode, 7 steps played again, 0 differ" in capsys.readouterr().out
    assert main(["run", str(recorded)]) == 0
    played = capsys.readouterr().out
    assert main(["show", str(recorded)]) == 0
    shown = capsys.readouterr().out
    assert played.splitlines()[-1] == shown.splitlines()[-1] == "sum of rewards 1.0, score 1.0, won True"
    assert played.split("\n\n")[1:] == shown.split("\n\n")[1:], "a page at a time, from the record or played again"


def test_an_episode_file_is_recorded_again_as_it_is(recorded, tmp_path):
    again = tmp_path / "again.jsonl"
    assert main(["record", str(recorded), "--out", str(again)]) == 0
    assert again.read_text() == recorded.read_text()


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_every_kind_of_episode_survives_the_file(version, tmp_path):
    scripts = [
        Script(actions=("search[<r>]", "click[next >]"), env_id=f"WebShop-{version}", seed=5),
        Script(actions=("search[\ud83d lamp é]", "click[nothing]", "nonsense"), env_id=f"WebShop-{version}"),
        Script(
            actions=("search[lamp]",) * 3,
            env_id=f"WebShop-{version}",
            settings={"goals": "human", "max_steps": 2, "show_attrs": True, "observation_mode": "text_rich"},
            reset_options={"goal_index": 7},
        ),
    ]
    episodes = [record(script) for script in scripts]
    path = tmp_path / "episodes.jsonl"
    assert write_episodes(path, episodes) == 3
    read = list(read_episodes(path))
    assert read == episodes
    assert [verify(episode) for episode in read] == [None] * 3
    assert [step.truncated for step in read[2].steps] == [False, True, True]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda e: e["steps"][2].update(
                observation=e["steps"][2]["observation"].replace("Price: $40", "Price: $41")
            ),
            "step 2, click[b0pa24va31]: observation differs",
        ),
        (lambda e: e["steps"][0].update(available_actions=[]), "the reset: available_actions differs"),
        (lambda e: e["steps"][4]["available_actions"].pop(), "step 4, click[< prev]: available_actions differs"),
        (lambda e: e["steps"][6].update(reward=0.75), "step 7, click[buy now]: reward differs"),
        (lambda e: e["steps"][6].update(terminated=False), "step 7, click[buy now]: terminated differs"),
        (lambda e: e["steps"][5].update(reason="no"), "step 6, click[3 x 5 feet]: whether the action is possible"),
        (lambda e: e["reward_breakdown"].update(r_type=0.5), "the end: reward_breakdown differs"),
        (lambda e: e.update(goal_id="0" * 16), "the reset: goal_id differs"),
        (lambda e: e.update(catalogue_hash="0" * 64), "the catalogue: catalogue_hash differs"),
    ],
)
def test_the_first_step_that_differs_is_told(recorded, capsys, change, told):
    changed(recorded, change)
    capsys.readouterr()
    assert main(["verify", str(recorded)]) == 1
    out = capsys.readouterr().out
    assert told in out and "1 differ" in out


def test_a_difference_in_a_long_page_is_shown_where_it_is(recorded, capsys):
    change = lambda e: e["steps"][2].update(observation=e["steps"][2]["observation"].replace("$40.99", "$41.99"))  # noqa: E731
    changed(recorded, change)
    main(["verify", str(recorded)])
    out = capsys.readouterr().out
    assert "recorded …" in out and "Price: $41.99" in out and "Price: $40.99" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("steps"), "line 1: steps must be a list"),
        (lambda e: e["steps"][1].pop("action"), "line 1: step 2: action is missing"),
        (lambda e: e["steps"][1].update(reward=True), "line 1: step 2: reward is missing or of the wrong kind"),
        (lambda e: e.update(shopgym_episode=99), "line 1: format 99, this version reads 1"),
        (lambda e: e.update(notes=[3]), "line 1: notes is missing or of the wrong kind"),
        (lambda e: e.update(env_id="CartPole-v1"), "env_id must be one of WebShop-v0, WebShop-v1"),
        (lambda e: e["settings"].update(version="v0"), "episode 1: settings: the version is that of env_id"),
        (lambda e: e["settings"].update(max_step=3), "no setting 'max_step'"),
        (lambda e: e["settings"].update(split_by={}), "episode 1: settings: split_by must be a single value"),
        (lambda e: e["settings"].update(data_dir="\0"), "episode 1: settings: data_dir must be a directory's path"),
    ],
)
def test_a_wrong_episode_is_one_clear_line(recorded, capsys, change, message):
    changed(recorded, change)
    capsys.readouterr()
    assert main(["verify", str(recorded)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith(f"error: {recorded}")


def test_a_line_that_was_cut_while_it_was_written_is_left_out(recorded, capsys):
    whole = recorded.read_text()
    recorded.write_text(whole + whole[:500])
    assert len(list(read_episodes(recorded))) == 1
    capsys.readouterr()
    assert main(["verify", str(recorded)]) == 1, "not all of the file was played again"
    told = capsys.readouterr().out
    assert "the last line is cut off; its episode was not played again" in told and "1 episode, " in told
    assert main(["show", str(recorded)]) == 0
    assert "its episode is not shown" in capsys.readouterr().err
    recorded.write_text(whole[:500])
    assert main(["verify", str(recorded)]) == 2
    assert "holds no whole episode" in capsys.readouterr().err
    recorded.write_text(whole[:500] + "\n" + whole)
    assert main(["show", str(recorded)]) == 2
    assert "line 1: not JSON" in capsys.readouterr().err


def test_a_file_that_is_there_is_not_written_over(recorded, capsys):
    before = recorded.read_text()
    capsys.readouterr()
    assert main(["record", str(SCRIPT), "--out", str(recorded)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert recorded.read_text() == before


def test_one_episode_of_many_is_shown(recorded, capsys):
    recorded.write_text(recorded.read_text() * 2)
    capsys.readouterr()
    assert main(["show", str(recorded), "--episode", "2"]) == 0
    assert capsys.readouterr().out.count("played by script") == 1
    assert main(["show", str(recorded), "--episode", "3"]) == 2
    assert "holds no episode 3" in capsys.readouterr().err
    assert main(["show", str(recorded), "--episode", "9" * 25]) == 2
    assert f"holds no episode {'9' * 25}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["record", "convert"])
def test_a_name_that_is_too_long_is_one_clear_line(tmp_path, capsys, command):
    out = tmp_path / ("x" * 300)
    assert main([command, str(SCRIPT), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"error: {out}: File name too long; name another place\n"


@pytest.mark.parametrize(("change", "code"), [({}, 0), ({"goal_id": "0" * 16}, 1)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_the_exit_code_of_verify_does_not_depend_on_who_reads(recorded, change, code, unbuffered):
    changed(recorded, lambda episode: episode.update(change))
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "webshop_env.playback", "verify", str(recorded)],
            stdout=writing,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_the_output_is_one_clear_line(recorded, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "webshop_env.playback", "show", str(recorded)],
            stdout=full,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    told = b"error: standard output: cannot be written (No space left on device); send it elsewhere\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_ctrl_c_is_one_word_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(playback, "record", interrupted)
    try:
        assert main(["record", str(SCRIPT), "--out", str(tmp_path / "e.jsonl")]) == 130
    except KeyboardInterrupt:  # it would end pytest
        pytest.fail("a traceback")
    assert capsys.readouterr() == ("", "stopped\n")
    assert not list(tmp_path.iterdir())


def test_a_recorded_shared_shop_is_opened_again_with_its_own_settings(tmp_path):
    shop = open_shop(version="v0", preseed=3, goals="human")
    recorder = EpisodeRecorder(WebShopTextEnv(version="v0", shop=shop), made_by="test", reset_options={"goal_index": 1})
    recorder.step("search[lamp]")
    episode = recorder.episode()
    assert (episode.settings["preseed"], episode.settings["goals"]) == (3, "human")
    assert verify(episode) is None
