"""A file of named arrays that opens by a memory map: nothing is read before it is used, and processes share its pages.

A fixed start (mark, length and checksum of the header), a header in JSON, then the arrays one after another, each at a
multiple of 64 bytes, little-endian.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from webshop_env.search.base import IndexMismatchError

_MARK = b"ShopGym\x1a"
_START = struct.Struct("<8sII")  # mark, bytes of the header, its CRC-32
_ALIGNMENT = 64


def write_arrays(path: Path, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file, whole or not at all: readers never see half of it, and those of an older one keep theirs.

    Args:
        path: Replaced in one step; its directory is made.
        facts: What the header says besides; plain values that JSON can hold.
        arrays: Any number of arrays of numbers or bytes.
    """
    layout, offset = {}, 0
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("<")
        layout[name] = {"dtype": dtype.str, "shape": array.shape, "offset": offset}
        offset = _aligned(offset + array.nbytes)
    header = json.dumps({**facts, "arrays": layout, "array_bytes": offset}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_START.pack(_MARK, len(header), zlib.crc32(header)) + header)
            _pad(file)
            for array in arrays.values():
                np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tofile(file)
                _pad(file)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def map_arrays(path: Path, file_format: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Open a file of `write_arrays`.

    Args:
        path: The file.
        file_format: What the fact "format" must be.

    Returns:
        Its facts, and its arrays, read-only.

    Raises:
        IndexMismatchError: It is cut short, was damaged in its header, or is of another format; the message says which.
        FileNotFoundError: There is no such file.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_START.size)
        if len(start) < _START.size or not start.startswith(_MARK):
            raise _refusal(path, f"not a search index of this release: it begins with {start[:8]!r}")
        _, header_bytes, checksum = _START.unpack(start)
        header = file.read(header_bytes)
        if zlib.crc32(header) != checksum:
            raise _refusal(path, "damaged: its header does not have its checksum")
        facts = json.loads(header)
        if facts.get("format") != file_format:
            raise _refusal(path, f"format {facts.get('format')} is not {file_format}")
        first = _aligned(_START.size + header_bytes)
        if size != first + facts["array_bytes"]:
            raise _refusal(path, f"damaged: {size:,} bytes instead of {first + facts['array_bytes']:,}")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arrays = {}
    for name, place in facts.pop("arrays").items():
        shape = tuple(place["shape"])
        values = np.frombuffer(
            mapped, dtype=place["dtype"], count=int(np.prod(shape, dtype=np.int64)), offset=first + place["offset"]
        )
        arrays[name] = values.reshape(shape)
    return facts, arrays


def _refusal(path: Path, reason: str) -> IndexMismatchError:
    return IndexMismatchError(f"{path}: {reason}; build the index again")


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _pad(file: Any) -> None:
    file.write(bytes(_aligned(file.tell()) - file.tell()))
