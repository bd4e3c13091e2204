"""How long does Python search for garbage during a rollout, and how long as training lets it?

    python benchmarks/bench_garbage.py                                            the default run's rollouts
    python benchmarks/bench_garbage.py recipe=webshop_smollm2_135m \\
        env.webshop.data_dir=DIR actor_rollout_ref.model.path=POLICY              those of another run

A run is opened as training opens it. It collects `--rollouts` updates' episodes with Python's own thresholds, then as
many under `little_garbage_collection`, and both again, `--turns` times; nothing is learnt. Further words are settings.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch

import numpy as np
import torch
from machine import RESULTS, describe_machine, run_script, write_result

from trainers.gigpo_fsdp import collect
from trainers.memory import little_garbage_collection
from trainers.ranks import joined_ranks, set_threads
from trainers.run import Run, open_run, rollout_sampling
from trainers.settings import resolve

WAYS = ("as Python has it", "as training lets it")
ALL_OBJECTS = 2
"""Number of the generation whose search looks at all objects."""


class Search:
    """Watches the search for garbage while `watched`."""

    def __init__(self) -> None:
        self.seconds, self.num_full = 0.0, 0
        self._began = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        gc.callbacks.append(self._note)
        try:
            yield
        finally:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = perf_counter()
        else:
            self.seconds += perf_counter() - self._began
            self.num_full += info["generation"] == ALL_OBJECTS


def rollouts(run: Run, updates: range) -> list[dict[str, Any]]:
    """Plays the episodes of some updates."""
    played = []
    for update in updates:
        run.engine.load_weights(run.actor.full_weights(run.engine.dtype), version=update)
        search, began = Search(), perf_counter()
        with search.watched():
            batch, _ = collect(run, update, rollout_sampling(run.settings))
        seconds = perf_counter() - began
        played.append(
            {"seconds": seconds, "searching_s": search.seconds, "num_full": search.num_full, "rows": len(batch)}
        )
        run.engine.sleep()
    return played


def summary(played: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the rollouts of one way."""
    seconds, searching, rows = (np.asarray([one[key] for one in played]) for key in ("seconds", "searching_s", "rows"))
    return {
        "num_rollouts": len(played),
        "rollout_s": round(float(seconds.mean()), 3),
        "searching_s": round(float(searching.mean()), 4),
        "searching_percent": round(float(100 * searching.sum() / seconds.sum()), 2),
        "num_full": sum(one["num_full"] for one in played),
        "rows": round(float(rows.mean()), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10, help="one after the other in a way")
    parser.add_argument("--turns", type=int, default=3, help="times that each way has its turn")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_garbage.json")
    options, words = parser.parse_known_args()
    set_threads()
    played: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with joined_ranks() as ranks, tempfile.TemporaryDirectory() as scratch:
        settings, _, _ = resolve([*words, f"trainer.output_dir={scratch}/run", "trainer.logger=[]"])
        run = open_run(settings, ranks)
        try:
            rollouts(run, range(2))  # caches fill, which is no rollout's usual work
            update = 2
            for _ in range(options.turns):
                for way in WAYS:
                    with ExitStack() as held:
                        if way == WAYS[1]:
                            held.enter_context(little_garbage_collection())
                        played[way] += rollouts(run, range(update, update + options.rollouts))
                    update += options.rollouts
            num_objects = len(gc.get_objects())
        finally:
            run.log.close()
            run.engine.close()
    print("| search for garbage | rollouts | rollout (s) | searching (s) | share (%) | searches of all objects |")
    print("| --- | --- | --- | --- | --- | --- |")
    ways = {way: summary(rows) for way, rows in played.items()}
    for way, row in ways.items():
        print(
            f"| {way} | {row['num_rollouts']} | {row['rollout_s']:.2f} | {row['searching_s']:.3f} "
            f"| {row['searching_percent']:.1f} | {row['num_full']} |"
        )
    machine = describe_machine("torch", "transformers", "numpy")
    if torch.cuda.is_available():
        machine["hardware"]["gpu"] = torch.cuda.get_device_name()
    config = {"rollouts": options.rollouts, "turns": options.turns}
    write_result(machine | {"config": config, "num_objects": num_objects, "ways": ways}, options.out)


if __name__ == "__main__":
    run_script(main)
