"""Tests that need an extra skip without it, unless they were asked for: then they fail."""

from __future__ import annotations

import importlib.util
import os

import pytest


def require_extra(extra: str, *modules: str) -> None:
    """Call at the top of a test module, before anything of the extra is used.

    Args:
        extra: Its name in setup.cfg. SHOPGYM_REQUIRE_EXTRAS lists those that must not be skipped.
        modules: What must be importable.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if not missing:
        return
    message = f"needs {', '.join(missing)}: pip install -e '.[{extra},dev]'"
    if extra in os.environ.get("SHOPGYM_REQUIRE_EXTRAS", "").replace(",", " ").split():
        pytest.fail(message, pytrace=False)
    pytest.skip(message, allow_module_level=True)
