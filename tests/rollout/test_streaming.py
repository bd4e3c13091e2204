"""Episodes that do not wait for each other, with policies that take requests one at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from random import Random

import numpy as np
import pytest
from small_lm import small_model, small_tokenizer

from env_manager import EnvConfig, EnvManager
from rollout import (
    CollectorConfig,
    Generation,
    GenerationRequest,
    NoiseKey,
    SamplingParams,
    StepBatch,
    TrajectoryCollector,
)
from rollout.constrained import ActionGrammar
from rollout.engines.hf import HFEngine
from rollout.engines.scripted import ScriptedPolicy
from rollout.types import StreamingPolicy

PARAMS = SamplingParams(max_tokens=64)
PATH = ["down", "down", "right", "right", "down", "right"]


class ThreadedScript(ScriptedPolicy):
    """Answers each request in a thread of its own, after `wait_for(request)` returns."""

    def __init__(self, wait_for) -> None:
        super().__init__(lambda prompt, admissible: "")
        self._wait_for = wait_for
        self._pool = ThreadPoolExecutor(16)
        self._running: dict[Future[Generation], int] = {}
        self._num_requests = 0

    def submit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[int]:
        numbers = []
        for request in requests:
            self._running[self._pool.submit(self._answer, request, params)] = self._num_requests
            numbers.append(self._num_requests)
            self._num_requests += 1
        return numbers

    def poll(self) -> list[tuple[int, Generation]]:
        done, _ = wait(self._running, timeout=20, return_when=FIRST_COMPLETED)
        assert done, "an episode waits for another one"
        return [(self._running.pop(future), future.result()) for future in done]

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        return [self._answer(request, params) for request in requests]

    def _answer(self, request: GenerationRequest, params: SamplingParams) -> Generation:
        self._wait_for(request)
        text = f"<action>{PATH[request.noise.step]}</action>"
        ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
        return Generation(ids, np.zeros(len(ids), np.float32), text, is_cut=False, weight_version=self.weight_version)


class LockStep:
    """The same policy without its streaming methods."""

    def __init__(self, policy) -> None:
        self.weight_version, self.encode, self.generate = policy.weight_version, policy.encode, policy.generate


class InPieces(HFEngine):
    """A transformers engine that answers two requests at a time, the latest first."""

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self._queue: deque[tuple[int, GenerationRequest, SamplingParams]] = deque()
        self._num_requests = 0
        self.most_waiting = 0

    def submit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[int]:
        numbers = list(range(self._num_requests, self._num_requests + len(requests)))
        self._num_requests += len(requests)
        self._queue.extend((number, request, params) for number, request in zip(numbers, requests, strict=True))
        self.most_waiting = max(self.most_waiting, len(self._queue))
        return numbers

    def poll(self) -> list[tuple[int, Generation]]:
        piece = [self._queue.pop() for _ in range(min(2, len(self._queue)))]
        replies = self.generate([request for _, request, _ in piece], piece[0][2])
        return [(number, reply) for (number, _, _), reply in zip(piece, replies, strict=True)]


def same_rows(one: StepBatch, other: StepBatch) -> None:
    assert one.anchor_texts == other.anchor_texts
    for name in ("episode_id", "group_id", "step_index", "anchor_id", "reward", "won", "truncated", "task_score"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    for name in ("prompt_ids", "reply_ids"):
        assert [row.tolist() for row in getattr(one, name)] == [row.tolist() for row in getattr(other, name)], name
    assert one.action.tolist() == other.action.tolist()
    for mine, theirs in zip(one.rollout_log_probs, other.rollout_log_probs, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def lake(policy, num_envs: int = 4, goals: Sequence[int] = (0, 1)) -> StepBatch:
    collector = TrajectoryCollector(EnvManager("FrozenLake-v1", num_envs))
    return collector.collect(goals, policy, PARAMS, group_size=2, update=0, seed=0)


def test_an_episode_ends_while_its_sibling_waits_for_a_first_reply() -> None:
    others_are_at_their_end = threading.Barrier(4)

    def wait_for(request: GenerationRequest) -> None:
        # Episode 0 gets its first reply when the three others ask for their last one.
        if request.noise.step == (0 if request.noise.episode == 0 else 5):
            others_are_at_their_end.wait(20)

    batch = lake(ThreadedScript(wait_for))
    assert batch.episode_length.tolist() == [6] * 24
    assert batch.won.all()


def test_replies_in_any_order_give_the_episodes_of_the_lock_step_loop() -> None:
    lottery = Random(3)
    pause = threading.Event()
    streaming = ThreadedScript(lambda request: pause.wait(lottery.random() / 50))
    assert isinstance(streaming, StreamingPolicy)
    lock_step = LockStep(ThreadedScript(lambda request: None))
    assert not isinstance(lock_step, StreamingPolicy)
    same_rows(lake(streaming), lake(lock_step))
    same_rows(lake(streaming, num_envs=2), lake(lock_step))


def test_a_model_that_answers_in_pieces_plays_the_same_shopping_trips() -> None:
    tokenizer = small_tokenizer()
    batches = []
    for kind in (InPieces, HFEngine):
        engine = kind(small_model(tokenizer), tokenizer, grammar=ActionGrammar(tokenizer, max_tokens=24))
        config = EnvConfig(
            prompt="compact", max_steps=4, max_prompt_tokens=400, count_tokens=engine.count_tokens, success_reward=10.0
        )
        collector = TrajectoryCollector(EnvManager("WebShop-v1", 6, config), CollectorConfig(constrained=True))
        params = SamplingParams(max_tokens=24)
        batches.append(collector.collect([3, 4, 5], engine, params, group_size=2, update=1, seed=0))
        if kind is InPieces:
            assert engine.most_waiting == 6
    assert len(batches[0]) > 12
    same_rows(*batches)


class OneByOne(ThreadedScript):
    """Finishes one reply after the other, the oldest first."""

    def __init__(self) -> None:
        super().__init__(lambda request: None)
        self.asked: list[int] = []

    def submit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[int]:
        self.asked.append(len(requests))
        return super().submit(requests, params)

    def poll(self) -> list[tuple[int, Generation]]:
        oldest = min(self._running, key=self._running.__getitem__)
        return [(self._running.pop(oldest), oldest.result())]


def test_prompts_are_read_together_while_most_replies_are_being_written() -> None:
    policy = OneByOne()
    rows = lake(policy, num_envs=64, goals=range(32))
    same_rows(rows, lake(LockStep(ThreadedScript(lambda request: None)), num_envs=64, goals=range(32)))
    most = policy.asked[: -len(policy.asked) // 6]  # at the end few are left, and none of them waits for many
    assert most[0] == 64 and set(most[1:]) == {4}, "one in sixteen"
    assert sum(policy.asked) == len(rows)


def test_what_a_policy_fails_at_ends_the_collection() -> None:
    def fail(request: GenerationRequest) -> None:
        if request.noise.step == 2:
            raise OSError("the line is dead")

    with pytest.raises(OSError, match="the line is dead"):
        lake(ThreadedScript(fail))


def test_replies_to_an_interrupted_collection_are_dropped() -> None:
    policy = ThreadedScript(lambda request: None)
    policy.submit([GenerationRequest(policy.encode("an old prompt"), NoiseKey(0, 0, 0, 3))], PARAMS)
    assert lake(policy).won.all()
