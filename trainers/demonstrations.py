"""Episodes to imitate: of the oracle, of a policy without a model, or out of a rollout's file.

Dimensions: N rows (steps), E episodes, B slots of the manager.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from env_manager import EnvManager
from env_manager.plugins import import_plugin
from rollout.constrained import SEARCH, ActionGrammar, NotLosslessError
from rollout.engines.hf import HFEngine
from rollout.storage import load_batch
from trainers.scoring import Pairs
from trainers.settings import EnvSettings, SettingsError
from trainers.worlds import is_shop, open_shop_world
from webshop_env.policies import (
    GuidedPolicy,
    LookingPolicy,
    OraclePolicy,
    Policy,
    ReadingPolicy,
    Remembering,
    RulePolicy,
)

if TYPE_CHECKING:
    from rollout.types import StepBatch
    from trainers.worlds import World
    from webshop_env.shop import Shop

BUY = "click[buy now]"
_NO_TAGS = str.maketrans("<>", "  ")
_IN_SHOPS: dict[str, Callable[[Shop, int], Policy]] = {
    "oracle": lambda shop, max_steps: OraclePolicy(shop),
    "guided": lambda shop, max_steps: GuidedPolicy(shop, max_steps=max_steps),
    "rule": lambda shop, max_steps: RulePolicy(shop),
    "looking": lambda shop, max_steps: LookingPolicy(shop, max_steps),
    "reading": lambda shop, max_steps: ReadingPolicy(shop, max_steps),
}
"""Made with the shop and the steps of an episode."""


@dataclass(slots=True)
class Demonstrations:
    """What a source saw and did."""

    prompts: list[str] = field(default_factory=list)
    """[N]."""
    admissible: list[tuple[str, ...]] = field(default_factory=list)
    """[N]."""
    actions: list[str] = field(default_factory=list)
    """[N]."""
    thoughts: list[str] = field(default_factory=list)
    """[N]: the source's reasons, where it gives any."""
    episode: list[int] = field(default_factory=list)
    """[N]: number of the row's episode."""
    won: list[bool] = field(default_factory=list)
    """[E]."""
    score: list[float] = field(default_factory=list)
    """[E] in [0, 1]."""

    @property
    def num_episodes(self) -> int:
        return len(self.won)

    @property
    def num_won(self) -> int:
        return sum(self.won)

    def keep(self, *, won_only: bool = False, min_score: float = 0.0) -> Demonstrations:
        """The rows of the episodes that are good enough, numbered anew."""
        good = np.flatnonzero(_is_good(np.asarray(self.won, dtype=bool), np.asarray(self.score), won_only, min_score))
        number = {int(old): new for new, old in enumerate(good)}
        rows = [row for row, episode in enumerate(self.episode) if episode in number]
        return Demonstrations(
            [self.prompts[row] for row in rows],
            [self.admissible[row] for row in rows],
            [self.actions[row] for row in rows],
            [self.thoughts[row] for row in rows],
            [number[self.episode[row]] for row in rows],
            [self.won[old] for old in good],
            [self.score[old] for old in good],
        )


@dataclass(frozen=True, slots=True)
class Lesson:
    """Rows to imitate, and what they were chosen from."""

    rows: Pairs
    num_episodes: int
    num_won: int
    num_left_out: int
    """Rows of these episodes that cannot be imitated."""

    def __str__(self) -> str:
        return (
            f"{len(self.rows)} rows of {self.num_episodes} episodes, {self.num_won} of them won; {self.num_left_out} "
            "left out, their reply is too long, malformed, not admissible, or lost in the tokenizer"
        )


def is_recorded(source: str) -> bool:
    """Whether a source is a file of episodes."""
    return source.endswith(".parquet")


def make_source(name: str, world: World, env: EnvSettings) -> Policy:
    """The policy that shows how it is done.

    Args:
        name: "oracle", "guided", "rule", "looking" or "reading" in shops; or "module:name", something that is called
            with the world (a `Shop`, where it is one) and returns an object with `act(observation, info) -> action`.
            One that remembers what it saw also has `fresh()`, which returns another one for another episode; one that
            gives reasons has them as the text `thought` after each action, for templates that think.
        world: Where it plays.
        env: Settings that opened it.

    Raises:
        ShopGymError: There is no such policy.
    """
    if name in _IN_SHOPS:
        if not is_shop(env):
            raise SettingsError(
                f"source: {name} plays shops, and env.env_name={env.env_name} is none; take module:name, or a "
                "rollout's .parquet file"
            )
        return _IN_SHOPS[name](open_shop_world(env), env.max_steps)
    attribute = import_plugin(name, setting="source")
    if attribute == name:
        raise SettingsError(
            f"source: no policy is called {name!r}; there are {', '.join(_IN_SHOPS)}, module:name, and .parquet files"
        )
    make = getattr(importlib.import_module(name.partition(":")[0]), attribute, None)
    policy = make(world) if callable(make) else None
    if not callable(getattr(policy, "act", None)):
        raise SettingsError(
            f"source: {name} must be called with the world and return an object with act(observation, info)"
        )
    return cast("Policy", policy)


def demonstrate(
    manager: EnvManager, source: Policy, goals: np.ndarray, *, noise: float = 0.0, haste: float = 0.0, seed: int = 0
) -> Demonstrations:
    """Plays a policy through a manager.

    Args:
        manager: Its prompts are what is recorded; it ends up reset to the last goals.
        source: What chooses the actions, by the pages; if it has `fresh()`, each episode gets its own.
        goals: int [E], one episode each, in any number.
        noise: Share of steps at which something else than the source's action is played. What is recorded is the
            source's action all the same, so that the way back is learnt too.
        haste: Share of item pages at which the demonstrator buys although the source would still choose an option.
            That purchase is what is recorded: a habit that only reward can tell from a good one.
        seed: Of noise and haste; each episode has its own generator.
    """
    shown = Demonstrations()
    for start in range(0, len(goals), manager.num_envs):
        chosen = [int(goal) for goal in goals[start : start + manager.num_envs]]
        sources = [source.fresh() if isinstance(source, Remembering) else source for _ in chosen]
        generators = [random.Random(f"{seed} {start + slot}") for slot in range(len(chosen))]
        shown.won += [False] * len(chosen)
        shown.score += [0.0] * len(chosen)
        observations = manager.reset(chosen)
        while observations.is_live.any():
            slots = [int(slot) for slot in np.flatnonzero(observations.is_live)]
            replies = []
            for slot in slots:
                action, possible = sources[slot].act(*manager.page(slot)), observations.admissible[slot]
                thought = str(getattr(sources[slot], "thought", None) or "").translate(_NO_TAGS)
                is_choosing = manager.page(slot)[1].get("page_kind") == "item" and action != BUY
                if haste and is_choosing and BUY in possible and generators[slot].random() < haste:
                    action = BUY
                shown.prompts.append(observations.prompts[slot])
                shown.admissible.append(possible)
                shown.actions.append(action)
                shown.thoughts.append(thought)
                shown.episode.append(start + slot)
                others = [a for a in possible if a not in (action, SEARCH, BUY)]
                if others and generators[slot].random() < noise:
                    action = generators[slot].choice(others)
                replies.append(
                    f"<think>{thought}</think><action>{action}</action>"
                    if manager.template.thinks
                    else f"<action>{action}</action>"
                )
            result = manager.step(replies, slots)
            for slot, won, score in zip(slots, result.won.tolist(), result.task_score.tolist(), strict=True):
                shown.won[start + slot] = won
                shown.score[start + slot] = score
            observations = result.observations
    return shown


def encode(shown: Demonstrations, engine: HFEngine, grammar: ActionGrammar) -> Lesson:
    """Rows as token ids; replies that are not admissible, do not fit or are lost in the tokenizer are left out."""
    prompts: list[np.ndarray] = []
    replies: list[np.ndarray] = []
    admissible: list[tuple[str, ...] | None] = []
    for prompt, possible, action, thought in zip(
        shown.prompts, shown.admissible, shown.actions, shown.thoughts, strict=True
    ):
        try:
            reply = grammar.encode_reply(action, thought)
        except NotLosslessError:
            continue
        if len(reply) <= grammar.max_tokens and (action in possible or action.startswith("search[")):
            prompts.append(engine.encode(prompt))
            replies.append(reply)
            admissible.append(possible)
    rows = Pairs(prompts, replies, admissible, np.arange(len(prompts)))
    return Lesson(rows, shown.num_episodes, shown.num_won, len(shown.prompts) - len(prompts))


def recorded(
    path: str,
    goals: np.ndarray,
    manager: EnvManager,
    engine: HFEngine,
    *,
    won_only: bool = False,
    min_score: float = 0.0,
    masked: bool = True,
    max_tokens: int,
) -> Lesson:
    """The rows of a rollout's file (`rollout/storage.py`), token for token as they were written.

    Args:
        path: Parquet file that `save_batch` wrote.
        goals: The goals to learn from. Episodes of others are left out, so that a file of validations teaches nothing.
        manager: Makes the prompts of this run; it ends up reset.
        engine: Its tokenizer must be the one that the episodes were written with.
        won_only: Leave out episodes that were not won.
        min_score: Leave out episodes with a lower task score.
        masked: Whether the rows are learnt under the masks of constrained decoding.
        max_tokens: Longest reply.

    Raises:
        ShopGymError: The file is no rollout, its prompts are not those of this run, or it lacks what masks need.
    """
    batch = load_batch(Path(path).expanduser())
    is_kept = _is_good(batch.won, batch.task_score, won_only, min_score)
    is_kept &= np.isin(batch.goal_index, goals) & (batch.row_weight > 0)
    batch = batch.select(np.flatnonzero(is_kept))
    _refuse_other_prompts(path, batch, manager, engine)
    _, firsts = np.unique(batch.episode_id, return_index=True)
    lengths = np.asarray([len(reply) for reply in batch.reply_ids], dtype=np.int64)
    rows = batch.select(np.flatnonzero(batch.format_valid & (lengths <= max_tokens)))
    if masked and any(possible is None for possible in rows.admissible):
        raise SettingsError(
            f"source: {path} holds replies that were not decoded under the page's actions; set masked=false"
        )
    pairs = Pairs(list(rows.prompt_ids), list(rows.reply_ids), list(rows.admissible), np.arange(len(rows)))
    return Lesson(pairs, len(firsts), int(batch.won[firsts].sum()), len(batch) - len(rows))


def _is_good(won: np.ndarray, score: np.ndarray, won_only: bool, min_score: float) -> np.ndarray:
    return (won | (not won_only)) & (score >= np.float32(min_score))


def _refuse_other_prompts(path: str, batch: StepBatch, manager: EnvManager, engine: HFEngine) -> None:
    """Compares the first prompt of every goal: tokenizer, template, catalogue and lengths all show in it."""
    is_first = batch.step_index == 0
    goals, firsts = np.unique(batch.goal_index[is_first], return_index=True)
    told: Any = batch.prompt_ids[is_first][firsts]
    for start in range(0, len(goals), manager.num_envs):
        chosen = goals[start : start + manager.num_envs]
        for goal, prompt, ids in zip(chosen, manager.reset(chosen).prompts, told[start:], strict=False):
            if not np.array_equal(engine.encode(prompt), ids):
                raise SettingsError(
                    f"source: {path}: the first prompt of goal {goal} is not the one that this run makes; take the "
                    "tokenizer (init), the environment and the lengths that the episodes were recorded with"
                )
