"""The examples, run as a reader would; the endpoint is a small HTTP server of this file."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from env_manager import EnvManager
from rollout import GenerationRequest, NoiseKey, SamplingParams, TrajectoryCollector, load_batch
from rollout.types import StreamingPolicy

ROOT = Path(__file__).resolve().parents[2]


def load_example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables,
    )


class Endpoint(ThreadingHTTPServer):
    """Chat completions from the rule of `scripted_agent.py`, thought about aloud; the first request of all is refused
    as a busy server would."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[dict] = []
        self.keys: set[str | None] = set()
        self.lock = threading.Lock()
        self.reply_to = load_example("scripted_agent").reply_to
        self.base_url = f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(body)
            self.server.keys.add(self.headers["Authorization"])
            is_first = len(self.server.seen) == 1
        if is_first:
            return self._send(503, {"error": "busy"})
        if self.path != "/v1/chat/completions" or body["model"] != "shopper":
            return self._send(404, {"error": f"no model {body['model']}"})
        prompt = body["messages"][0]["content"]
        if prompt == "odd":
            return self._send(200, {"choices": []})
        text = f"<think>let me see — yes</think>{self.server.reply_to(prompt, None)}"
        reason = "stop"
        if body["max_tokens"] < 10:
            text, reason = text[: body["max_tokens"]], "length"
        self._send(200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]})

    def _send(self, code: int, answer: dict) -> None:
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_function_shops_and_its_rollout_is_saved(tmp_path) -> None:
    done = run_example("scripted_agent", str(tmp_path / "r.parquet"))
    assert done.returncode == 0, done.stderr
    assert "won, score 1.000" in done.stdout
    batch = load_batch(tmp_path / "r.parquet")
    assert f"{len(batch)} steps saved" in done.stdout
    assert batch.action_possible.all() and batch.terminated.all()


def test_a_model_behind_an_endpoint_plays(endpoint, tmp_path) -> None:
    done = run_example(
        "openai_agent", "--base-url", endpoint.base_url, "--model", "shopper", "--goals", "6",
        "--out", str(tmp_path / "r.parquet"), OPENAI_API_KEY="sk-test",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    batch = load_batch(tmp_path / "r.parquet")
    assert "<think>let me see — yes</think>" in done.stdout
    assert batch.format_valid.all() and batch.won.any()
    assert len(endpoint.seen) == len(batch) + 1, "the refused request was sent again"
    assert endpoint.keys == {"Bearer sk-test"}
    assert {(body["temperature"], body["max_tokens"]) for body in endpoint.seen} == {(0.4, 512)}
    # Each step of an episode has its own seed.
    assert len({body["seed"] for body in endpoint.seen}) == len(batch)


def test_what_the_endpoint_refuses_is_said_in_one_line(endpoint) -> None:
    done = run_example("openai_agent", "--base-url", endpoint.base_url, "--model", "other", "--goals", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert 'HTTP 404: {"error": "no model other"}' in done.stderr


def test_streamed_and_listed_replies_are_the_same_episodes(endpoint) -> None:
    example = load_example("openai_agent")
    policy = example.OpenAIPolicy(endpoint.base_url, "shopper", first_pause_s=0.01)
    assert isinstance(policy, StreamingPolicy)

    class Listed:
        weight_version, encode, generate = 0, policy.encode, policy.generate

    batches = [
        TrajectoryCollector(EnvManager("WebShop-v1", 4)).collect(
            range(4), each, SamplingParams(max_tokens=512), group_size=1, update=0, seed=0
        )
        for each in (policy, Listed())
    ]
    assert batches[0].action.tolist() == batches[1].action.tolist()
    assert batches[0].won.tolist() == batches[1].won.tolist()
    policy.close()


def test_cut_odd_and_missing_answers(endpoint) -> None:
    example = load_example("openai_agent")
    policy = example.OpenAIPolicy(endpoint.base_url, "shopper", first_pause_s=0.01, max_tries=2)

    def ask(prompt: str, admissible: tuple[str, ...] | None = None, max_tokens: int = 100):
        request = GenerationRequest(policy.encode(prompt), NoiseKey(0, 0, 0, 0), admissible)
        return policy.generate([request], SamplingParams(max_tokens=max_tokens))[0]

    page = "Your assignment: red mug\nFrom here you can do one of the following:\n'search[<your query>]'"
    cut = ask(page, max_tokens=5)
    assert (cut.text, cut.is_cut) == ("<thin", True)
    assert not ask(page).is_cut
    with pytest.raises(example.EndpointError, match="no choices"):
        ask("odd")
    with pytest.raises(example.EndpointError, match="constrained"):
        ask(page, ("click[a]",))
    policy.close()
    nobody = example.OpenAIPolicy("http://127.0.0.1:9", "shopper", first_pause_s=0.01, max_tries=2)
    policy = nobody
    with pytest.raises(example.EndpointError, match="gave no reply"):
        ask(page)
    nobody.close()


def test_the_rollout_benchmark_times_every_part(tmp_path) -> None:
    arguments = ("--templates", "compact", "--repeats", "1", "--no-policy", "--out", str(tmp_path / "b.json"))
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "bench_rollout.py", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    head, rule, row = done.stdout.splitlines()
    assert head.count("|") == rule.count("|") == row.count("|") == 9
    result = json.loads((tmp_path / "b.json").read_text())["scripted"][0]
    parts = [result[f"{part}_s"]["mean"] for part in ("prompts", "tokenization", "stepping", "flattening")]
    assert result["all_s"]["mean"] == pytest.approx(sum(parts), abs=0.003)
    assert min(parts) > 0
