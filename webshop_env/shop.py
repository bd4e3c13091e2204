"""One immutable shop: catalogue, goals, search and scores, shared by any number of sessions."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from webshop_env.cache import catalogue_cache
from webshop_env.catalog import Catalog, Version, index_document
from webshop_env.compiled import open_catalog
from webshop_env.errors import ShopGymError
from webshop_env.goals import (
    SPLITS,
    GoalKind,
    GoalList,
    Variant,
    build_goals,
    draw_goal,
    select_goals,
    split_indexes,
)
from webshop_env.reward import Breakdown, score_v0, score_v1
from webshop_env.search import BM25Index, BM25Search
from webshop_env.search.base import IndexMismatchError, SearchEngine
from webshop_env.table_file import TableError
from webshop_env.types import Goal, Product

EMBEDDED_CATALOGUE = Path(__file__).resolve().parent / "assets" / "catalogue"
MAX_HITS = 50
"""Products that a search finds at most, as published."""

_LOG = logging.getLogger(__name__)
_MEMO_LOCK = threading.RLock()


class Shop:
    """What all sessions share and none changes. Made by `open_shop`.

    Attributes:
        version: "v0", the published benchmark, or "v1", the corrected one.
        products: By asin, in file order.
        goals: In their order; `goals[i].goal_index == i`.
        catalogue_hash: SHA-256 of what products and goals come from.
        warnings: Odd rows of the catalogue and what was done about each.
    """

    def __init__(self, catalog: Catalog, goal_list: GoalList, arguments: Mapping[str, Any]) -> None:
        self.version: Version = catalog.version
        self.products: Mapping[str, Product] = catalog.products
        self.goals: Sequence[Goal] = goal_list.goals
        self.catalogue_hash: str = catalog.catalogue_hash
        self.warnings = catalog.warnings
        self._catalog = catalog
        self._goal_list = goal_list
        self._arguments = dict(arguments)
        self._splits = split_indexes(goal_list, arguments["split_by"])
        self._score = score_v0 if self.version == "v0" else score_v1
        self._found = lru_cache(maxsize=1 << 14)(self._search)
        self._by_label = lru_cache(maxsize=2)(self._group_by_label)

    def split(self, name: str) -> np.ndarray:
        """Goal indexes (int32, rising, read-only) of "train", "eval", "test" or "all"."""
        try:
            return self._splits[name]
        except KeyError:
            raise ShopGymError(f"split must be one of {', '.join(SPLITS)}, got {name!r}") from None

    def iter_goals(self, split: str = "all", *, num_shards: int = 1, shard: int = 0) -> Iterator[Goal]:
        """Each goal of a split once; `num_shards` workers with different `shard` share them without overlap."""
        if not 0 <= shard < num_shards:
            raise ShopGymError(f"shard must be in 0 to num_shards - 1, got shard {shard} of {num_shards}")
        return (self.goals[i] for i in self.split(split)[shard::num_shards])

    def goal_by_id(self, goal_id: str) -> Goal:
        """The goal of that id (16 hex digits)."""
        try:
            return self.goals[self._goal_list.place_of(goal_id)]
        except KeyError:
            raise ShopGymError(f"no goal has goal_id {goal_id!r}; `shop.goals` lists the {len(self.goals)}") from None

    def goal_at(self, goal_index: Any) -> Goal:
        """The goal at a place of the whole list; any integral type will do."""
        try:
            index = operator.index(goal_index)
        except TypeError:
            raise ShopGymError(f"goal_index must be an integer, got {goal_index!r}") from None
        if isinstance(goal_index, bool | np.bool_) or not 0 <= index < len(self.goals):
            raise ShopGymError(f"goal_index must be in 0 to {len(self.goals) - 1}, got {goal_index}")
        return self.goals[index]

    def longest_task(self) -> str:
        """The longest instruction; the first among equals."""
        return self.goals[int(np.argmax(self._goal_list.columns.lengths))].instruction_text

    def search(self, words: Sequence[str]) -> tuple[str, ...]:
        """Asins of the top 50 products for the words, joined by blanks and taken as they are; best first.

        Raises:
            QueryTooLongError: More than 1,024 distinct terms in v0, as published; v1 takes the first 1,024.
        """
        return self._found(" ".join(words))

    def asins_labelled(self, label: Literal["category", "query"], value: str) -> tuple[str, ...]:
        """Asins of the products with that category or query, in file order: what v0's `<c>` and `<q>` list.

        The first call reads the whole catalogue.
        """
        return self._by_label(label).get(value, ())

    def price_of(self, asin: str) -> float:
        """The price that the score uses, in US dollars: v0's draw, or what v1 shows (NaN when none is known)."""
        try:
            return float(self._goal_list.prices[self._catalog.rows[asin]])
        except KeyError:
            raise ShopGymError(f"no product has asin {asin!r}") from None

    def score(
        self, goal: Goal, asin: str, options: Mapping[str, str], *, price_usd: float | None = None
    ) -> tuple[float, Breakdown]:
        """Score in [0, 1] of buying a product with the selected options (name -> value) for a goal, and its parts.

        `price_usd` is for what-if questions; None is the shop's own price.
        """
        price = self.price_of(asin)
        if price_usd is not None:
            price = price_usd
        return self._score(self.products[asin], goal, options, price_usd=price, nouns=self._catalog.nouns)

    def new_rng(self) -> random.Random:
        """A generator of the caller's own, in the state that the original's is in after construction."""
        rng = random.Random()
        rng.setstate(self._goal_list.rng_state)
        return rng

    def draw_goal(self, rng: random.Random) -> Goal:
        """A goal drawn by weight, as the original does for a session without one."""
        return self.goals[draw_goal(rng, self.goals, self._goal_list.running_weights)]

    def describe(self) -> dict[str, Any]:
        """Counts, splits, hash and settings of the shop; plain values that JSON can hold."""
        settings = ["goals", "split_by", "search"] + (["preseed", "variant"] if self.version == "v0" else [])
        return {
            "version": self.version,
            "directory": str(self._catalog.directory),
            "catalogue_hash": self.catalogue_hash,
            "num_products": len(self.products),
            "num_goals": len(self.goals),
            "num_products_with_goals": len(np.unique(self._goal_list.columns.rows)),
            "split_sizes": {name: len(self._splits[name]) for name in SPLITS},
            "num_rows_skipped": sum(warning.is_skipped for warning in self.warnings),
            "warnings": self._catalog.warning_counts,
            "nouns": self._catalog.nouns.describe(),
            **{name: self._arguments[name] for name in settings},
        }

    @property
    def settings(self) -> dict[str, Any]:
        """What `open_shop` was given, defaults included."""
        return dict(self._arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are the shop itself, and another process opens its own: nothing is copied byte by byte."""
        return _reopen, (self._arguments,)

    def __repr__(self) -> str:
        return f"<Shop {self.version}: {len(self.products)} products, {len(self.goals)} goals>"

    def _group_by_label(self, label: str) -> dict[str, tuple[str, ...]]:
        groups: dict[str, list[str]] = {}
        for asin, product in self.products.items():
            groups.setdefault(getattr(product, label), []).append(asin)
        return {value: tuple(asins) for value, asins in groups.items()}

    def _search(self, query: str) -> tuple[str, ...]:
        return _engine(self._catalog, self._arguments["search"]).search(query, MAX_HITS)


def open_shop(
    data_dir: str | Path | None = None,
    *,
    version: Version = "v1",
    goals: GoalKind = "synthetic",
    split_by: str = "goal",
    search: str = "bm25",
    preseed: int = 0,
    num_products: int | None = None,
    variant: Variant = None,
    limit_goals: int | None = None,
    filter_goals: Callable[[int, Goal], bool] | None = None,
) -> Shop:
    """The shop of a catalogue; the same arguments give the same object.

    Args:
        data_dir: Directory in WebShop's format; None is the embedded catalogue.
        version: "v1", corrected, or "v0", as published.
        goals: "synthetic" or "human" instructions.
        split_by: "goal" for the published cut; "product" (or "product:3", another such cut) shares no product.
        search: "bm25", embedded, or "pyserini" (an extra).
        preseed: Seed of v0's private draws of prices and caps.
        num_products: Only the first rows of the product file; None takes all.
        variant: "verl": one seed, `preseed`, also for the order of goals (v0 only).
        limit_goals: Keep this many goals, drawn by weight.
        filter_goals: Called with (place, goal); goals that it refuses are left out.

    Raises:
        ShopGymError: A setting is unknown, or (CatalogError) a file is missing or malformed.
    """
    _check("version", version, ("v0", "v1"))
    _check("goals", goals, ("synthetic", "human"))
    _check("search", search, ("bm25", "pyserini"))
    _check("variant", variant, (None, "verl"))
    check_whole("preseed", preseed)
    for name, number in (("num_products", num_products), ("limit_goals", limit_goals)):
        if number is not None:
            check_whole(name, number, 1)
    if filter_goals is not None and not callable(filter_goals):
        raise ShopGymError(f"filter_goals must be a function of (index, goal), got {filter_goals!r}")
    if data_dir is not None and not isinstance(data_dir, str | Path):
        raise ShopGymError(f"data_dir must be a directory's path, got {data_dir!r}")
    if version == "v1" and (preseed != 0 or variant is not None):
        raise ShopGymError("preseed and variant belong to version v0: v1 draws nothing")
    return _reopen(
        {
            "data_dir": str(EMBEDDED_CATALOGUE if data_dir is None else Path(os.path.expanduser(data_dir)).resolve()),
            "version": version,
            "goals": goals,
            "split_by": split_by,
            "search": search,
            "preseed": int(preseed),
            "num_products": num_products,
            "variant": variant,
            "limit_goals": limit_goals,
            "filter_goals": filter_goals,
        }
    )


def _reopen(arguments: dict[str, Any]) -> Shop:
    with _MEMO_LOCK:
        return _open(**arguments)


@lru_cache(maxsize=32)
def _open(**arguments: Any) -> Shop:
    directory, kind = arguments["data_dir"], arguments["goals"]
    catalog = _catalog(directory, arguments["version"], arguments["num_products"])
    whole = _whole_goals(catalog, kind, arguments["preseed"], arguments["variant"])
    goal_list = select_goals(whole, limit_goals=arguments["limit_goals"], filter_goals=arguments["filter_goals"])
    if not goal_list.goals:
        needed = "items_human_ins*.json" if kind == "human" else "instructions in items_ins*.json"
        raise ShopGymError(
            f"{directory}: none of its {goal_list.num_whole} {kind} goals is left; goals need {needed}, "
            "and a filter or limit must keep at least one"
        )
    is_index_missing = catalog.compiled_file is not None and not os.path.exists(index_file(catalog))
    if arguments["search"] != "bm25" or is_index_missing:
        # What cannot be had shows now, not as a search that fails; and what is made once is there for all processes.
        _engine(catalog, arguments["search"])
    return Shop(catalog, goal_list, arguments)


@lru_cache(maxsize=8)
def _catalog(directory: str, version: Version, num_products: int | None) -> Catalog:
    catalog = open_catalog(directory, version=version, num_products=num_products)
    catalog.nouns.require(product.title for product in catalog.products.values())
    return catalog


def _whole_goals(catalog: Catalog, kind: GoalKind, preseed: int, variant: Variant) -> GoalList:
    """All goals; those without a seed of one's own are kept beside a compiled catalogue."""
    if catalog.compiled_file is None or preseed != 0 or variant is not None:
        return build_goals(catalog, kind, preseed=preseed, variant=variant)
    path = goals_file(catalog, kind)
    try:
        return GoalList.read(path, catalog, kind)
    except OSError:  # nothing there, or a cache that cannot be read
        pass
    except TableError as error:
        _LOG.warning("%s", error)
    goal_list = build_goals(catalog, kind)
    try:
        goal_list.write(path)
        return GoalList.read(path, catalog, kind)
    except (OSError, TableError):  # the cache cannot be written: everything works without
        return goal_list


def goals_file(catalog: Catalog, kind: GoalKind) -> Path:
    """Where the goals of a compiled catalogue are kept."""
    return catalogue_cache(catalog.catalogue_hash) / f"goals-{catalog.version}-{kind}.table"


def _engine(catalog: Catalog, name: str) -> SearchEngine:
    with _MEMO_LOCK:
        return _build_engine(catalog, name)


@lru_cache(maxsize=8)
def _build_engine(catalog: Catalog, name: str) -> SearchEngine:
    """Shared by all shops of one catalogue; the embedded engine's index is kept beside a compiled catalogue."""
    if name == "bm25" and (stored := _stored_index(catalog)) is not None:
        return BM25Search(stored, truncate_long_queries=catalog.version == "v1")
    documents = map(index_document, catalog.products.values())
    hash_, is_cut = catalog.catalogue_hash, catalog.version == "v1"
    if name == "pyserini":
        from webshop_env.search.pyserini import PyseriniSearch

        return PyseriniSearch.open(
            list(documents), list(catalog.asins), catalogue_hash=hash_, truncate_long_queries=is_cut
        )
    index = BM25Index.build(documents, catalog.asins, catalogue_hash=hash_)
    if catalog.compiled_file is not None:
        with contextlib.suppress(OSError):  # without a cache, every process makes its own
            index.save(index_file(catalog))
    return BM25Search(index, truncate_long_queries=is_cut)


def index_file(catalog: Catalog) -> Path:
    """Where `data build` keeps the search index of a catalogue."""
    return catalogue_cache(catalog.catalogue_hash) / f"bm25-{catalog.version}.index"


def _stored_index(catalog: Catalog) -> BM25Index | None:
    try:
        return BM25Index.load(index_file(catalog), catalog.catalogue_hash)
    except OSError:  # nothing there, or a cache that cannot be read
        return None
    except IndexMismatchError as error:
        _LOG.warning("%s", error)
        return None


def check_whole(name: str, value: object, least: int | None = None) -> None:
    """Refuses what is no whole number, or one under `least`; True and False are none."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ShopGymError(f"{name} must be a whole number{bound}, got {value!r}")


def _check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ShopGymError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
