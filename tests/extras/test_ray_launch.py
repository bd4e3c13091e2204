"""Two ranks in Ray's workers give torchrun's numbers, and whatever ends the command ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from extra import require_extra

from trainers.checkpoint import load_weights

require_extra("ray", "ray", "pandas")

ROOT = Path(__file__).resolve().parents[2]
MARK = "SHOPGYM_TEST_MARK"
DEADLINE_S = 200
pytestmark = pytest.mark.timeout(3 * DEADLINE_S)  # what hangs is told by its own deadline
RAY = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2")
SMALL = (
    *("trainer.total_updates=1", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.logger=[console]"),
    *("data.train_batch_size=2", "env.rollout.n=4", "env.reward=score", "env.max_steps=6"),
)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a training whose processes, however many, carry a mark; none outlives the test."""
    started = []

    def start(mark: str, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *launcher, "trainers/gigpo_fsdp.py", *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def marked(mark: str) -> dict[int, str]:
    """Command lines of the living processes that carry the mark."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"in {DEADLINE_S} s not seen: {what}"
        time.sleep(0.2)


def read_until(process: subprocess.Popen[str], words: str) -> None:
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"{words!r} was never printed: {process.stderr.read()[-3000:]}")


def metrics(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(("time/", "memory/"))} for line in lines]


def test_two_workers_give_the_metrics_and_weights_of_torchrun(start, tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    for name, launcher, more in (("ray", (), RAY), ("torchrun", torchrun, ())):
        process = start(name, *SMALL, *more, f"trainer.output_dir={tmp_path / name}", launcher=launcher)
        out, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors[-3000:]
        assert out.count("update 1/1") == 1, "one rank speaks, once"
    ours, theirs = metrics(tmp_path / "ray"), metrics(tmp_path / "torchrun")
    assert ours[0]["actor/update_skipped"] == 0.0
    assert ours == theirs
    weights = [load_weights(tmp_path / name / "checkpoints" / "update_000001") for name in ("ray", "torchrun")]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("actor_rollout_ref.model.path=/no/such/policy",), "model path '/no/such/policy' does not exist"),
        (("trainer.nnodes=500",), "ask for 1000 ranks"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_process(start, tmp_path, words, complaint):
    mark = uuid.uuid4().hex
    process = start(mark, *SMALL, *RAY, *words, f"trainer.output_dir={tmp_path / 'run'}")
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and complaint in said[0], errors[-3000:]
    assert not (tmp_path / "run").exists()
    wait_until(lambda: not marked(mark), "the end of every process")


@pytest.mark.parametrize("end", ["Ctrl-C", "a lost rank"])
def test_what_ends_the_command_or_a_rank_ends_all(start, tmp_path, end):
    mark = uuid.uuid4().hex
    # Updates of some seconds: both signals must come within one.
    long = ("data.train_batch_size=16", "env.rollout.n=8", "trainer.total_updates=500")
    process = start(mark, *SMALL, *RAY, *long, f"trainer.output_dir={tmp_path / 'run'}")
    read_until(process, "update 1/500")
    ranks = [pid for pid, line in marked(mark).items() if "RayTrainWorker" in line]
    assert len(ranks) == 2
    if end == "Ctrl-C":
        process.send_signal(signal.SIGINT)
        while "the run ends after the update at hand" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)  # the second one waits for nothing
    else:
        os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == (130 if end == "Ctrl-C" else 1), errors[-3000:]
    wait_until(lambda: not marked(mark), "the end of every process")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_wish_to_end_reaches_the_ranks_which_save(start, tmp_path, number):
    mark, run = uuid.uuid4().hex, tmp_path / "run"
    words = ("trainer.total_updates=500", "trainer.save_freq=-1", f"trainer.output_dir={run}")
    process = start(mark, *SMALL, *RAY, *words)
    read_until(process, "update 1/500")
    process.send_signal(number)
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors[-3000:]
    assert f"{number.name}: the run ends after the update at hand" in errors
    done = len(metrics(run))
    assert 1 <= done < 500
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"update_{done:06d}"]
    assert f"trainer.resume_from={run}" in out
    wait_until(lambda: not marked(mark), "the end of every process")
