"""Noun phrases, titles and instructions: pure functions from words to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from data.vocabulary import Kind, Vocabulary

MAX_TITLE_WORDS = 11
SMALL_WORDS = {"with", "for", "and", "of"}


def by_place(attributes: Sequence[str], vocabulary: Vocabulary) -> dict[str, list[str]]:
    """Sort attributes into those that stand before the kind, behind "with", and behind "for"."""
    groups: dict[str, list[str]] = {"before": [], "with": [], "for": []}
    for attribute in attributes:
        groups[vocabulary.places[attribute]].append(attribute)
    return groups


def tail(groups: dict[str, list[str]]) -> str:
    """What follows the kind: " with side pockets for travel", or an empty text."""
    return "".join(f" {word} {' and '.join(groups[word])}" for word in ("with", "for") if groups[word])


def with_article(phrase: str, number: Literal["one", "many", "mass"]) -> str:
    """Put "a" or "an" before what is counted one by one; `phrase` is returned as it is otherwise."""
    if number != "one":
        return phrase
    first = phrase.split()[0]
    sounds_open = (first[0] in "aeiou" and not first.startswith(("usb", "eu", "one"))) or first == "hdmi"
    return f"{'an' if sounds_open else 'a'} {phrase}"


def noun_phrase(head: str, attributes: Sequence[str], kind: Kind, *, vocabulary: Vocabulary, joiner: str) -> str:
    """Name a product by its attributes: "a quick drying, v neck maxi dress with side pockets".

    Args:
        head: what it is called, such as "maxi dress".
        attributes: what it is said to be, in the order of mention.
        kind: decides about the article.
        vocabulary: knows where each attribute stands.
        joiner: what stands between two attributes before the head, such as ", ".
    """
    groups = by_place(attributes, vocabulary)
    before = joiner.join(groups["before"])
    return with_article(f"{before} {head}".strip(), kind.number) + tail(groups)


def title(brand: str, head: str, attributes: Sequence[str], *, vocabulary: Vocabulary, filler: str | None) -> str:
    """Write "Brand Filler Attributes Head with … for …".

    The filler is dropped where it would make more than `MAX_TITLE_WORDS` words.
    """
    groups = by_place(attributes, vocabulary)
    words = [brand, *(word for a in groups["before"] for word in a.split()), *head.split(), *tail(groups).split()]
    if filler is not None and len(words) < MAX_TITLE_WORDS:
        words.insert(1, filler)
    return " ".join(word if word in SMALL_WORDS else capitalised(word) for word in words)


def capitalised(word: str) -> str:
    """Upper-case the first letter and leave the rest ("women's" -> "Women's")."""
    return word[:1].upper() + word[1:]
