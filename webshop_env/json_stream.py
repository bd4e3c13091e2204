"""Large JSON files read element by element, so that a catalogue of a million products needs no memory of its size."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from webshop_env.errors import CatalogError

CHUNK_BYTES = 1 << 20

_BLANKS = re.compile(r"[ \t\n\r]*")
_LONGEST_WORD = len("-Infinity")
"""An error nearer to the end of what has been read may only mean that a word is not there in full."""

Progress = Callable[[int], None]
"""Called now and then with the number of bytes that have been read."""


def iter_array(path: Path, *, on_bytes: Progress | None = None) -> Iterator[Any]:
    """The elements of a file that holds one JSON array.

    Raises:
        CatalogError: The file cannot be read, is not JSON, or holds something else than an array. What stands before
            a fault is still given.
    """
    with _Source(path, on_bytes) as source:
        if source.next_char() != "[":
            raise source.wrong_kind("a list of products")
        source.skip()
        while not source.ends_with("]"):
            yield source.value()[0]
            source.comma("]")
        source.finish()


def iter_object(path: Path, *, on_bytes: Progress | None = None) -> Iterator[tuple[str, str]]:
    """The keys of a file that holds one JSON object, each with the JSON text of its value (which is valid).

    A key may come twice; for `json.loads` the last one counts.

    Raises:
        CatalogError: As for `iter_array`.
    """
    with _Source(path, on_bytes) as source:
        if source.next_char() != "{":
            raise source.wrong_kind("an object by asin")
        source.skip()
        while not source.ends_with("}"):
            if source.next_char() != '"':
                raise source.fault("Expecting property name enclosed in double quotes")
            key, _ = source.value()
            if source.next_char() != ":":
                raise source.fault("Expecting ':' delimiter")
            source.skip()
            yield key, source.value()[1]
            source.comma("}")
        source.finish()


class _Source:
    """The text of a file, of which only the part around the current place is kept."""

    def __init__(self, path: Path, on_bytes: Progress | None) -> None:
        self._path, self._on_bytes = path, on_bytes
        self._decode_value = json.JSONDecoder().raw_decode
        self._text, self._place, self._num_dropped = "", 0, 0
        self._num_bytes, self._is_whole = 0, False

    def __enter__(self) -> _Source:
        try:
            self._file: BinaryIO = open(self._path, "rb")
            start = self._file.read(4)
            self._file.seek(0)
        except OSError as error:
            raise self._unreadable(error) from error
        self._decoder = codecs.getincrementaldecoder(json.detect_encoding(start))("surrogatepass")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def next_char(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            match = _BLANKS.match(self._text, self._place)
            self._place = match.end() if match else self._place
            if self._place < len(self._text):
                return self._text[self._place]
            if not self._read_more():
                return ""

    def skip(self) -> None:
        self._place += 1

    def ends_with(self, bracket: str) -> bool:
        """Whether the array or object ends here; if so, its bracket is passed."""
        if self.next_char() != bracket:
            return False
        self.skip()
        return True

    def comma(self, bracket: str) -> None:
        """Passes a comma that something follows; stays before a closing bracket."""
        char = self.next_char()
        if char == ",":
            self.skip()
            if self.next_char() == bracket:
                raise self.fault("Illegal trailing comma")
        elif char != bracket:
            raise self.fault("Expecting ',' delimiter")

    def finish(self) -> None:
        if self.next_char():
            raise self.fault("Extra data")

    def value(self) -> tuple[Any, str]:
        """The value that begins here, and its text."""
        self.next_char()
        while True:
            try:
                value, end = self._decode_value(self._text, self._place)
            except RecursionError as error:
                raise self.fault(str(error)) from error
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _LONGEST_WORD
                if not is_cut or not self._read_more():
                    raise self.fault(error.msg, error.pos) from error
                continue
            if end >= len(self._text) - _LONGEST_WORD and self._read_more():  # "0." is 0 until its next digit is there
                continue
            text, self._place = self._text[self._place : end], end
            return value, text

    def fault(self, what: str, place: int | None = None) -> CatalogError:
        place = self._num_dropped + (self._place if place is None else place)
        return CatalogError(f"{self._path}: not JSON ({what}: char {place}); fetch or build the file again")

    def wrong_kind(self, wanted: str) -> CatalogError:
        kind = type(self.value()[0]).__name__
        return CatalogError(f"{self._path}: must hold {wanted}, not a {kind}; fetch or build the file again")

    def _read_more(self) -> bool:
        """Forgets what is behind and reads on, twice as much when one value is long; False at the end."""
        if self._is_whole:
            return False
        self._text, self._num_dropped, self._place = self._text[self._place :], self._num_dropped + self._place, 0
        try:
            content = self._file.read(max(CHUNK_BYTES, len(self._text)))
        except OSError as error:
            raise self._unreadable(error) from error
        self._is_whole = not content
        self._num_bytes += len(content)
        try:
            self._text += self._decoder.decode(content, final=self._is_whole)
        except UnicodeDecodeError as error:
            raise CatalogError(f"{self._path}: not JSON ({error}); fetch or build the file again") from error
        if self._on_bytes is not None:
            self._on_bytes(self._num_bytes)
        return True

    def _unreadable(self, error: OSError) -> CatalogError:
        return CatalogError(f"{self._path}: cannot be read ({error.strerror})")
