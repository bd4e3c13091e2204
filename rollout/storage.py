"""A rollout as one Parquet file: to look at, to replay, to train on elsewhere.

One row per environment step under the names of `StepBatch`. Columns that a batch does not fill are left out. The page
of each step is there as text in column `anchor` (stored once per distinct page). What comes back equals what was
saved: values, types of numbers, lengths, None.

Columns and facts for readers can be added (`extra`, `world`): the viewer (`python -m webshop_env.site FILE`) shows
prompts and replies as text, parts of advantages, and the page for people where it knows what was played in.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.engines.prompts import writable
from rollout.types import StepBatch, ragged
from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    import pyarrow

FORMAT = "1"
"""Changes when files of before can no longer be read."""

_NUMBER_ROWS = {
    "prompt_ids": np.int32,
    "reply_ids": np.int32,
    "rollout_log_probs": np.float32,
    "old_log_probs": np.float32,
    "ref_log_probs": np.float32,
}
"""Columns whose rows are arrays, and the type of an array's numbers where there are no rows to tell."""
_TEXTS = ("action", "problem", "reason")
_COLUMNS = tuple(f.name for f in fields(StepBatch) if f.name != "anchor_texts")
_OPTIONAL = {f.name for f in fields(StepBatch) if f.default is None}


def save_batch(
    batch: StepBatch,
    path: str | Path,
    *,
    extra: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
    world: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a batch as one Parquet file, which is there whole or not at all; a file of that name is replaced.

    Halves of surrogate pairs, which odd catalogues hold, become question marks in it.

    Args:
        batch: Any rows.
        path: Where to.
        extra: More columns, N values each, for people and other programs; `load_batch` leaves them out.
        world: What was played in, as JSON can hold it: `env_id`, `settings`, `catalogue_hash`.

    Raises:
        ShopGymError: pyarrow is not installed, or the file cannot be written.
        ValueError: rows of a column hold numbers of different types, or an extra column has a name of the batch's.
    """
    pa, parquet = require_pyarrow()
    if taken := sorted((extra or {}).keys() & {*_COLUMNS, "anchor"}):
        raise ValueError(f"extra column {taken[0]!r}: the batch has one of that name")
    target = Path(path)
    used = set(batch.anchor_id.tolist())
    about = {
        "format": FORMAT,
        "num_anchors": len(batch.anchor_texts),
        # Pages of rows that were left out of the batch: numbers of anchors stay what they were.
        "other_anchors": {str(i): text for i, text in enumerate(batch.anchor_texts) if i not in used},
        "world": dict(world or {}),
    }
    columns = {name: _to_arrow(pa, name, getattr(batch, name)) for name in _COLUMNS if getattr(batch, name) is not None}
    anchors = [writable(text) for text in batch.anchor_texts]
    columns["anchor"] = pa.array([anchors[i] for i in batch.anchor_id], pa.string())
    columns |= {name: pa.array(values) for name, values in (extra or {}).items()}
    table = pa.table(columns).replace_schema_metadata({"shopgym_step_batch": json.dumps(about)})
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    except OSError as error:
        raise ShopGymError(f"{target} cannot be written ({error.strerror}); name another place") from None
    try:
        with os.fdopen(handle, "wb") as file:
            parquet.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, target)
    except OSError as error:
        raise ShopGymError(f"{target} cannot be written ({error.strerror}); name another place") from None
    finally:
        with suppress(FileNotFoundError):
            os.unlink(scratch)
    return target


def load_batch(path: str | Path) -> StepBatch:
    """Reads what `save_batch` wrote.

    Raises:
        ShopGymError: pyarrow is not installed, or the file is missing, damaged, or something else.
    """
    table = read_table(
        path,
        lambda reason: ShopGymError(
            f"{path} cannot be read as a rollout ({reason}); give a file that save_batch wrote"
        ),
    )
    about = _about(table.schema.metadata or {}, path)
    missing = {*_COLUMNS, "anchor"} - _OPTIONAL - set(table.column_names)
    if missing:
        raise ShopGymError(f"{path} is no rollout: it lacks the column {min(missing)}; give a file of save_batch")
    columns: dict[str, Any] = {
        name: _from_arrow(name, table.column(name)) for name in _COLUMNS if name in table.column_names
    }
    texts = {int(i): text for i, text in about["other_anchors"].items()}
    texts.update(zip(columns["anchor_id"].tolist(), table.column("anchor").to_pylist(), strict=True))
    return StepBatch(**columns, anchor_texts=tuple(texts[i] for i in range(about["num_anchors"])))


def read_table(path: str | Path, refusal: Callable[[str], ShopGymError]) -> pyarrow.Table:
    """The table of a Parquet file.

    Args:
        path: Where it is.
        refusal: Makes the error of a file that cannot be read out of the reason.

    Raises:
        ShopGymError: pyarrow is not installed, or `refusal`'s.
    """
    pa, parquet = require_pyarrow()
    try:
        with open(path, "rb") as file:
            return parquet.read_table(file)
    except (OSError, pa.ArrowInvalid) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "no whole Parquet file"
        raise refusal(reason) from None


def require_pyarrow() -> tuple[Any, Any]:
    """`pyarrow` and `pyarrow.parquet`.

    Raises:
        ShopGymError: They are not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ShopGymError("Parquet files need pyarrow: pip install 'shopgym[train]'") from None
    return pyarrow, pyarrow.parquet


def _about(metadata: Mapping[bytes, bytes], path: str | Path) -> dict[str, Any]:
    about = json.loads(metadata.get(b"shopgym_step_batch", b"{}"))
    if about.get("format") != FORMAT:
        found = f"format {about['format']}" if about else "another kind of table"
        raise ShopGymError(f"{path} is {found}, not a rollout of format {FORMAT}; give a file that save_batch wrote")
    return about


def _to_arrow(pa: Any, name: str, column: np.ndarray) -> pyarrow.Array:
    if name in _NUMBER_ROWS:
        types = {row.dtype for row in column} or {np.dtype(_NUMBER_ROWS[name])}
        if len(types) > 1:
            raise ValueError(f"{name}: rows hold {' and '.join(sorted(map(str, types)))}; make them all the same")
        offsets = np.cumsum([0, *(len(row) for row in column)])
        values = np.concatenate(column) if len(column) else np.zeros(0, types.pop())
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))
    if name == "admissible":
        return pa.array([None if row is None else list(map(writable, row)) for row in column], pa.list_(pa.string()))
    if name in _TEXTS:
        return pa.array([None if text is None else writable(text) for text in column.tolist()], pa.string())
    return pa.array(column)


def _from_arrow(name: str, column: pyarrow.ChunkedArray) -> np.ndarray:
    if name in _NUMBER_ROWS:
        lists = column.combine_chunks()
        values = lists.values.to_numpy(zero_copy_only=False)
        offsets = lists.offsets.to_numpy()
        return ragged([values[start:stop].copy() for start, stop in pairwise(offsets)])
    if name == "admissible":
        return ragged([None if row is None else tuple(row) for row in column.to_pylist()])
    if name in _TEXTS:
        return ragged(column.to_pylist())
    return column.to_numpy().copy()
