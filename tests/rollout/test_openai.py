"""The engine for endpoints, against a small HTTP server: replies, troubles, limits."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from endpoint import Endpoint, serving

from env_manager import EnvManager
from rollout import GenerationRequest, NoiseKey, SamplingParams, TrajectoryCollector
from rollout.engines.openai import EndpointError, OpenAIEngine
from rollout.types import Generation, StreamingPolicy

PAGE = "Your assignment: red mug\nFrom here you can do one of the following:\n'search[<your query>]'"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as server:
        yield server


@pytest.fixture
def engine(endpoint: Endpoint) -> Iterator[OpenAIEngine]:
    engine = OpenAIEngine(endpoint.base_url, "shopper", first_pause_s=0.01, max_tries=2)
    yield engine
    engine.close()


def request(engine: OpenAIEngine, prompt: str, number: int = 0, **changes) -> GenerationRequest:
    return GenerationRequest(engine.encode(prompt), NoiseKey(0, -1, number, 0), **changes)


def ask(engine: OpenAIEngine, prompt: str, *, max_tokens: int = 100, **changes) -> Generation:
    return engine.generate([request(engine, prompt, **changes)], SamplingParams(max_tokens=max_tokens))[0]


def test_streamed_and_listed_replies_are_the_same_episodes(endpoint, engine):
    assert isinstance(engine, StreamingPolicy)

    class Listed:
        weight_version, encode, generate = 0, engine.encode, engine.generate

    batches = [
        TrajectoryCollector(EnvManager("WebShop-v1", 4)).collect(
            range(4), each, SamplingParams(max_tokens=512), group_size=1, update=0, seed=0
        )
        for each in (engine, Listed())
    ]
    assert batches[0].action.tolist() == batches[1].action.tolist()
    assert batches[0].won.tolist() == batches[1].won.tolist()
    seeds = [body["seed"] for body in endpoint.seen[1:]]
    assert sorted(seeds) == sorted(2 * sorted(set(seeds))), "the same step of the same episode has the same seed"


def test_cut_and_odd_replies(engine):
    cut = ask(engine, PAGE, max_tokens=5)
    assert (cut.text, cut.is_cut) == ("<thin", True)
    assert cut.log_probs.shape == cut.reply_ids.shape and np.isnan(cut.log_probs).all(), "an endpoint tells none"
    assert not ask(engine, PAGE).is_cut
    assert ask(engine, "no content").text == ""
    assert ask(engine, "taken out").text == "<think>hm</think><action>a</action>"
    assert ask(engine, "half a character").text == "?!"


@pytest.mark.parametrize(
    ("prompt", "complaint", "num_requests"),
    [
        ("no choices", r"no choices\[0\]", 1),
        ("no message", r"no choices\[0\]", 1),
        ("forbidden", r'HTTP 401: {"error": "the key', 1),
        ("broken", "HTTP 500: .*out of memory", 2),
        ("created", "HTTP 201", 2),
        ("no JSON", "gave no reply", 2),
    ],
)
def test_what_is_no_reply_is_said_in_one_line_and_tried_again_if_it_may_pass(
    endpoint, engine, prompt, complaint, num_requests
):
    ask(engine, PAGE)
    before = len(endpoint.seen)
    with pytest.raises(EndpointError, match=complaint) as caught:
        ask(engine, prompt)
    assert "\n" not in str(caught.value)
    assert len(endpoint.seen) - before == num_requests
    assert ask(engine, PAGE).text, "the engine goes on"


def test_what_an_endpoint_cannot_do_is_refused(engine):
    with pytest.raises(EndpointError, match="constrained"):
        ask(engine, PAGE, admissible=("click[a]",))
    with pytest.raises(EndpointError, match="top_k"):
        engine.submit([request(engine, PAGE)], SamplingParams(top_k=3))
    with pytest.raises(EndpointError, match="no address such as"):
        OpenAIEngine("localhost:8000/v1", "shopper")
    with pytest.raises(EndpointError, match=r"base URL 'http://\[bad' is no address such as"):
        OpenAIEngine("http://[bad", "shopper")
    with pytest.raises(EndpointError, match="num_parallel must be at least 1, got 0"):
        OpenAIEngine("http://localhost:8000/v1", "shopper", num_parallel=0)
    assert engine.poll() == []


@pytest.mark.parametrize("key", ["se\rcret", "se\x00cret", "sécret", "se\u200bcret"])
def test_a_key_that_no_header_can_carry_is_refused_and_never_quoted(endpoint, key):
    with pytest.raises(EndpointError, match="the API key holds a character") as caught:
        OpenAIEngine(endpoint.base_url, "shopper", api_key=key)
    assert "cret" not in str(caught.value)


def test_blanks_around_a_key_are_not_sent(endpoint):
    ask(OpenAIEngine(endpoint.base_url, "shopper", api_key=" sk-test\r\n", first_pause_s=0.01), PAGE)
    ask(OpenAIEngine(endpoint.base_url, "shopper", api_key=" \n", first_pause_s=0.01), PAGE)
    assert endpoint.keys == {"Bearer sk-test", None}


def test_nobody_there_and_a_server_that_says_nothing(endpoint):
    nobody = OpenAIEngine("http://127.0.0.1:9/v1", "shopper", first_pause_s=0.01, max_tries=2)
    with pytest.raises(EndpointError, match="refused"):
        ask(nobody, PAGE)
    endpoint.delay_s = 3.0
    slow = OpenAIEngine(endpoint.base_url, "shopper", timeout_s=0.2, max_tries=1)
    with pytest.raises(EndpointError, match="timed out"):
        ask(slow, PAGE)


def test_no_more_requests_than_allowed_are_under_way_and_each_reply_comes_once(endpoint):
    endpoint.delay_s = 0.05
    engine = OpenAIEngine(endpoint.base_url, "shopper", num_parallel=3, first_pause_s=0.01)
    numbers = engine.submit([request(engine, PAGE, i) for i in range(12)], SamplingParams(max_tokens=50))
    got = []
    while len(got) < len(numbers):
        got += [number for number, _ in engine.poll()]
    assert sorted(got) == numbers
    assert 2 <= endpoint.most_running <= 3
    assert engine.poll() == []


def test_closing_gives_up_what_waits(endpoint):
    endpoint.delay_s = 0.2
    engine = OpenAIEngine(endpoint.base_url, "shopper", num_parallel=1, first_pause_s=60.0)
    engine.submit([request(engine, PAGE, i) for i in range(5)], SamplingParams())
    deadline = time.monotonic() + 60
    while not endpoint.seen and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.close()  # the first request waits a minute for its second try
    engine._threads[0].join(timeout=30)
    assert not engine._threads[0].is_alive()
    assert len(endpoint.seen) == 1
