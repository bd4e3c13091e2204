"""Where files that can be made again are kept: $SHOPGYM_CACHE, else ~/.cache/shopgym."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_SETTLED_S = 2.0
"""A file that was changed a moment ago may change again without another time stamp: its hash is not kept."""


def catalogue_cache(catalogue_hash: str) -> Path:
    """The directory of what was built for one catalogue; it need not exist."""
    return _base() / catalogue_hash


def remembered_hash(paths: Sequence[Path], what: str, compute: Callable[[], str]) -> str:
    """The hash of some files, computed once and looked up by the files' names, sizes and time stamps after that.

    A file that is written, replaced or touched gets another time of change (ctime, which no program sets at will), so
    its old hash is never found again. A cache that cannot be written only costs the time.

    Args:
        paths: The files; all exist.
        what: Tells apart the hashes that are made of the same files.
        compute: Makes the hash, 64 hex digits.
    """
    facts = [what, *([str(path.resolve()), *_stamp(path)] for path in paths)]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    kept = _base() / "hashes" / key
    try:
        if re.fullmatch(r"[0-9a-f]{64}", text := kept.read_text(encoding="ascii")):
            return text
    except (OSError, UnicodeDecodeError):
        pass
    started_s = time.time()
    result = compute()
    if facts[1:] == [[str(path.resolve()), *_stamp(path)] for path in paths] and all(
        path.stat().st_ctime < started_s - _SETTLED_S for path in paths
    ):
        with contextlib.suppress(OSError):
            write_whole(kept, result)
    return result


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: readers never see half of it, and a full disk is left nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # Ctrl-C may come when it has just got its name
                os.unlink(file.name)
            raise


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _base() -> Path:
    return Path(os.environ.get("SHOPGYM_CACHE") or Path.home() / ".cache" / "shopgym").expanduser()
