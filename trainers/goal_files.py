"""Goal lists as data: one Parquet file, one goal a row.

| column | type | what it is |
|---|---|---|
| goal_id | string | names the goal in its catalogue, whatever the order and the split (a seed, where goals are seeds) |
| data_source | string | the environment that the list was made with |
| modality | string | `text`: what observations are |
| split, index | string, int64 | where the goal came from, and its place in this file |
| env_kwargs | struct | settings of that environment, and the hash of its catalogue |

There are no prompts: those are made in the rollout, from what the environment shows. verl-agent's files have the same
task and no goals either: a row there only counts, and the environment draws whatever it likes. Here the rows are the
goals that are played, so that a list means the same to everybody who reads it. Hence a training list of one batch
trains on those few goals in every update, and is rarely what is wanted: make it long, or use the train split.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.storage import read_table, require_pyarrow
from trainers.files import write_atomically
from trainers.settings import EnvSettings, SettingsError
from trainers.worlds import SeedWorld, goal_ids, is_shop
from webshop_env.shop import Shop

if TYPE_CHECKING:
    from trainers.worlds import World

FORMAT = "1"
"""Changes when files of before can no longer be read."""
COLUMNS = ("goal_id", "data_source", "modality", "env_kwargs")
"""What reading needs."""
MODALITIES = ("text",)


def save_goals(path: Path, goals: np.ndarray, world: World, env: EnvSettings, *, split: str, modality: str) -> None:
    """Writes a goal list; a file of that name is replaced in one step.

    Args:
        path: Parquet file.
        goals: int [E], places in the whole list of the world's goals.
        world: What they are goals of.
        env: Settings that opened it.
        split: Where they come from.
        modality: One of `MODALITIES`.
    """
    pa, parquet = require_pyarrow()
    made_with = {
        "env_name": env.env_name,
        "variant": env.variant,
        "goals": env.webshop.goals if is_shop(env) else None,
        "split_by": env.webshop.split_by if is_shop(env) else None,
        "seed": env.seed,
        "catalogue_hash": world.catalogue_hash,
    }
    num = len(goals)
    table = pa.table(
        {
            "goal_id": pa.array(goal_ids(world, goals), pa.string()),
            "data_source": pa.array([env.env_name] * num, pa.string()),
            "modality": pa.array([modality] * num, pa.string()),
            "split": pa.array([split] * num, pa.string()),
            "index": pa.array(range(num), pa.int64()),
            "env_kwargs": pa.array(
                [made_with] * num, pa.struct([(key, pa.int64() if key == "seed" else pa.string()) for key in made_with])
            ),
        }
    )
    sink = pa.BufferOutputStream()
    parquet.write_table(table.replace_schema_metadata({"shopgym_goal_list": json.dumps({"format": FORMAT})}), sink)
    write_atomically(path, sink.getvalue().to_pybytes())


def load_goals(path: str, world: World, env: EnvSettings, *, key: str) -> np.ndarray:
    """The goals of a list, int32 [E] in its order, as places in the whole list of this world's goals.

    A list serves both versions and both variants of a shop: its goals are the same in all of them.

    Args:
        path: Parquet file; `~` and `$NAME` are filled in.
        world: What the goals must belong to.
        env: Settings that opened it.
        key: The setting that names the file, for errors.

    Raises:
        SettingsError: The file is missing, damaged or no goal list, holds nothing or a goal twice, or is about another
            environment, catalogue or modality.
    """
    rows = _rows(Path(os.path.expandvars(path)).expanduser(), key)
    where = f"{key}: {path}"
    if not rows["goal_id"]:
        raise SettingsError(f"{where} holds no goals; make it anew with python -m data.prepare")
    for source in dict.fromkeys(rows["data_source"]):
        if source != env.env_name and not (is_shop(env) and str(source).startswith("WebShop-")):
            raise SettingsError(f"{where} was made for {source}, this run has env.env_name={env.env_name}; {_AGAIN}")
    for modality in dict.fromkeys(rows["modality"]):
        if modality not in MODALITIES:
            raise SettingsError(f"{where} is about the modality {modality}, environments here show text; {_AGAIN}")
    for made_with in rows["env_kwargs"]:
        if (then := made_with.get("catalogue_hash")) != world.catalogue_hash:
            raise SettingsError(
                f"{where} was made for catalogue {str(then)[:16]}, this run has {world.catalogue_hash[:16]}: "
                f"set env.webshop.data_dir to the same catalogue; or {_AGAIN}"
            )
    if len(set(rows["goal_id"])) < len(rows["goal_id"]):
        twice = next(goal for i, goal in enumerate(rows["goal_id"]) if goal in rows["goal_id"][:i])
        raise SettingsError(f"{where} names goal {twice} twice; {_AGAIN}")
    return np.asarray([_place(world, goal, env, where) for goal in rows["goal_id"]], dtype=np.int32)


_AGAIN = "make a list for this run with python -m data.prepare"


def _rows(path: Path, key: str) -> dict[str, list[Any]]:
    table = read_table(
        path,
        lambda reason: SettingsError(
            f"{key}: {path} cannot be read ({reason}); make it with python -m data.prepare, or leave it out"
        ),
    )
    found = json.loads((table.schema.metadata or {}).get(b"shopgym_goal_list", b"{}")).get("format")
    missing = [column for column in COLUMNS if column not in table.column_names]
    if found != FORMAT or missing:
        why = f"it lacks the column {missing[0]}" if missing else f"its format is {found}, not {FORMAT}"
        raise SettingsError(f"{key}: {path} is no goal list ({why}); make it with python -m data.prepare")
    return {column: table.column(column).to_pylist() for column in COLUMNS}


def _place(world: World, goal_id: str, env: EnvSettings, where: str) -> int:
    """Where the world has a goal."""
    try:
        if isinstance(world, Shop):
            return world.goal_by_id(goal_id).goal_index
        place = int(goal_id)
        if isinstance(world, SeedWorld) and not 0 <= place < world.num_goals:
            raise ValueError
    except ValueError:  # ShopGymError is one
        kind = f"{env.webshop.goals} goals of this catalogue" if is_shop(env) else f"goals of {env.env_name}"
        raise SettingsError(f"{where} names goal {goal_id}, which is none of the {kind}; {_AGAIN}") from None
    return place
