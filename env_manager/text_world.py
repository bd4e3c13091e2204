"""Games that Microsoft's TextWorld generates, one per seed (extra `textworld`).

The goal index is the seed of the game: episodes of one goal play the same game. A game is compiled once, in about two
seconds, and kept in the cache directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium

from env_manager.types import PageView
from webshop_env.cache import catalogue_cache
from webshop_env.errors import ShopGymError
from webshop_env.spaces import TextSpace

_INFOS = ("objective", "description", "inventory", "admissible_commands", "won", "score", "max_score")
_BLANK_LINES = re.compile(r"\n\s*\n+")


class TextWorldGame(gymnasium.Env):
    """Takes the commands that the game lists; anything else changes nothing.

    The observation is what the game answered, if anything, then where the player stands and what he carries.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  (Gymnasium's way)

    def __init__(self, *, num_rooms: int = 3, num_objects: int = 4, quest_length: int = 3) -> None:
        """Sets the size of the games.

        Args:
            num_rooms: At least 1.
            num_objects: At least 1.
            quest_length: Commands of the shortest way to win, at least 1.
        """
        try:
            import textworld
        except ImportError:
            raise ShopGymError("TextWorld-v0 needs the package textworld: pip install 'shopgym[textworld]'") from None
        self._textworld = textworld
        self._size = {"nb_rooms": num_rooms, "nb_objects": num_objects, "quest_length": quest_length}
        self._game: Any = None
        self.path: Path | None = None
        """File of the game that is played; None before the first reset."""
        self._state: Any = None
        self._answer = ""
        self._is_over = True
        self.observation_space = TextSpace()
        self.action_space = TextSpace()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        path = self._compiled(seed if seed is not None else int(self.np_random.integers(2**31)))
        if path != self.path:
            self.close()
            with warnings.catch_warnings():  # the interpreter does not know the game; TextWorld keeps its score itself
                warnings.simplefilter("ignore")
                self._game = self._textworld.start(str(path), self._textworld.EnvInfos(**dict.fromkeys(_INFOS, True)))
            self.path = path
        self._state, self._answer, self._is_over = self._game.reset(), "", False
        return self._page(), self._info("")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._is_over:
            return self._page(), 0.0, True, False, self._info("the game is over")
        if action not in self._state.admissible_commands:
            return self._page(), 0.0, False, False, self._info(f"the game does not offer {action[:40]!r} here")
        before = self._state.score
        self._state, _, self._is_over = self._game.step(action)
        # The status line follows the prompt sign; a description is shown anyway.
        answer = _tidy(self._state.feedback.split("\n>")[0])
        self._answer = "" if answer.startswith("-= ") else answer
        return self._page(), float(self._state.score - before), bool(self._is_over), False, self._info("")

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None

    def _page(self) -> str:
        return "\n".join(part for part in (self._answer, *self._place()) if part)

    def _place(self) -> tuple[str, str]:
        return _tidy(self._state.description), _tidy(self._state.inventory)

    def _info(self, reason: str) -> dict[str, Any]:
        state = self._state
        return {
            "available_actions": () if self._is_over else tuple(state.admissible_commands),
            "action_possible": not reason,
            "reason": reason,
            "won": bool(state.won),
            "task_score": state.score / state.max_score if state.max_score else 0.0,
            "instruction_text": _tidy(state.objective).replace("\n", " "),
            "place": "\n".join(self._place()),
        }

    def _compiled(self, seed: int) -> Path:
        """The file of one game; two processes that make it at once make the same one."""
        made_by = json.dumps([self._textworld.__version__, self._size], sort_keys=True)
        directory = catalogue_cache("textworld") / hashlib.sha256(made_by.encode()).hexdigest()[:16]
        path = directory / f"{seed}.z8"
        if path.is_file() and path.with_suffix(".json").is_file():
            return path
        directory.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=directory))
        try:
            options = self._textworld.GameOptions()
            options.seeds, options.path = seed, str(work / path.name)
            for name, value in self._size.items():
                setattr(options, name, value)
            self._textworld.make(options)
            for name in (path.with_suffix(".json").name, path.name):  # the game last: it says that all is there
                os.replace(work / name, directory / name)
        finally:
            shutil.rmtree(work)
        return path


def view(observation: str, info: Mapping[str, Any]) -> PageView:
    """The page line by line; the anchor is the place and what is carried, whatever led there."""
    return PageView(
        task=info["instruction_text"],
        anchor=info["place"],
        pieces=tuple(observation.split("\n")),
        admissible=info["available_actions"],
    )


def _tidy(text: str | None) -> str:
    return _BLANK_LINES.sub("\n", (text or "").strip())


gymnasium.register(id="TextWorld-v0", entry_point="env_manager.text_world:TextWorldGame")
