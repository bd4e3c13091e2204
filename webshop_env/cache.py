"""Where files that can be made again are kept: $SHOPGYM_CACHE, else ~/.cache/shopgym."""

from __future__ import annotations

import os
from pathlib import Path


def catalogue_cache(catalogue_hash: str) -> Path:
    """The directory of what was built for one catalogue; it need not exist."""
    base = os.environ.get("SHOPGYM_CACHE") or Path.home() / ".cache" / "shopgym"
    return Path(base).expanduser() / catalogue_hash
