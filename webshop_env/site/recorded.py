"""Rollouts (Parquet) and episode files as one kind of record, for the viewer.

The columns of a rollout are those of `rollout/storage.py`; only those that are shown are read. A column that a file
lacks is shown as missing, never made up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from webshop_env.episodes import Episode, read_episodes
from webshop_env.errors import ShopGymError

MAX_EPISODES = 50_000
"""Episodes of a file that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """In what an episode was played, as the file says."""

    env_id: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    catalogue_hash: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """An episode in a list."""

    number: int
    """What the address says: its number in the rollout, or its place in the episode file from 1."""
    group: int | None
    goal_index: int
    goal: str
    """The instruction, where the file has it."""
    won: bool
    score: float
    episode_return: float
    length: int
    num_malformed: int | None
    """Replies out of form; None where there were no replies."""
    num_impossible: int
    """Actions that did nothing."""
    end: str
    """"won", "bought", "out of steps" or "left"."""

    @property
    def num_invalid(self) -> int:
        return max(self.num_malformed or 0, self.num_impossible)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """One step; None stands for what the file does not have."""

    page: str
    """What the agent saw: the anchor of a rollout, the observation of an episode file."""
    actions: tuple[str, ...] | None
    action: str
    reward: float
    reason: str
    problem: str | None = None
    prompt: str | None = None
    reply: str | None = None
    prompt_is_cut: bool = False
    reply_is_cut: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)
    """Step return and advantages, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEpisode:
    """An episode to be looked at step by step."""

    summary: Summary
    world: World
    reset_options: Mapping[str, Any]
    seed: int | None
    steps: tuple[ShownStep, ...]
    last_page: str | None
    """After the last step."""
    made_by: str
    notes: tuple[str, ...] = ()


class RecordedFile:
    """A file of episodes; subclasses say how it is read."""

    def summaries(self) -> tuple[Summary, ...]:
        """All episodes, in the order of the file."""
        raise NotImplementedError

    def episode(self, number: int) -> ShownEpisode:
        """One of them.

        Raises:
            ShopGymError: It has no such episode.
        """
        raise NotImplementedError

    @property
    def world(self) -> World:
        """Of the first episode."""
        raise NotImplementedError


def open_recorded(path: Path) -> RecordedFile:
    """A rollout or an episode file.

    Raises:
        ShopGymError: It is neither.
    """
    stat = path.stat()
    return _open(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _open(path: Path, changed_ns: int, num_bytes: int) -> RecordedFile:
    if path.suffix == ".parquet":
        return Rollout(path)
    if path.suffix == ".jsonl":
        return EpisodeFile(path)
    raise ShopGymError("The viewer shows rollouts (.parquet) and episode files (.jsonl).")


class EpisodeFile(RecordedFile):
    """What playback and the shop record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._summaries: list[Summary] = []
        self._world = World()
        for number, episode in enumerate(islice(read_episodes(path), MAX_EPISODES), start=1):
            if number == 1:
                self._world = _world_of(episode)
            self._summaries.append(_summary_of(number, episode))

    @property
    def world(self) -> World:
        return self._world

    def summaries(self) -> tuple[Summary, ...]:
        return tuple(self._summaries)

    def episode(self, number: int) -> ShownEpisode:
        episode = next(islice(read_episodes(self._path), number - 1, number), None) if number > 0 else None
        if episode is None:
            raise ShopGymError(f"This file has no episode {number}.")
        steps = tuple(
            ShownStep(
                page=step.observation,
                actions=step.available_actions,
                action=step.action,
                reward=step.reward,
                reason=step.reason,
            )
            for step in episode.steps
        )
        return ShownEpisode(
            summary=_summary_of(number, episode),
            world=_world_of(episode),
            reset_options=episode.reset_options,
            seed=episode.seed,
            steps=steps,
            last_page=episode.observation,
            made_by=episode.made_by,
            notes=episode.notes,
        )


def _world_of(episode: Episode) -> World:
    return World(env_id=episode.env_id, settings=episode.settings, catalogue_hash=episode.catalogue_hash)


def _summary_of(number: int, episode: Episode) -> Summary:
    steps = episode.steps
    is_bought = any(step.terminated for step in steps)
    is_cut = bool(steps) and steps[-1].truncated
    return Summary(
        number=number,
        group=episode.goal_index,
        goal_index=episode.goal_index,
        goal=episode.instruction_text,
        won=episode.won,
        score=episode.task_score,
        episode_return=episode.episode_return,
        length=len(steps),
        num_malformed=None,
        num_impossible=sum(bool(step.reason) for step in steps),
        end=_end(episode.won, is_bought, is_cut),
    )


def _end(won: bool, is_bought: bool, is_cut: bool) -> str:
    return "won" if won else "bought" if is_bought else "out of steps" if is_cut else "left"


class Rollout(RecordedFile):
    """A Parquet file of `rollout/storage.py`."""

    _OF_EPISODE = ("group_id", "episode_id", "goal_index", "won", "task_score", "episode_return", "episode_length",
                   "truncated")  # fmt: skip
    _OF_STEP = ("step_index", "format_valid", "action_possible", "reward")
    _MORE = ("terminated", "action", "problem", "reason", "prompt_is_cut", "reply_is_cut", "admissible", "prompt",
             "reply")  # fmt: skip
    _PARTS = ("step_return", "advantage", "episode_advantage", "step_advantage")

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError:
            raise ShopGymError("Rollouts need pyarrow: pip install 'shopgym[site]'") from None
        self._path, self._parquet, self._errors = path, parquet, (OSError, pyarrow.ArrowException)
        try:
            schema = parquet.read_schema(path)
        except self._errors:
            raise ShopGymError("This is no whole Parquet file.") from None
        self._columns = set(schema.names)
        missing = {*self._OF_EPISODE, *self._OF_STEP, "anchor"} - self._columns
        if missing:
            raise ShopGymError(f"This Parquet file is no rollout: it lacks the column {min(missing)}.")
        self._world = _world_in((schema.metadata or {}).get(b"shopgym_step_batch", b""))
        wrong = [name for name, kind in _KINDS.items() if not _is_kind(schema.field(name).type, kind)]
        if wrong:
            raise ShopGymError(f"This Parquet file is no rollout: its column {wrong[0]} holds something else.")
        self._summaries = self._summarise()

    @property
    def world(self) -> World:
        return self._world

    def summaries(self) -> tuple[Summary, ...]:
        return self._summaries

    def episode(self, number: int) -> ShownEpisode:
        summary = next((summary for summary in self._summaries if summary.number == number), None)
        if summary is None:
            raise ShopGymError(f"This rollout has no episode {number}.")
        wanted = [n for n in ("anchor", *self._OF_STEP, *self._MORE, *self._PARTS) if n in self._columns]
        rows = self._read(wanted, filters=[("episode_id", "==", number)])
        rows = list({row["step_index"]: row for row in rows}.values())  # some estimates train on repeated rows
        rows.sort(key=lambda row: row["step_index"])
        return ShownEpisode(
            summary=summary,
            world=self._world,
            reset_options={"goal_index": summary.goal_index},
            seed=None,
            steps=tuple(self._step(row) for row in rows),
            last_page=None,
            made_by="policy",
        )

    def _step(self, row: Mapping[str, Any]) -> ShownStep:
        reason = row.get("reason") or ("" if row["action_possible"] else "the page does not offer it")
        problem = row.get("problem") or (None if row["format_valid"] else "malformed")
        admissible = row.get("admissible")
        return ShownStep(
            page=row["anchor"],
            actions=None if admissible is None else tuple(admissible),
            action=row.get("action") or "",
            reward=row["reward"],
            reason=reason,
            problem=problem,
            prompt=row.get("prompt"),
            reply=row.get("reply"),
            prompt_is_cut=bool(row.get("prompt_is_cut")),
            reply_is_cut=bool(row.get("reply_is_cut")),
            parts={name: row[name] for name in self._PARTS if row.get(name) is not None},
        )

    def _summarise(self) -> tuple[Summary, ...]:
        names = [*self._OF_EPISODE, "format_valid", "action_possible"]
        if "terminated" in self._columns:
            names.append("terminated")
        episodes: dict[int, dict[str, Any]] = {}
        taken: set[tuple[int, int]] = set()
        for row in self._read([*names, "step_index"]):
            step = (row["episode_id"], row["step_index"])
            if step in taken:
                continue
            taken.add(step)
            first = episodes.setdefault(row["episode_id"], {**row, "malformed": 0, "impossible": 0})
            first["malformed"] += not row["format_valid"]
            first["impossible"] += not row["action_possible"]
        return tuple(
            Summary(
                number=number,
                group=row["group_id"],
                goal_index=row["goal_index"],
                goal="",
                won=row["won"],
                score=row["task_score"],
                episode_return=row["episode_return"],
                length=row["episode_length"],
                num_malformed=row["malformed"],
                num_impossible=row["impossible"],
                end=_end(row["won"], bool(row.get("terminated", row["task_score"] > 0)), row["truncated"]),
            )
            for number, row in islice(sorted(episodes.items()), MAX_EPISODES)
        )

    def _read(self, columns: list[str], filters: Any = None) -> list[dict[str, Any]]:
        try:
            rows: list[dict[str, Any]] = self._parquet.read_table(
                self._path, columns=columns, filters=filters, partitioning=None
            ).to_pylist()
        except self._errors:
            raise ShopGymError("This Parquet file is damaged.") from None
        if any(row[name] is None for row in rows for name in columns if name in _KINDS):
            raise ShopGymError("This Parquet file is no rollout: values are missing.")
        return rows


_KINDS = {
    **dict.fromkeys(("group_id", "episode_id", "goal_index", "episode_length", "step_index"), "int"),
    **dict.fromkeys(("task_score", "episode_return", "reward"), "float"),
    **dict.fromkeys(("won", "truncated", "format_valid", "action_possible"), "bool"),
    "anchor": "string",
}
"""What the columns that every rollout has hold."""


def _is_kind(arrow_type: Any, kind: str) -> bool:
    """int64 and uint8 are both "int"; "double" is Arrow's other name of a float."""
    name = str(arrow_type).replace("double", "float")
    return kind in name.removeprefix("large_") and "<" not in name


def _world_in(metadata: bytes) -> World:
    try:
        world = json.loads(metadata).get("world", {})
        return World(
            env_id=str(world.get("env_id", "")),
            settings=dict(world.get("settings", {})),
            catalogue_hash=str(world.get("catalogue_hash", "")),
        )
    except (ValueError, AttributeError, TypeError, RecursionError):
        return World()


def reply_parts(reply: str) -> list[tuple[str, str]]:
    """A reply cut into what it thinks, what it does and the rest: ("think" | "action" | "", text), tags included."""
    parts, done = [], 0
    for match in _MARKED.finditer(reply):
        parts += [("", reply[done : match.start()])] if match.start() > done else []
        parts.append((match[1].lower(), match[0]))
        done = match.end()
    return parts + ([("", reply[done:])] if done < len(reply) else [])


_MARKED = re.compile(r"<(think|action)>.*?(?:</\1>|\Z)", flags=re.IGNORECASE | re.DOTALL)
