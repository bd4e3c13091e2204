"""What several test modules share: where reference data lie, and a cache that tests do not leave behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# Before torch is imported anywhere: two threads are what the smallest supported machine has.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Threads that spin while they wait are many times slower where something else keeps one of the cores busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A process that is aborted tells where it stood.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# What runs in a shell's background ignores Ctrl-C, and so would every process here that is to be ended by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """The folder with `golden/` (recordings of the original) and `webshop-1k/` (its 1,000 products).

    They are not part of the repository. Elsewhere than in CI their absence skips the test.
    """
    path = Path(os.environ.get("SHOPGYM_REFERENCE_DIR", ROOT.parent / "shared" / "data"))
    if (path / "golden").is_dir() and (path / "webshop-1k").is_dir():
        return path
    message = f"no reference data in {path}: put golden/ and webshop-1k/ there or set SHOPGYM_REFERENCE_DIR"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the user's cache out of the tests, and the tests out of the user's cache."""
    if "SHOPGYM_CACHE" not in os.environ:
        monkeypatch.setenv("SHOPGYM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
