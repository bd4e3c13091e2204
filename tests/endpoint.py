"""A small OpenAI-compatible server, for tests: it answers as the rule of `examples/scripted_agent.py` shops."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[1]


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Endpoint(ThreadingHTTPServer):
    """Serves the model `shopper`, which thinks aloud; the first request of all is refused as a busy server would.

    Prompts that are the name of a trouble (`ODD`) get it as their answer.
    """

    ODD: ClassVar[dict[str, tuple[int, object]]] = {
        "no choices": (200, {"choices": []}),
        "no message": (200, {"choices": [{"text": "a completion"}]}),
        "no content": (200, {"choices": [{"message": {"content": None}}]}),
        "taken out": (200, {"choices": [{"message": {"content": "<action>a</action>", "reasoning_content": "hm"}}]}),
        "half a character": (200, {"choices": [{"message": {"content": "\ud800!"}}]}),
        "no JSON": (200, "<html>"),
        "created": (201, {"choices": []}),
        "forbidden": (401, {"error": "the key\nis wrong"}),
        "broken": (500, {"error": "out of memory"}),
    }

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[dict] = []
        self.keys: set[str | None] = set()
        self.lock = threading.Lock()
        self.reply_to = load_example("scripted_agent").reply_to
        self.base_url = f"http://127.0.0.1:{self.server_port}/v1"
        self.num_running = self.most_running = 0
        self.delay_s = 0.0


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(body)
            self.server.keys.add(self.headers["Authorization"])
            is_first = len(self.server.seen) == 1
            self.server.num_running += 1
            self.server.most_running = max(self.server.most_running, self.server.num_running)
        threading.Event().wait(self.server.delay_s)
        with self.server.lock:
            self.server.num_running -= 1
        self._send(*((503, {"error": "busy"}) if is_first else self._answer(body)))

    def _answer(self, body: dict) -> tuple[int, object]:
        if self.path != "/v1/chat/completions" or body["model"] != "shopper":
            return 404, {"error": f"no model {body['model']}"}
        prompt = body["messages"][0]["content"]
        if prompt in self.server.ODD:
            return self.server.ODD[prompt]
        text, reason = f"<think>let me see — yes</think>{self.server.reply_to(prompt, None)}", "stop"
        if body["max_tokens"] < 10:
            text, reason = text[: body["max_tokens"]], "length"
        return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}

    def _send(self, code: int, answer: object) -> None:
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args) -> None:
        pass


@contextmanager
def serving() -> Iterator[Endpoint]:
    """A server on a free port of this machine, stopped at the end."""
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
