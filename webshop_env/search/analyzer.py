"""Text to search terms, token for token as Lucene's English analyzer cuts them.

Four steps: the standard tokenizer (word boundaries of Unicode Standard Annex 29, emoji kept as tokens), a trailing
possessive 's off, lower case, 33 stop words out, Porter's stemmer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from webshop_env.search.stemmer import stem
from webshop_env.search.word_break import ClassTable

MAX_TOKEN_LENGTH = 255
"""Longer tokens are cut into pieces of this many UTF-16 units."""

MAX_KEPT_PIECES, MAX_KEPT_LENGTH = 1 << 18, 32
"""How many pieces of text are kept with their terms (some 60 MB), and up to how many characters each."""

STOP_WORDS = frozenset(
    {
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "but",
        "by",
        "for",
        "if",
        "in",
        "into",
        "is",
        "it",
        "no",
        "not",
        "of",
        "on",
        "or",
        "such",
        "that",
        "the",
        "their",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "was",
        "will",
        "with",
    }
)

# Plain ASCII needs no table of classes. A row of underscores alone is matched too and dropped later: if it were no
# match, it would be tried again from each of its places.
_ASCII_RUN = r"(?:[A-Za-z]+(?:[:.'][A-Za-z]+)*|[0-9]+(?:[.,;'][0-9]+)*)+"
_ASCII_TOKEN = re.compile(rf"(?=\w)_*+(?:{_ASCII_RUN}(?:_+{_ASCII_RUN})*_*)?+", re.ASCII)


_MARKS = "xcvVztTS"
"""The classes that never start a token but stay with what they follow (S starts one, in scripts without blanks)."""
_APOSTROPHES = ("'", "\u2019", "\uff07")


def _class_pattern() -> re.Pattern[str]:
    """The token rules over a text in which each character is replaced by its class letter of `word_break.RANGES`.

    Rule numbers are those of Annex 29. Each alternative is greedy and leaves nothing to choose at any place, so the
    first match is also the longest.
    """
    x = f"[{_MARKS}]*"  # WB4: marks go with what they follow
    hebrew = f"h{x}(?:q{x}|d{x}h{x})"  # WB7a-c: quotes after and inside
    letters = f"[aAh]{x}(?:[lbq]{x}[aAh]{x})*"  # WB6, 7
    digits = f"n{x}(?:(?:[mbq]{x})?n{x})*"  # WB8, 11, 12
    run = f"(?:(?:{hebrew}|{letters}|{digits})+|k{x}(?:k{x})*)"  # WB5, 9, 10, 13
    word = f"(?:u{x})*+{run}(?:(?:u{x})+{run})*(?:u{x})*"  # WB13a, 13b

    m = "[xcztTS]*"  # as x, without presentation selectors
    sign = f"[pP]{m}V?"
    toned = f"P{m}M{m}"
    joiners = "(?:(?<=z)|z+)"  # m has taken them if it could
    more = f"{joiners}(?:{toned}|{sign})|(?:(?<=z)|z)M{m}"
    letter = f"A{m}V?"  # a sign that is a letter too
    emoji = f"(?:z*{toned}|M{m}|z*{sign}|z*{letter})(?:t+T|(?:{more}|{joiners}{letter})*)"
    from_letter = f"{letter}(?:{joiners}{letter})*(?:{more})(?:{more}|{joiners}{letter})*"  # longer than its word
    flag = f"r{x}r{x}"
    keycap = rf"\*{m}V?c{m}"
    return re.compile(f"{from_letter}|{word}|u+|{emoji}|{flag}|{keycap}|(?:[sS]{x})+|[ig]{x}")


_CLASS_TOKEN = _class_pattern()
_CLASSES = ClassTable()


def _pieces(text: str, classes: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut an over-long token as a scanner does that never sees more than 255 UTF-16 units at a time."""
    while start < end:
        stop, room = start, MAX_TOKEN_LENGTH
        while stop < end and (room := room - _utf16_units(text[stop])) >= 0:
            stop += 1
        piece = _CLASS_TOKEN.match(classes, start, stop)
        if piece is None:  # a sign that joined two halves and now stands first
            start += 1
        else:
            yield start, piece.end()
            start = piece.end()


def _utf16_units(character: str) -> int:
    return 2 if character > "\uffff" else 1


def tokenize(text: str) -> list[str]:
    """Cut a text into words, numbers and emoji as they stand, before any of them is changed or dropped."""
    if text.isascii():
        tokens = _ASCII_TOKEN.findall(text)
        if len(text) <= MAX_TOKEN_LENGTH or max(map(len, tokens), default=0) <= MAX_TOKEN_LENGTH:
            return [token for token in tokens if token.strip("_")] if "_" in text else tokens
    tokens = []
    classes = text.translate(_CLASSES)
    for match in _CLASS_TOKEN.finditer(classes):
        start, end = match.span()
        spans: Iterable[tuple[int, int]] = ((start, end),)
        if end - start > MAX_TOKEN_LENGTH // 2:
            spans = _pieces(text, classes, start, end)
        # Joining signs alone, such as "__", are no token.
        tokens += [text[i:j] for i, j in spans if classes[i] != "u" or classes[i:j].strip("u")]
    return tokens


def _lower(token: str) -> str:
    """Lower case letter by letter, as Java does: no rule for a final sigma, and a dotted capital I becomes "i"."""
    return token.lower() if token.isascii() else "".join(map(str.lower, token.replace("\u0130", "i")))


def _stem_utf16(word: str) -> str:
    """Stem a word with characters beyond U+FFFF, each of which counts as two letters."""
    units = word.encode("utf-16-le", "surrogatepass")
    letters = "".join(chr(int.from_bytes(units[i : i + 2], "little")) for i in range(0, len(units), 2))
    return stem(letters).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


@lru_cache(maxsize=1 << 16)
def _term(token: str) -> str | None:
    """Turn one token into its search term; None for a stop word. Pieces with and without a comma share it."""
    if token[-1] in "sS" and token[-2:-1] in _APOSTROPHES:
        token = token[:-2]
    word = _lower(token)
    if word in STOP_WORDS:
        return None
    return stem(word) if word.isascii() or max(word) <= "\uffff" else _stem_utf16(word)


class _PieceTerms(dict[str, tuple[str, ...]]):
    """Piece of a text between two blanks -> its terms, found once for the pieces that come first, which come often.

    A blank is part of no token and joins nothing, so what stands between two of them is cut the same in any text.
    """

    def __missing__(self, piece: str) -> tuple[str, ...]:
        terms = tuple(term for term in map(_term, tokenize(piece)) if term is not None)
        if len(self) < MAX_KEPT_PIECES and len(piece) <= MAX_KEPT_LENGTH:
            self[piece] = terms
        return terms


_PIECES = _PieceTerms()


def analyze(text: str) -> list[str]:
    """Turn a document or a query into its search terms, in the order of the text, repeated ones repeated.

    Args:
        text: any text; the empty text, or one of stop words and signs only, gives an empty list.

    Returns:
        Terms, such as ["reclaim", "wood", "tabl"] for "The reclaimed wood table's".
    """
    return [term for piece in text.split(" ") for term in _PIECES[piece]]
