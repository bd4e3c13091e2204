"""Fetch the public files of WebShop: resumable, and checked by size and hash.

Addresses come from `assets/sources.json`, or from a file of one's own in the same format: `{"sets": {NAME: [{"name",
"url", "bytes", "sha256"}, ...]}}`. Where size and hash are not known (null), the first fetch records them in
`fetched.lock.json` beside the files, and later ones hold the files to it.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from webshop_env.cache import write_whole
from webshop_env.command_line import say
from webshop_env.datatools.command import Command
from webshop_env.errors import ShopGymError

SOURCES = Path(__file__).resolve().parents[1] / "assets" / "sources.json"
LOCK_NAME = "fetched.lock.json"
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Source:
    """One file to fetch."""

    name: str
    url: str
    num_bytes: int | None
    sha256: str | None
    """None for what nobody has recorded yet."""


def read_sources(path: Path, set_name: str) -> tuple[Source, ...]:
    """The files of a set, or one line that says what is wrong with the list."""
    try:
        sets = json.loads(path.read_text(encoding="utf-8"))["sets"]
        if set_name not in sets:
            raise ShopGymError(f"{path.name}: no set {set_name!r}; there are {', '.join(sorted(sets))}")
        if not isinstance(sets[set_name], list) or not sets[set_name]:
            raise ShopGymError(f"{path}: set {set_name!r} must be a list of at least one file")
        sources = tuple(
            Source(str(record["name"]), str(record["url"]), record.get("bytes"), record.get("sha256"))
            for record in sets[set_name]
        )
    except OSError as error:
        raise ShopGymError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise ShopGymError(f"{path}: not a list of sources (nested too deeply)") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ShopGymError):
            raise
        raise ShopGymError(f"{path}: not a list of sources ({type(error).__name__}: {error})") from None
    for source in sources:
        is_name = Path(source.name).name == source.name and source.name.isprintable() and source.name != LOCK_NAME
        if not is_name or not source.name.endswith(".json"):
            raise ShopGymError(f"{path}: {source.name!r} is not a file name such as 'items_shuffle.json'")
        if problem := _problem_of(source.url):
            raise ShopGymError(f"{path}: {source.name}: the address {problem}")
    return sources


def _problem_of(url: str) -> str:
    """What is wrong with an address; empty if nothing."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
        host.encode("idna")  # as it is looked up
    except ValueError as error:  # a bracket that is not closed, a port above 65535, a part of a name of 64 letters
        return f"{url!r} is none ({error})"
    if parts.scheme not in ("http", "https"):
        return "must begin with http:// or https://"
    if not host:
        return f"{url!r} names no host"
    if not url.isascii() or not url.isprintable() or " " in url:
        return f"{url!r} holds a character that must be written as %XX"
    return ""


def fetch(directory: Path, sources: tuple[Source, ...], *, say: Callable[[str], None]) -> None:
    """Have every file in the directory, whole and as expected; what is there already is checked and left alone.

    Raises:
        ShopGymError: There is no network, the server does not send the file, or a file is not the expected one.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = _read_lock(directory / LOCK_NAME)
        for source in sources:
            path = directory / source.name
            if path.exists():
                facts, how = _facts(path), "present"
                _require_expected(path, facts, source, lock)
            else:
                part = _download(path, source, say)
                facts, how = _facts(part), "fetched"
                try:
                    _require_expected(path, facts, source, lock)
                    _require_json(part, source)
                except ShopGymError:
                    _forget(part)
                    raise
                os.replace(part, path)
                _forget(part)
            lock[source.name] = {"url": source.url, **facts}
            write_whole(directory / LOCK_NAME, json.dumps(lock, indent=2, sort_keys=True) + "\n")
            say(f"{source.name}: {how}, {facts['bytes']:,} bytes, sha256 {facts['sha256'][:16]}")
    except OSError as error:
        raise ShopGymError(f"{error.filename or directory}: {error.strerror or error}") from error


def _download(path: Path, source: Source, say: Callable[[str], None]) -> Path:
    """Fetch into `NAME.part`, from where an earlier try stopped if the server still has the same file."""
    part = path.with_name(path.name + ".part")
    state_path = part.with_name(part.name + ".state")
    state = _read_state(state_path, source.url)
    num_have = part.stat().st_size if part.exists() and state else 0
    headers = {"User-Agent": "shopgym", "Accept-Encoding": "identity"}
    if num_have:
        headers |= {"Range": f"bytes={num_have}-", "If-Range": state["validator"]}
    where = f"{source.name}: {urlsplit(source.url).netloc}"
    by_hand = f"check the network, or put the file there by hand: {source.url} -> {path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(source.url, headers=headers), timeout=TIMEOUT_S) as answer:
            if answer.headers.get_content_type() == "text/html":
                raise ShopGymError(f"{where} sent a web page instead of the file (a quota or a sign-in?); {by_hand}")
            is_resumed = answer.status == 206 and _starts_at(answer.headers.get("Content-Range"), num_have)
            if answer.status == 206 and not is_resumed:
                raise ShopGymError(f"{where} sent another part than was asked for; delete {part} and try again")
            num_have = num_have if is_resumed else 0
            length = answer.headers.get("Content-Length")
            total = num_have + int(length) if length and length.isdigit() else None
            validator = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            if validator and not validator.startswith("W/"):
                state_path.write_text(json.dumps({"url": source.url, "validator": validator}), encoding="utf-8")
            elif not is_resumed:
                state_path.unlink(missing_ok=True)
            if is_resumed:
                say(f"{source.name}: goes on after {num_have:,} bytes")
            with part.open("ab" if is_resumed else "wb") as file:
                while chunk := answer.read(CHUNK_BYTES):
                    file.write(chunk)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # The part is not what the server has any more.
            _forget(part)
        raise ShopGymError(f"{where} answered {error.code} {error.reason}; {by_hand}") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise ShopGymError(f"{where} cannot be reached or stopped sending ({reason}); {by_hand}") from None
    size = part.stat().st_size
    if total is not None and size != total:
        raise ShopGymError(f"{where} stopped sending after {size:,} of {total:,} bytes; run the command again to go on")
    return part


def _starts_at(content_range: str | None, num_have: int) -> bool:
    return content_range is not None and content_range.replace(" ", "").startswith(f"bytes{num_have}-")


def _read_state(path: Path, url: str) -> dict[str, str]:
    """Of an interrupted fetch from the same address: what tells whether the server still has the same file."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    is_usable = isinstance(state, dict) and state.get("url") == url and isinstance(state.get("validator"), str)
    return state if is_usable else {}


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    part.with_name(part.name + ".state").unlink(missing_ok=True)


def _facts(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _require_expected(path: Path, facts: Mapping[str, Any], source: Source, lock: Mapping[str, Any]) -> None:
    recorded = lock.get(source.name, {})
    for what, expected, where in (
        ("bytes", source.num_bytes, "the list of sources"),
        ("sha256", source.sha256, "the list of sources"),
        ("bytes", recorded.get("bytes"), LOCK_NAME),
        ("sha256", recorded.get("sha256"), LOCK_NAME),
    ):
        if expected is not None and facts[what] != expected:
            raise ShopGymError(
                f"{path}: {what} {facts[what]} is not the {expected} of {where}; delete the file (or its entry "
                "there, if the public file has changed) and fetch again"
            )


def _require_json(part: Path, source: Source) -> None:
    with part.open("rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start[:1] not in (b"[", b"{"):
        raise ShopGymError(f"{source.name}: what {urlsplit(source.url).netloc} sent is not JSON; see {source.url}")


def _read_lock(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        lock = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ShopGymError(f"{path}: not JSON ({error}); delete it to record the files again") from None
    if not isinstance(lock, dict) or not all(isinstance(entry, dict) for entry in lock.values()):
        raise ShopGymError(f"{path}: not an object of file name -> facts; delete it to record the files again")
    return lock


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data_dir", type=Path, help="directory to fetch into; made if missing")
    parser.add_argument("--set", default="full", dest="set_name", help="full (1.18 million products) or small (1,000)")
    parser.add_argument("--sources", type=Path, default=SOURCES, help="another list of addresses")


def _run(arguments: argparse.Namespace) -> int:
    fetch(arguments.data_dir, read_sources(arguments.sources, arguments.set_name), say=say)
    return 0


FETCH = Command("fetch", __doc__.split("\n")[0], _add_arguments, _run)
