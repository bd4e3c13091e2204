"""One file of named columns, written whole or not at all and opened in a moment, whatever its size.

Layout: the columns one after another, each on a multiple of 64 bytes; then a JSON text that says what the file is and
where each column lies; then the length of that text (8 bytes, little endian) and `MAGIC`. Arrays are memory-mapped, so
all processes of a machine share them through the page cache. Texts are read from the same cache one at a time: mapped
in, every one of them would draw its neighbours into the memory of the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from webshop_env.errors import ShopGymError

MAGIC = b"shopgym-table-1\n"
_ALIGNMENT = 64
_TAIL_BYTES = 8 + len(MAGIC)


class TableError(ShopGymError):
    """A table file is cut off, damaged, or not the one that it should be."""


class TableWriter:
    """What is being written; made by `write_table`.

    Attributes:
        facts: Small values that JSON can hold; kept with the columns.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.facts: dict[str, Any] = {}
        self._file = file
        self._columns: dict[str, tuple[str, int, int]] = {}

    def put(self, name: str, values: np.ndarray) -> None:
        """Add a column of numbers, one-dimensional."""
        start = self._align()
        self._file.write(np.ascontiguousarray(values).data)
        self._columns[name] = (values.dtype.str, start, values.size)

    def put_texts(self, name: str, texts: Iterable[bytes]) -> int:
        """Add a column of texts as they come, without holding them in memory; returns their number."""
        start = self._align()
        ends, end = array("q", [0]), 0
        for text in texts:
            self._file.write(text)
            end += len(text)
            ends.append(end)
        self._columns[name] = ("|u1", start, end)
        self.put(f"{name}.ends", np.asarray(ends))
        return len(ends) - 1

    def _align(self) -> int:
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        return self._file.tell()

    def _finish(self, kind: str, catalogue_hash: str) -> None:
        head = {"kind": kind, "catalogue_hash": catalogue_hash, "facts": self.facts, "columns": self._columns}
        text = json.dumps(head).encode()
        self._file.write(text + len(text).to_bytes(8, "little") + MAGIC)


@contextmanager
def write_table(path: Path, kind: str, catalogue_hash: str) -> Iterator[TableWriter]:
    """Write a table; it is there, whole and on the disk, when the block has ended without an error.

    Args:
        path: An older file there is replaced in one step; who has it open keeps the older one.
        kind: What the columns are, with a number that changes when their meaning does.
        catalogue_hash: The catalogue that it was made from.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_orphans(path)
    handle, temporary = _locked_temporary(path)
    try:
        with os.fdopen(handle, "wb", buffering=1 << 20) as file:
            writer = TableWriter(file)
            yield writer
            writer._finish(kind, catalogue_hash)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
            os.replace(temporary, path)  # still locked: another writer would take it for an orphan
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # Ctrl-C may come when it has just got its name
            os.unlink(temporary)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _locked_temporary(path: Path) -> tuple[int, str]:
    """A new file beside the path, open and locked, and its name."""
    while True:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".tmp")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except BaseException:
            os.close(handle)
            os.unlink(temporary)
            raise
        if os.fstat(handle).st_nlink:
            return handle, temporary
        os.close(handle)  # another writer took it for an orphan before it was locked


def _remove_orphans(path: Path) -> None:
    """Remove what writers that were killed have left; who still writes holds a lock."""
    for orphan in path.parent.glob(f".{path.name}-*.tmp"):
        with contextlib.suppress(OSError), open(orphan, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            orphan.unlink()


class Texts(Sequence[bytes]):
    """A column of texts, read from the file when they are asked for."""

    def __init__(self, table: TableFile, start: int, ends: np.ndarray) -> None:
        self._table, self._start, self._ends = table, start, ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> list[bytes]: ...
    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(place)
        first, last = self._ends[place : place + 2].tolist()
        return self._table.read(self._start + first, last - first)

    def __iter__(self) -> Iterator[bytes]:
        for first in range(0, len(self), 1024):
            ends = self._ends[first : first + 1025].tolist()
            block = self._table.read(self._start + ends[0], ends[-1] - ends[0])
            for left, right in pairwise(ends):
                yield block[left - ends[0] : right - ends[0]]


class TableFile:
    """An open table. It stays open and whole as long as anything refers to it, even if the file is replaced.

    Args:
        path: The file.
        kind: What it must be.
        catalogue_hash: The catalogue that it must have been made from.

    Raises:
        FileNotFoundError: There is no such file.
        TableError: It is cut off, damaged, of another kind or of another catalogue; the message says which.
    """

    def __init__(self, path: Path, kind: str, catalogue_hash: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            self._handle = os.dup(file.fileno())
        size = os.fstat(self._handle).st_size
        head = self._read_head(size)
        if head.get("kind") != kind:
            raise TableError(f"{path}: holds {head.get('kind')!r}, not {kind!r}; build it again")
        if head.get("catalogue_hash") != catalogue_hash:
            found = str(head.get("catalogue_hash"))[:16]
            raise TableError(f"{path}: made from catalogue {found}, not from {catalogue_hash[:16]}; build it again")
        self.facts: dict[str, Any] = head["facts"]
        self._columns: dict[str, Any] = head["columns"]
        self._map = mmap.mmap(self._handle, size, access=mmap.ACCESS_READ)

    def array(self, name: str) -> np.ndarray:
        """A column of numbers, memory-mapped and read-only."""
        dtype, start, count = self._columns[name]
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=start)

    def texts(self, name: str) -> Texts:
        """A column of texts."""
        return Texts(self, self._columns[name][1], self.array(f"{name}.ends"))

    def read(self, start: int, length: int) -> bytes:
        """Bytes of the file."""
        return os.pread(self._handle, length, start)

    def __del__(self) -> None:
        if (handle := getattr(self, "_handle", None)) is not None:
            os.close(handle)

    def _read_head(self, size: int) -> dict[str, Any]:
        tail = os.pread(self._handle, _TAIL_BYTES, max(size - _TAIL_BYTES, 0))
        if tail[8:] != MAGIC:
            raise TableError(f"{self.path}: cut off or not a table of this release; build it again")
        length = int.from_bytes(tail[:8], "little")
        try:
            head = json.loads(os.pread(self._handle, length, size - _TAIL_BYTES - length))
            end = max((start + count * np.dtype(dtype).itemsize for dtype, start, count in head["columns"].values()))
            if end > size - _TAIL_BYTES - length:
                raise ValueError("a column lies outside of the file")
            return head
        except (ValueError, KeyError, TypeError, OSError, OverflowError) as error:
            raise TableError(f"{self.path}: damaged ({error}); build it again") from error
