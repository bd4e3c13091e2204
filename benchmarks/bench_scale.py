"""How do costs grow with the catalogue, the number of environments and the history in the prompt?

    python benchmarks/bench_scale.py [DIR ...]          the embedded catalogue and those of DIR, in WebShop's format
    python benchmarks/bench_scale.py --small            a smoke run

`python -m data.generate_large` makes large catalogues. Each is compiled as `python -m data.build DIR --no-nouns` does,
into FOLDER of `--cache` (kept for another run, which then tells no times of building), opened in a fresh process, and
played in: episodes of the oracle and of random walks in turn. Nouns of names are computed when a score needs them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_env import in_own_process, memory_of_environments, memory_of_workers, resident_bytes
from machine import RESULTS, describe_machine, run_script, write_result

from env_manager import EnvConfig, EnvManager
from webshop_env import WebShopTextEnv, WebShopVectorEnv, open_shop
from webshop_env.errors import ShopGymError
from webshop_env.policies import OraclePolicy, RandomPolicy

NUM_STEPS = 15


def build(data: str) -> dict[str, Any]:
    """Wall and CPU time and peak memory of compiling a catalogue in a process of its own."""
    command = (sys.executable, "-m", "data.build", data, "--no-nouns", "--version", "v1")
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=Path(__file__).resolve().parent.parent, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise ShopGymError(f"{data} could not be compiled")
    return {
        "build_s": time.perf_counter() - began,
        "build_cpu_s": usage.ru_utime + usage.ru_stime,
        "build_peak_bytes": usage.ru_maxrss * 1024,
    }


def play(data: str | None, num_episodes: int) -> dict[str, Any]:
    """Opening, resident memory and time of a step, in this process."""
    import_bytes = resident_bytes()
    began = time.perf_counter()
    shop = open_shop(data)
    open_s = time.perf_counter() - began
    opened_bytes = resident_bytes()
    env = WebShopTextEnv(shop=shop, max_steps=NUM_STEPS)
    policies = (OraclePolicy(shop), RandomPolicy(0))
    goals, step_s, num_steps, times = shop.split("all"), 0.0, 0, []
    for i in range(num_episodes):
        observation, info = env.reset(options={"goal_index": int(goals[i * 7919 % len(goals)])})
        is_over = False
        while not is_over:
            action = policies[i % 2].act(observation, info)
            began = time.perf_counter()
            observation, _, terminated, truncated, info = env.step(action)
            times.append(time.perf_counter() - began)
            is_over = terminated or truncated
    step_s, num_steps = sum(times), len(times)
    times.sort()
    return {
        "num_products": len(shop.products),
        "num_goals": len(shop.goals),
        "import_bytes": import_bytes,
        "open_s": open_s,
        "opened_bytes": opened_bytes,
        "played_bytes": resident_bytes(),
        "num_episodes": num_episodes,
        "num_steps": num_steps,
        "step_ms": 1e3 * step_s / num_steps,
        "step_p50_ms": 1e3 * times[num_steps // 2],
        "step_p99_ms": 1e3 * times[num_steps * 99 // 100],
        "has_tagger": "spacy" in sys.modules,
    }


def step_environments(num_envs: int, num_rounds: int) -> float:
    """Microseconds of a step of one slot, in a vector environment of so many: a random walk, warm caches."""
    env = WebShopVectorEnv(num_envs, shop=open_shop(), max_steps=NUM_STEPS)
    spent = 0.0
    for round_ in range(num_rounds + 1):
        policy = RandomPolicy(0)
        observations, infos = env.reset(seed=0)
        for _ in range(NUM_STEPS):
            slots = [{key: infos[key][i] for key in ("available_actions", "instruction_text")} for i in range(num_envs)]
            actions = [policy.act(seen, info) for seen, info in zip(observations, slots, strict=True)]
            began = time.perf_counter()
            observations, *_, infos = env.step(actions)
            spent += (time.perf_counter() - began) if round_ else 0.0
    return 1e6 * spent / (num_envs * NUM_STEPS * num_rounds)


def step_history(history_length: int, num_rounds: int) -> dict[str, Any]:
    """Microseconds and characters of a prompt with so much history, stepping included."""
    config = EnvConfig(prompt="think", max_steps=NUM_STEPS, history_length=history_length)
    manager = EnvManager("WebShop-v1", 32, config)
    spent, num_prompts, num_chars = 0.0, 0, 0
    for round_ in range(num_rounds + 1):
        policy = RandomPolicy(0)
        seen = manager.reset(range(32))
        while seen.is_live.any():
            replies, slots = [], []
            for slot in range(32):
                if seen.is_live[slot]:
                    listed = {"available_actions": seen.admissible[slot], "instruction_text": "red mug"}
                    slots.append(slot)
                    replies.append(f"<think>.</think><action>{policy.act(seen.prompts[slot], listed)}</action>")
            began = time.perf_counter()
            seen = manager.step(replies, slots).observations
            if round_:
                spent += time.perf_counter() - began
                num_prompts += len(slots)
                num_chars += sum(len(seen.prompts[slot]) for slot in slots if seen.is_live[slot])
    return {
        "history_length": history_length,
        "prompt_us": 1e6 * spent / num_prompts,
        "prompt_chars": num_chars / num_prompts,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """The three curves, as a picture beside the JSON."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (products, environments, histories) = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    rows = sorted(result["catalogues"], key=lambda row: row["num_products"])
    sizes = [row["num_products"] for row in rows]
    products.loglog(sizes, [row["step_p50_ms"] for row in rows], "o-", label="step, median (ms)")
    products.loglog(sizes, [row["step_p99_ms"] for row in rows], "o-", label="step, 99 % (ms)")
    products.loglog(sizes, [1e3 * row["open_s"] for row in rows], "o-", label="opening (ms)")
    products.set(xlabel="products", title="catalogue")
    numbers = [row["num_envs"] for row in result["environments"]]
    environments.semilogx(
        numbers, [row["step_us"] for row in result["environments"]], "o-", label="step of a slot (µs)"
    )
    environments.set(xlabel="environments", title="one process", ylim=(0, None))
    lengths = [row["history_length"] for row in result["histories"]]
    histories.plot(lengths, [row["prompt_us"] for row in result["histories"]], "o-", label="step and prompt (µs)")
    histories.plot(
        lengths, [row["prompt_chars"] / 100 for row in result["histories"]], "o-", label="prompt (100 chars)"
    )
    histories.set(xlabel="steps of history in the prompt", title="manager", ylim=(0, None))
    for axes in (products, environments, histories):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def print_tables(result: dict[str, Any]) -> None:
    """As Markdown, for `benchmarks/README.md`."""
    print("| catalogue | products | goals | build (s) | build, CPU (s) | build, peak (MB) | open (ms) ", end="")
    print("| opened (MB) | after episodes (MB) | step, mean / p50 / p99 (ms) | one worker more (MB) |")
    print("|" + " --- |" * 11)
    for row in result["catalogues"]:
        built = ("build_s", 1, ".1f"), ("build_cpu_s", 1, ".1f"), ("build_peak_bytes", 1e6, ",.0f")
        cells = [format(row[key] / unit, form) if key in row else "" for key, unit, form in built]
        steps = " / ".join(f"{row[key]:.3f}" for key in ("step_ms", "step_p50_ms", "step_p99_ms"))
        print(
            f"| {row['catalogue']} | {row['num_products']:,} | {row['num_goals']:,} | {' | '.join(cells)} "
            f"| {1e3 * row['open_s']:.1f} | {row['opened_bytes'] / 1e6:.0f} | {row['played_bytes'] / 1e6:.0f} "
            f"| {steps} | {row['workers']['growth_bytes'] / 1e6:.1f} |"
        )
    print("\n| environments | step of a slot (µs) | memory, all (MB) |\n| --- | --- | --- |")
    for row in result["environments"]:
        print(f"| {row['num_envs']:,} | {row['step_us']:.1f} | {row['bytes'] / 1e6:.1f} |")
    print("\n| history | step and prompt (µs) | prompt (characters) |\n| --- | --- | --- |")
    for row in result["histories"]:
        print(f"| {row['history_length']} | {row['prompt_us']:.0f} | {row['prompt_chars']:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dirs", nargs="*", type=Path, metavar="DIR", help="catalogues beside the embedded one")
    parser.add_argument("--cache", type=Path, help="keep compiled catalogues here (default: a folder that is deleted)")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="few episodes, workers and environments")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_scale.json")
    options = parser.parse_args()
    for data_dir in options.data_dirs:
        if not data_dir.is_dir():
            raise ShopGymError(f"{data_dir}: no such directory")
    num_episodes, num_workers, num_rounds = options.episodes, options.workers, 3
    env_numbers, history_lengths = (1, 4, 16, 64, 256, 1024), (0, 1, 2, 4, 8, 16)
    if options.small:
        num_episodes, num_workers, num_rounds, env_numbers, history_lengths = 20, 2, 1, (1, 16), (0, 2)
    result = describe_machine("gymnasium", "numpy")
    with ExitStack() as stack:
        cache = options.cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["SHOPGYM_CACHE"] = str(cache.resolve())
        rows = []
        for data_dir in (None, *options.data_dirs):
            data = None if data_dir is None else str(data_dir.resolve())
            is_new = data is not None and not (cache / f"{Path(data).name}.built").exists()
            row: dict[str, Any] = {"catalogue": "embedded" if data is None else Path(data).name}
            if data is not None and is_new:
                row |= build(data)
                (cache / f"{Path(data).name}.built").touch()
            in_own_process(play, data, 1)  # compiles what was small enough not to be built
            row |= in_own_process(play, data, num_episodes)
            row["workers"] = memory_of_workers(data, num_workers)
            rows.append(row)
        result["catalogues"] = rows
        result["environments"] = [
            {
                "num_envs": number,
                "step_us": in_own_process(step_environments, number, num_rounds),
                "bytes": in_own_process(memory_of_environments, None, number),
            }
            for number in env_numbers
        ]
        result["histories"] = [in_own_process(step_history, length, num_rounds) for length in history_lengths]
    print_tables(result)
    write_result(result, options.out)
    draw(result, options.out.with_suffix(".png"))


if __name__ == "__main__":
    run_script(main)
