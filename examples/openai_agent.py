"""How good is a model behind an OpenAI-compatible endpoint? It plays a few goals, many at a time, none waiting.

Run: OPENAI_API_KEY=... python examples/openai_agent.py --base-url http://localhost:8000/v1 --model NAME [--goals 8]

Any server with POST {base-url}/chat/completions will do. What comes back is text: there are no token ids and no
log-probs to train on, so that this is for evaluation and for collecting examples.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from env_manager import EnvConfig, EnvManager
from rollout import Generation, GenerationRequest, SamplingParams, TrajectoryCollector, save_batch
from rollout.report import sample_report
from webshop_env.errors import ShopGymError


class EndpointError(ShopGymError):
    """The endpoint cannot be reached or refuses what it is asked."""


class OpenAIPolicy:
    """Answers prompts through an endpoint; as it has `submit` and `poll`, no episode waits for another's reply.

    Tokens are UTF-8 bytes, because an endpoint has no others to show.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str = "",
        num_parallel: int = 16,
        timeout_s: float = 120.0,
        max_tries: int = 4,
        first_pause_s: float = 1.0,
    ) -> None:
        self.weight_version = 0
        self._url, self._model, self._api_key = f"{base_url.rstrip('/')}/chat/completions", model, api_key
        self._timeout_s, self._max_tries, self._first_pause_s = timeout_s, max_tries, first_pause_s
        self._pool = ThreadPoolExecutor(num_parallel)
        self._running: dict[Future[Generation], int] = {}
        self._num_requests = 0

    def encode(self, prompt: str) -> np.ndarray:
        """The bytes of the prompt, int32."""
        return np.frombuffer(prompt.encode(), dtype=np.uint8).astype(np.int32)

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """All replies, in the order of the requests."""
        return list(self._pool.map(lambda request: self._answer(request, params), requests))

    def submit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[int]:
        """Sends requests off; `poll` brings the replies."""
        numbers = []
        for request in requests:
            numbers.append(self._num_requests)
            self._running[self._pool.submit(self._answer, request, params)] = self._num_requests
            self._num_requests += 1
        return numbers

    def poll(self) -> list[tuple[int, Generation]]:
        """Waits for at least one reply."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        return [(self._running.pop(future), future.result()) for future in done]

    def close(self) -> None:
        """Gives up what has not been sent yet."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _answer(self, request: GenerationRequest, params: SamplingParams) -> Generation:
        if request.admissible is not None:
            raise EndpointError("an endpoint cannot be held to a page's actions: collect without `constrained`")
        noise = request.noise
        answer = self._post(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": bytes(request.prompt_ids.astype(np.uint8)).decode()}],
                "temperature": params.temperature,
                "max_tokens": params.max_tokens,
                # The same for the same step of the same episode, where the server honours it.
                "seed": hash((noise.seed, noise.update, noise.episode, noise.step)) % 2**31,
            }
        )
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise EndpointError(f"{self._url} answered {json.dumps(answer)[:200]}: no choices[0].message") from None
        reply_ids = self.encode(text)
        return Generation(
            reply_ids=reply_ids,
            log_probs=np.zeros(len(reply_ids), dtype=np.float32),
            text=text,
            is_cut=choice.get("finish_reason") == "length",
            weight_version=self.weight_version,
        )

    def _post(self, body: dict) -> dict:
        """Sends one request; what may pass (a busy or restarting server, a lost line) is tried again after a pause."""
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        problem = ""
        for attempt in range(self._max_tries):
            if attempt:
                time.sleep(self._first_pause_s * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}: {error.read().decode(errors='replace')[:200]}"
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, ValueError) as error:  # no connection, a timeout; no JSON
                problem = str(error)
        raise EndpointError(f"{self._url} gave no reply ({problem}); check --base-url, --model and OPENAI_API_KEY")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True, help="where the API begins, such as http://localhost:8000/v1")
    parser.add_argument("--model", required=True, help="name of the model at that endpoint")
    parser.add_argument("--goals", type=int, default=8, help="goals to play, once each")
    parser.add_argument("--temperature", type=float, default=0.4)
    parser.add_argument("--max-tokens", type=int, default=512, help="of a reply")
    parser.add_argument("--parallel", type=int, default=16, help="requests under way at once")
    parser.add_argument("--out", help="Parquet file for the episodes")
    options = parser.parse_args()

    policy = OpenAIPolicy(
        options.base_url,
        options.model,
        api_key=os.environ.get("OPENAI_API_KEY", ""),
        num_parallel=options.parallel,
    )
    collector = TrajectoryCollector(EnvManager("WebShop-v1", options.goals, EnvConfig(prompt="think")))
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    try:
        batch = collector.collect(range(options.goals), policy, params, group_size=1, update=0, seed=0)
    finally:
        policy.close()
    print(sample_report(batch, num_episodes=2, decode=lambda ids: bytes(ids.tolist()).decode()))
    figures = collector.statistics
    print(f"success {figures['rollout/success_frac']:.3f}, score {figures['rollout/task_score']:.3f}")
    if options.out:
        print(f"{len(batch)} steps saved to {save_batch(batch, options.out)}")


if __name__ == "__main__":
    try:
        main()
    except ShopGymError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
