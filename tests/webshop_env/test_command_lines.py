"""Every mistake on a command line is one line on stderr and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import subprocess
import sys

import gymnasium
import pytest

from data import generate
from webshop_env import cli, conformance, playback
from webshop_env.errors import ShopGymError
from webshop_env.shop import EMBEDDED_CATALOGUE, open_shop


def complaint(main, arguments, capsys) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe[", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"actions": [], "settings": {"data_dir": 3}}', "data_dir must be a directory's path, got 3"),
        (b'{"actions": [], "settings": {"num_products": "x"}}', "num_products must be a whole number of at least 1"),
        (b'{"actions": [], "settings": {"limit_goals": "x"}}', "limit_goals must be a whole number of at least 1"),
        (b'{"actions": [], "settings": {"filter_goals": "x"}}', "filter_goals must be a function"),
        (b'{"actions": [], "settings": {"split_by": 3}}', "split_by must be 'goal', 'product'"),
        (b'{"actions": [], "settings": {"shop": "x"}}', "shop must be an open shop"),
        (b'{"actions": [], "settings": {"success_reward": "x"}}', "success_reward must be a number"),
        (b'{"actions": [], "settings": {"show_attrs": "no"}}', "show_attrs must be one of False, True"),
        (b'{"actions": [], "settings": {"session_prefix": 3}}', "session_prefix must be a text"),
        (b'{"actions": [], "settings": {"id": "x"}}', "no setting 'id'"),
        (b'{"actions": [], "settings": {"max_episode_steps": "x"}}', "did you mean max_steps?"),
        (b'{"actions": [], "settings": {"version": "v0"}}', "the version is that of env"),
        (b'{"actions": [], "goal_index": 99999999}', "goal_index must be in 0 to"),
    ],
)
def test_a_wrong_script_names_its_file(tmp_path, capsys, content, message):
    path = tmp_path / "script.json"
    path.write_bytes(content)
    error = complaint(playback.main, ["run", path], capsys)
    assert message in error and error.startswith(f"error: {path}: ")


def test_an_endless_action_is_not_printed_whole(tmp_path, capsys):
    path = tmp_path / "script.json"
    path.write_text(json.dumps([f"search[{'x' * 30_000}]"]))
    error = complaint(playback.main, ["run", path], capsys)
    assert "action 1, search[xxx" in error and "30008 characters" in error and len(error) < 800


def test_a_catalogue_that_the_option_names_is_not_blamed_on_the_script(tmp_path, capsys):
    path = tmp_path / "script.json"
    path.write_text("[]")
    assert complaint(playback.main, ["run", path, "--data", tmp_path / "no"], capsys).startswith(
        f"error: {tmp_path / 'no'}: "
    )


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("goals", {"a": 1}, "record 0 lacks index"),
        ("goals", [1], "record 0 is not an object"),
        ("reward", {"kind": "x"}, "record 0 lacks asin, options, price"),
        ("prices", {"asin": "nowhere", "price": 1}, "no product has asin 'nowhere'"),
        ("doc_tokens", {"asin": "nowhere", "tokens": []}, "no product has asin 'nowhere'"),
    ],
)
def test_a_wrong_recording_names_file_and_record(tmp_path, capsys, name, record, message):
    path = tmp_path / f"{name}.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(record).encode()))
    error = complaint(conformance.main, [tmp_path, "--data", EMBEDDED_CATALOGUE], capsys)
    assert message in error and str(path) in error


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("items_shuffle.json", "[", "not JSON"),
        ("items_shuffle.json", "{}", "must hold a list of products"),
        ("items_shuffle.json", "[]", "none of its 0 rows is a product for sale"),
        ("items_ins.json", "[]", "must hold an object by asin"),
        ("items_ins.json", '{"B01": {"instruction": 3}}', "product B01: instruction must be a text"),
        ("name_nouns.json", "[]", "not an object of asin"),
    ],
)
def test_a_broken_catalogue_is_named_with_its_directory(tmp_path, capsys, file, content, message):
    product = {"asin": "B01", "name": "red mug", "pricing": "$3.00"}
    goal = {"B01": {"instruction": "a mug", "attributes": [], "instruction_attributes": []}}
    whole = {"items_shuffle.json": [product], "items_ins.json": goal, "name_nouns.json": {"B01": ["mug"]}}
    for name, value in whole.items():
        (tmp_path / name).write_text(content if name == file else json.dumps(value))
    error = complaint(cli.main, ["describe", "--data-dir", tmp_path], capsys)
    assert message in error and error.startswith(f"error: {tmp_path / file}: ")


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "below"
    arguments = ["--out", out, "--products", 25, "--no-nouns"]
    assert f"--out {out}: cannot be written" in complaint(generate.main, arguments, capsys)
    assert str(out) in complaint(cli.main, ["data", "fetch", out], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("options", [[1], "goal_index", 3])
def test_reset_options_are_a_dict(options):
    single = gymnasium.make("webshop_env:WebShop-v1", disable_env_checker=True)
    vector = gymnasium.make_vec("webshop_env:WebShop-v1", num_envs=2)
    for env in (single, vector):
        with pytest.raises(ShopGymError, match="reset options are a dict"):
            env.reset(options=options)


def test_a_vector_says_what_actions_and_seeds_it_takes():
    env = gymnasium.make_vec("webshop_env:WebShop-v1", num_envs=2)
    for seed in ("x", 1.5, [1, "x"]):
        with pytest.raises(ShopGymError, match="a seed is a whole number"):
            env.reset(seed=seed)
    env.reset(seed=0)
    for actions in (None, 3, "xy"):
        with pytest.raises(ShopGymError, match="one action for each slot"):
            env.step(actions)


@pytest.mark.parametrize("preseed", ["x", 1.5, True])
def test_a_preseed_is_a_whole_number(preseed):
    with pytest.raises(ShopGymError, match=re.escape(f"preseed must be a whole number, got {preseed!r}")):
        open_shop(version="v0", preseed=preseed)


def test_a_pickled_environment_goes_on_where_it_was():
    env = gymnasium.make("webshop_env:WebShop-v1").unwrapped
    env.reset(seed=3)
    copy = pickle.loads(pickle.dumps(env))
    assert copy.step("search[mug]")[0] == env.step("search[mug]")[0]
    assert copy.reset()[0] == env.reset()[0]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is closed to root")
def test_a_closed_directory_is_one_line(tmp_path, capsys):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    try:
        assert "cannot be read" in complaint(cli.main, ["describe", "--data-dir", closed], capsys)
        assert "cannot be read" in complaint(cli.main, ["data", "check", closed / "below"], capsys)
        assert "permission denied" in complaint(conformance.main, [closed / "below", "--data", closed], capsys)
    finally:
        closed.chmod(0o700)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    path = tmp_path / "script.json"
    path.write_text(json.dumps(["search[mug]"]))
    command = [sys.executable, "-m", "webshop_env.playback", "run", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as playing:
        playing.stdout.close()
        assert playing.stderr.read() == b""
    assert playing.returncode == 0
