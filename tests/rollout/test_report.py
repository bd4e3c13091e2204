"""Episodes as text."""

from __future__ import annotations

import numpy as np
import pytest

from env_manager import EnvConfig, EnvManager
from rollout import SamplingParams, StepBatch, TrajectoryCollector
from rollout.engines.scripted import EOS, ScriptedPolicy
from rollout.report import episode_report, episodes_by_success, sample_report

WALKS = {11: ["left"] * 6, 12: ["down", "down", "right", "right", "down", "right"], 13: ["right", "down"]}
"""Goal -> moves: into the wall until time is up, to the goal, into a hole."""


def decode(ids: np.ndarray) -> str:
    return bytes(int(i) for i in ids if i != EOS).decode()


@pytest.fixture(scope="module")
def batch() -> StepBatch:
    class Walker(ScriptedPolicy):
        def generate(self, requests, params):
            answers = []
            for request in requests:
                goal = sorted(WALKS)[request.noise.episode]
                move = WALKS[goal][request.noise.step]
                text = "fly" if (goal, request.noise.step) == (11, 5) else f"<action>{move}</action>"
                answers += ScriptedPolicy(lambda prompt, admissible, text=text: text).generate([request], params)
            return answers

    manager = EnvManager("FrozenLake-v1", 3, EnvConfig(max_steps=6))
    return TrajectoryCollector(manager).collect(
        sorted(WALKS), Walker(lambda prompt, admissible: ""), SamplingParams(max_tokens=64), group_size=1, update=0,
        seed=0,
    )  # fmt: skip


def test_episodes_are_ranked_by_score_then_length(batch) -> None:
    assert batch.won[batch.episode_id == 1].all()
    assert episodes_by_success(batch) == [1, 2, 0]


def test_an_episode_tells_pages_replies_and_effects(batch) -> None:
    text = episode_report(batch, 1, decode=decode)
    lines = text.splitlines()
    assert lines[0] == "Episode 1, group 1, goal 12: won, score 1.000, return 1, 6 steps"
    assert [line for line in lines if line.startswith("Step ")] == [f"Step {i}" for i in range(1, 7)]
    moves = [line.removeprefix("    -> ") for line in lines if line.startswith("    -> ")]
    assert moves == WALKS[12]
    assert "    reply: <action>down</action>" in lines
    assert lines[-1] == "       (reward 1)"
    first_prompt = decode(batch.prompt_ids[batch.episode_id == 1][0]).splitlines()[0]
    assert f"    | {first_prompt}"[:100] in text
    assert max(map(len, lines)) <= 118


def test_what_went_wrong_is_said(batch) -> None:
    text = episode_report(batch, 0)
    assert text.startswith("Episode 0, group 0, goal 11: out of steps, score 0.000")
    assert "malformed: no <action>…</action>; not taken: " in text
    assert "reply:" not in text and "First prompt" not in text
    assert "lost" in episode_report(batch, 2).splitlines()[0]


def test_a_sample_holds_the_best_and_the_worst(batch) -> None:
    text = sample_report(batch, num_episodes=2)
    assert [line for line in text.splitlines() if line.startswith("Place")] == ["Place 1 of 3", "Place 3 of 3"]
    assert text.index("Episode 1,") < text.index("Episode 0,")
    assert sample_report(batch, num_episodes=9).count("Place ") == 3


def test_returns_of_partial_episodes_are_what_was_earned_so_far(batch) -> None:
    cut = batch.select(np.flatnonzero(batch.episode_id == 0))
    assert cut.truncated.all() and not cut.won.any() and not cut.terminated.any()
    assert cut.episode_return.tolist() == [0.0] * 6
    assert cut.task_score.tolist() == [0.0] * 6


def test_unknown_episodes_are_refused(batch) -> None:
    with pytest.raises(ValueError, match="no episode 77"):
        episode_report(batch, 77)
