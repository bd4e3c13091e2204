"""Run by torchrun on four ranks, two for each engine: what `test_led_ranks.py` compares with one process.

Arguments: a file for what the first rank found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from env_manager import EnvManager
from rollout import Generation, GenerationRequest, SamplingParams, StepBatch, TrajectoryCollector
from rollout.engines.led import LedEngine, RankGroups
from rollout.engines.scripted import ScriptedPolicy
from trainers.ranks import Ranks, leave_process, start_ranks, stop_ranks
from trainers.rollouts import collect_over_ranks
from webshop_env.errors import ShopGymError

PARAMS = SamplingParams(max_tokens=64)
PATH = ["down", "down", "right", "right", "down", "right"]


class Part(ScriptedPolicy):
    """Answers one request at a time. With groups it is a part of an engine: no step without its neighbour's."""

    notes, dtype = (), torch.float32

    def __init__(self, groups: RankGroups | None = None) -> None:
        super().__init__(lambda prompt, admissible: "")
        self.groups, self.calls, self.refuses = groups, 0, False
        self._queue: list[tuple[int, GenerationRequest]] = []

    def submit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[int]:
        if self.refuses:
            raise ShopGymError("a prompt is too long")
        numbers = list(range(self.calls, self.calls + len(requests)))
        self._queue += zip(numbers, requests, strict=True)
        self.calls += len(requests)
        return numbers

    def poll(self) -> list[tuple[int, Generation]]:
        number, request = self._queue.pop(0)
        mine = (self.calls, request.noise.episode, request.noise.step, request.prompt_ids.tolist())
        assert self.groups is None or self.groups.send(mine) == mine, "the parts do different things"
        text = f"<action>{PATH[request.noise.step]}</action>"
        ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
        return [(number, Generation(ids, np.zeros(len(ids), np.float32), text, is_cut=False))]


def play(engine: Part | LedEngine, ranks: Ranks, goals: Sequence[int]) -> StepBatch:
    collector = TrajectoryCollector(EnvManager("FrozenLake-v1", 2))
    return collect_over_ranks(
        *(collector, engine, np.asarray(goals), PARAMS, ranks), group_size=2, update=0, seed=0, weight_version=0
    )


def rows_of(batch: StepBatch) -> list[list[object]]:
    columns = (batch.episode_id, batch.group_id, batch.step_index, batch.goal_index, batch.reward, batch.action)
    return [
        [value.item() if isinstance(value, np.generic) else value for value in row]
        for row in zip(*columns, strict=True)
    ]


def main(out: Path) -> None:
    ranks = start_ranks("cpu")
    part = Part(RankGroups(2))
    engine = LedEngine(part, RankGroups(2))
    found = {"rows": {}, "calls": []}
    for goals in ([0, 1, 2], [1], [0, 1, 2, 3]):
        rows = rows_of(play(engine, ranks, goals))
        assert all(other == rows for other in ranks.gather(rows))
        found["rows"][",".join(map(str, goals))] = rows
        found["calls"].append(ranks.gather(part.calls))
    part.refuses = True
    try:
        play(engine, ranks, [0, 1, 2])
    except ShopGymError as error:
        found["refusals"] = ranks.gather(str(error))
    part.refuses = False
    found["after"] = rows_of(play(engine, ranks, [1]))
    if ranks.is_first:
        out.write_text(json.dumps(found))
    ranks.barrier()
    stop_ranks()
    leave_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
