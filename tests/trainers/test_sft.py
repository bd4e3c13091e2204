"""Imitation: the oracle seen through the manager's prompts, and a policy that learns from it."""

from __future__ import annotations

import json
import re

import pytest
import torch

from trainers.demonstrations import demonstrate
from trainers.errors import TrainingError
from trainers.goal_files import save_goals
from trainers.models import load_model, load_tokenizer, refuse_other_prompts
from trainers.settings import SettingsError, resolve
from trainers.sft import SftSettings, main, run
from trainers.worlds import make_manager, open_world
from webshop_env.policies import OraclePolicy


@pytest.fixture(scope="module")
def settings():
    return resolve(["out=unused"], SftSettings)[0]


@pytest.fixture(scope="module")
def shop(settings):
    return open_world(settings.env)


def test_the_oracle_wins_through_the_manager_and_its_actions_are_admissible(settings, shop):
    manager = make_manager(settings.env, settings.data, 8, count_tokens=None)
    shown = demonstrate(manager, OraclePolicy(shop), shop.split("train")[:20])
    assert (shown.num_episodes, shown.num_won) == (20, 20)
    assert shown.prompts[0].startswith("task: ")
    for possible, action in zip(shown.admissible, shown.actions, strict=True):
        assert action in possible or action.startswith("search[")


def test_noise_shows_the_way_back_and_belongs_to_the_seed(settings, shop):
    manager = make_manager(settings.env, settings.data, 8, count_tokens=None)
    goals = shop.split("train")[:8]
    plain = demonstrate(manager, OraclePolicy(shop), goals)
    noisy = demonstrate(manager, OraclePolicy(shop), goals, noise=0.4, seed=1)
    assert len(noisy.actions) > len(plain.actions)
    assert "click[< prev]" in noisy.actions
    assert noisy.actions == demonstrate(manager, OraclePolicy(shop), goals, noise=0.4, seed=1).actions


def test_a_policy_is_made_from_nothing_with_its_provenance(tmp_path, capsys):
    words = [
        f"out={tmp_path / 'p'}",
        "goals=24",
        "epochs=4",
        "hidden=32",
        "layers=1",
        "heads=2",
        "vocab_size=800",
        "eval_goals=4",
        "device=cpu",
        "batch_rows=16",
        "lr=0.01",
    ]
    main(words)
    made = json.loads((tmp_path / "p" / "provenance.json").read_text())
    assert made["environment"] == "WebShop-v1"
    assert made["made_by"].startswith("python trainers/sft.py out=")
    assert made["settings"]["goals"] == 24
    assert made["figures"]["loss"] < 2.0
    refuse_other_prompts(
        str(tmp_path / "p"), prompt_template_hash=made["prompt_template_hash"], environment="WebShop-v1"
    )
    assert len(load_tokenizer(str(tmp_path / "p"))) <= 800
    assert load_model(str(tmp_path / "p")).num_parameters() == made["num_parameters"]
    assert "eval success" in capsys.readouterr().out

    settings = resolve(words, SftSettings)[0]
    world = open_world(settings.env)
    save_goals(
        tmp_path / "l.parquet", world.split("test")[:3], world, settings.env, split="test", modality="text"
    )  # played whole
    listed = resolve([*words, f"out={tmp_path / 'q'}", f"data.val_files={tmp_path / 'l.parquet'}"], SftSettings)[0]
    again = run(listed, "again")
    assert "n=3" in again["figures"]["eval_success"] and "n=4" in made["figures"]["eval_success"]
    assert again["weights_hash"] == made["weights_hash"]


def test_fewer_goals_than_asked_for_are_told(tmp_path, capsys):
    words = ["goals=500", "eval_goals=400", "epochs=0.1", "hidden=16", "layers=1", "heads=2", "vocab_size=400"]
    main([*words, f"out={tmp_path / 'p'}", "env.webshop.num_products=20", "device=cpu"])
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert re.fullmatch(r"note: goals=500: the train split has \d+ goals, all of them are played", notes[0])
    assert re.fullmatch(r"note: eval_goals=400: the eval split has \d+ goals, all of them are played", notes[1])
    assert len(notes) == 2


def test_what_leaves_nothing_to_imitate_is_named(tmp_path):
    words = ["goals=4", "source=rule", "won_only=true", "min_score=1", "env.max_steps=1", f"out={tmp_path / 'p'}"]
    with pytest.raises(SettingsError, match=r"nothing is left to imitate.*won_only and min_score decide"):
        main([*words, "init=embedded", "device=cpu"])


def test_what_was_taught_is_kept_when_its_evaluation_is_broken_off(tmp_path, monkeypatch, capsys):
    def interrupted(*parts):
        raise KeyboardInterrupt

    monkeypatch.setattr("trainers.sft._evaluate", interrupted)
    words = ["goals=2", "epochs=0.1", "hidden=16", "layers=1", "heads=2", "eval_goals=2", "device=cpu"]
    with pytest.raises(KeyboardInterrupt):
        main([*words, f"out={tmp_path / 'p'}"])
    assert load_model(str(tmp_path / "p")).num_parameters() > 0
    assert "eval_success" not in json.loads((tmp_path / "p" / "provenance.json").read_text())["figures"]
    assert "MB of weights" in capsys.readouterr().out


def test_a_directory_of_imitation_is_whole_or_not_there(tmp_path, monkeypatch):
    def failing(directory, **parts) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr("trainers.sft.save_policy", failing)
    words = [f"out={tmp_path / 'p'}", "goals=2", "epochs=0.1", "hidden=16", "layers=1", "heads=2", "eval_goals=0"]
    with pytest.raises(OSError, match="disk full"):
        main([*words, "vocab_size=400", "device=cpu"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("epochs", [4, 20])
def test_a_policy_that_is_no_number_is_not_written(tmp_path, epochs):
    words = [f"out={tmp_path / 'p'}", "goals=4", "hidden=16", "layers=1", "heads=2", "eval_goals=0", "vocab_size=400"]
    with pytest.raises(TrainingError, match=r"not finite; nothing was written.*lower lr") as caught:
        main([*words, "device=cpu", "lr=1e30", "weight_decay=0", "grad_clip=1e30", "batch_rows=8", f"epochs={epochs}"])
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_no_memory_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("trainers.sft.imitate", lambda *_: torch.empty(10**15))
    words = [f"out={tmp_path / 'p'}", "goals=2", "hidden=16", "layers=1", "heads=2", "vocab_size=400", "device=cpu"]
    with pytest.raises(TrainingError, match=r"out of memory: lower micro_batch_tokens \(65536\)") as caught:
        main(words)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_many_ranks_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="one process, not on 2 ranks"):
        main([f"out={tmp_path / 'p'}"])


def test_out_must_be_given():
    with pytest.raises(SettingsError, match="out=DIR"):
        main([])
