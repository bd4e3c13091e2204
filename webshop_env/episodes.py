"""Episodes as records that files keep: what was seen, done and earned, step by step, and in which shop.

An episode file is JSON lines, one episode a line. Playback writes and reads it, the site writes people's sessions in
it, the viewer shows it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from webshop_env.errors import ShopGymError
from webshop_env.text_env import WebShopTextEnv

FORMAT = 1
"""Stands in every line under `shopgym_episode`; changes when lines of before can no longer be read."""
MAX_NUMBER = 2**53
"""Nothing that is counted or earned is larger; NaN is no number either."""
NOT_RECORDED = frozenset({"shop", "data_dir", "filter_goals", "render_mode", "version"})
"""Settings that say how an environment was made, not what it is: the catalogue is known by its hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStep:
    """One observation, what was done there, and what came of it."""

    observation: str
    available_actions: tuple[str, ...]
    action: str
    reward: float
    terminated: bool
    truncated: bool
    reason: str
    """Why the action did nothing; "" when it was possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """From reset to where it was left."""

    env_id: str
    settings: dict[str, Any]
    """Of the environment, beside the catalogue."""
    catalogue_hash: str
    reset_options: dict[str, Any]
    seed: int | None
    """What `reset` was given."""
    goal_index: int
    goal_id: str
    instruction_text: str
    made_by: str
    """"script", "human", a policy's name ..."""
    steps: tuple[EpisodeStep, ...]
    observation: str
    """The page after the last step."""
    available_actions: tuple[str, ...]
    task_score: float
    won: bool
    reward_breakdown: dict[str, Any] = field(default_factory=dict)
    """How the score came about; empty without a purchase."""
    notes: tuple[str, ...] = ()
    """What is to be known about where it comes from."""

    @property
    def episode_return(self) -> float:
        return sum(step.reward for step in self.steps)

    def to_line(self) -> str:
        """The episode as a line of a file, without the line's end."""
        return json.dumps({"shopgym_episode": FORMAT, **asdict(self)})


class EpisodeRecorder:
    """Plays in an environment and keeps what happens: the one way in which episodes come to be recorded.

    Args:
        env: Just made; nobody else may step it.
        made_by: Who plays.
        seed: For `reset`.
        reset_options: For `reset`.
    """

    def __init__(
        self, env: WebShopTextEnv, *, made_by: str, seed: int | None = None, reset_options: Mapping[str, Any]
    ) -> None:
        self.env = env
        self.made_by = made_by
        self.seed = seed
        self.reset_options = dict(reset_options)
        self.observation, self.info = env.reset(seed=seed, options=self.reset_options)
        self.steps: list[EpisodeStep] = []
        self.notes: list[str] = []

    def step(self, action: str) -> EpisodeStep:
        """Takes an action and keeps it."""
        before, available = self.observation, tuple(self.info["available_actions"])
        self.observation, reward, terminated, truncated, self.info = self.env.step(action)
        taken = EpisodeStep(
            observation=before,
            available_actions=available,
            action=action,
            reward=float(reward),
            terminated=terminated,
            truncated=truncated,
            reason=self.info["reason"],
        )
        self.steps.append(taken)
        return taken

    def episode(self) -> Episode:
        """Everything so far."""
        info, settings = self.info, self.env.settings
        return Episode(
            env_id=f"WebShop-{settings.version}",
            settings=recorded_settings(self.env),
            catalogue_hash=self.env.shop.catalogue_hash,
            reset_options=self.reset_options,
            seed=self.seed,
            goal_index=info["goal_index"],
            goal_id=info["goal_id"],
            instruction_text=info["instruction_text"],
            made_by=self.made_by,
            steps=tuple(self.steps),
            observation=self.observation,
            available_actions=tuple(info["available_actions"]),
            task_score=float(info["task_score"]),
            won=bool(info["won"]),
            reward_breakdown=dict(info["reward_breakdown"] or {}),
            notes=tuple(self.notes),
        )


def recorded_settings(env: WebShopTextEnv) -> dict[str, Any]:
    """The settings that an environment like this one is made with, beside version and catalogue."""
    settings = {f.name: getattr(env.settings, f.name) for f in fields(env.settings) if f.name not in NOT_RECORDED}
    opened = env.shop.settings  # a shared shop brings its own
    return {name: opened.get(name, value) for name, value in settings.items()}


def write_episodes(path: Path, episodes: Iterable[Episode]) -> int:
    """Writes an episode file that is there whole or not at all; returns how many it holds.

    Raises:
        ShopGymError: There is such a file already, or it cannot be written.
    """
    if path.exists():
        raise ShopGymError(f"{path}: is there already; name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:
        raise ShopGymError(f"{path}: cannot be written ({error.strerror}); name another place") from None
    count = 0
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            for episode in episodes:
                file.write(episode.to_line() + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except OSError as error:
        raise ShopGymError(f"{path}: cannot be written ({error.strerror}); name another place") from None
    finally:
        with suppress(FileNotFoundError):
            os.unlink(scratch)
    return count


def read_episodes(path: Path, *, on_cut: Callable[[], None] = lambda: None) -> Iterator[Episode]:
    """The episodes of a file, in order; a last line that was cut short while it was written is left out.

    Args:
        path: The file.
        on_cut: Called where such a line is left out.

    Raises:
        ShopGymError: The file cannot be read, or a line is no episode (after the episodes before it).
    """
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if not line.endswith("\n"):
                        on_cut()
                        return
                    raise ShopGymError(f"{path}: line {number}: not JSON: {error}") from None
                yield read_episode(record, where=f"{path}: line {number}")
    except OSError as error:
        raise ShopGymError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ShopGymError(f"{path}: not a text file; give a file that playback wrote") from None


def read_episode(record: Any, *, where: str) -> Episode:
    """An episode from what JSON made of it.

    Args:
        record: Anything.
        where: For the message.

    Raises:
        ShopGymError: It is something else; the message says what is missing or wrong.
    """
    if not isinstance(record, dict) or "shopgym_episode" not in record:
        raise ShopGymError(f"{where}: no episode; give a file that playback wrote")
    if record["shopgym_episode"] != FORMAT:
        raise ShopGymError(f"{where}: format {record['shopgym_episode']!r}, this version reads {FORMAT}")
    steps = record.get("steps")
    if not isinstance(steps, list):
        raise ShopGymError(f"{where}: steps must be a list")
    values = _checked(record, _EPISODE_TYPES, where)
    values["steps"] = tuple(
        EpisodeStep(**_checked(step, _STEP_TYPES, f"{where}: step {number}"))
        for number, step in enumerate(steps, start=1)
    )
    return Episode(**values)


_STEP_TYPES: dict[str, tuple[type, ...]] = {
    "observation": (str,),
    "available_actions": (list,),
    "action": (str,),
    "reward": (int, float),
    "terminated": (bool,),
    "truncated": (bool,),
    "reason": (str,),
}
_EPISODE_TYPES: dict[str, tuple[type, ...]] = {
    "env_id": (str,),
    "settings": (dict,),
    "catalogue_hash": (str,),
    "reset_options": (dict,),
    "seed": (int, type(None)),
    "goal_index": (int,),
    "goal_id": (str,),
    "instruction_text": (str,),
    "made_by": (str,),
    "observation": (str,),
    "available_actions": (list,),
    "task_score": (int, float),
    "won": (bool,),
    "reward_breakdown": (dict,),
    "notes": (list,),
}


def _checked(record: Any, types: Mapping[str, tuple[type, ...]], where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ShopGymError(f"{where}: not an object")
    values: dict[str, Any] = {}
    for name, allowed in types.items():
        value = record.get(name)
        is_wrong = not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)
        if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
            is_wrong = True
        if name in ("seed", "goal_index") and isinstance(value, int) and value < 0:
            is_wrong = True
        if is_wrong or (isinstance(value, list) and not all(isinstance(item, str) for item in value)):
            raise ShopGymError(f"{where}: {name} is missing or of the wrong kind; record the episode anew")
        values[name] = tuple(value) if isinstance(value, list) else value
    return values
