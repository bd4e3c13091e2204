"""Checkpoints: found, kept, refused; and the step after loading equals the step without it."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_rows import rows

from trainers.actor import Actor, ActorConfig
from trainers.checkpoint import (
    CheckpointError,
    RunState,
    find_checkpoint,
    load_optimizer,
    load_weights,
    read_state,
    refuse_other_shapes,
    save_checkpoint,
    set_later_aside,
)
from trainers.losses import LossConfig
from trainers.models import load_model, make_small_policy, train_tokenizer
from trainers.ranks import start_ranks


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["click[buy now] search[red mug]"] * 5, 300)


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_small_policy(tokenizer, hidden=16, layers=1, heads=2)


def new_actor(model) -> Actor:
    config = ActorConfig(lr=1e-2, loss=LossConfig(use_kl_loss=False))
    return Actor(copy.deepcopy(model).requires_grad_(True), start_ranks(), config, pad_id=0)


def save(run_dir, actor, tokenizer, updates_done: int, **fields):
    state = RunState(updates_done=updates_done, **fields)
    return save_checkpoint(run_dir, actor, state, tokenizer=tokenizer, made={})


def test_the_step_after_loading_equals_the_step_without(model, tokenizer, tmp_path):
    actor = new_actor(model)
    actor.update(rows(0))
    actor.update(rows(1))
    checkpoint = save(tmp_path, actor, tokenizer, 2)
    actor.update(rows(2))

    resumed = new_actor(model)
    resumed.load_full_state_dict(load_weights(checkpoint))
    load_optimizer(checkpoint, resumed)
    resumed.update(rows(2))
    expected = actor.full_state_dict()
    for name, tensor in resumed.full_state_dict().items():
        assert torch.equal(tensor, expected[name]), name

    without_moments = new_actor(model)
    without_moments.load_full_state_dict(load_weights(checkpoint))
    without_moments.update(rows(2))
    assert not all(torch.equal(t, expected[n]) for n, t in without_moments.full_state_dict().items())


def test_the_policy_inside_is_a_hugging_face_directory_with_the_same_weights(model, tokenizer, tmp_path):
    actor = new_actor(model)
    checkpoint = save(tmp_path, actor, tokenizer, 1)
    loaded = load_model(str(checkpoint / "policy"))
    for name, tensor in actor.full_state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_latest_is_found_and_the_last_two_are_kept(model, tokenizer, tmp_path):
    assert find_checkpoint(tmp_path) is None
    actor = new_actor(model)
    for number in (1, 2, 10):
        save(tmp_path, actor, tokenizer, number)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["update_000002", "update_000010"]
    latest = tmp_path / "checkpoints" / "update_000010"
    for place in (tmp_path, tmp_path / "checkpoints", latest):
        assert find_checkpoint(place) == latest


def test_a_half_written_checkpoint_is_never_taken(model, tokenizer, tmp_path):
    whole = save(tmp_path, new_actor(model), tokenizer, 1)
    (tmp_path / "checkpoints" / "update_000002" / "policy").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".update_000003-abc").mkdir()
    assert find_checkpoint(tmp_path) == whole
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(tmp_path / "nothing")


KILLED = """
import os, signal, sys
from pathlib import Path
from trainers.files import atomic_directory

with atomic_directory(Path(sys.argv[1])) as scratch:
    (scratch / "policy").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_kill_inside_a_save_left_goes_with_the_next_save(model, tokenizer, tmp_path):
    actor, folder = new_actor(model), tmp_path / "checkpoints"
    whole = save(tmp_path, actor, tokenizer, 1)
    command = [sys.executable, "-c", KILLED, str(folder / "update_000002")]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=60)
    (folder / ".old-update_000000" / "policy").mkdir(parents=True)
    assert killed.returncode == -9
    assert len(list(folder.glob(".update_000002-*"))) == 1
    assert find_checkpoint(tmp_path) == whole
    save(tmp_path, actor, tokenizer, 2)
    assert sorted(p.name for p in folder.iterdir()) == ["update_000001", "update_000002"]


def test_what_was_done_after_an_update_is_set_aside(model, tokenizer, tmp_path):
    for number in (2, 3):
        save(tmp_path, new_actor(model), tokenizer, number)
    (tmp_path / "validations").mkdir()
    for number in (0, 2, 3):
        (tmp_path / "validations" / f"update_{number:06d}.json").write_text("old")
    for _ in range(2):  # the second time nothing is left to move
        set_later_aside(tmp_path, 2)
        assert find_checkpoint(tmp_path).name == "update_000002"
        left = sorted(p.name for p in (tmp_path / "validations").iterdir())
        assert left == ["update_000000.json", "update_000002.json"]
    aside = tmp_path / "superseded"
    assert (aside / "checkpoints" / "update_000003" / "state.json").is_file()
    assert (aside / "validations" / "update_000003.json").read_text() == "old"
    save(tmp_path, new_actor(model), tokenizer, 3)
    assert len(set_later_aside(tmp_path, 2)) == 1  # another branch takes the place of the first


def test_weights_of_another_shape_are_refused(model, tokenizer, tmp_path):
    checkpoint = save(tmp_path, new_actor(model), tokenizer, 1)
    wider = new_actor(make_small_policy(tokenizer, hidden=32, layers=1, heads=2))
    with pytest.raises(CheckpointError, match="is of another model"):
        refuse_other_shapes(checkpoint, load_weights(checkpoint), wider)


def test_state_comes_back_and_other_prompts_are_refused(model, tokenizer, tmp_path):
    hashes = {"environment": "WebShop-v1", "prompt_template_hash": "aa"}
    checkpoint = save(tmp_path, new_actor(model), tokenizer, 3, metrics=[{"update": 1, "x": 0.1}], hashes=hashes)
    state = read_state(checkpoint, hashes=hashes)
    assert (state.updates_done, state.metrics) == (3, [{"update": 1, "x": 0.1}])
    with pytest.raises(CheckpointError, match="prompt template hash aa, this run has bb"):
        read_state(checkpoint, hashes=hashes | {"prompt_template_hash": "bb"})
    (checkpoint / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(checkpoint, hashes=hashes)
