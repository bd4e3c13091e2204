"""Goals as columns of numbers: a list of millions costs a few bytes a goal, and may be mapped from a file."""

from __future__ import annotations

import bisect
import itertools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from webshop_env.catalog import Catalog, Instruction
from webshop_env.table_file import TableFile, write_table
from webshop_env.types import Goal, Product

# Dimensions: G goals, N products.

GoalKind = Literal["synthetic", "human"]

NO_CAP_USD = 1_000_000.0
"""`price_upper` of a goal whose instruction names no price."""

_TABLE = "goals-2"
_NUM_KEPT = 1 << 12
_GOAL_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, eq=False)
class GoalColumns:
    """What tells goals apart; all else of a goal follows from its product."""

    rows: np.ndarray
    """int32 [G], the product's place in the catalogue."""
    wishes: np.ndarray
    """int64 [G], which of the product's `combinations`, or which of its human instructions."""
    ids: np.ndarray
    """uint64 [G], `goal_id` as a number."""
    caps: np.ndarray
    """float64 [G], US dollars."""
    weights: np.ndarray
    """float64 [G]."""
    lengths: np.ndarray
    """int32 [G], characters of the instruction."""

    def take(self, places: np.ndarray) -> GoalColumns:
        """The goals at some places, in their order."""
        return GoalColumns(*(getattr(self, column.name)[places] for column in fields(self)))


class Goals(Sequence[Goal]):
    """Goals in their order, each made when it is asked for; equal to any sequence of the same goals."""

    def __init__(self, catalog: Catalog, kind: GoalKind, columns: GoalColumns) -> None:
        self._catalog, self._kind, self._columns = catalog, kind, columns
        self._kept = lru_cache(maxsize=_NUM_KEPT)(self._make)

    def __len__(self) -> int:
        return len(self._columns.rows)

    @overload
    def __getitem__(self, index: int) -> Goal: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Goal, ...]: ...
    def __getitem__(self, index: int | slice) -> Goal | tuple[Goal, ...]:
        if isinstance(index, slice):
            return tuple(map(self._make, range(*index.indices(len(self)))))
        place = operator.index(index)
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"goal {index} of {len(self)}")
        return self._kept(place)

    def __iter__(self) -> Iterator[Goal]:
        return map(self._make, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def _make(self, index: int) -> Goal:
        columns = self._columns
        asin = self._catalog.asins[int(columns.rows[index])]
        product, wish, cap = self._catalog.products[asin], int(columns.wishes[index]), float(columns.caps[index])
        options: dict[str, str] | tuple[str, ...]
        if self._kind == "synthetic":
            instruction = self._catalog.instructions[asin]
            options = _combination(product, wish)
            text = synthetic_text(instruction, options)
        else:
            instruction = self._catalog.human_instructions[asin][wish]
            options, text = instruction.options, instruction.text
        return Goal(
            goal_id=f"{int(columns.ids[index]):016x}",
            goal_index=index,
            asin=asin,
            instruction_text=text + price_text(cap),
            attributes=instruction.attributes,
            options=options,
            price_upper=cap,
            name=product.title,
            category=product.category,
            query=product.query,
            product_category=product.product_category,
            weight=float(columns.weights[index]),
        )


@dataclass(frozen=True, eq=False)
class GoalList:
    """The goals of a shop, with what was drawn on the way to them."""

    catalog: Catalog
    kind: GoalKind
    goals: Goals
    """In their order; `goals[i].goal_index == i`."""
    columns: GoalColumns
    """The same, as arrays."""
    prices: np.ndarray
    """float64 [N], the price of each product that the score uses, in US dollars; NaN when none is known (v1)."""
    rng_state: tuple[Any, ...]
    """State of the private generator after all draws; v0's sessions go on from it."""
    whole_indexes: np.ndarray
    """int32 [G], place of each goal in the list before `filter_goals` and `limit_goals`; splits are cut there."""
    num_whole: int
    """Length of that list."""
    running_weights: np.ndarray
    """float64 [G + 1], for `draw_goal`."""
    places_by_id: np.ndarray
    """int32 [G], the places in the order of their ids."""

    @classmethod
    def of(
        cls,
        catalog: Catalog,
        kind: GoalKind,
        columns: GoalColumns,
        *,
        prices: np.ndarray,
        rng_state: tuple[Any, ...],
        whole_indexes: np.ndarray,
        num_whole: int,
    ) -> GoalList:
        """Adds what follows from the columns."""
        return cls(
            catalog=catalog,
            kind=kind,
            goals=Goals(catalog, kind, columns),
            columns=columns,
            prices=prices,
            rng_state=rng_state,
            whole_indexes=whole_indexes,
            num_whole=num_whole,
            running_weights=running_sums(columns.weights),
            places_by_id=np.argsort(columns.ids, kind="stable").astype(np.int32),
        )

    def place_of(self, goal_id: str) -> int:
        """The place of the goal with that id.

        Raises:
            KeyError: There is none.
        """
        if not isinstance(goal_id, str) or not _GOAL_ID.fullmatch(goal_id):
            raise KeyError(goal_id)
        wanted = int(goal_id, 16)
        # By bisection: with a sorter, `searchsorted` would first go through all places.
        found = bisect.bisect_left(self.places_by_id, wanted, key=lambda place: int(self.columns.ids[place]))
        if found == len(self.places_by_id) or int(self.columns.ids[self.places_by_id[found]]) != wanted:
            raise KeyError(goal_id)
        return int(self.places_by_id[found])

    def write(self, path: Path) -> None:
        """Keep a whole list in a file.

        Raises:
            OSError: The file cannot be written.
        """
        with write_table(path, _TABLE, self.catalog.catalogue_hash) as table:
            for column in fields(self.columns):
                table.put(column.name, getattr(self.columns, column.name))
            for name in ("prices", "whole_indexes", "running_weights", "places_by_id"):
                table.put(name, getattr(self, name))
            table.facts["rng_state"] = self.rng_state

    @classmethod
    def read(cls, path: Path, catalog: Catalog, kind: GoalKind) -> GoalList:
        """The list that `write` kept; its columns are mapped.

        Raises:
            FileNotFoundError: There is no such file.
            TableError: It is cut off, damaged or of another catalogue.
        """
        table = TableFile(path, _TABLE, catalog.catalogue_hash)
        columns = GoalColumns(*(table.array(column.name) for column in fields(GoalColumns)))
        version, state, gauss = table.facts["rng_state"]
        return cls(
            catalog=catalog,
            kind=kind,
            goals=Goals(catalog, kind, columns),
            columns=columns,
            prices=table.array("prices"),
            rng_state=(version, tuple(state), gauss),
            whole_indexes=table.array("whole_indexes"),
            num_whole=len(columns.rows),
            running_weights=table.array("running_weights"),
            places_by_id=table.array("places_by_id"),
        )


def combinations(product: Product) -> Iterator[dict[str, str]]:
    """Every way to select one value of each option group; groups in the order of their names."""
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _combination(product: Product, place: int) -> dict[str, str]:
    """The one of `combinations` at a place, without those before it: the last group turns fastest."""
    chosen = []
    for name in sorted(product.options, reverse=True):
        place, value = divmod(place, len(product.options[name]))
        chosen.append((name, product.options[name][value]))
    return dict(reversed(chosen))


def synthetic_text(instruction: Instruction, options: Mapping[str, str]) -> str:
    """An instruction with the options that are wanted, without the price."""
    wish = ", and ".join(f"{name}: {value}" for name, value in options.items())
    return instruction.text + (f" with {wish}" if wish else "")


def price_text(price_upper: float) -> str:
    """The end of an instruction, such as ", and price lower than 40.00 dollars"; empty without a cap."""
    return "" if price_upper == NO_CAP_USD else f", and price lower than {price_upper:.2f} dollars"


def running_sums(weights: np.ndarray) -> np.ndarray:
    """float64 [len + 1]: 0, then the sums of the first, the first two ... weights, added one after another."""
    return np.concatenate([np.zeros(1), np.cumsum(weights, dtype=np.float64)])
