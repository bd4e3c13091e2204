"""A catalogue in the form that opens in a moment: made once, kept in the cache, read where it is needed.

`products-VERSION.table` has a record for each product (its texts and what it is wanted for), the asins, and how to find
an asin; `goals-VERSION-KIND.table` has the columns of `goals.GoalList`; `nouns-VERSION.table` has the nouns of names.
They are made from the catalogue's files, which stay the truth: whatever does not fit to them is left alone, and said.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from webshop_env.cache import catalogue_cache, remembered_hash
from webshop_env.catalog import (
    Catalog,
    CatalogFiles,
    CatalogReader,
    CatalogWarning,
    Instruction,
    Version,
    find_files,
    load_catalog,
    load_nouns,
    noun_files,
    noun_source,
    price_pair,
)
from webshop_env.errors import CatalogError
from webshop_env.nouns import NameNouns
from webshop_env.table_file import TableError, TableFile, TableWriter, Texts, write_table
from webshop_env.types import Product

LEAST_BYTES = 1 << 18
"""A smaller product file is read in no time; it is only compiled when asked for."""
MOST_BYTES = 1 << 26
"""A larger product file is not compiled by the way: that takes minutes, so the user is told how to do it."""

_PRODUCTS, _NOUNS = "products-2", "nouns-1"
_NUM_KEPT = 1 << 12
"""Decoded products that are kept; about 4 kB each."""
_LOG = logging.getLogger(__name__)

T = TypeVar("T")


def open_catalog(data_dir: str | Path, *, version: Version = "v1", num_products: int | None = None) -> Catalog:
    """The catalogue of a directory, compiled if it is or if that takes no more than seconds, else in memory.

    The compiled file is found by the SHA-256 of the catalogue's files, which is kept by their names, sizes and time
    stamps; so a changed file is noticed without reading it. Arguments and errors are those of `load_catalog`.
    """
    files = find_files(data_dir, num_products)
    catalogue_hash = files.hash(num_products)
    path = products_file(catalogue_hash, version)
    try:
        return read_compiled(files, path, version, catalogue_hash)
    except OSError:  # nothing there, or a cache that cannot be read
        pass
    except TableError as error:
        _LOG.warning("%s", error)
    num_bytes = files.products.stat().st_size
    if num_bytes > MOST_BYTES:
        _LOG.warning(
            "%s: reading %.1f GB; `python -m data.build %s` (or `shopgym data build`) makes it open in a second",
            files.products,
            num_bytes / 1e9,
            files.directory,
        )
    elif num_bytes >= LEAST_BYTES:
        try:
            write_products(path, files, version, num_products=num_products, catalogue_hash=catalogue_hash)
            return read_compiled(files, path, version, catalogue_hash)
        except (OSError, TableError):  # the cache cannot be written: everything works without
            pass
    return load_catalog(data_dir, version=version, num_products=num_products)


def products_file(catalogue_hash: str, version: Version) -> Path:
    """Where the compiled products of a catalogue are kept."""
    return catalogue_cache(catalogue_hash) / f"products-{version}.table"


def write_products(
    path: Path,
    files: CatalogFiles,
    version: Version,
    *,
    num_products: int | None,
    catalogue_hash: str,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Compile the products of a directory, with no more than a few hundred bytes of memory for each.

    Args:
        path: The file to write.
        files: What to read.
        version: As for `load_catalog`.
        num_products: As for `load_catalog`.
        catalogue_hash: `files.hash(num_products)`.
        on_bytes: Called now and then with the number of bytes of the product file that have been read.

    Raises:
        CatalogError: A file is not what it should be, or changed while it was read.
        OSError: The file cannot be written.
    """
    reader = CatalogReader(files, version, num_products, on_bytes=on_bytes)
    asins: list[bytes] = []
    hashes, prices, wanted, wanted_by_humans = array("Q"), array("d"), array("i"), array("i")
    other_spelling: dict[str, str] = {}

    def records() -> Iterator[bytes]:
        for row, entry in enumerate(reader):
            product = entry.product
            asins.append(_encode(product.asin))
            hashes.append(_hash64(product.asin))
            prices.extend(price_pair(product))
            if entry.instruction is not None:
                wanted.append(row)
            if entry.human_instructions:
                wanted_by_humans.append(row)
            if entry.asin_in_files != product.asin:
                other_spelling[product.asin] = entry.asin_in_files
            yield _record(product, entry.instruction, entry.human_instructions)

    with write_table(path, _PRODUCTS, catalogue_hash) as table:
        table.put_texts("records", records())
        table.put_texts("asins", asins)
        _put_keys(table, hashes)
        table.put("prices", np.asarray(prices))
        table.put("with_instruction", np.asarray(wanted))
        table.put("with_human_instructions", np.asarray(wanted_by_humans))
        warnings = ([w.row, w.asin, w.kind, w.detail, w.is_skipped] for w in reader.warnings)
        table.put_texts("warnings", (_encode(json.dumps(warning)) for warning in warnings))
        table.facts["other_spelling"] = other_spelling
        if files.hash(num_products) != catalogue_hash:
            raise CatalogError(f"{files.directory}: a file changed while it was read; try again")


def read_compiled(files: CatalogFiles, path: Path, version: Version, catalogue_hash: str) -> Catalog:
    """The catalogue of a compiled file; products are decoded when they are asked for.

    Raises:
        FileNotFoundError: There is no such file.
        TableError: It is cut off, damaged or of another catalogue.
    """
    table = TableFile(path, _PRODUCTS, catalogue_hash)
    asins = Decoded(table.texts("asins"), _decode)
    rows = Rows(asins, _Keys(table))
    records = table.texts("records")
    everything = range(len(records))

    @lru_cache(maxsize=_NUM_KEPT)
    def entry(row: int) -> _Entry:
        return _entry(asins[row], records[row])

    products: ByAsin[Product] = ByAsin(rows, asins, everything, lambda row: entry(row).product)
    other_spelling: dict[str, str] = table.facts["other_spelling"]
    spellings: ByAsin[str] = ByAsin(rows, asins, everything, lambda row: other_spelling.get(asins[row], asins[row]))
    with_instruction, with_human = table.array("with_instruction"), table.array("with_human_instructions")
    return Catalog(
        directory=files.directory,
        version=version,
        products=products,
        rows=rows,
        asins=asins,
        prices=table.array("prices").reshape(-1, 2),
        instructions=ByAsin(rows, asins, with_instruction, lambda row: entry(row).instruction),
        human_instructions=ByAsin(rows, asins, with_human, lambda row: entry(row).human_instructions),
        nouns=_open_nouns(files, version, catalogue_hash, products, spellings),
        warnings=Decoded(table.texts("warnings"), _warning),
        asin_in_files=spellings,
        catalogue_hash=catalogue_hash,
        compiled_file=path,
    )


class Decoded(Sequence[T]):
    """A column of texts as what they stand for, decoded when asked for; equal to any sequence of the same things."""

    def __init__(self, texts: Texts, decode: Callable[[bytes], T]) -> None:
        self._texts, self._decode = texts, decode

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[T, ...]: ...
    def __getitem__(self, place: int | slice) -> T | tuple[T, ...]:
        if isinstance(place, slice):
            return tuple(map(self._decode, self._texts[place]))
        return self._decode(self._texts[place])

    def __iter__(self) -> Iterator[T]:
        return map(self._decode, self._texts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]


class Rows(Mapping[str, int]):
    """The place of each asin, found without a dict of all asins."""

    def __init__(self, asins: Sequence[str], keys: _Keys) -> None:
        self._asins = asins
        self._find = lru_cache(maxsize=4 * _NUM_KEPT)(partial(keys.find, is_key=lambda row, asin: asins[row] == asin))

    def __getitem__(self, asin: str) -> int:
        return self._find(asin)

    def __iter__(self) -> Iterator[str]:
        return iter(self._asins)

    def __len__(self) -> int:
        return len(self._asins)


class ByAsin(Mapping[str, T]):
    """What is known of some products, by asin and in file order; decoded when it is asked for."""

    def __init__(
        self, rows: Rows, asins: Sequence[str], members: range | np.ndarray, get: Callable[[int], Any]
    ) -> None:
        """Takes the rows of those products, ascending, and how to get at one."""
        self._rows, self._asins, self._members, self._get = rows, asins, members, get

    def __getitem__(self, asin: str) -> T:
        row = self._rows[asin]
        if not self._has(row):
            raise KeyError(asin)
        return self._get(row)

    def __contains__(self, asin: object) -> bool:
        return asin in self._rows and self._has(self._rows[asin])  # type: ignore[index]

    def __iter__(self) -> Iterator[str]:
        if isinstance(self._members, range):
            return iter(self._asins)
        return (self._asins[row] for row in self._members.tolist())

    def __len__(self) -> int:
        return len(self._members)

    def _has(self, row: int) -> bool:
        if isinstance(self._members, range):
            return True
        place = int(self._members.searchsorted(np.int32(row)))
        return place < len(self._members) and int(self._members[place]) == row


class CompiledNouns(NameNouns):
    """Nouns that are looked up in a table, which also knows whether it holds those of all products."""

    def __init__(self, table: TableFile, *, source: str) -> None:
        super().__init__(_NounsByName(table), source=source, tagger=table.facts["tagger"])
        self._first_missing: str | None = table.facts["first_missing"]

    def require(self, names: Iterable[str]) -> None:
        super().require([] if self._first_missing is None else [self._first_missing])


class _NounsByName(Mapping[str, tuple[str, ...]]):
    def __init__(self, table: TableFile) -> None:
        self._texts, self._keys = table.texts("nouns"), _Keys(table)

    def __getitem__(self, name: str) -> tuple[str, ...]:
        found = self._keys.find(name, lambda row, key: json.loads(self._texts[row])[0] == key)
        return tuple(json.loads(self._texts[found])[1:])

    def __iter__(self) -> Iterator[str]:
        return (json.loads(text)[0] for text in self._texts)

    def __len__(self) -> int:
        return len(self._texts)


def _open_nouns(
    files: CatalogFiles,
    version: Version,
    catalogue_hash: str,
    products: Mapping[str, Product],
    spellings: Mapping[str, str],
) -> NameNouns:
    """The nouns of the catalogue's noun files, compiled if the cache can be written."""
    paths = noun_files(files.directory, catalogue_hash)
    if not paths:
        return NameNouns()
    nouns_hash = remembered_hash(paths, "nouns", partial(_hash_contents, paths))
    path = catalogue_cache(catalogue_hash) / f"nouns-{version}-{nouns_hash[:16]}.table"
    source = noun_source(files.directory, paths)
    try:
        return CompiledNouns(TableFile(path, _NOUNS, nouns_hash), source=source)
    except OSError:  # nothing there, or a cache that cannot be read
        pass
    except TableError as error:
        _LOG.warning("%s", error)
    titles = {spellings[asin]: product.title for asin, product in products.items()}
    nouns = load_nouns(files.directory, catalogue_hash, titles)
    try:
        with write_table(path, _NOUNS, nouns_hash) as table:
            hashes = array("Q")
            table.put_texts("nouns", (_put(hashes, name, _encode(_json([name, *of]))) for name, of in nouns.items()))
            _put_keys(table, hashes)
            table.facts["tagger"] = nouns.describe()["tagger"]
            table.facts["first_missing"] = next(nouns.missing(titles.values()), None)
        return CompiledNouns(TableFile(path, _NOUNS, nouns_hash), source=source)
    except (OSError, TableError):
        return nouns


class _Keys:
    """Finds the row of a text by binary search among 64-bit hashes, which are mapped from the table."""

    def __init__(self, table: TableFile) -> None:
        self._hashes, self._rows = table.array("hashes"), table.array("rows_by_hash")

    def find(self, key: object, is_key: Callable[[int, str], bool]) -> int:
        """The row for which `is_key(row, key)` holds.

        Raises:
            KeyError: There is none.
        """
        if not isinstance(key, str):
            hash(key)  # what no dict takes, no table takes
            raise KeyError(key)
        wanted = _hash64(key)
        place = int(self._hashes.searchsorted(np.uint64(wanted)))
        while place < len(self._hashes) and int(self._hashes[place]) == wanted:
            if is_key(row := int(self._rows[place]), key):
                return row
            place += 1
        raise KeyError(key)


def _put_keys(table: TableWriter, hashes: array[int]) -> None:
    unsorted = np.asarray(hashes)
    order = np.argsort(unsorted, kind="stable").astype(np.int32)
    table.put("hashes", unsorted[order])
    table.put("rows_by_hash", order)


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(_encode(text), digest_size=8).digest(), "little")


def _put(hashes: array[int], key: str, text: bytes) -> bytes:
    hashes.append(_hash64(key))
    return text


class _Entry(NamedTuple):
    product: Product
    instruction: Instruction | None
    human_instructions: tuple[Instruction, ...]


def _record(product: Product, instruction: Instruction | None, human: tuple[Instruction, ...]) -> bytes:
    fields = [getattr(product, field) for field in _PRODUCT_FIELDS]
    wishes = [wish and [wish.text, wish.attributes, wish.options] for wish in (instruction, *human)]
    return _encode(_json([fields, wishes]))


def _entry(asin: str, record: bytes) -> _Entry:
    fields, wishes = json.loads(_decode(record))
    title, description, bullets, prices, price_tag, category, query, path, options, attributes, image = fields
    product = Product(
        asin,
        title,
        description,
        tuple(bullets),
        tuple(prices),
        price_tag,
        category,
        query,
        path,
        {name: tuple(values) for name, values in options.items()},
        tuple(attributes),
        image,
    )
    instruction, *human = wishes
    return _Entry(product, instruction and _instruction(instruction), tuple(map(_instruction, human)))


def _instruction(wish: list[Any]) -> Instruction:
    text, attributes, options = wish
    return Instruction(text, tuple(attributes), tuple(options))


_PRODUCT_FIELDS = [field.name for field in dataclasses.fields(Product) if field.name != "asin"]


def _warning(text: bytes) -> CatalogWarning:
    return CatalogWarning(*json.loads(text))


def _hash_contents(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{len(content)}\n".encode() + content)
    return digest.hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")
