"""Which goals are played when: the order of training, the list of validations.

Goals come from the splits of the world, or from goal lists (`goal_files.py`) where the settings name them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainers.goal_files import load_goals
from trainers.settings import DataSettings, EnvSettings, Settings, SettingsError
from trainers.worlds import goal_products, is_shop

if TYPE_CHECKING:
    from trainers.worlds import World

GOAL_ORDER_SEED = 233
"""Chooses the fixed validation goals out of a split; the published split seed."""


def train_goals(world: World, env: EnvSettings, data: DataSettings) -> tuple[np.ndarray, str]:
    """The goals to learn from, and where they come from.

    Raises:
        SettingsError: The goal list does not fit this world.
    """
    if data.train_files is None:
        return world.split("train"), "the train split"
    return load_goals(data.train_files, world, env, key="data.train_files"), data.train_files


def training_goals(world: World, settings: Settings) -> GoalOrder:
    """The goals to learn from, in the order of the run's seed.

    Raises:
        SettingsError: The goal list does not fit this world, or there are fewer goals than an update plays.
    """
    goals, source = train_goals(world, settings.env, settings.data)
    num = settings.goals_of_a_try
    key = "data.train_batch_size" if num == settings.data.train_batch_size else "data.gen_batch_size"
    products = goal_products(world, goals) if settings.data.sample_by == "product" and is_shop(settings.env) else None
    return GoalOrder(goals, num, seed=settings.trainer.seed, source=source, key=key, products=products)


def validation_goals(world: World, settings: Settings) -> np.ndarray:
    """int32, rising: the goals that every validation plays, all of the goal list or a fixed choice of the split.

    Raises:
        SettingsError: The goal list does not fit this world; the split is empty, or has fewer goals than
            `val_batch_size` where there are validations.
    """
    env, data, trainer = settings.env, settings.data, settings.trainer
    goals, source = goals_to_play(world, env, data, split=validation_split(env), num=data.val_batch_size)
    validates = trainer.val_before_train or trainer.test_freq > 0
    if data.val_files is None and len(goals) < data.val_batch_size and validates:
        raise SettingsError(
            f"data.val_batch_size={data.val_batch_size} is more than the {len(goals)} goals of the {source} split; "
            "lower it"
        )
    return goals


def goals_to_play(
    world: World, env: EnvSettings, data: DataSettings, *, split: str, num: int
) -> tuple[np.ndarray, str]:
    """The goals that a policy is measured on, int32, rising, and the name of the split or file that they come from.

    Args:
        world: What they are goals of.
        env: Settings that opened it.
        data: Names a goal list (`val_files`), which is then played whole, or none.
        split: Where they come from without a list.
        num: How many of it, a fixed choice.

    Raises:
        SettingsError: The goal list does not fit this world, or the split is empty.
    """
    if data.val_files is None:
        return fixed_goals(world, split, num), split
    return np.sort(load_goals(data.val_files, world, env, key="data.val_files")), Path(data.val_files).name


def validation_split(env: EnvSettings) -> str:
    """Goals that validations play: those of `eval`; the published run uses the first goals of the list."""
    return "test" if env.variant == "verl" and is_shop(env) else "eval"


def validation_source(env: EnvSettings, data: DataSettings) -> str:
    """Where the goals of validations come from: a split, or the name of a file."""
    return validation_split(env) if data.val_files is None else Path(data.val_files).name


def goals_hash(goals: np.ndarray) -> str:
    """16 hex digits that change when any goal of a list does."""
    return hashlib.sha256(np.sort(goals).astype("<i4").tobytes()).hexdigest()[:16]


def goal_notes(order: GoalOrder, validation: np.ndarray, settings: Settings) -> list[str]:
    """What to tell about goals before long work begins: what teaches nothing, comes too often, is tested on as well."""
    notes = []
    if settings.env.rollout.n == 1 and settings.algorithm.adv_estimator != "reinforce++":
        notes.append(
            f"env.rollout.n=1: {settings.algorithm.adv_estimator} compares episodes of one goal, and with one of each "
            "there is next to nothing to learn; set env.rollout.n=2 or more, or algorithm.adv_estimator=reinforce++"
        )
    num_played = settings.trainer.total_updates * settings.goals_of_a_try
    times = f"{num_played / order.epoch_size:.3g} times"
    if order.is_by_product and num_played > order.epoch_size:
        notes.append(
            f"data.sample_by=product: this run plays {num_played} goals of {order.epoch_size} products, "
            f"each about {times}"
        )
    elif settings.data.train_files is not None and num_played > order.epoch_size:
        notes.append(
            f"data.train_files holds {order.epoch_size} goals, and this run plays {num_played}: each comes about "
            f"{times} (rows are goals here; the published files only count them)"
        )
    num_shared = len(np.intersect1d(order.goals, validation))
    if num_shared:
        notes.append(f"{num_shared} of the {len(validation)} validation goals are trained on too")
    return notes


def tell_of_fewer(goals: np.ndarray, source: str, *, key: str, num: int) -> None:
    """Prints a note where a setting asks for more goals than there are."""
    if len(goals) < num:
        print(f"note: {key}={num}: {source} has {len(goals)} goals, all of them are played", flush=True)


def fixed_goals(world: World, split: str, num: int) -> np.ndarray:
    """The same `num` goals of a split every time, int32, rising; all of them when it has fewer."""
    goals = world.split(split)
    if len(goals) == 0:
        raise SettingsError(
            f"the {split} split of this catalogue is empty; name a goal list (data.train_files, data.val_files), or "
            "another catalogue"
        )
    return fixed_choice(goals, num)


def fixed_choice(goals: np.ndarray, num: int) -> np.ndarray:
    """The same `num` of some goals every time, rising; all of them, as they are, when there are fewer."""
    if num >= len(goals):
        return np.asarray(goals)
    return np.sort(np.random.default_rng(GOAL_ORDER_SEED).permutation(goals)[:num])


def by_product(goals: np.ndarray, products: Sequence[str | None]) -> list[np.ndarray]:
    """The goals of each product, in their order."""
    places: dict[str | None, list[int]] = {}
    for place, product in enumerate(products):
        places.setdefault(product, []).append(place)
    return [goals[of_product] for of_product in places.values()]


class GoalOrder:
    """Training goals in a seeded order: every goal once, then all again in another order.

    Or every product once, with one of its goals, then all again with their next ones: for a policy that is measured by
    its mean over products. More than half of the original's have one or two goals, together 4 % of all goals.

    The goals of an update are a function of its number, and of where a run went on: its update, and its place in the
    order, which a checkpoint saves (`place`) because another batch size may have led there.
    """

    def __init__(
        self,
        goals: np.ndarray,
        batch_size: int,
        *,
        seed: int,
        source: str = "the train split",
        key: str = "data.train_batch_size",
        products: Sequence[str | None] | None = None,
    ) -> None:
        """Takes the goals.

        Args:
            goals: int [E], each once.
            batch_size: Goals of an update.
            seed: Of the order.
            source: Where they come from, for the error.
            key: What the user calls the batch size, for the error.
            products: That of each goal, where every product comes once; None where every goal does.

        Raises:
            SettingsError: There are fewer goals, or products, than one update plays.
        """
        self.goals, self.batch_size, self.seed = np.asarray(goals), batch_size, seed
        self._of_products = None if products is None else by_product(self.goals, products)
        self.epoch_size = len(self.goals if self._of_products is None else self._of_products)
        """Goals of an epoch: all of them, or one of each product."""
        if self.epoch_size < batch_size:
            kind = "goals" if self._of_products is None else "products"
            raise SettingsError(f"{key}={batch_size} is more than the {self.epoch_size} {kind} of {source}; lower it")
        self._origin = (0, 0)

    @property
    def is_by_product(self) -> bool:
        """Products come once an epoch, not goals."""
        return self._of_products is not None

    def go_on(self, update: int, place: int) -> None:
        """Takes an update's first goal from a place of the order, and those of all others from where that leads."""
        self._origin = (update, place)

    def place(self, update: int) -> int:
        """Where in the order the first goal of an update lies: goals played before it, later tries aside."""
        first_update, first_place = self._origin
        return first_place + (update - first_update) * self.batch_size

    def batch(self, update: int, attempt: int = 0) -> np.ndarray:
        """int32 [batch_size]: the goals of an update, from 0.

        Args:
            update: Pass of the main loop.
            attempt: 0 gives what the order has for this update; by product one that ends an epoch and begins the next
                may hold a product twice. Later ones give the other goals, or goals of the other products, in an order
                of their own, each once before any comes again.
        """
        first = self.place(update)
        places = [divmod(place, self.epoch_size) for place in range(first, first + self.batch_size)]
        orders = {epoch: self._permuted((self.seed, epoch), self.epoch_size) for epoch, _ in places}
        members = [int(orders[epoch][at]) for epoch, at in places]
        if attempt:
            epoch = places[0][0]
            others = np.setdiff1d(np.arange(self.epoch_size), members)
            mixed = self._permuted((self.seed, update, 1), others if len(others) else self.epoch_size)
            tried = range((attempt - 1) * self.batch_size, attempt * self.batch_size)
            return self._goals(np.take(mixed, tried, mode="wrap").tolist(), [epoch] * self.batch_size)
        return self._goals(members, [epoch for epoch, _ in places])

    @staticmethod
    def _permuted(seed: tuple[int, ...], members: np.ndarray | int) -> np.ndarray:
        return np.random.default_rng(seed).permutation(members)

    def _goals(self, members: Sequence[int], epochs: Sequence[int]) -> np.ndarray:
        """The goal that each member of the order, a goal or a product, stands for in its epoch."""
        if self._of_products is None:
            return self.goals[np.asarray(members)]
        goals = []
        for product, epoch in zip(members, epochs, strict=True):
            of_product = self._of_products[product]
            again, at = divmod(epoch, len(of_product))
            goals.append(self._permuted((self.seed, again, product, 2), of_product)[at])
        return np.asarray(goals, dtype=self.goals.dtype)
