"""From the files of a catalogue to products: rows are read, repaired where the original would crash, and listed.

A catalogue is a directory with `items_shuffle*.json` (products), `items_ins*.json` (attributes and synthetic
instructions), and, where there are any, `items_human_ins*.json` and `name_nouns.json`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from webshop_env.actions import BUTTON_KEYS, match_key
from webshop_env.cache import catalogue_cache, remembered_hash
from webshop_env.errors import CatalogError
from webshop_env.json_stream import iter_array, iter_object
from webshop_env.nouns import NameNouns, read_name_nouns
from webshop_env.types import Product

_LOG = logging.getLogger(__name__)

Version = Literal["v0", "v1"]

MAX_ASIN_CHARS = 10
MAX_OPTION_CHARS = 4000
"""Longest name and value of an option together (v1), so that every option fits into an action."""
MISSING_PRICE_USD = 100.0
"""What v0 sells a product without a price for, as published."""
UNAVAILABLE_TAG = "unavailable"
"""What v1 shows where no price is known."""
NO_ATTRIBUTES = ("DUMMY_ATTR",)
"""Attributes of a product that the attribute file does not hold, as published."""


@dataclass(frozen=True, slots=True)
class CatalogWarning:
    """One odd row of the product file and what was done about it."""

    row: int
    """Place in the file, from 0."""
    asin: str
    kind: str
    """What was odd, such as "price" or "duplicate asin"; `Catalog.warning_counts` counts these."""
    detail: str
    is_skipped: bool = False
    """The row is not for sale; otherwise it was repaired."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a product is wanted for, as the instruction files say, without options or price."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Wanted option values; only human instructions have them."""


@dataclass(frozen=True, slots=True)
class CatalogFiles:
    """The files of one directory that a catalogue is read from."""

    directory: Path
    products: Path
    instructions: Path
    human: Path | None

    def hash(self, num_products: int | None) -> str:
        """SHA-256 of the files that products and goals come from, and of the number of rows taken."""
        paths = [self.products, self.instructions, *([self.human] if self.human else [])]
        return remembered_hash(paths, f"catalogue {num_products}", partial(_hash_files, paths, num_products))


@dataclass(frozen=True, slots=True)
class Entry:
    """A product with what is said of it elsewhere than in its row."""

    product: Product
    asin_in_files: str
    instruction: Instruction | None
    human_instructions: tuple[Instruction, ...]


@dataclass(frozen=True, eq=False)
class Catalog:
    """Everything read from one directory. Immutable; any number of shops share it."""

    directory: Path
    version: Version
    products: Mapping[str, Product]
    """By asin, in file order."""
    rows: Mapping[str, int]
    """By asin: its place in that order."""
    asins: Sequence[str]
    """In that order."""
    prices: np.ndarray
    """float64 [N, 2] in that order: `Product.prices`, NaN where there are fewer than two."""
    instructions: Mapping[str, Instruction]
    """By asin: the synthetic instruction."""
    human_instructions: Mapping[str, tuple[Instruction, ...]]
    """By asin: the crowd-written instructions."""
    nouns: NameNouns
    warnings: Sequence[CatalogWarning]
    asin_in_files: Mapping[str, str]
    """By asin: how the files spell it, which differs where v1 sells a lower-case asin in upper case."""
    catalogue_hash: str
    """SHA-256 of the files that products and goals come from, and of the number of rows taken."""
    compiled_file: Path | None = None
    """The file in the cache that products are read from when they are needed; None when all are in memory."""

    @property
    def warning_counts(self) -> dict[str, int]:
        """How many rows were odd, by kind."""
        return dict(sorted(Counter(warning.kind for warning in self.warnings).items()))


def find_files(data_dir: str | Path, num_products: int | None = None) -> CatalogFiles:
    """The files of a catalogue's directory.

    Raises:
        CatalogError: There is no such directory, a file is missing, or `num_products` is under 1.
    """
    try:
        directory = Path(os.path.expanduser(data_dir))
    except TypeError:
        raise CatalogError(f"data_dir must be a directory's path, got {data_dir!r}") from None
    try:
        os.listdir(directory)
    except PermissionError as error:
        raise CatalogError(f"{directory}: cannot be read ({error.strerror})") from None
    except OSError:
        raise CatalogError(
            f"{directory}: no such directory; data_dir must hold items_shuffle*.json and items_ins*.json"
        ) from None
    if num_products is not None and num_products < 1:
        raise CatalogError(f"num_products must be at least 1, got {num_products}")
    return CatalogFiles(
        directory,
        _find(directory, "items_shuffle*.json"),
        _find(directory, "items_ins*.json"),
        next(iter(_matches(directory, "items_human_ins*.json")), None),
    )


def load_catalog(data_dir: str | Path, *, version: Version = "v1", num_products: int | None = None) -> Catalog:
    """Read a catalogue's directory into memory; `compiled.open_catalog` reads nothing that it does not need.

    Args:
        data_dir: Directory with the files named at the top of this module.
        version: "v0" repeats the published reading; "v1" shows a range at its upper end and a missing price as
            unavailable, drops empty option values and groups, and upper-cases asins so that they can be clicked.
        num_products: Take only this many rows from the start of the product file; None takes all.

    Raises:
        CatalogError: A file is missing or is not what it should be.
    """
    files = find_files(data_dir, num_products)
    catalogue_hash = files.hash(num_products)
    reader = CatalogReader(files, version, num_products)
    entries = {entry.product.asin: entry for entry in reader}
    asin_in_files = {asin: entry.asin_in_files for asin, entry in entries.items()}
    titles = {entry.asin_in_files: entry.product.title for entry in entries.values()}
    return Catalog(
        directory=files.directory,
        version=version,
        products={asin: entry.product for asin, entry in entries.items()},
        rows={asin: row for row, asin in enumerate(entries)},
        asins=tuple(entries),
        prices=np.array([price_pair(entry.product) for entry in entries.values()], dtype=np.float64),
        instructions={asin: entry.instruction for asin, entry in entries.items() if entry.instruction is not None},
        human_instructions={asin: e.human_instructions for asin, e in entries.items() if e.human_instructions},
        nouns=load_nouns(files.directory, catalogue_hash, titles),
        warnings=tuple(reader.warnings),
        asin_in_files=asin_in_files,
        catalogue_hash=catalogue_hash,
    )


def index_document(product: Product) -> str:
    """The text that search finds a product by: title, description, first bullet point and options, lower case."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first_bullet = product.bullet_points[0] if product.bullet_points else ""
    return " ".join([product.title, product.description, first_bullet, options]).lower()


def price_pair(product: Product) -> tuple[float, float]:
    """The prices of a product as a row of `Catalog.prices`."""
    low, high, *_ = (*product.prices, math.nan, math.nan)
    return low, high


def shown_price(prices: tuple[float, ...]) -> float:
    """The one price of v1: the upper end of a range; NaN, which no cap allows, when none is known."""
    return max(prices) if prices else math.nan


class CatalogReader:
    """Turns the files of a catalogue into entries one by one, and remembers what was odd.

    Args:
        files: Where to read.
        version: As for `load_catalog`.
        num_products: As for `load_catalog`.
        on_bytes: Called now and then with the number of bytes of the product file that have been read.
    """

    def __init__(
        self,
        files: CatalogFiles,
        version: Version,
        num_products: int | None = None,
        *,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self.version = version
        self.warnings: list[CatalogWarning] = []
        self._files, self._num_products, self._on_bytes = files, num_products, on_bytes
        self._instructions = _Packed(files.instructions)
        self._human = _Packed(files.human) if files.human else {}
        self._keys: set[str] = set()

    def __iter__(self) -> Iterator[Entry]:
        num_rows = num_entries = 0
        for record in iter_array(self._files.products, on_bytes=self._on_bytes):
            if self._num_products is None or num_rows < self._num_products:
                entry = self._read(num_rows, record)
                if entry is not None:
                    num_entries += 1
                    yield entry
            num_rows += 1  # all are counted, and a damaged end is found
        if not num_entries:
            raise CatalogError(
                f"{self._files.products}: none of its {num_rows} rows is a product for sale; fetch or build the file "
                "again"
            )

    def _read(self, row: int, record: Any) -> Entry | None:
        """The row's product, or None and a warning that says why there is none."""
        if not isinstance(record, dict):
            self._warn(row, "", "row", f"a {type(record).__name__}, not an object", is_skipped=True)
            return None
        written = record.get("asin")
        if not isinstance(written, str) or not written or written == "nan" or len(written) > MAX_ASIN_CHARS:
            detail = f"{str(written)[:40]!r} is not 1 to {MAX_ASIN_CHARS} characters"
            self._warn(row, str(written)[:40], "asin", detail, is_skipped=True)
            return None
        asin = written
        if self.version == "v1":
            asin = " ".join(written.split()).upper()
            if not asin or match_key(asin) in BUTTON_KEYS:
                detail = f"{written!r} is a button" if asin else "only blanks"
                self._warn(row, written, "asin", detail, is_skipped=True)
                return None
        key = match_key(asin) if self.version == "v1" else asin
        if key in self._keys:
            self._warn(row, asin, "duplicate asin", "an earlier row has it", is_skipped=True)
            return None
        self._keys.add(key)
        if asin != written:
            self._warn(row, asin, "lower-case asin", f"{written!r} is sold as {asin!r}")

        def note(kind: str, detail: str) -> None:
            self._warn(row, asin, kind, detail)

        prices, price_tag = read_pricing(record.get("pricing"), self.version, note)
        wishes = self._instructions.get(written)
        product = Product(
            asin=asin,
            title=_text(record, "name", note, instead=asin),
            description=_text(record, "full_description", note),
            bullet_points=_bullets(record.get("small_description"), note),
            prices=prices,
            price_tag=price_tag,
            category=_text(record, "category", note),
            query=_text(record, "query", note).lower().strip(),
            product_category=_text(record, "product_category", note),
            options=_options(record.get("customization_options"), self.version, note),
            attributes=_attributes(wishes),
            main_image=_first_image(record.get("images"), note),
        )
        human: tuple[Instruction, ...] = ()
        if self._files.human and written in self._human:
            human = _human(self._files.human, written, self._human[written])
        return Entry(product, written, _synthetic(self._files.instructions, written, wishes), human)

    def _warn(self, row: int, asin: str, kind: str, detail: str, *, is_skipped: bool = False) -> None:
        self.warnings.append(CatalogWarning(row, asin, kind, detail, is_skipped))


class _Packed(Mapping[str, Any]):
    """A JSON object by its keys, kept as text: a tenth of the memory of what is in it."""

    def __init__(self, path: Path) -> None:
        self._texts = {key: text.encode("utf-8", "surrogatepass") for key, text in iter_object(path)}

    def __getitem__(self, key: str) -> Any:
        return json.loads(self._texts[key])

    def __contains__(self, key: object) -> bool:
        return key in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


_Note = Callable[[str, str], None]

_NUMBER = re.compile(r"[\d.,]*\d[\d.,]*")
_AMOUNT = re.compile(r"(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|\.\d+")
_IN_BRACKETS = re.compile(r"\([^)]*\)")


def read_pricing(pricing: Any, version: Version, note: _Note) -> tuple[tuple[float, ...], str]:
    """Prices in US dollars and the tag that pages show.

    Args:
        pricing: The row's `pricing`, such as "$12.99" or "$12.99$15.99"; None or "" when there is none.
        version: The two versions read odd texts differently; see `load_catalog`.
        note: Called with ("price", what was done) when the text is odd.
    """
    is_missing = pricing is None or pricing == "" or pricing == []
    if version == "v0":
        prices = () if is_missing else _prices_as_published(str(pricing))
        if not prices:
            if not is_missing:
                note("price", f"{str(pricing)[:40]!r} holds no price; sold for ${MISSING_PRICE_USD}")
            return (MISSING_PRICE_USD,), f"${MISSING_PRICE_USD}"
        return prices, " to ".join(f"${price}" for price in prices)
    prices = () if is_missing else _prices_corrected(str(pricing), note)
    if not prices:
        return (), UNAVAILABLE_TAG
    return prices, f"${shown_price(prices)}"


def _prices_as_published(text: str) -> tuple[float, ...]:
    """At most two prices, each from the digits and points after a "$"; empty where the original would crash."""
    try:
        return tuple(float(re.sub(r"[^\d.]", "", part)) for part in text.split("$")[1:])[:2]
    except ValueError:
        return ()


def _prices_corrected(text: str, note: _Note) -> tuple[float, ...]:
    """One price or the two ends of a range, as the file orders them, without prices per unit (in brackets).

    A price of which any part cannot be read, such as "$1.2.3" or "$12,99", is no price: better none than a wrong one.
    """
    if text.strip().lower() == "free":
        note("price", f"{text!r} is taken as $0.0")
        return (0.0,)
    main = _IN_BRACKETS.sub(" ", text)
    numbers = [number.rstrip(".,") for number in _NUMBER.findall(main)]
    amounts = [float(number.replace(",", "")) for number in numbers if _AMOUNT.fullmatch(number)]
    is_clear = len(amounts) == len(numbers) > 0 and all(map(math.isfinite, amounts))
    has_other_currency = re.search(r"[A-Za-z€£¥₹]", re.sub(r"\b(?:US|USD|to)\b", "", main, flags=re.IGNORECASE))
    if not is_clear or has_other_currency:
        note("price", f"{text[:40]!r} is not a price in dollars such as '$12.99'; shown as unavailable")
        return ()
    if not re.fullmatch(r"\s*\$\d+(?:\.\d+)?(?:\s*-?\s*\$\d+(?:\.\d+)?)?\s*", text):
        note("price", f"{text[:40]!r} is read as {' to '.join(f'${amount}' for amount in amounts[:2])}")
    elif len(amounts) == 2 and amounts[0] > amounts[1]:
        note("price range", f"{text[:40]!r} runs from high to low; the higher price counts")
    return tuple(amounts[:2])


def _text(record: Mapping[str, Any], key: str, note: _Note, *, instead: str = "") -> str:
    value = record.get(key)
    if isinstance(value, str):
        return value
    note(key, f"{key} is {'missing' if value is None else type(value).__name__}; {instead!r} is used")
    return instead if value is None else str(value)


def _bullets(value: Any, note: _Note) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(bullet, str) for bullet in values):
        note("small_description", "a bullet point is not a text; it is left empty")
    return tuple(bullet if isinstance(bullet, str) else "" for bullet in values)


def _options(groups: Any, version: Version, note: _Note) -> dict[str, tuple[str, ...]]:
    if not groups:
        return {}
    if not isinstance(groups, dict):
        note("options", f"customization_options is a {type(groups).__name__}, not an object; left out")
        return {}
    options: dict[str, tuple[str, ...]] = {}
    for name, contents in groups.items():
        if not isinstance(contents, list):
            note("options", f"option {name!r} has no list of values; left out")
            continue
        values: list[str] = []
        for content in contents:
            value = content.get("value") if isinstance(content, dict) else content
            if value is None or isinstance(value, dict | list):
                note("options", f"option {name!r} has a value that is not a text; left out")
                continue
            text = str(value).strip().replace("/", " | ").lower()
            if version == "v1" and not text.strip():
                note("options", f"option {name!r} has an empty value; left out")
                continue
            if version == "v1" and len(name) + len(text) > MAX_OPTION_CHARS:
                note("options", f"option {name[:40]!r} has a value of {len(text)} characters; left out")
                continue
            values.append(text)
        if version == "v1" and not values:
            note("options", f"option {name!r} has no value; left out")
            continue
        if name.lower() in options:
            note("options", f"option {name.lower()!r} comes twice; its last values count")
        options[name.lower()] = tuple(values)
    return options


def _attributes(record: Any) -> tuple[str, ...]:
    if not isinstance(record, dict) or not isinstance(record.get("attributes"), list):
        return NO_ATTRIBUTES
    return tuple(str(attribute) for attribute in record["attributes"])


def _first_image(images: Any, note: _Note) -> str:
    if isinstance(images, list) and images and isinstance(images[0], str):
        return images[0]
    note("images", "there is no picture")
    return ""


def _synthetic(path: Path, asin: str, record: Any) -> Instruction | None:
    if not isinstance(record, dict) or record.get("instruction") is None:
        return None
    text, attributes = record["instruction"], record.get("instruction_attributes")
    if not isinstance(text, str) or not isinstance(attributes, list):
        raise CatalogError(
            f"{path}: product {asin}: instruction must be a text with a list of instruction_attributes; correct the "
            "entry or leave it out"
        )
    return Instruction(text, tuple(map(str, attributes)))


def _human(path: Path, asin: str, records: Any) -> tuple[Instruction, ...]:
    try:
        wishes = [(r["instruction"].strip("."), r["instruction_attributes"], r["instruction_options"]) for r in records]
    except (TypeError, KeyError, AttributeError) as error:
        raise CatalogError(
            f"{path}: product {asin}: each entry needs instruction, instruction_attributes and "
            f"instruction_options ({type(error).__name__}: {error})"
        ) from error
    # A text would come apart into its letters and an object into its keys: goals that nobody can win.
    if not all(isinstance(attributes, list) and isinstance(options, list) for _, attributes, options in wishes):
        raise CatalogError(
            f"{path}: product {asin}: instruction_attributes and instruction_options must be lists of texts; correct "
            "the entry or leave it out"
        )
    return tuple(Instruction(text, tuple(map(str, attrs)), tuple(map(str, options))) for text, attrs, options in wishes)


def noun_cache_file(catalogue_hash: str) -> Path:
    """Where `data build` keeps the nouns of names that the catalogue's own file does not hold."""
    return catalogue_cache(catalogue_hash) / "name_nouns.json"


def noun_files(directory: Path, catalogue_hash: str) -> list[Path]:
    """The files that hold nouns of a catalogue, those that count more last."""
    paths = (noun_cache_file(catalogue_hash), directory / "name_nouns.json")  # the catalogue's own file wins
    return [path for path in paths if os.path.exists(path)]  # False for a cache that cannot be entered, too


def load_nouns(directory: Path, catalogue_hash: str, titles: Mapping[str, str]) -> NameNouns:
    """Nouns of the names of all products, as far as files hold them.

    A damaged file of the cache is left out, with a warning: `data build` makes it again where names need it.

    Args:
        directory: The catalogue's.
        catalogue_hash: The catalogue's.
        titles: By asin, as the files spell it: the product's name.

    Raises:
        CatalogError: The catalogue's own file is none.
    """
    known: dict[str, tuple[str, ...]] = {}
    taggers = []
    paths = []
    for path in noun_files(directory, catalogue_hash):
        try:
            nouns, tagger = read_name_nouns(path, titles)
        except CatalogError as error:
            if path != noun_cache_file(catalogue_hash):
                raise
            _LOG.warning("%s: damaged, its nouns are not used (%s)", path, error.__cause__)
            continue
        paths.append(path)
        known |= nouns
        taggers.append(tagger)
    return NameNouns(known, source=noun_source(directory, paths), tagger=" and ".join(dict.fromkeys(taggers)))


def noun_source(directory: Path, paths: Sequence[Path]) -> str:
    """The noun files as `NameNouns.describe` names them."""
    return " and ".join(path.name if path.parent == directory else str(path) for path in paths)


def _matches(directory: Path, pattern: str) -> list[Path]:
    """Files of that pattern; the one with the shortest name (the full set, as published) first."""
    return sorted(directory.glob(pattern), key=lambda path: (len(path.name), path.name))


def _find(directory: Path, pattern: str) -> Path:
    paths = _matches(directory, pattern)
    if not paths:
        raise CatalogError(f"{directory}: no {pattern}; put the file there, or leave data_dir out for the embedded one")
    return paths[0]


def _hash_files(paths: Sequence[Path], num_products: int | None) -> str:
    digest = hashlib.sha256()
    for path in paths:
        try:
            with open(path, "rb") as file:
                digest.update(f"{os.fstat(file.fileno()).st_size}\n".encode())
                while content := file.read(1 << 20):
                    digest.update(content)
        except OSError as error:
            raise CatalogError(f"{path}: cannot be read ({error.strerror})") from error
    if num_products is not None:
        digest.update(f"rows {num_products}\n".encode())
    return digest.hexdigest()
