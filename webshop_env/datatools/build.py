"""Build once what makes every later opening of a catalogue fast: products, goals, nouns of names, search index."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from webshop_env.cache import catalogue_cache, write_whole
from webshop_env.catalog import Catalog, CatalogFiles, Version, find_files, index_document, noun_cache_file
from webshop_env.command_line import say
from webshop_env.compiled import products_file, read_compiled, write_products
from webshop_env.datatools.command import Command
from webshop_env.datatools.progress import Progress
from webshop_env.errors import ShopGymError
from webshop_env.goals import GoalKind, GoalList, build_goals
from webshop_env.nouns import TAGGER_KEY, load_tagger, nouns_of, tagger_name
from webshop_env.search import BM25Index
from webshop_env.search.base import IndexMismatchError
from webshop_env.shop import EMBEDDED_CATALOGUE, goals_file, index_file
from webshop_env.table_file import TableError

VERSIONS: tuple[Version, ...] = get_args(Version)
_BATCH_NAMES = 256


def build_catalogue(
    data_dir: Path,
    *,
    say: Callable[[str], None],
    num_products: int | None = None,
    versions: tuple[Version, ...] = VERSIONS,
    with_nouns: bool = True,
) -> None:
    """Make what is missing in the cache; what is there and fits is left alone, what does not fit is made anew.

    Args:
        data_dir: A catalogue's directory; nothing is written there.
        say: Called with one line about each thing.
        num_products: Only the first rows, as `open_shop(num_products=...)` reads them; they have a cache of their own.
        versions: For which versions of the environment.
        with_nouns: Tag the names that no noun file holds, about a millisecond each; otherwise they are tagged when a
            score needs them.

    Raises:
        CatalogError: A file is missing or malformed, or names have to be tagged and spaCy is not installed.
        ShopGymError: The cache cannot be written.
    """
    files = find_files(data_dir, num_products)
    try:
        catalogs = [_build_products(files, version, num_products, say) for version in versions]
        for catalog in catalogs if with_nouns else ():
            catalog.nouns.require(product.title for product in catalog.products.values())
        for catalog in catalogs:
            _build_goals(catalog, say)
        if with_nouns:
            _build_nouns(catalogs, say)
        _build_indexes(catalogs, say)
    except OSError as error:
        place = error.filename or catalogue_cache("")  # an error of writing, as on a full disk, names no file
        raise ShopGymError(
            f"{place}: cannot be written ({error.strerror}); set SHOPGYM_CACHE to a writable directory"
        ) from error


def _build_products(
    files: CatalogFiles, version: Version, num_products: int | None, say: Callable[[str], None]
) -> Catalog:
    catalogue_hash = files.hash(num_products)
    path = products_file(catalogue_hash, version)
    try:
        catalog = read_compiled(files, path, version, catalogue_hash)
        say(f"products {version}: present, {path}")
        return catalog
    except FileNotFoundError:
        pass
    except TableError as error:
        say(str(error))
    with Progress(f"products {version}", files.products.stat().st_size) as progress:
        write_products(
            path, files, version, num_products=num_products, catalogue_hash=catalogue_hash, on_bytes=progress
        )
    catalog = read_compiled(files, path, version, catalogue_hash)
    say(f"products {version}: built, {len(catalog.products)} products, {path}")
    return catalog


def _build_goals(catalog: Catalog, say: Callable[[str], None]) -> None:
    for kind in get_args(GoalKind):
        label = f"{kind} goals {catalog.version}"
        path = goals_file(catalog, kind)
        try:
            GoalList.read(path, catalog, kind)
            say(f"{label}: present, {path}")
            continue
        except FileNotFoundError:
            pass
        except TableError as error:
            say(str(error))
        with Progress(label, len(catalog.products)) as progress:
            goal_list = build_goals(catalog, kind, on_row=progress)
        goal_list.write(path)
        say(f"{label}: built, {len(goal_list.goals)} goals, {path}")


def _build_nouns(catalogs: list[Catalog], say: Callable[[str], None]) -> None:
    names = {name for catalog in catalogs for name in catalog.nouns.missing(p.title for p in catalog.products.values())}
    path = noun_cache_file(catalogs[0].catalogue_hash)
    if not names:
        say(f"nouns: present, in {catalogs[0].nouns.source}")
        return
    ordered = sorted(names)
    tagger = load_tagger(ordered[0])
    nouns: dict[str, tuple[str, ...]] = {}
    with Progress("nouns", len(ordered)) as progress:
        for name, tagged in zip(ordered, tagger.pipe(ordered, batch_size=_BATCH_NAMES), strict=True):
            nouns[name] = nouns_of(tagged)
            progress(len(nouns))
    table: dict[str, object] = {TAGGER_KEY: tagger_name(tagger)}
    for catalog in catalogs:
        for asin, product in catalog.products.items():
            if product.title in nouns:
                table[catalog.asin_in_files[asin]] = nouns[product.title]
    write_whole(path, json.dumps(table))
    say(f"nouns: built for {len(names)} names, {path}")


def _build_indexes(catalogs: list[Catalog], say: Callable[[str], None]) -> None:
    built: BM25Index | None = None
    built_from = ""
    for catalog in catalogs:
        path = index_file(catalog)
        if _fits(path, catalog.catalogue_hash, say):
            say(f"search index {catalog.version}: present, {path}")
            continue
        if built is None or _hash_documents(catalog) != built_from:
            with Progress(f"search index {catalog.version}", len(catalog.products)) as progress:
                documents = _documents(catalog, progress)
                built = BM25Index.build(documents, catalog.asins, catalogue_hash=catalog.catalogue_hash)
            built_from = _hash_documents(catalog) if catalog is not catalogs[-1] else ""
        built.save(path)
        say(f"search index {catalog.version}: built, {built.num_docs} documents, {path}")


def _documents(catalog: Catalog, progress: Callable[[int], None]) -> Iterator[str]:
    for row, product in enumerate(catalog.products.values()):
        progress(row)
        yield index_document(product)


def _hash_documents(catalog: Catalog) -> str:
    """The versions mostly have the same documents, and reading them is quick against building an index."""
    digest = hashlib.sha256()
    for asin, product in catalog.products.items():
        digest.update(json.dumps([asin, index_document(product)]).encode())
    return digest.hexdigest()


def _fits(path: Path, catalogue_hash: str, say: Callable[[str], None]) -> bool:
    try:
        BM25Index.load(path, catalogue_hash)
    except FileNotFoundError:
        return False
    except IndexMismatchError as error:
        say(str(error))
        return False
    return True


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data_dir", nargs="?", type=Path, default=EMBEDDED_CATALOGUE, help="directory (default: the embedded one)"
    )
    parser.add_argument("--products", type=int, default=None, metavar="N", help="only the first N rows")
    parser.add_argument("--version", choices=VERSIONS, default=None, help="only for this version (default: for both)")
    parser.add_argument(
        "--no-nouns", action="store_true", help="leave out tagging, which takes about 1 ms a name; scores tag then"
    )


def _run(arguments: argparse.Namespace) -> int:
    build_catalogue(
        arguments.data_dir,
        say=say,
        num_products=arguments.products,
        versions=VERSIONS if arguments.version is None else (arguments.version,),
        with_nouns=not arguments.no_nouns,
    )
    return 0


BUILD = Command("build", __doc__.split("\n")[0], _add_arguments, _run)
