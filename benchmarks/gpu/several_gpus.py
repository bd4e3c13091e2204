"""Do several GPUs of one machine learn the same as one, how fast, and what happens when a rank dies?

    python benchmarks/gpu/several_gpus.py                       all GPUs of the machine
    python benchmarks/gpu/several_gpus.py --only losses,sync    some of the questions
    python benchmarks/gpu/several_gpus.py --tiny                a smoke run, on two ranks of a CPU too

losses       an actor's updates on the same rows, Qwen2.5-1.5B's shape in bfloat16: one rank against all. What bfloat16
             alone does is told by one rank with other micro-batches
uneven       fewer rows than ranks, and numbers that ranks do not divide, in float32; a run with one group for all
checkpoint   one of all ranks, and of two, resumed on one and on other numbers, in float32: the next two updates
kill         SIGKILL to a rank in the middle of an update of the training command: when the run ends; it is resumed
scaling      an update of the published recipe with the same work on one rank and on all, by phase
sync         weights from the sharded actor into each rank's engine, as the training command does it; where scaling is
             asked too, its run tells
tensor_parallel  neighbours share an engine, two by two: how far its log-probs are from the actor's, and its speed

Losses, uneven, checkpoint and kill measure no speed: where there are GPUs they are asked at the same time. The policy
of losses and of the questions after kill has random weights and acts by constrained decoding. It earns nothing, so the
advantages of scaling, sync and tensor_parallel are drawn; its replies run to their limit. Every answer is written as
soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch

from rollout.engines.vllm_install import installed_vllm
from trainers.checkpoint import find_checkpoint
from trainers.trouble import ENGINE_GAP_NATS
from webshop_env.errors import ShopGymError

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from bench_vllm import QWEN, SMALL  # noqa: E402
from machine import command_to_keep, describe_machine, place_of_result, run_script, write_result  # noqa: E402

RANKS = Path(__file__).with_name("several_gpus_ranks.py")
TRAIN, TRAIN_ON_ANYTHING = (str(ROOT / "trainers" / "gigpo_fsdp.py"),), (str(RANKS), "train")
LOSS_TOLERANCE, NORM_TOLERANCE = 0.01, 0.02
"""Of losses (reward units and nats; theirs is about 1), and of gradient norms (share), in bfloat16."""
PHASES = ("collect", "old_log_probs", "reference", "learn", "load")
EXACT = 1e-4
"""Of both, as a share, in float32."""
SYNC_TARGET_S, KILL_TARGET_S = 0.2, 60.0
EFFICIENCY_TARGETS = {2: 0.85, 8: 0.75}
RANDOM_POLICY = (
    *("actor_rollout_ref.rollout.constrained=true", "trainer.logger=[console]"),
    *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"),
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is."""

    shape: dict[str, int]
    losses: dict[str, int]
    update: tuple[str, ...]
    """Settings of the update that is measured."""
    engine: tuple[str, ...]
    small: tuple[str, ...]
    """Settings of runs of the embedded policy."""
    limits_s: dict[str, float]


FULL = Size(
    shape=QWEN,
    losses={"num_rows": 32, "longest": 1_800, "updates": 3},
    update=(
        *("recipe=webshop_qwen2.5_1.5b", "data.train_batch_size=16", "env.rollout.n=8", "env.max_steps=4"),
        "data.max_response_length=128",
    ),
    engine=("actor_rollout_ref.rollout.gpu_memory_utilization=0.5",),
    small=("data.train_batch_size=16", "data.val_batch_size=16"),
    limits_s={
        **{"losses": 180, "uneven": 180, "checkpoint": 240, "kill": 240},
        **{"scaling": 420, "sync": 240, "tensor_parallel": 300},
    },
)
TINY = Size(
    shape=SMALL | {"hidden_size": 128},
    losses={"num_rows": 9, "longest": 80, "updates": 2},
    update=("data.train_batch_size=4", "env.rollout.n=4", "env.max_steps=6"),
    engine=("actor_rollout_ref.rollout.gpu_memory_utilization=0.2",),
    small=("data.train_batch_size=4", "env.rollout.n=4", "data.val_batch_size=2"),
    limits_s=dict.fromkeys(("losses", "uneven", "checkpoint", "kill", "scaling", "sync", "tensor_parallel"), 400.0),
)


class Failure(Exception):
    """A process that ended otherwise than it should, or took too long."""


class Bench:
    """Starts ranks of this machine, and keeps what they say."""

    def __init__(
        self,
        size: Size,
        *,
        num_ranks: int,
        scratch: Path,
        uses_gpu: bool,
        num_updates: int,
        policy: Path | None = None,
    ) -> None:
        self.size, self.num_ranks, self.scratch, self.uses_gpu = size, num_ranks, scratch, uses_gpu
        self.num_updates = num_updates
        self.device = "cuda" if uses_gpu else "cpu"
        self.lines: dict[int, list[dict[str, float]]] = {}
        """Updates of the published recipe that were measured, by number of ranks."""
        self._policy, self._lock = policy or scratch / "policy", Lock()

    @property
    def environment(self) -> dict[str, str]:
        """Of every process: one machine, no NVLink multicast."""
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        chosen = {
            **{"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"},
            **{"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"},
            **{"PYTHONPATH": paths, "OMP_WAIT_POLICY": "PASSIVE"},
        }
        local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
        return local | dict(os.environ) | chosen

    def policy(self) -> Path:
        """A policy of the shape with random weights, made once."""
        with self._lock:
            if not self._policy.is_dir():
                words = {"shape": self.size.shape, "folder": str(self._policy)}
                self._wait(
                    self.start([sys.executable, str(RANKS), "policy", json.dumps(words)], "policy"), 240, "policy"
                )
        return self._policy

    def ask(self, question: str, num_ranks: int, *, name: str = "", limit_s: float, **arguments: Any) -> dict[str, Any]:
        """What so many ranks of `several_gpus_ranks.py` answer."""
        name = name or question
        answer = self.scratch / f"{name}.json"
        words = {**arguments, "answer": str(answer), "device": self.device}
        self._wait(self.start(torchrun(num_ranks, str(RANKS), question, json.dumps(words)), name), limit_s, name)
        return dict(json.loads(answer.read_text(encoding="utf-8")))

    def start_training(
        self, num_ranks: int, name: str, *words: str, script: tuple[str, ...] = TRAIN
    ) -> subprocess.Popen[bytes]:
        """The training command on so many ranks."""
        return self.start(torchrun(num_ranks, *script, *words, f"trainer.n_gpus_per_node={num_ranks}"), name)

    def train(self, num_ranks: int, name: str, *words: str, limit_s: float) -> None:
        """The training command, to its end."""
        self._wait(self.start_training(num_ranks, name, *words), limit_s, name)

    def watch(self, num_ranks: int, name: str, *words: str, limit_s: float) -> list[dict[str, float]]:
        """Metrics of the first updates of a run, which is ended then: a checkpoint of it would tell nothing here."""
        run = self.scratch / name
        words = (*words, f"trainer.output_dir={run}", f"trainer.total_updates={self.num_updates + 1}")
        process = self.start_training(num_ranks, name, *words, script=TRAIN_ON_ANYTHING)
        began, found = perf_counter(), []
        try:
            while len(found) < self.num_updates:
                if process.poll() is not None:
                    raise Failure(f"{name}: exit code {process.returncode}\n{self.tail(name)}")
                if perf_counter() - began > limit_s:
                    raise Failure(f"{name}: not done after {limit_s} s\n{self.tail(name)}")
                sleep(0.2)
                fresh = updates_of(run)
                for line in fresh[len(found) :]:
                    say(f"{name}: update {line['update']} after {perf_counter() - began:.0f} s: {seconds_of(line)}")
                found = fresh
        finally:
            end(process)
        return found[: self.num_updates]

    def start(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        say(f"{name}: started")
        with open(self.scratch / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def tail(self, name: str) -> str:
        """The last of what a process said."""
        return (self.scratch / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-3_000:]

    def _wait(self, process: subprocess.Popen[bytes], limit_s: float, name: str) -> None:
        began = perf_counter()
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise Failure(f"{name}: not done after {limit_s} s\n{self.tail(name)}") from None
        finally:
            end(process)
        say(f"{name}: exit code {code} after {perf_counter() - began:.0f} s")
        if code:
            raise Failure(f"{name}: exit code {code}\n{self.tail(name)}")


def torchrun(num_ranks: int, *words: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_ranks), *words),
    ]


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a process and of those that it started: all of them are in one session of their own."""
    if process.poll() is not None:
        return
    ranks = children(process.pid)
    for pid in (process.pid, *ranks):
        for kill in (os.killpg, os.kill):  # torchrun makes each rank the first of a group
            try:
                kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
    process.wait()
    while any(is_running(pid) for pid in ranks):
        sleep(0.05)


def children(pid: int) -> dict[int, int]:
    """Ranks that a torchrun started: process id -> rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                words = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended, or is somebody else's
            rank = next((word[5:] for word in words if word.startswith(b"RANK=")), b"")
            if parent == pid and rank:
                found[int(folder.name)] = int(rank)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def updates_of(run: Path) -> list[dict[str, float]]:
    """Whole lines of metrics that tell of learning."""
    file = run / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if "rollout/num_episodes" in line]


def seconds_of(line: dict[str, float]) -> dict[str, float]:
    return {phase: line[f"time/{phase}_s"] for phase in PHASES if f"time/{phase}_s" in line}


def say(text: str) -> None:
    print(text, flush=True)


def ask_losses(bench: Bench) -> dict[str, Any]:
    arguments = {**bench.size.losses, "policy": str(bench.policy()), "vocab_size": bench.size.shape["vocab_size"]}
    answer = bench.ask("losses", bench.num_ranks, limit_s=bench.size.limits_s["losses"], **arguments)
    for name in ("one_rank_otherwise", "all_ranks"):
        answer[f"gap_of_{name}"] = gap(answer["one_rank"], answer[name])
    found = answer["gap_of_all_ranks"]
    return answer | {"is_met": found["loss"] <= LOSS_TOLERANCE and found["grad_norm_share"] <= NORM_TOLERANCE}


def gap(expected: list[dict[str, float]], got: list[dict[str, float]]) -> dict[str, float]:
    """The largest difference of a loss, and of a gradient norm as a share of it."""
    pairs = list(zip(expected, got, strict=True))
    return {
        "loss": max(abs(a["loss"] - b["loss"]) for a, b in pairs),
        "loss_share": max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in pairs),
        "grad_norm_share": max(abs(a["grad_norm"] - b["grad_norm"]) / a["grad_norm"] for a, b in pairs),
    }


def is_exact(found: dict[str, float]) -> bool:
    return found["loss_share"] <= EXACT and found["grad_norm_share"] <= EXACT


def ask_uneven(bench: Bench) -> dict[str, Any]:
    limit_s = bench.size.limits_s["uneven"]
    answer = bench.ask("uneven", bench.num_ranks, limit_s=limit_s, policy="embedded", vocab_size=2_000)
    answer["gap"] = gap(answer["one_rank"], answer["all_ranks"])
    run = bench.scratch / "one_group"
    words = ("data.train_batch_size=1", "env.rollout.n=3", "data.val_batch_size=1", "trainer.total_updates=2")
    more = ("trainer.val_before_train=false", "trainer.logger=[console]", f"trainer.output_dir={run}")
    bench.train(bench.num_ranks, "one_group", *words, *more, limit_s=limit_s)
    answer["episodes_of_one_group"] = [int(line["rollout/num_episodes"]) for line in updates_of(run)]
    return answer | {"is_met": is_exact(answer["gap"]) and answer["episodes_of_one_group"] == [3, 3]}


def ask_checkpoint(bench: Bench) -> dict[str, Any]:
    limit_s, shared = bench.size.limits_s["checkpoint"], {"policy": "embedded", "vocab_size": 2_000}
    pairs = [(bench.num_ranks, number) for number in (1, 2, 4, 8) if number <= bench.num_ranks]
    pairs += [(2, number) for number in (1, bench.num_ranks) if bench.num_ranks > 2]
    saved: dict[int, dict[str, Any]] = {}
    resumed = []
    for saver, number in pairs:
        folder = bench.scratch / f"saved_on_{saver}"
        if saver not in saved:
            saved[saver] = bench.ask(
                "save", saver, name=f"save_on_{saver}", limit_s=limit_s, folder=str(folder), **shared
            )
        name = f"resume_{saver}_on_{number}"
        found = bench.ask("resume", number, name=name, limit_s=limit_s, folder=str(folder), **shared)
        for kind in ("sharded", "full"):
            resumed.append(
                {
                    **{"saved_on": saver, "resumed_on": number, "format": kind},
                    **gap(saved[saver]["updates"], found[kind]),
                }
            )
    return {"went_on": list(saved.values()), "resumed": resumed, "is_met": all(map(is_exact, resumed))}


def ask_kill(bench: Bench) -> dict[str, Any]:
    """The last rank dies in the middle of the third update or a later one; every update leaves a checkpoint."""
    run, limit_s = bench.scratch / "killed", bench.size.limits_s["kill"]
    words = (*bench.size.small, "trainer.total_updates=1000", "trainer.save_freq=1", "trainer.test_freq=-1")
    more = ("trainer.checkpoint_format=sharded", "trainer.val_before_train=false", "trainer.logger=[console]")
    began = perf_counter()
    process = bench.start_training(bench.num_ranks, "killed", *words, *more, f"trainer.output_dir={run}")
    try:
        while len(updates_of(run)) < 2:
            if process.poll() is not None:
                raise Failure(f"killed: exit code {process.returncode}\n{bench.tail('killed')}")
            if perf_counter() - began > limit_s:
                raise Failure(f"killed: not done after {limit_s} s\n{bench.tail('killed')}")
            sleep(0.02)
        sleep(0.5 * sum(seconds_of(updates_of(run)[-1]).values()))
        victim = max(children(process.pid).items(), key=lambda item: item[1])[0]
        before = len(updates_of(run))
        began = perf_counter()
        os.kill(victim, signal.SIGKILL)
        try:
            code: int | None = process.wait(timeout=KILL_TARGET_S * 2)
        except subprocess.TimeoutExpired:
            code = None
        ended_s = perf_counter() - began
    finally:
        end(process)
    checkpoint = find_checkpoint(run)
    if checkpoint is None:
        raise Failure(f"killed: no checkpoint\n{bench.tail('killed')}")
    done = int(checkpoint.name.removeprefix("update_"))
    say(f"kill: exit code {code} after {ended_s:.1f} s, {checkpoint.name}")
    answer = {"updates_before": before, "ended_s": round(ended_s, 1), "exit_code": code, "checkpoint_of_update": done}
    words = (f"trainer.resume_from={run}", f"trainer.total_updates={done + 2}")
    bench.train(bench.num_ranks, "resumed", *words, limit_s=limit_s)
    answer["updates_after"] = [int(line["update"]) for line in updates_of(run)]
    went_on = answer["updates_after"] == list(range(1, done + 3))
    return answer | {"is_met": bool(code) and ended_s < KILL_TARGET_S and went_on}


def ask_scaling(bench: Bench) -> dict[str, Any]:
    size, numbers = bench.size, sorted({1, bench.num_ranks})
    words = (*size.update, *size.engine, *RANDOM_POLICY, f"actor_rollout_ref.model.path={bench.policy()}")
    for number in numbers:
        name = f"scaling_on_{number}"
        if number not in bench.lines:
            bench.lines[number] = bench.watch(number, name, *words, limit_s=size.limits_s["scaling"])
    answer: dict[str, Any] = {"settings": without_places(words), "warm_up_updates": 1, "by_ranks": {}}
    for number in numbers:
        lines = bench.lines[number][1:]
        seconds = {phase: mean(line.get(f"time/{phase}_s", 0.0) for line in lines) for phase in PHASES}
        answer["by_ranks"][number] = {
            "seconds": seconds | {"all": sum(seconds.values())},
            "rows": mean(line["rollout/num_steps"] for line in lines),
            "tokens": mean(tokens_of(line) for line in lines),
            "lines": bench.lines[number],
        }
    one, many = (answer["by_ranks"][number] for number in (numbers[0], numbers[-1]))
    answer["efficiency"] = {
        phase: one["seconds"][phase] / (bench.num_ranks * many["seconds"][phase])
        for phase in (*PHASES, "all")
        if many["seconds"][phase]
    }
    answer["efficiency_per_token"] = answer["efficiency"]["all"] * many["tokens"] / one["tokens"]
    target = EFFICIENCY_TARGETS.get(bench.num_ranks)
    return answer | {"target": target, "is_met": answer["efficiency"]["all"] >= target if target else None}


def without_places(words: Sequence[str]) -> list[str]:
    """Settings to keep: not where the random policy lay."""
    return [word for word in words if not word.startswith("actor_rollout_ref.model.path=")]


def tokens_of(line: dict[str, float]) -> float:
    """Tokens that an update's passes see: all prompts and replies."""
    return line["rollout/num_steps"] * line["rollout/prompt_length_tokens"] + line["rollout/generated_tokens"]


def ask_sync(bench: Bench) -> dict[str, Any]:
    size, number = bench.size, bench.num_ranks
    if number not in bench.lines:
        few = (f"data.train_batch_size={number}", "env.rollout.n=2", "env.max_steps=2", "data.max_response_length=64")
        words = (*size.update, *few, *size.engine, *RANDOM_POLICY, f"actor_rollout_ref.model.path={bench.policy()}")
        bench.lines[number] = bench.watch(number, "sync", *words, limit_s=size.limits_s["sync"])
    lines = bench.lines[number][1:]
    stages = sorted({name for line in lines for name in line if name.startswith("time/engine_")} | {"time/load_s"})
    seconds = {name.removeprefix("time/"): [line[name] for line in lines] for name in stages}
    sync = seconds.get("engine_sync_s")
    return {"ranks": number, "seconds": seconds, "is_met": max(sync) < SYNC_TARGET_S if sync else None}


def ask_tensor_parallel(bench: Bench) -> dict[str, Any]:
    size, number = bench.size, bench.num_ranks
    if not any(word.endswith("rollout.name=vllm") for word in size.engine) or number % 2:
        return {"skipped": "no vLLM" if number % 2 == 0 else "an odd number of ranks", "is_met": None}
    shared = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    words = (*size.update, shared, *size.engine, *RANDOM_POLICY, f"actor_rollout_ref.model.path={bench.policy()}")
    lines = bench.watch(number, "tensor_parallel", *words, limit_s=size.limits_s["tensor_parallel"])
    gaps = {name: [line[f"actor/engine_gap_{name}"] for line in lines] for name in ("mean_nats", "max_nats")}
    answer = {
        "settings": without_places(words),
        "engine_gap": gaps,
        "collect_tokens_per_s": [line["time/collect_tokens_per_s"] for line in lines[1:]],
        "sync_s": [line["time/engine_sync_s"] for line in lines[1:]],
        "lines": lines,
    }
    return answer | {"is_met": max(gaps["mean_nats"]) < ENGINE_GAP_NATS}


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


QUESTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "losses": ask_losses,
    "uneven": ask_uneven,
    "checkpoint": ask_checkpoint,
    "kill": ask_kill,
    "scaling": ask_scaling,
    "sync": ask_sync,
    "tensor_parallel": ask_tensor_parallel,
}
TIMED = ("scaling", "sync", "tensor_parallel")
"""Questions that need the machine to themselves."""


def print_table(result: dict[str, Any]) -> None:
    print("\n| question | ranks | figure | met |\n| --- | --- | --- | --- |")
    for name, answer in result["answers"].items():
        met = {True: "yes", False: "no", None: ""}[answer.get("is_met")]
        print(f"| {name} | {result['ranks']} | {figure(name, answer)} | {met} |")
    scaling = result["answers"].get("scaling", {})
    if "by_ranks" in scaling:
        numbers = list(scaling["by_ranks"])
        print("\n| phase | " + " | ".join(f"{number} ranks (s)" for number in numbers) + " | efficiency |")
        print("| --- |" + " --- |" * (len(numbers) + 1))
        for phase in (*PHASES, "all"):
            seconds = [f"{scaling['by_ranks'][number]['seconds'][phase]:.2f}" for number in numbers]
            efficiency = scaling["efficiency"].get(phase)
            print(f"| {phase} | {' | '.join(seconds)} | {efficiency:.2f} |" if efficiency else f"| {phase} | | |")


def figure(name: str, answer: dict[str, Any]) -> str:
    if "error" in answer:
        return answer["error"].splitlines()[0]
    if "skipped" in answer:
        return f"skipped: {answer['skipped']}"
    if name == "tensor_parallel":
        gaps = answer["engine_gap"]
        return (
            f"gap of engine and actor {max(gaps['mean_nats']):.2g} nats (mean), {max(gaps['max_nats']):.2g} (largest); "
            f"{max(answer['collect_tokens_per_s']):.0f} tokens/s, sync {max(answer['sync_s']):.3f} s"
        )
    if name == "losses":
        other, found = answer["gap_of_one_rank_otherwise"], answer["gap_of_all_ranks"]
        return (
            f"loss differs by {found['loss']:.2g} (one rank, other micro-batches: {other['loss']:.2g}), gradient norm "
            f"by {found['grad_norm_share']:.2%} ({other['grad_norm_share']:.2%})"
        )
    if name == "uneven":
        return f"{answer['rows']} rows: loss and norm differ by {max(answer['gap'].values()):.1g} at most"
    if name == "checkpoint":
        pairs = sorted({(row["saved_on"], row["resumed_on"]) for row in answer["resumed"]})
        worst = max(max(row["loss_share"], row["grad_norm_share"]) for row in answer["resumed"])
        return f"{', '.join(f'{a} to {b}' for a, b in pairs)}: loss and norm differ by {worst:.1g} at most (share)"
    if name == "kill":
        return f"ended after {answer['ended_s']} s, resumed after update {answer['checkpoint_of_update']}"
    if name == "sync":
        return ", ".join(f"{stage} {max(values):.3f}" for stage, values in answer["seconds"].items())
    seconds = {number: row["seconds"]["all"] for number, row in answer["by_ranks"].items()}
    return (
        ", ".join(f"{value:.1f} s on {number}" for number, value in seconds.items())
        + f": efficiency {answer['efficiency']['all']:.2f}, per token {answer['efficiency_per_token']:.2f}"
    )


def answer_all(bench: Bench, names: list[str], keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Asks, and keeps each answer as it comes; a question that fails is told and the others go on."""

    def answer(name: str) -> dict[str, Any]:
        began = perf_counter()
        try:
            found = QUESTIONS[name](bench)
        except Failure as error:
            found = {"error": str(error), "is_met": False}
            say(f"{name} FAILED: {error}")
        except Exception:
            found = {"error": traceback.format_exc(), "is_met": False}
            say(f"{name} FAILED: {found['error']}")
        return found | {"took_s": round(perf_counter() - began, 1)}

    together = [name for name in names if name not in TIMED]
    with ThreadPoolExecutor(max_workers=len(together) if bench.uses_gpu and together else 1) as pool:
        asked = {pool.submit(answer, name): name for name in together}
        for done in as_completed(asked):
            keep(asked[done], done.result())
    for name in names:
        if name in TIMED:
            keep(name, answer(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a smoke run, on a CPU as well")
    parser.add_argument("--ranks", type=int, help="how many; else all GPUs, or two where there is none")
    parser.add_argument("--only", default=",".join(QUESTIONS), help="questions, by commas")
    parser.add_argument("--updates", type=int, default=3, help="of scaling and sync; the first one warms up")
    parser.add_argument(
        "--one-rank", type=Path, help="result of --only scaling --ranks 1 --updates the same, not measured again"
    )
    parser.add_argument("--policy", type=Path, help="directory where the random policy is, or is kept for a next time")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--logs", type=Path, help="keep what the processes say there")
    arguments = parser.parse_args()
    names = [name for name in QUESTIONS if name in arguments.only.split(",")]
    unknown = set(arguments.only.split(",")) - set(QUESTIONS)
    if unknown or arguments.updates < 2:
        parser.error(f"there is no question {min(unknown)!r}" if unknown else "--updates: two at least")
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU; --tiny runs without one")
    uses_gpu = torch.cuda.is_available()
    if arguments.ranks is not None and arguments.ranks < 1:
        parser.error("--ranks: one at least")
    num_ranks = arguments.ranks or (torch.cuda.device_count() if uses_gpu else 2)
    size = TINY if arguments.tiny else FULL
    packages = ["torch", "transformers"]
    with suppress(ShopGymError):
        packages.append(installed_vllm("cuda" if uses_gpu else "cpu")[0])
        size = replace(size, engine=("actor_rollout_ref.rollout.name=vllm", *size.engine))
    result: dict[str, Any] = describe_machine(*packages)
    result["command"] = command_to_keep("benchmarks/gpu/several_gpus.py", sys.argv[1:])
    if uses_gpu:
        result["hardware"]["gpu"] = torch.cuda.get_device_name()
        result["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    result |= {"ranks": num_ranks, "shape": size.shape, "answers": {}}
    out = arguments.out or place_of_result(f"several_gpus_{num_ranks}", is_small=arguments.tiny)
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock()

    def keep(name: str, answer: dict[str, Any]) -> None:
        with lock:
            result["answers"][name] = answer
            out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            say(f"{name}: {figure(name, answer)}")

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        bench = Bench(
            size,
            num_ranks=num_ranks,
            scratch=scratch,
            uses_gpu=uses_gpu,
            num_updates=arguments.updates,
            policy=arguments.policy,
        )
        if arguments.one_rank:
            before = json.loads(arguments.one_rank.read_text(encoding="utf-8"))
            bench.lines[1] = before["answers"]["scaling"]["by_ranks"]["1"]["lines"]
        try:
            answer_all(bench, names, keep)
        finally:
            if arguments.logs:
                arguments.logs.mkdir(parents=True, exist_ok=True)
                for log in scratch.glob("*.log"):
                    shutil.copy(log, arguments.logs)
    print_table(result)
    write_result(result, out)


if __name__ == "__main__":
    run_script(main)
