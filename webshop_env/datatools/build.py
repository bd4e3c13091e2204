"""Build once what makes every later opening of a catalogue fast: nouns of names, and the search index."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from webshop_env.catalog import Catalog, index_document, load_catalog, noun_cache_file
from webshop_env.datatools.command import Command
from webshop_env.errors import ShopGymError
from webshop_env.nouns import TAGGER_KEY, load_tagger, nouns_of, tagger_name
from webshop_env.search import BM25Index
from webshop_env.search.base import IndexMismatchError
from webshop_env.shop import EMBEDDED_CATALOGUE, index_file


def build_catalogue(data_dir: Path, *, say: Callable[[str], None], num_products: int | None = None) -> None:
    """Make what is missing in the cache, for both versions; what is there and fits is left alone.

    Args:
        data_dir: A catalogue's directory; nothing is written there.
        say: Called with one line about each thing.
        num_products: Only the first rows, as `open_shop(num_products=...)` reads them; they have a cache of their own.

    Raises:
        CatalogError: A file is missing or malformed, or names have to be tagged and spaCy is not installed.
        ShopGymError: The cache cannot be written.
    """
    catalogs = [load_catalog(data_dir, version=version, num_products=num_products) for version in ("v0", "v1")]
    try:
        _build_nouns(catalogs, say)
        _build_indexes(catalogs, say)
    except OSError as error:
        raise ShopGymError(
            f"{error.filename}: cannot be written ({error.strerror}); set SHOPGYM_CACHE to a writable directory"
        ) from error


def _build_nouns(catalogs: list[Catalog], say: Callable[[str], None]) -> None:
    names = {name for catalog in catalogs for name in catalog.nouns.missing(p.title for p in catalog.products.values())}
    path = noun_cache_file(catalogs[0].catalogue_hash)
    if not names:
        say(f"nouns: present, in {catalogs[0].nouns.source}")
        return
    ordered = sorted(names)
    tagger = load_tagger(ordered[0])
    nouns = dict(zip(ordered, map(nouns_of, tagger.pipe(ordered, batch_size=256)), strict=True))
    table: dict[str, object] = {TAGGER_KEY: tagger_name(tagger)}
    for catalog in catalogs:
        for asin, product in catalog.products.items():
            if product.title in nouns:
                table[catalog.asin_in_files[asin]] = nouns[product.title]
    _write_whole(path, json.dumps(table))
    say(f"nouns: built for {len(names)} names, {path}")


def _build_indexes(catalogs: list[Catalog], say: Callable[[str], None]) -> None:
    built: BM25Index | None = None
    built_from: list[tuple[str, str]] = []
    for catalog in catalogs:
        path = index_file(catalog)
        if _fits(path, catalog.catalogue_hash):
            say(f"search index {catalog.version}: present, {path}")
            continue
        documents = [(asin, index_document(product)) for asin, product in catalog.products.items()]
        if built is None or documents != built_from:
            texts, asins = [text for _, text in documents], [asin for asin, _ in documents]
            built, built_from = BM25Index.build(texts, asins, catalogue_hash=catalog.catalogue_hash), documents
        built.save(path)
        say(f"search index {catalog.version}: built, {built.num_docs} documents, {path}")


def _fits(path: Path, catalogue_hash: str) -> bool:
    try:
        BM25Index.load(path, catalogue_hash)
    except (FileNotFoundError, IndexMismatchError):
        return False
    return True


def _write_whole(path: Path, text: str) -> None:
    """Whole or not at all: readers never see half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data_dir", nargs="?", type=Path, default=EMBEDDED_CATALOGUE, help="directory (default: the embedded one)"
    )
    parser.add_argument("--products", type=int, default=None, metavar="N", help="only the first N rows")


def _run(arguments: argparse.Namespace) -> int:
    build_catalogue(arguments.data_dir, say=print, num_products=arguments.products)
    return 0


BUILD = Command("build", __doc__.split("\n")[0], _add_arguments, _run)
