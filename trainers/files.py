"""Files and directories that are either complete or not there, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    from trainers.ranks import Ranks


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A scratch directory that becomes `target` in one step when the block ends without an error.

    If `target` is there already (another process was faster), it is kept and the scratch directory thrown away.
    """
    _make_directory(target.parent)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        scratch.chmod(0o755)
        yield scratch
        for path in (*scratch.rglob("*"), scratch):
            sync(path)
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.is_dir():
                raise
        sync(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class WriteError(Exception):
    """Some rank could not write its part."""


def write_together(target: Path, ranks: Ranks, write: Callable[[Path], None]) -> None:
    """A directory that all ranks write into, and that becomes `target` only when none of them failed.

    Args:
        target: Directory on a disk that all ranks share.
        ranks: All must call it.
        write: Writes this rank's part into a scratch directory. Where it needs the other ranks it must fail on all of
            them or on none.

    Raises:
        WriteError: On every rank, with what the first one that failed said; nothing is left on the disk then.
    """
    with ExitStack() as stack:
        make = (lambda: stack.enter_context(atomic_directory(target))) if ranks.is_first else (lambda: None)
        scratch = _agreed(ranks, make)[0]
        _agreed(ranks, lambda: write(scratch))
        _agreed(ranks, stack.pop_all().close)


def _agreed(ranks: Ranks, action: Callable[[], Any]) -> list[Any]:
    """Results of an action of every rank, unless one failed."""
    result, problem = None, None
    try:
        result = action()
    except Exception as error:  # some writers raise bare ones, and the other ranks must not wait for this one
        first_line = (str(error).strip().splitlines() or [""])[0]
        problem = f"{type(error).__name__}: {first_line}"
    outcomes = ranks.gather((result, problem))
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text]
    if problems:
        raise WriteError(problems[0])
    return [result for result, _ in outcomes]


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file in one step."""
    _make_directory(path.parent)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        sync(scratch)
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    sync(path.parent)


def keep_copy(path: Path, target: Path) -> Path:
    """Copies a file that is about to be replaced to `target`, or beside it where that name is taken by another.

    Returns:
        Where the copy lies; an equal one of before is as good.
    """
    content, place, number = path.read_bytes(), target, 1
    while place.exists() and place.read_bytes() != content:
        number += 1
        place = target.with_stem(f"{target.stem}-{number}")
    if not place.exists():
        write_atomically(place, content)
    return place


def require_writable(directory: Path, *, setting: str) -> None:
    """Finds out early whether a directory can be made and written, and leaves nothing behind.

    Raises:
        ShopGymError: It cannot; the message begins with `setting`, the name of what the user chose.
    """
    try:
        nearest = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
        tempfile.TemporaryDirectory(dir=nearest, prefix=".shopgym-").cleanup()
    except OSError as error:
        raise ShopGymError(f"{setting}: {directory} cannot be written ({error.strerror}); name another place") from None


def _make_directory(directory: Path) -> None:
    """Makes a directory and those above it, each one safely on the disk."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are safely on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
