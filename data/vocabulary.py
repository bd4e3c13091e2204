"""The hand-written word lists of the embedded catalogue, read and checked once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from webshop_env.errors import ShopGymError

WORDS_DIR = Path(__file__).parent / "words"

Place = Literal["before", "with", "for"]
"""Where an attribute stands beside a kind: "quick drying dress", "dress with side pockets", "dress for travel"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One search label: what its products are called, what they can be, which options they come in."""

    label: str
    """The product's `query`, such as "women's dresses"."""
    department: str
    """The product's `category`, such as "fashion"."""
    path: tuple[str, ...]
    """Parts of `product_category` above the head."""
    number: Literal["one", "many", "mass"]
    """How the heads are counted: "a dress", "shorts", "tea"."""
    generic: str
    """The word that all heads share, such as "dress"."""
    heads: tuple[str, ...]
    """Names of the sub-kinds, such as "maxi dress"."""
    fillers: tuple[str, ...]
    """Title words that no instruction mentions."""
    attributes: tuple[str, ...]
    """What its products can be."""
    options: dict[str, str]
    """Option name -> name of a list in options.json."""
    price: tuple[int, int]
    """Lowest and highest price, US dollars."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """All that the generator can say."""

    kinds: tuple[Kind, ...]
    places: dict[str, Place]
    """Attribute -> where it stands."""
    lines: dict[str, str]
    """Attribute -> the sentence of its bullet point; holds the attribute word for word."""
    exclusive: tuple[frozenset[str], ...]
    """Sets of attributes of which a product has at most one."""
    no_predicate: frozenset[str]
    """Attributes that cannot follow "is": a table is space saving, but no table is solid wood."""
    options: dict[str, tuple[str, ...]]
    brands: dict[str, tuple[str, ...]]
    """Department -> invented brand names."""
    templates: dict[str, Any]


def load_vocabulary(words_dir: Path = WORDS_DIR) -> Vocabulary:
    """Read the word lists and refuse any that point to a word which is not there.

    Args:
        words_dir: folder with attributes.json, kinds.json, options.json, brands.json, templates.json.

    Raises:
        ShopGymError: A list is missing, is no JSON, or names an unknown attribute or option list.
    """
    attributes = _read(words_dir / "attributes.json")
    places: dict[str, Place] = {}
    for place in ("before", "with", "for"):
        places.update(dict.fromkeys(attributes[place], place))
    lines = {**attributes["before"], **attributes["with"], **attributes["for"]}
    vocabulary = Vocabulary(
        kinds=tuple(Kind(**_with_tuples(record)) for record in _read(words_dir / "kinds.json")),
        places=places,
        lines=lines,
        exclusive=tuple(frozenset(group) for group in attributes["exclusive"]),
        no_predicate=frozenset(attributes["no_predicate"]),
        options={name: tuple(values) for name, values in _read(words_dir / "options.json").items()},
        brands={name: tuple(values) for name, values in _read(words_dir / "brands.json").items()},
        templates=_read(words_dir / "templates.json"),
    )
    _check(vocabulary)
    return vocabulary


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShopGymError(f"{path}: cannot be read ({error.strerror}); the word lists belong in data/words") from None
    except json.JSONDecodeError as error:
        raise ShopGymError(f"{path}: not JSON, line {error.lineno}: {error.msg}") from None


def _with_tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


def _check(vocabulary: Vocabulary) -> None:
    for attribute, line in vocabulary.lines.items():
        if attribute not in line.lower():
            raise ShopGymError(f"attributes.json: the line of {attribute!r} does not hold these words: {line!r}")
    for kind in vocabulary.kinds:
        for attribute in kind.attributes:
            if attribute not in vocabulary.lines:
                raise ShopGymError(f"kinds.json: {kind.label}: attribute {attribute!r} is not in attributes.json")
        for name, list_name in kind.options.items():
            if list_name not in vocabulary.options:
                raise ShopGymError(f"kinds.json: {kind.label}: option {name!r}: no list {list_name!r} in options.json")
