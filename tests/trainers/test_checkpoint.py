"""Checkpoints: found, kept, refused; and the step after loading equals the step without it."""

from __future__ import annotations

import copy
import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_rows import rows

from trainers.actor import Actor, ActorConfig, NotFinite
from trainers.checkpoint import (
    RunState,
    find_checkpoint,
    read_state,
    restore,
    save_checkpoint,
    set_later_aside,
)
from trainers.errors import CheckpointError, TrainingError
from trainers.export import export
from trainers.export import main as export_main
from trainers.losses import LossConfig
from trainers.models import load_model, load_tokenizer, make_small_policy, provenance, train_tokenizer
from trainers.ranks import start_ranks
from webshop_env.errors import ShopGymError


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["click[buy now] search[red mug]"] * 5, 300)


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_small_policy(tokenizer, hidden=16, layers=1, heads=2)


def new_actor(model, **changes) -> Actor:
    config = ActorConfig(lr=1e-2, loss=LossConfig(use_kl_loss=False), **changes)
    return Actor(copy.deepcopy(model).requires_grad_(True), start_ranks(), config, pad_id=0)


def save(run_dir, actor, tokenizer, updates_done: int, *, max_to_keep=2, checkpoint_format="full", **fields):
    state = RunState(updates_done=updates_done, **fields)
    how = {"max_to_keep": max_to_keep, "checkpoint_format": checkpoint_format}
    return save_checkpoint(run_dir, actor, state, tokenizer=tokenizer, made={"made_by": "a test"}, **how)


@pytest.fixture(params=["full", "sharded"])
def checkpoint_format(request):
    return request.param


def test_the_step_after_loading_equals_the_step_without(model, tokenizer, tmp_path, checkpoint_format):
    actor = new_actor(model)
    actor.update(rows(0))
    actor.update(rows(1))
    checkpoint = save(tmp_path, actor, tokenizer, 2, checkpoint_format=checkpoint_format)
    actor.update(rows(2))

    resumed = new_actor(model)
    restore(checkpoint, resumed)
    resumed.update(rows(2))
    expected = actor.full_state_dict()
    for name, tensor in resumed.full_state_dict().items():
        assert torch.equal(tensor, expected[name]), name

    without_moments = new_actor(model)
    restore(checkpoint, without_moments)
    without_moments.optimizer.state.clear()
    without_moments.update(rows(2))
    assert not all(torch.equal(t, expected[n]) for n, t in without_moments.full_state_dict().items())


def test_a_pass_without_gradients_before_it_changes_no_checkpoint(model, tokenizer, tmp_path, checkpoint_format):
    actor = new_actor(model)
    actor.update(rows(0))
    actor.log_probs(rows(1))
    checkpoint = save(tmp_path, actor, tokenizer, 1, checkpoint_format=checkpoint_format)
    resumed = new_actor(model)
    resumed.log_probs(rows(1))
    restore(checkpoint, resumed)
    assert set(resumed.optimizer.state) == set(resumed.trained)
    for learner in (actor, resumed):
        learner.update(rows(2))
    expected = actor.full_state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.full_state_dict().items())


def test_moments_of_what_is_not_trained_stop_a_save(model, tokenizer, tmp_path, checkpoint_format):
    actor = new_actor(model)
    actor.update(rows(0))
    actor.optimizer.state[torch.zeros(1)] = {"step": torch.ones(())}
    with pytest.raises(TrainingError, match=r"state of \d+ tensors, only \d+ of them are trained"):
        save(tmp_path, actor, tokenizer, 1, checkpoint_format=checkpoint_format)


def test_steps_that_were_skipped_before_a_checkpoint_count_after_it(model, tokenizer, tmp_path, checkpoint_format):
    spoilt = rows(0)
    spoilt.advantage[:] = float("nan")
    actor = new_actor(model, max_nan_steps=2)
    actor.update(rows(0))
    assert actor.update(spoilt)["actor/skipped_steps"] == 1
    checkpoint = save(tmp_path, actor, tokenizer, 2, checkpoint_format=checkpoint_format)
    resumed = new_actor(model, max_nan_steps=2)
    restore(checkpoint, resumed)
    for learner in (actor, resumed):
        with pytest.raises(NotFinite, match="2 optimizer steps in a row"):
            learner.update(spoilt)

    state = json.loads((checkpoint / "state.json").read_text())
    del state["num_nan_steps"]  # as checkpoints were before
    (checkpoint / "state.json").write_text(json.dumps(state))
    restore(checkpoint, resumed)
    assert resumed.num_nan_steps == 0


def test_the_policy_inside_is_a_hugging_face_directory_with_the_same_weights(model, tokenizer, tmp_path):
    actor = new_actor(model)
    checkpoint = save(tmp_path, actor, tokenizer, 1)
    loaded = load_model(str(checkpoint / "policy"))
    for name, tensor in actor.full_state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_checkpoint_is_exported_as_a_hugging_face_directory(model, tokenizer, tmp_path, checkpoint_format, dtype):
    actor = new_actor(model)
    actor.update(rows(0))
    checkpoint = save(tmp_path, actor, tokenizer, 1, checkpoint_format=checkpoint_format)
    export(checkpoint, tmp_path / "out", dtype=dtype)
    loaded = load_model(str(tmp_path / "out"), dtype=dtype)
    for name, tensor in actor.full_state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype)), name
    assert load_tokenizer(str(tmp_path / "out")).get_vocab() == tokenizer.get_vocab()
    assert provenance(str(tmp_path / "out")) == {"made_by": "a test"}


def test_the_command_exports_the_latest_and_overwrites_nothing(model, tokenizer, tmp_path, capsys):
    actor = new_actor(model)
    for number in (1, 2):
        actor.update(rows(number))
        save(tmp_path, actor, tokenizer, number, checkpoint_format="sharded")
    words = [f"checkpoint={tmp_path}", f"out={tmp_path / 'out'}"]
    export_main(words)
    assert capsys.readouterr().out == f"{tmp_path / 'checkpoints' / 'update_000002'} -> {tmp_path / 'out'}\n"
    loaded = load_model(str(tmp_path / "out"))
    for name, tensor in actor.full_state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    with pytest.raises(ShopGymError, match=r"out: .* exists"):
        export_main(words)
    with pytest.raises(ShopGymError, match="checkpoint is needed"):
        export_main(words[1:])


def test_no_more_checkpoints_stay_than_asked_for(model, tokenizer, tmp_path):
    actor, folder = new_actor(model), tmp_path / "checkpoints"
    for number in (1, 2, 3):
        save(tmp_path, actor, tokenizer, number, max_to_keep=None)
    assert len(list(folder.iterdir())) == 3
    save(tmp_path, actor, tokenizer, 4, max_to_keep=1)
    assert [path.name for path in folder.iterdir()] == ["update_000004"]


@contextmanager
def small_files(num_bytes: int):
    """No file may grow beyond a size: what writers see is what a full disk shows them."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("num_bytes", [300, 3_000, 30_000])  # fails at the state, the tokenizer, the tensors
def test_a_checkpoint_that_finds_no_room_leaves_the_one_before_and_nothing_else(
    model, tokenizer, tmp_path, checkpoint_format, num_bytes
):
    actor, folder = new_actor(model), tmp_path / "checkpoints"
    actor.update(rows(0))
    whole = save(tmp_path, actor, tokenizer, 1, max_to_keep=1, checkpoint_format=checkpoint_format)
    expected = {name: tensor.clone() for name, tensor in actor.full_state_dict().items()}
    actor.update(rows(1))
    with small_files(num_bytes), pytest.raises(TrainingError) as caught:
        save(tmp_path, actor, tokenizer, 2, max_to_keep=1, checkpoint_format=checkpoint_format)
    line = str(caught.value)
    assert "\n" not in line and "update_000002 could not be written (rank 0: " in line
    assert f"The last good checkpoint is {whole}" in line
    assert list(folder.iterdir()) == [whole]
    resumed = new_actor(model)
    restore(whole, resumed)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.full_state_dict().items())


def test_a_disk_that_is_full_in_earnest(model, tokenizer, tmp_path, checkpoint_format):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        actor = new_actor(model)
        (disk / "ballast").write_bytes(bytes(380_000))
        with pytest.raises(TrainingError, match="could not be written"):
            save(disk, actor, tokenizer, 1, checkpoint_format=checkpoint_format)
        assert list((disk / "checkpoints").iterdir()) == []
        (disk / "ballast").unlink()
        assert find_checkpoint(disk) is None
        save(disk, actor, tokenizer, 1, checkpoint_format=checkpoint_format)
    finally:
        subprocess.run(["umount", str(disk)], check=True, capture_output=True)


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
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "update_000003.parquet").write_text("old")
    for _ in range(2):  # the second time nothing is left to move
        set_later_aside(tmp_path, 2)
        assert find_checkpoint(tmp_path).name == "update_000002"
        left = sorted(p.name for p in (tmp_path / "validations").iterdir())
        assert left == ["update_000000.json", "update_000002.json"]
    aside = tmp_path / "superseded"
    assert (aside / "checkpoints" / "update_000003" / "state.json").is_file()
    assert (aside / "validations" / "update_000003.json").read_text() == "old"
    assert (aside / "rollouts" / "update_000003.parquet").is_file() and not any((tmp_path / "rollouts").iterdir())
    save(tmp_path, new_actor(model), tokenizer, 3)
    assert len(set_later_aside(tmp_path, 2)) == 1  # another branch takes the place of the first


def test_weights_of_another_shape_are_refused(model, tokenizer, tmp_path, checkpoint_format):
    checkpoint = save(tmp_path, new_actor(model), tokenizer, 1, checkpoint_format=checkpoint_format)
    wider = new_actor(make_small_policy(tokenizer, hidden=32, layers=1, heads=2))
    with pytest.raises(CheckpointError, match="is of another model"):
        restore(checkpoint, wider)


@pytest.mark.parametrize("name", ["shards/.metadata", "shards/__0_0.distcp"])
def test_shards_that_cannot_be_read_are_refused(model, tokenizer, tmp_path, name):
    checkpoint = save(tmp_path, new_actor(model), tokenizer, 1, checkpoint_format="sharded")
    (checkpoint / name).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"cannot be read .*; go on from an earlier checkpoint"):
        restore(checkpoint, new_actor(model))


DAMAGES = [
    ("sharded", "shards/__0_0.distcp"),
    ("sharded", "shards/.metadata"),
    ("sharded", "policy/provenance.json"),
    ("sharded", "policy/config.json"),
    ("full", "policy/model.safetensors"),
    ("full", "policy/provenance.json"),
]


@pytest.mark.parametrize(("checkpoint_format", "name"), DAMAGES)
def test_exports_of_damaged_checkpoints_are_refused_in_one_line(model, tokenizer, tmp_path, checkpoint_format, name):
    checkpoint = save(tmp_path, new_actor(model), tokenizer, 1, checkpoint_format=checkpoint_format)
    size = (checkpoint / name).stat().st_size
    for new_size in (size * 2 // 3, size // 3, 0, None):
        if new_size is None:
            (checkpoint / name).unlink()
        else:
            os.truncate(checkpoint / name, new_size)
        with pytest.raises(CheckpointError, match=r"cannot be read .*; go on from an earlier checkpoint") as caught:
            export(checkpoint, tmp_path / "out")
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_the_command_names_its_own_setting(tmp_path):
    missing = tmp_path / "nothing"
    command = [sys.executable, "-m", "trainers.export", f"checkpoint={missing}", f"out={tmp_path / 'out'}"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr == f"error: checkpoint: {missing} does not exist; give a run directory or a checkpoint\n"


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
