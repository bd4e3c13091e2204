"""Memory, disk and numbers that run out: one line that says where, what to change, and from where to go on."""

from __future__ import annotations

import errno
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainers.actor import NotFinite
from trainers.command import run_command
from trainers.errors import TrainingError, faults_told, is_disk_full
from trainers.faults import LOWER, TURN_ON, told_in_one_line
from trainers.files import write_atomically
from trainers.ranks import start_ranks
from trainers.settings import flatten, resolve
from webshop_env.errors import ShopGymError


@pytest.fixture
def run(tmp_path):
    return SimpleNamespace(log=SimpleNamespace(current_phase="learn"), directory=tmp_path)


def line_of(error, run=None, *words: str) -> str:
    settings, _, _ = resolve([*words])
    with pytest.raises(TrainingError) as caught, told_in_one_line(settings, start_ranks(), run):
        if isinstance(error, BaseException):
            raise error
        error()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "ask_for_too_much",
    [
        lambda: torch.empty(10**15),
        lambda: np.empty(10**15),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("NCCL error: unhandled cuda error: out of memory"),
    ],
)
def test_no_memory_says_which_settings_to_lower_in_this_phase(run, ask_for_too_much):
    line = line_of(ask_for_too_much, run, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7")
    assert "in the phase learn rank 0 (cpu) is out of memory" in line
    assert "lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (7), " in line
    assert "set actor_rollout_ref.model.enable_gradient_checkpointing=true" in line
    assert "No checkpoint was saved yet" in line


def test_what_is_on_already_is_not_advised(run):
    line = line_of(MemoryError(), run, "actor_rollout_ref.model.enable_gradient_checkpointing=true")
    assert "enable_gradient_checkpointing" not in line


def test_advice_names_settings_that_exist():
    known = flatten(resolve([])[0])
    for table in (LOWER, TURN_ON):
        for keys in table.values():
            assert set(keys) <= set(known)
    assert all(known[key] is False for keys in TURN_ON.values() for key in keys)


def test_memory_may_end_before_there_is_a_run():
    assert "in the phase open" in line_of(MemoryError())


def test_the_last_good_checkpoint_is_named(run, tmp_path):
    (tmp_path / "checkpoints" / "update_000004").mkdir(parents=True)
    (tmp_path / "checkpoints" / "update_000004" / "state.json").write_text("{}")
    line = line_of(NotFinite(5), run)
    assert "5 optimizer steps in a row" in line
    assert "trainer.max_nan_steps" in line
    assert f"trainer.resume_from={tmp_path / 'checkpoints' / 'update_000004'}" in line


def test_a_full_disk_is_told(run):
    assert "the disk is full" in line_of(OSError(errno.ENOSPC, "No space left on device"), run)


def test_other_errors_pass_as_they_are(run):
    settings, _, _ = resolve([])
    for error in (RuntimeError("shapes differ"), OSError(errno.EIO, "input/output error"), ValueError("x")):
        with pytest.raises(type(error)) as caught, told_in_one_line(settings, start_ranks(), run):
            raise error
        assert caught.value is error


@pytest.mark.parametrize(
    ("rank", "on_every_rank", "speaks"), [("0", True, True), ("1", True, False), ("1", False, True)]
)
def test_commands_exit_with_1_and_one_rank_speaks(monkeypatch, capsys, rank, on_every_rank, speaks):
    def main(arguments: list[str]) -> None:
        raise TrainingError("no room", on_every_rank=on_every_rank)

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["train"])
    with pytest.raises(SystemExit) as caught:
        run_command(main)
    assert caught.value.code == 1
    assert capsys.readouterr().err == ("error: no room\n" if speaks else "")


def test_a_text_that_finds_no_room_leaves_the_old_one_and_nothing_else(tmp_path):
    import resource

    path = tmp_path / "settings.yaml"
    write_atomically(path, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError):
            write_atomically(path, "new " * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_known_by_what_safetensors_says_of_it():
    from safetensors import SafetensorError

    full = SafetensorError("Error while serializing: I/O error: File too large (os error 27)")
    assert is_disk_full(full) and not is_disk_full(SafetensorError("invalid header"))
    with pytest.raises(TrainingError, match="the disk is full"), faults_told("the machine", "less"):
        raise full


def test_a_mistake_of_the_caller_stays_one_whatever_it_speaks_of():
    with pytest.raises(ShopGymError), faults_told("the machine", "less"):
        raise ShopGymError("a model called 'out of memory' is not there")


def test_a_name_too_long_for_a_file_is_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command"])

    def main(arguments):
        (tmp_path / ("x" * 300)).mkdir()

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "too long for a file" in line and len(line) < 150
