"""Generation by a model behind an OpenAI-compatible endpoint (`POST {base_url}/chat/completions`), many at a time.

What comes back is text: there are no token ids and no log-probs to train on, so that this is for evaluation and for
collecting examples. Tokens are UTF-8 bytes, because an endpoint has no others to show.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlparse

import numpy as np

from rollout.noise import uniforms
from rollout.types import Generation, GenerationRequest, SamplingParams
from webshop_env.errors import ShopGymError

_LONGEST_PAUSE_S = 60.0


class EndpointError(ShopGymError):
    """The endpoint cannot be reached, refuses what it is asked, or answers something else than a reply."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A request on its way to a thread."""

    number: int
    request: GenerationRequest
    params: SamplingParams


class OpenAIEngine:
    """Answers prompts through an endpoint; as it has `submit` and `poll`, no episode waits for another's reply."""

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
        """Sends nothing yet.

        Args:
            base_url: Where the API begins, such as http://localhost:8000/v1.
            model: Name of the model there.
            api_key: Sent as a bearer token, without blanks around it; empty sends none.
            num_parallel: Requests under way at once, at most.
            timeout_s: Of one try.
            max_tries: Tries of one request; only what may pass (a busy or restarting server, a lost line) is tried
                again.
            first_pause_s: Before the second try; each later pause is twice as long, and a server that names one
                (`Retry-After`) gets that, up to a minute.

        Raises:
            EndpointError: The address is none, the key cannot be sent, or no request could ever be under way.
        """
        if not _is_address(base_url):
            raise EndpointError(f"base URL {base_url!r} is no address such as http://localhost:8000/v1")
        if num_parallel < 1:
            raise EndpointError(f"num_parallel must be at least 1, got {num_parallel}")
        self.weight_version = 0
        self._url, self._model = f"{base_url.rstrip('/')}/chat/completions", model
        self._headers = {"Content-Type": "application/json"}
        if api_key := api_key.strip():
            if not (api_key.isascii() and api_key.isprintable()):  # the key itself is not for logs
                raise EndpointError("the API key holds a character that is no printable ASCII; copy it again")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s, self._max_tries, self._first_pause_s = timeout_s, max_tries, first_pause_s
        self._num_parallel = num_parallel
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[int, Generation | Exception]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._num_sent = self._num_running = 0

    def encode(self, prompt: str) -> np.ndarray:
        """The bytes of the prompt, int32."""
        return np.frombuffer(prompt.encode(), dtype=np.uint8).astype(np.int32)

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """All replies, in the order of the requests."""
        numbers = self.submit(requests, params)
        replies: dict[int, Generation] = {}
        while not all(number in replies for number in numbers):
            replies.update(self.poll())
        return [replies[number] for number in numbers]

    def submit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[int]:
        """Sends requests off; `poll` brings the replies.

        Raises:
            EndpointError: They ask for what an endpoint cannot do.
        """
        if any(request.admissible is not None for request in requests):
            raise EndpointError("an endpoint cannot be held to a page's actions: collect without `constrained`")
        if params.top_k > 0:
            raise EndpointError("an endpoint takes no top_k; leave it off")
        numbers = []
        for request in requests:
            self._jobs.put(_Job(self._num_sent, request, params))
            numbers.append(self._num_sent)
            self._num_sent += 1
        self._num_running += len(requests)
        while len(self._threads) < min(self._num_parallel, self._num_running):
            # Daemons: whoever stops the program does not wait for a server that says nothing.
            self._threads.append(threading.Thread(target=self._work, daemon=True))
            self._threads[-1].start()
        return numbers

    def poll(self) -> list[tuple[int, Generation]]:
        """Waits for at least one reply.

        Raises:
            EndpointError: A request failed for good.
        """
        done: list[tuple[int, Generation]] = []
        while self._num_running:
            try:
                number, answer = self._answers.get(block=not done)
            except Empty:
                break
            self._num_running -= 1
            if isinstance(answer, Exception):
                raise answer
            done.append((number, answer))
        return done

    def close(self) -> None:
        """Gives up what has not been sent yet; what is under way ends unheard."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed.is_set():
            try:
                self._answers.put((job.number, self._answer(job.request, job.params)))
            except Exception as error:  # it belongs to whoever polls: a thread that dies would be waited for
                self._answers.put((job.number, error))

    def _answer(self, request: GenerationRequest, params: SamplingParams) -> Generation:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": bytes(request.prompt_ids.astype(np.uint8)).decode()}],
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            # The same for the same step of the same episode, where the server honours it.
            "seed": int(uniforms(request.noise, 1)[0] * 2**31),
        }
        if params.top_p < 1:
            body["top_p"] = params.top_p
        answer = self._post(body)
        try:
            choice = answer["choices"][0]
            text = _text_of(choice["message"])
        except (KeyError, IndexError, TypeError):
            raise EndpointError(f"{self._url} answered {json.dumps(answer)[:200]}: no choices[0].message") from None
        reply_ids = self.encode(text)
        return Generation(
            reply_ids=reply_ids,
            log_probs=np.full(len(reply_ids), np.nan, dtype=np.float32),
            text=text,
            is_cut=choice.get("finish_reason") == "length",
            weight_version=self.weight_version,
        )

    def _post(self, body: dict[str, Any]) -> Any:
        """Sends one request, again after a pause if what went wrong may pass."""
        request = urllib.request.Request(self._url, json.dumps(body).encode(), self._headers)
        problem, pause_s = "", self._first_pause_s
        for attempt in range(self._max_tries):
            if attempt and self._closed.wait(min(pause_s, _LONGEST_PAUSE_S)):
                break
            pause_s = self._first_pause_s * 2**attempt
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                    if response.status == 200:
                        return json.load(response)
                    problem = f"HTTP {response.status}"
            except urllib.error.HTTPError as error:
                problem = " ".join(f"HTTP {error.code}: {_beginning(error)}".split())
                if error.code not in (408, 429) and error.code < 500:
                    break
                pause_s = max(pause_s, _seconds(error.headers.get("Retry-After")))
            except (OSError, http.client.HTTPException, ValueError) as error:  # a lost line, a timeout; no JSON
                problem = str(error) or type(error).__name__
        raise EndpointError(f"{self._url} gave no reply ({problem}); check base URL, model name and API key")


def _is_address(url: str) -> bool:
    try:
        parts = urlparse(url)
    except ValueError:  # such as a bracket that is never closed
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


def _text_of(message: dict[str, Any]) -> str:
    """The reply, with the thoughts that a server took out of it put back where the model wrote them."""
    text = message["content"] or ""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    text = f"<think>{thoughts}</think>{text}" if thoughts else text
    return str(text).encode(errors="replace").decode()  # JSON can hold half a character, UTF-8 cannot


def _beginning(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(200).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return "no body"


def _seconds(header: str | None) -> float:
    """Of a Retry-After header; 0 where there is none, or a date."""
    try:
        return float(header or 0)
    except ValueError:
        return 0.0
