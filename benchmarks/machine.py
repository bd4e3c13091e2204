"""Where and with what a benchmark ran, and how its result is kept."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from webshop_env.errors import ShopGymError

RESULTS = Path(__file__).resolve().parent / "results"
PLACES = {
    **{"--data": "DIR", "--start": "START", "--out": "OUT", "--runs": "RUNS", "--logs": "LOGS", "--policy": "POLICY"},
    **{"--one-rank": "FILE", "--train-data": "MORE"},
}
"""Options that name a place, and what a kept command says instead."""


def describe_machine(*packages: str) -> dict[str, Any]:
    """Date, processor, load and versions, as every result begins with."""
    return {
        "date": datetime.date.today().isoformat(),
        "hardware": {"cpu": processor(), "cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 2)},
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
    }


def run_script(main: Callable[[], None]) -> None:
    """Runs a script's `main`; the caller's mistake is one line and exit code 2."""
    try:
        main()
    except ShopGymError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def command_to_keep(script: str, words: Sequence[str]) -> str:
    """A command line without the places where things lay on the machine.

    Args:
        script: Its path in the repository.
        words: What followed it; the word behind an option that names a place is replaced by a name for it.
    """
    kept = list(words)
    for i, word in enumerate(words[:-1]):
        if word in PLACES:
            kept[i + 1] = PLACES[word]
    return " ".join(["python", script, *kept])


def processor() -> str:
    """Name of the CPU where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def place_of_result(name: str, *, is_small: bool) -> Path:
    """Where a result goes that is given no other place: a smoke run measures nothing, and replaces no figures."""
    return (Path("outputs") / "benchmarks" if is_small else RESULTS) / f"{name}.json"


def write_result(result: dict[str, Any], path: Path) -> None:
    """Keeps a result as JSON, and says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"\n{path}")
