"""How many people can shop at once, does anything get lost, and what do sessions that nobody ends cost?

    python benchmarks/bench_site.py                 50 visitors x 20 steps, then 10,000 abandoned sessions

The site runs in a process of its own, over real connections, and records its visitors. Each visitor follows what its
page offers, drawn at random, and checks that the page after a step is that step's. At the end every episode of the
record is compared with what its visitor sent, and played again. Needs the extra `site`.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
from machine import RESULTS, describe_machine, write_result

from webshop_env.episodes import read_episodes
from webshop_env.playback import verify
from webshop_env.shop import open_shop

ROOT = Path(__file__).resolve().parent.parent
_STEP = re.compile(r"&#34;step&#34;: (\d+),")
_CONTROL = re.compile(r'<button type="submit" name="click" value="(\d+)"[^>]*? data-click="([^"]*)"')
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class Site:
    """The site in a process of its own.

    Args:
        record: Where it keeps episodes.
        max_steps: Of an episode.
    """

    def __init__(self, record: Path, max_steps: int) -> None:
        command = [sys.executable, "-m", "webshop_env.site", "--port", "0", "--record", str(record)]
        command += ["--max-steps", str(max_steps)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        self.host = urlsplit(self._process.stdout.readline().split()[-1]).netloc

    def memory_mb(self) -> float:
        """Resident memory of the process."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def cpu_s(self) -> float:
        """Processor time that it has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=120)


@contextmanager
def serving(record: Path, max_steps: int) -> Iterator[Site]:
    site = Site(record, max_steps)
    try:
        yield site
    finally:
        site.close()


class Visitor:
    """One connection, one session, a number of steps."""

    def __init__(self, host: str, goal: int, queries: list[str]) -> None:
        self.goal = goal
        self.actions: list[str] = []
        self.seconds: list[float] = []
        """A step each: sending it and reading the page that it leads to."""
        self.problem = ""
        self._rng = random.Random(goal)
        self._queries = queries
        self._connection = http.client.HTTPConnection(host, timeout=300)

    def shop(self, num_steps: int, start: threading.Barrier) -> None:
        try:
            start.wait()
            address = self.send("POST", "/shop", goal=str(self.goal))[0]
            page = self.send("GET", address)[1]
            for step in range(num_steps):
                form, action = self._choose(page)
                began = perf_counter()
                self.send("POST", address, step=str(step), **form)
                page = self.send("GET", address)[1]
                self.seconds.append(perf_counter() - began)
                self.actions.append(action)
                shown = _STEP.search(page)
                if shown is None or int(shown[1]) != step + 1:
                    raise AssertionError(f"after step {step + 1} the page is another one's")
        except Exception as error:  # is told at the end, for all visitors
            self.problem = f"visitor of goal {self.goal}: {error!r}"
        finally:
            self._connection.close()

    def _choose(self, page: str) -> tuple[dict[str, str], str]:
        if "data-search>" in page:
            query = self._rng.choice(self._queries)
            return {"query": query}, f"search[{query}]"
        controls = [(n, unescape(text)) for n, text in _CONTROL.findall(page)]
        number, text = self._rng.choice([control for control in controls if control[1] != "buy now"])
        return {"click": number}, f"click[{text}]"

    def send(self, method: str, path: str, **form: str) -> tuple[str, str]:
        """Where an answer leads to, and its text."""
        self._connection.request(method, path, urlencode(form) if form else None, FORM if form else {})
        answer = self._connection.getresponse()
        text = answer.read().decode()
        if answer.status not in (200, 303):
            raise AssertionError(f"{method} {path[:6]}: status {answer.status}")
        return answer.headers.get("Location", ""), text


def measure_visitors(num_visitors: int, num_steps: int) -> dict[str, Any]:
    """All at once; then what they did is looked for in the record."""
    queries = sorted({product.query for product in open_shop().products.values()})
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder)
        with serving(record, num_steps) as site:
            visitors = [Visitor(site.host, goal, queries) for goal in range(num_visitors)]
            start = threading.Barrier(num_visitors + 1)
            threads = [threading.Thread(target=visitor.shop, args=(num_steps, start)) for visitor in visitors]
            for thread in threads:
                thread.start()
            start.wait()
            began, cpu_before = perf_counter(), site.cpu_s()
            for thread in threads:
                thread.join()
            wall_s, cpu_s, memory_mb = perf_counter() - began, site.cpu_s() - cpu_before, site.memory_mb()
        episodes = {e.goal_index: e for path in record.iterdir() for e in read_episodes(path)}
    problems = [visitor.problem for visitor in visitors if visitor.problem]
    lost = sum(
        [step.action for step in episodes[visitor.goal].steps] != visitor.actions if visitor.goal in episodes else True
        for visitor in visitors
    )
    seconds = np.concatenate([visitor.seconds for visitor in visitors])
    return {
        "visitors": num_visitors,
        "steps_each": num_steps,
        "steps": len(seconds),
        "errors": problems,
        "episodes_lost_or_changed": lost,
        "episodes_that_verify": sum(verify(episode) is None for episode in episodes.values()),
        "wall_s": round(wall_s, 2),
        "steps_per_s": round(len(seconds) / wall_s, 1),
        "server_cpu_ms_per_step": round(1000 * cpu_s / len(seconds), 2),
        "step_p50_ms": round(1000 * float(np.quantile(seconds, 0.5)), 1),
        "step_p99_ms": round(1000 * float(np.quantile(seconds, 0.99)), 1),
        "server_memory_mb": round(memory_mb, 1),
    }


def measure_abandoned(num_sessions: int) -> dict[str, Any]:
    """Sessions that search once and are never seen again, beside one that goes on."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), 10_000) as site:
        faithful = Visitor(site.host, 0, ["lamp"])
        address = faithful.send("POST", "/shop", goal="0")[0]
        other = Visitor(site.host, 1, ["lamp"])
        before, half, began = site.memory_mb(), 0.0, perf_counter()
        for number in range(num_sessions):
            abandoned = other.send("POST", "/shop", goal=str(number % 1000))[0]
            other.send("POST", abandoned, step="0", query="area rugs")
            if number % 500 == 0:
                faithful.send("GET", address)
            if number == num_sessions // 2:
                half = site.memory_mb()
        wall_s = perf_counter() - began
        faithful.send("POST", address, step="0", query="lamp")
        page = faithful.send("GET", address)[1]
        kept = sum(1 for path in Path(folder).iterdir() for _ in read_episodes(path))
        after = site.memory_mb()
    return {
        "sessions": num_sessions,
        "memory_before_mb": round(before, 1),
        "memory_half_way_mb": round(half, 1),
        "memory_after_mb": round(after, 1),
        "dropped_and_recorded": kept,
        "the_faithful_session_lives": "&#34;step&#34;: 1," in page,
        "sessions_per_s": round(num_sessions / wall_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--visitors", type=int, default=50)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--abandoned", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_site.json")
    options = parser.parse_args()
    result = describe_machine("flask", "waitress", "numpy")
    result["visitors"] = measure_visitors(options.visitors, options.steps)
    result["abandoned"] = measure_abandoned(options.abandoned)
    for name in ("visitors", "abandoned"):
        print(name, *(f"  {key}: {value}" for key, value in result[name].items()), sep="\n")
    write_result(result, options.out)
    visitors = result["visitors"]
    is_whole = not visitors["errors"] and visitors["episodes_lost_or_changed"] == 0
    return 0 if is_whole and visitors["episodes_that_verify"] == options.visitors else 1


if __name__ == "__main__":
    sys.exit(main())
