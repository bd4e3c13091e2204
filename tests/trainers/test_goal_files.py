"""Goal lists as Parquet files: what is inside, who may read them, and what is refused."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from data.prepare import main as prepare
from trainers.goal_files import load_goals, save_goals
from trainers.settings import SettingsError, resolve
from trainers.worlds import goal_products, open_world

ROOT = Path(__file__).resolve().parents[2]


def env_of(*words: str):
    return resolve(list(words))[0].env


@pytest.fixture(scope="module")
def lists(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lists") / "text"
    assert prepare(["--mode", "text", "--train_data_size", "16", "--val_data_size", "256", "--out", str(out)]) == 0
    return out


def test_the_lists_hold_goals_with_the_columns_that_users_of_such_files_expect(lists):
    rows = parquet.read_table(lists / "test.parquet").to_pylist()
    shop = open_world(env_of())
    assert len(rows) == 256 and parquet.read_table(lists / "train.parquet").num_rows == 16
    assert {(row["data_source"], row["modality"], row["split"]) for row in rows} == {("WebShop-v1", "text", "eval")}
    assert [row["index"] for row in rows] == list(range(256))
    assert {shop.goal_by_id(row["goal_id"]).goal_index for row in rows} <= set(shop.split("eval").tolist())
    assert rows[0]["env_kwargs"]["catalogue_hash"] == shop.catalogue_hash


def test_the_default_place_is_where_published_scripts_look(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare(["--train_data_size", "2", "--val_data_size", "2"]) == 0
    assert str(tmp_path / "data" / "verl-agent" / "text" / "train.parquet") in capsys.readouterr().out
    path = "$HOME/data/verl-agent/text/train.parquet"
    assert len(load_goals(path, open_world(env_of()), env_of(), key="data.train_files")) == 2


def test_a_list_means_the_same_goals_in_every_version_and_order_of_the_shop(lists):
    path = str(lists / "train.parquet")
    v1, verl = env_of(), env_of("env.env_name=Webshop", "env.seed=7")
    shops = open_world(v1), open_world(verl)
    places = [load_goals(path, shop, env, key="k") for shop, env in zip(shops, (v1, verl), strict=True)]
    assert places[0].tolist() != places[1].tolist(), "the variant has an order of its own"
    ids = [[shop.goal_at(goal).goal_id for goal in goals] for shop, goals in zip(shops, places, strict=True)]
    assert ids[0] == ids[1] == parquet.read_table(path).column("goal_id").to_pylist()


def test_a_train_list_can_be_spread_over_products(tmp_path, capsys):
    words = ["--val_data_size", "2", "--out", str(tmp_path)]
    shop, env = open_world(env_of()), env_of()
    whole = Counter(goal_products(shop, shop.split("train")))
    assert prepare([*words, "--max_per_product", "3"]) == 0
    goals = load_goals(str(tmp_path / "train.parquet"), shop, env, key="k")
    assert Counter(goal_products(shop, goals)) == {product: min(num, 3) for product, num in whole.items()}
    assert max(whole.values()) > 3 and set(goals.tolist()) <= set(shop.split("train").tolist())
    assert prepare([*words, "--max_per_product", "3", "--train_data_size", str(len(goals) + 1)]) == 2
    assert prepare([*words, "--max_per_product", "0"]) == 2
    assert prepare([*words, "--max_per_product", "3", "env.env_name=FrozenLake-v1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and f"0 (all) to {len(goals)}" in errors[0]
    assert "--max_per_product must be at least 1, got 0" in errors[1] and "are of no product" in errors[2]


def test_a_train_list_can_hold_goals_of_few_options(tmp_path, capsys):
    words, shop, env = ["--val_data_size", "2", "--out", str(tmp_path)], open_world(env_of()), env_of()
    fewest = min(len(shop.goal_at(int(goal)).options) for goal in shop.split("train"))
    assert prepare([*words, "--max_options", str(fewest)]) == 0
    goals = load_goals(str(tmp_path / "train.parquet"), shop, env, key="k")
    assert {len(shop.goal_at(int(goal)).options) for goal in goals} == {fewest}
    assert len(goals) == sum(len(shop.goal_at(int(goal)).options) == fewest for goal in shop.split("train"))
    assert prepare([*words, "--max_options", str(fewest), "--max_per_product", "1"]) == 0
    assert prepare([*words, "--max_options", str(fewest - 1)]) == 2
    assert prepare([*words, "--max_options", "-1"]) == 2
    assert prepare([*words, "--max_options", "0", "env.env_name=FrozenLake-v1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all(line.startswith("error: --max_options") for line in errors)


SMALL_SPLIT = ("env.webshop.num_products=100", "env.webshop.split_by=product")


def test_a_small_split_gives_all_its_validation_goals_unless_more_are_asked_for(tmp_path, capsys):
    num = len(open_world(env_of(*SMALL_SPLIT)).split("eval"))
    assert 0 < num < 256
    assert prepare(["--out", str(tmp_path / "default"), *SMALL_SPLIT]) == 0
    assert f"test.parquet: {num} of the {num} eval goals" in capsys.readouterr().out
    assert prepare(["--out", str(tmp_path / "asked"), "--val_data_size", "256", *SMALL_SPLIT]) == 2
    assert f"--val_data_size must be 0 (all) to {num}, " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["default"]


def test_help_lists_the_settings(capsys):
    with pytest.raises(SystemExit):
        prepare(["--help"])
    assert "env.webshop.data_dir=null" in capsys.readouterr().out


def test_a_full_disk_leaves_no_list(tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, hard))  # enough for two goals
    try:
        assert prepare(["--out", str(tmp_path / "lists"), "--train_data_size", "2", "--val_data_size", "0"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err == (
        f"error: --out: {tmp_path / 'lists'} cannot be written (File too large); name another place\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path, unbuffered):
    command = [sys.executable, "-m", "data.prepare", "--val_data_size", "2", "--out", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as running:
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 0


def test_goals_of_other_environments_are_seeds(tmp_path):
    env = env_of("env.env_name=FrozenLake-v1")
    words = ["--train_data_size", "3", "--val_data_size", "4", "--out", str(tmp_path), "env.env_name=FrozenLake-v1"]
    assert prepare(words) == 0
    world = open_world(env)
    goals = load_goals(str(tmp_path / "train.parquet"), world, env, key="k")
    assert len(goals) == 3 and set(goals.tolist()) <= set(world.split("train").tolist())
    with pytest.raises(SettingsError, match=r"made for FrozenLake-v1, this run has env\.env_name=WebShop-v1"):
        load_goals(str(tmp_path / "train.parquet"), open_world(env_of()), env_of(), key="k")
    with pytest.raises(SettingsError, match="made for catalogue"):
        other = env_of("env.env_name=FrozenLake-v1")
        load_goals(str(tmp_path / "train.parquet"), type(world)("FrozenLake-v1", 99), other, key="k")


def changed(lists: Path, target: Path, change) -> str:
    """A copy of the train list with changed rows."""
    table = parquet.read_table(lists / "train.parquet")
    rows = table.to_pylist()
    change(rows)
    meta = table.schema.metadata
    parquet.write_table(pa.Table.from_pylist(rows, schema=table.schema).replace_schema_metadata(meta), target)
    return str(target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.clear(), "holds no goals"),
        (lambda rows: rows[3].update(goal_id="0" * 16), "names goal 0000000000000000, which is none of the synthetic"),
        (lambda rows: rows[3].update(goal_id=rows[1]["goal_id"]), "twice"),
        (lambda rows: rows[3].update(modality="visual"), "modality visual"),
        (lambda rows: rows[3]["env_kwargs"].update(catalogue_hash="ab" * 32), "made for catalogue abababababababab"),
        (lambda rows: rows[3].update(data_source="Sokoban-v0"), "made for Sokoban-v0"),
    ],
)
def test_a_list_that_does_not_fit_is_refused_in_one_line(lists, tmp_path, change, message):
    path = changed(lists, tmp_path / "list.parquet", change)
    with pytest.raises(SettingsError, match=message) as caught:
        load_goals(path, open_world(env_of()), env_of(), key="data.train_files")
    assert str(caught.value).startswith(f"data.train_files: {path}") and "\n" not in str(caught.value)


def test_goals_of_another_kind_are_refused(lists):
    env = env_of("env.webshop.goals=human")
    with pytest.raises(SettingsError, match="which is none of the human goals of this catalogue"):
        load_goals(str(lists / "train.parquet"), open_world(env), env, key="data.train_files")


def test_what_is_no_goal_list_is_refused(lists, tmp_path):
    world, env = open_world(env_of()), env_of()

    def refusal(path: Path) -> str:
        with pytest.raises(SettingsError) as caught:
            load_goals(str(path), world, env, key="data.val_files")
        assert "\n" not in str(caught.value) and "python -m data.prepare" in str(caught.value)
        return str(caught.value)

    assert "No such file" in refusal(tmp_path / "none.parquet")
    (tmp_path / "half.parquet").write_bytes((lists / "train.parquet").read_bytes()[:-9])
    assert "no whole Parquet file" in refusal(tmp_path / "half.parquet")
    parquet.write_table(pa.table({"data_source": ["text"], "prompt": ["x"]}), tmp_path / "published.parquet")
    assert "is no goal list (it lacks the column goal_id)" in refusal(tmp_path / "published.parquet")
    table = parquet.read_table(lists / "train.parquet")
    later = table.replace_schema_metadata({"shopgym_goal_list": json.dumps({"format": "2"})})
    parquet.write_table(later, tmp_path / "later.parquet")
    assert "its format is 2, not 1" in refusal(tmp_path / "later.parquet")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "visual"], "--mode must be text, got visual"),
        (["--train_data_size", "99999"], "--train_data_size must be 0 (all) to 4302, the goals of the train split"),
        (["--val_data_size", "-1"], "--val_data_size must be 0 (all) to 1000"),
        (["env.webshop.data_dir=nowhere"], "nowhere"),
        (["env.maxsteps=3"], "did you mean 'env.max_steps'?"),
        (["--out", "/dev/null/lists"], "--out: /dev/null/lists cannot be written"),
    ],
)
def test_preparing_refuses_in_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare(words) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_list_is_replaced_whole(tmp_path):
    world, env = open_world(env_of()), env_of()
    for goals in ([1500, 1501], [1502]):
        save_goals(tmp_path / "l.parquet", goals, world, env, split="train", modality="text")
    assert load_goals(str(tmp_path / "l.parquet"), world, env, key="k").tolist() == [1502]
    assert [path.name for path in tmp_path.iterdir()] == ["l.parquet"]
