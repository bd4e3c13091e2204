"""What do environments cost? Time to the first page, steps a second by kind of action, memory of one more.

    python benchmarks/bench_env.py                                   the embedded catalogue, scripted episodes
    python benchmarks/bench_env.py --data DIR --sessions FILE        a catalogue, and recorded sessions of the original
    python benchmarks/bench_env.py --small                           a smoke run

FILE holds one session a line, as `webshop_env.conformance` replays them. Every figure comes from processes of its own.
"Cold" is the first replay in a fresh process: the compiled catalogue is on disk, all caches in memory are empty; "warm"
is the second replay in the same process. A step includes the page's text and its available actions.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from machine import RESULTS, describe_machine, run_script, write_result

from webshop_env import WebShopTextEnv, WebShopVectorEnv, open_shop
from webshop_env.actions import parse_v0
from webshop_env.errors import ShopGymError
from webshop_env.policies import OraclePolicy, RandomPolicy

ORIGINAL_STEPS_PER_S = 44.3
"""The original with available actions: 1,000 products, one process, 260 recorded sessions, 2 cores."""
ORIGINAL_MS = {"search": 29.1, "page turn": 33.1, "item or option": 21.4, "sub page": 9.4, "buy": 34.6, "reset": 4.5}
"""The original by kind of action, available actions included."""
KINDS = tuple(ORIGINAL_MS)
FIRST_PAGE = """
import gymnasium, webshop_env, sys
env = gymnasium.make("WebShop-v1", data_dir={data!r}, disable_env_checker=True)
env.reset(seed=0)
assert "spacy" not in sys.modules
"""
SUB_PAGES = ("description", "features", "reviews", "attributes")

Session = tuple[dict[str, Any], dict[str, Any], list[str]]
"""Keyword arguments of the environment, options of its reset, actions."""


def recorded_sessions(path: Path) -> list[Session]:
    """Sessions of the original, which began with a goal's number."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [
        (record["env_kwargs"], {"session": record["session"]}, [step["action"] for step in record["steps"]])
        for record in records
    ]


def scripted_sessions(data: str | None, num_sessions: int) -> list[Session]:
    """Episodes of the oracle and of random walks, in turn."""
    shop = open_shop(data, version="v1")
    env = WebShopTextEnv(shop=shop)
    policies = (OraclePolicy(shop), RandomPolicy(0))
    sessions = []
    for i in range(num_sessions):
        goal, actions, is_over = int(shop.split("train")[i % len(shop.split("train"))]), [], False
        observation, info = env.reset(options={"goal_index": goal})
        while not is_over:
            actions.append(policies[i % 2].act(observation, info))
            observation, _, terminated, truncated, info = env.step(actions[-1])
            is_over = terminated or truncated
        sessions.append(({}, {"goal_index": goal}, actions))
    return sessions


def kind_of(action: str, page_kind: str) -> str:
    """Which of `KINDS` an action is, or "impossible" things among "item or option"."""
    parsed = parse_v0(action)
    if parsed.kind == "search":
        return "search"
    text = parsed.argument.lower()
    if text == "buy now":
        return "buy"
    if text in SUB_PAGES:
        return "sub page"
    if text == "next >" or (text == "< prev" and page_kind == "results"):
        return "page turn"
    return "item or option"


def replay(data: str | None, version: str, sessions: Sequence[Session], num_replays: int) -> list[dict[str, Any]]:
    """Seconds and counts by kind, of one replay after another in this process."""
    shop = open_shop(data, version=version)
    envs: dict[str, WebShopTextEnv] = {}
    for settings, _, _ in sessions:
        envs.setdefault(json.dumps(settings), WebShopTextEnv(shop=shop, version=version, max_steps=None, **settings))
    replays = []
    for _ in range(num_replays):
        seconds: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for settings, options, actions in sessions:
            env = envs[json.dumps(settings)]
            began = time.perf_counter()
            _, info = env.reset(options=options)
            now = time.perf_counter()
            seconds["reset"] += now - began
            counts["reset"] += 1
            for action in actions:
                kind = kind_of(action, info["page_kind"])
                began = time.perf_counter()
                _, _, _, _, info = env.step(action)
                seconds[kind] += time.perf_counter() - began
                counts[kind] += 1
        replays.append({"seconds": dict(seconds), "counts": dict(counts)})
    return replays


def memory_of_environments(data: str | None, number: int) -> int:
    """Bytes by which this process grows when it makes so many environments and searches in each."""
    shop = open_shop(data)
    warm = WebShopVectorEnv(1, shop=shop)  # what the first environment loads, all others share
    warm.reset(seed=0)
    warm.step(["search[red mug]"])
    before = resident_bytes()
    env = WebShopVectorEnv(number, shop=shop)
    env.reset(seed=0)
    env.step(["search[red mug]"] * number)
    return resident_bytes() - before


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def proportional_bytes(pid: int) -> int:
    """Memory of a process, with a page that n processes share counted as 1/n."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def worker(data: str | None, opened: Any, may_end: Any) -> None:
    """A process with the catalogue open and an environment in use."""
    env = WebShopTextEnv(data_dir=data)
    env.reset(seed=0)
    env.step("search[red mug]")
    opened.release()
    may_end.wait()


def memory_of_workers(data: str | None, num_workers: int) -> dict[str, Any]:
    """Sum of the PSS of 1 to `num_workers` spawned processes."""
    context = multiprocessing.get_context("spawn")
    opened, may_end = context.Semaphore(0), context.Event()
    workers, sums = [], []
    try:
        for _ in range(num_workers):
            process = context.Process(target=worker, args=(data, opened, may_end), daemon=True)
            process.start()
            workers.append(process)
            if not opened.acquire(timeout=120):
                raise SystemExit("error: a worker did not open the catalogue within two minutes")
            sums.append(sum(proportional_bytes(one.pid) for one in workers if one.pid))
    finally:
        may_end.set()
        for process in workers:
            process.join(timeout=30)
    growth = (sums[-1] - sums[0]) / max(len(sums) - 1, 1)
    return {"num_workers": num_workers, "pss_bytes": sums, "growth_bytes": growth}


def first_page_s(data: str | None, repeats: int) -> dict[str, Any]:
    """Wall time of a whole process that imports, makes an environment and resets it, and of one that does nothing."""

    def timed(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - began

    code = FIRST_PAGE.format(data=data)
    timed(code)  # compiles the catalogue, once for all
    times, empty = [timed(code) for _ in range(repeats)], [timed("pass") for _ in range(repeats)]
    return {"median_s": statistics.median(times), "all_s": times, "empty_process_s": statistics.median(empty)}


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function that runs in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def rates(runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Steps a second and milliseconds by kind: medians over processes, of the first and the second replay."""
    result: dict[str, Any] = {}
    for name, place in (("cold", 0), ("warm", 1)):
        replays = [run[place] for run in runs]
        totals = [sum(r["seconds"].values()) for r in replays]
        num_steps = sum(count for kind, count in replays[0]["counts"].items() if kind != "reset")
        result[name] = {
            "steps_per_s": num_steps / statistics.median(totals),
            "ms": {
                kind: 1e3 * statistics.median(r["seconds"][kind] for r in replays) / replays[0]["counts"][kind]
                for kind in KINDS
                if kind in replays[0]["counts"]
            },
        }
    return result | {"num_steps": num_steps, "num_sessions": replays[0]["counts"]["reset"], "num_processes": len(runs)}


def print_tables(result: dict[str, Any]) -> None:
    """As Markdown, for `benchmarks/README.md`."""
    print("| | steps/s | times the original |" + "".join(f" {kind} (ms) |" for kind in KINDS))
    print("|" + " --- |" * (3 + len(KINDS)))
    row = "".join(f" {ms:.1f} |" for ms in ORIGINAL_MS.values())
    print(f"| the original | {ORIGINAL_STEPS_PER_S} | 1 |{row}")
    for version, measured in result["steps"].items():
        for name in ("cold", "warm"):
            speed, ms = measured[name]["steps_per_s"], measured[name]["ms"]
            row = "".join(f" {ms[kind]:.4f} |" if kind in ms else " |" for kind in KINDS)
            print(f"| WebShop-{version}, {name} | {speed:,.0f} | {speed / ORIGINAL_STEPS_PER_S:,.0f} |{row}")
    first, workers, memory = result["first_page"], result["workers"], result["memory"]
    print("\n| question | figure |\n| --- | --- |")
    print(f"| whole process to the first page (s) | {first['median_s']:.2f} |")
    print(f"| of that, a process that does nothing (s) | {first['empty_process_s']:.2f} |")
    one, many = memory[0], memory[-1]
    each = (many["bytes"] - one["bytes"]) / (many["num_envs"] - one["num_envs"])
    print(f"| memory of one environment more, from 1 to {many['num_envs']:,} (KB) | {each / 1e3:.1f} |")
    print(f"| PSS of one worker more, of {workers['num_workers']} (MB) | {workers['growth_bytes'] / 1e6:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory of a catalogue; without it, the embedded one")
    parser.add_argument("--sessions", type=Path, help="recorded sessions of the original (.jsonl or .jsonl.gz)")
    parser.add_argument("--repeats", type=int, default=5, help="processes that each figure is the median of")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a smoke run: few sessions, processes and environments")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_env.json")
    options = parser.parse_args()
    if options.sessions and not options.sessions.is_file():
        raise ShopGymError(f"--sessions: there is no file {options.sessions}")
    result = describe_machine("gymnasium", "numpy")
    data = str(Path(options.data).resolve()) if options.data else None
    repeats, num_workers = (1, 2) if options.small else (options.repeats, options.workers)
    sessions = recorded_sessions(options.sessions) if options.sessions else scripted_sessions(data, 200)
    if options.small:
        sessions = sessions[:10]
    result["config"] = {
        "catalogue": Path(data).name if data else "embedded",
        "num_products": len(open_shop(data).products),
        "sessions": "recorded" if options.sessions else "scripted",
    }
    result["first_page"] = first_page_s(data, repeats)
    # Recorded sessions are the original's, with names that only v0 knows; v1 takes the same goals and actions.
    numbered = [
        ({}, {"goal_index": options_["session"]} if isinstance(options_.get("session"), int) else options_, actions)
        for _, options_, actions in sessions
        if "session" not in options_ or isinstance(options_["session"], int)
    ]
    plans = {"v0": sessions, "v1": numbered} if options.sessions else {"v0": numbered, "v1": numbered}
    result["steps"] = {
        version: rates([in_own_process(replay, data, version, plan, 2) for _ in range(repeats)])
        for version, plan in plans.items()
    }
    numbers = (1, 64) if options.small else (1, 16, 64, 256, 1024)
    result["memory"] = [
        {"num_envs": number, "bytes": in_own_process(memory_of_environments, data, number)} for number in numbers
    ]
    result["workers"] = memory_of_workers(data, num_workers)
    print_tables(result)
    write_result(result, options.out)


if __name__ == "__main__":
    run_script(main)
