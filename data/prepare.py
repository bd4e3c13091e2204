"""Goal lists for training and validation, as Parquet files of goal ids (`trainers/goal_files.py` says what is inside).

    python -m data.prepare --mode text --train_data_size 16 --val_data_size 256
    python -m data.prepare --train_data_size 0 --out lists env.webshop.data_dir=DIR env.webshop.split_by=product
    python -m data.prepare --max_per_product 6 --out lists env.webshop.data_dir=DIR env.webshop.split_by=product

Writes train.parquet and test.parquet, for `data.train_files` and `data.val_files`. Training goals are a fixed choice of
the train split, validation goals the very ones that a validation of as many goals plays without a list. The words after
the options are settings of training, which say what the goals are of: the embedded shop, unless they name another.

In the published preparation the sizes only count rows, and each update draws goals of its own; here a row is a goal.
So a train list of one batch, as in the first line, makes every update play the same goals: leave `data.train_files`
out, or write all goals (`--train_data_size 0`).

A product has as many goals as its options have combinations: of the 415 products behind the original's 6,910 goals one
has 558, 26 have three fifths, and half have one or two. `--max_per_product` spreads training over products;
`data.sample_by=product`, a setting of training, plays all of them equally often. `--max_options 0` keeps the goals that
name no option: what tells their product from others stands in its texts alone.
"""

# ruff: noqa: RUF009  group() makes dataclass fields

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.files import new_files
from trainers.files import require_writable
from trainers.goal_files import MODALITIES, save_goals
from trainers.goals import by_product, fixed_choice, fixed_goals, validation_split
from trainers.settings import DataSettings, EnvSettings, SettingsError, explain, group, resolve, setting
from trainers.worlds import World, goal_products, open_world
from webshop_env.command_line import run_safely, say
from webshop_env.shop import Shop

NUM_VAL = 256
"""Validation goals, unless the command line says how many; a split that has fewer gives all of its own."""


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """The settings of training that say which goals there are."""

    recipe: str = setting("tiny", "where env settings come from")
    env: EnvSettings = group(EnvSettings)
    data: DataSettings = group(DataSettings)


def prepare(
    out: Path,
    env: EnvSettings,
    *,
    modality: str,
    num_train: int,
    num_val: int | None,
    max_per_product: int | None = None,
    max_options: int | None = None,
) -> list[str]:
    """Writes both lists, or none.

    Args:
        out: Directory, made if need be; lists of before are replaced.
        env: What the goals are of.
        modality: What observations are.
        num_train: Goals of train.parquet; 0 takes the whole split.
        num_val: Goals of test.parquet; 0 takes the whole split, None up to `NUM_VAL` of it.
        max_per_product: Goals of a product in train.parquet, at most, a fixed choice; None takes all.
        max_options: Options that a goal of train.parquet asks for, at most; None takes all goals.

    Returns:
        What was written, a line for each file.

    Raises:
        ShopGymError: A split has fewer goals than asked for, or the directory cannot be written.
    """
    world = open_world(env)
    val_split = validation_split(env)
    train, val = (fixed_goals(world, split, sys.maxsize) for split in ("train", val_split))
    if max_options is not None:
        train = _simple(world, train, max_options)
    if max_per_product is not None:
        train = _spread(train, goal_products(world, train), max_per_product)
    if num_val is None:
        num_val = min(NUM_VAL, len(val))
    chosen = [
        ("train.parquet", "train", _choose(train, "train", num_train, option="--train_data_size")),
        ("test.parquet", val_split, _choose(val, val_split, num_val, option="--val_data_size")),
    ]
    require_writable(out, setting="--out")
    said = []
    try:
        with new_files(out, [name for name, _, _ in chosen]) as scratch:
            for name, split, goals in chosen:
                save_goals(scratch / name, goals, world, env, split=split, modality=modality)
                of_all = f"{len(goals)} of the {len(world.split(split))} {split} goals"
                said.append(f"{out / name}: {of_all} of {env.env_name}")
    except OSError as error:
        raise SettingsError(f"--out: {out} cannot be written ({error.strerror}); name another place") from None
    return said


def _choose(goals: np.ndarray, split: str, num: int, *, option: str) -> np.ndarray:
    if not len(goals):
        raise SettingsError(f"the {split} split has no goals; choose another env.webshop.split_by or catalogue")
    if num < 0 or num > len(goals):
        raise SettingsError(f"{option} must be 0 (all) to {len(goals)}, the goals of the {split} split, got {num}")
    return fixed_choice(goals, num or len(goals))


def _simple(world: World, goals: np.ndarray, most: int) -> np.ndarray:
    """Those that ask for so many options at most."""
    if most < 0:
        raise SettingsError(f"--max_options must be at least 0, got {most}")
    if not isinstance(world, Shop):
        raise SettingsError("--max_options: goals of this environment ask for no options; leave it out")
    simple = goals[[len(world.goal_at(int(goal)).options) <= most for goal in goals]]
    if not len(simple):
        raise SettingsError(f"--max_options={most}: every goal of the train split asks for more; raise it")
    return simple


def _spread(goals: np.ndarray, products: Sequence[str | None], most: int) -> np.ndarray:
    """Of each product so many goals at most, the same ones every time."""
    if most < 1:
        raise SettingsError(f"--max_per_product must be at least 1, got {most}")
    if None in products:
        raise SettingsError("--max_per_product: goals of this environment are of no product; leave it out")
    return np.sort(np.concatenate([fixed_choice(of_product, most) for of_product in by_product(goals, products)]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return run_safely(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"settings:\n{explain(PrepareSettings(), {})}",
    )
    parser.add_argument("--mode", default="text", help="modality of the observations: text")
    parser.add_argument("--train_data_size", type=int, default=0, help="goals of train.parquet; 0 (default) is all")
    parser.add_argument(
        "--val_data_size", type=int, help=f"goals of test.parquet; 0 is all (default: {NUM_VAL}, or all there are)"
    )
    parser.add_argument("--max_per_product", type=int, help="goals of a product in train.parquet, at most")
    parser.add_argument("--max_options", type=int, help="options that a goal of train.parquet asks for, at most")
    parser.add_argument("--out", type=Path, help="directory (default: ~/data/verl-agent/MODE, where scripts look)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of training, such as env.env_name")
    options = parser.parse_intermixed_args(arguments)
    out = options.out or Path("~/data/verl-agent") / options.mode
    if options.mode not in MODALITIES:
        raise SettingsError(f"--mode must be {MODALITIES[0]}, got {options.mode}: no page here is a picture")
    settings, notes, _ = resolve(options.settings, PrepareSettings)
    said = prepare(
        out.expanduser(),
        settings.env,
        modality=options.mode,
        num_train=options.train_data_size,
        num_val=options.val_data_size,
        max_per_product=options.max_per_product,
        max_options=options.max_options,
    )
    for line in (*(f"note: {note}" for note in notes), *said):
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
