"""Play a list of actions and see every page: `python -m webshop_env.playback examples/scripts/buy_one.json`.

A script is JSON: `{"env": "WebShop-v1", "goal_index": 3, "actions": ["search[red mug]", ...]}`, with optional
`"settings"` for `gymnasium.make`; or a bare list of actions for goal 0 of WebShop-v1.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium

import webshop_env  # noqa: F401  (registers the ids)
from webshop_env.errors import CatalogError, ShopGymError
from webshop_env.text_env import make_settings

ENV_IDS = ("WebShop-v0", "WebShop-v1")


@dataclass(frozen=True, kw_only=True)
class Script:
    """What to play, and where."""

    actions: tuple[str, ...]
    env_id: str = "WebShop-v1"
    reset_options: dict[str, Any] = field(default_factory=lambda: {"goal_index": 0})
    settings: dict[str, Any] = field(default_factory=dict)


def read_script(path: Path) -> Script:
    """Read a script file, or say in one line what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShopGymError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ShopGymError(f"{path}: not JSON: {error}") from None
    if isinstance(content, list):
        content = {"actions": content}
    if not isinstance(content, dict):
        raise ShopGymError(f"{path}: expected a list of actions or an object with actions")
    unknown = sorted(content.keys() - {"env", "goal_index", "goal_id", "actions", "settings"})
    if unknown:
        raise ShopGymError(f"{path}: unknown {', '.join(unknown)}; known: env, goal_index, goal_id, actions, settings")
    actions, settings = content.get("actions"), content.get("settings", {})
    if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
        raise ShopGymError(f"{path}: actions must be a list of texts")
    if not isinstance(settings, dict):
        raise ShopGymError(f"{path}: settings must be an object")
    if "version" in settings:
        raise ShopGymError(f"{path}: settings: the version is that of env, {' or '.join(ENV_IDS)}")
    env_id = content.get("env", "WebShop-v1")
    if env_id not in ENV_IDS:
        raise ShopGymError(f"{path}: env must be one of {', '.join(ENV_IDS)}, got {env_id!r}")
    named = {name: content[name] for name in ("goal_index", "goal_id") if name in content}
    return Script(actions=tuple(actions), env_id=env_id, reset_options=named or {"goal_index": 0}, settings=settings)


def play(script: Script) -> Iterator[str]:
    """Lines for people: each page, then the action, its reward and how it ended.

    Raises:
        ShopGymError: An action is not possible on its page (after the lines before it).
    """
    make_settings(**script.settings, version=script.env_id.removeprefix("WebShop-"))  # no arguments of make's own
    env = gymnasium.make(script.env_id, disable_env_checker=True, **script.settings)
    observation, info = env.reset(options=script.reset_options)
    yield f"goal {info['goal_index']} ({info['goal_id']}): {info['instruction_text']}"
    total = 0.0
    for number, action in enumerate(script.actions, start=1):
        yield f"\n{observation}\navailable: {', '.join(info['available_actions'])}"
        available = ", ".join(info["available_actions"]) or "none"
        observation, reward, terminated, truncated, info = env.step(action)
        if not info["action_possible"]:
            raise ShopGymError(
                f"action {number}, {shortened(action)}: {shortened(info['reason'])}; available: {available}"
            )
        total += float(reward)
        ended = ", terminated" if terminated else ", truncated" if truncated else ""
        yield f"\n[{number}] {action}: reward {reward}{ended}"
    yield f"\n{observation}\n\nsum of rewards {total}, score {info['task_score']}, won {info['won']}"


def shortened(text: str, max_chars: int = 200) -> str:
    """The text on one line, its end left out where it is very long."""
    text = " ".join(text.split())
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m webshop_env.playback", description=__doc__.split(":")[0])
    parser.add_argument("script", type=Path, help="JSON file with actions")
    parser.add_argument("--data", metavar="DIR", help="catalogue to use instead of the embedded one")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # actions may hold what no terminal can show
    try:
        script = read_script(options.script)
        if options.data:
            script.settings["data_dir"] = options.data
        for line in play(script):
            print(line)
    except ShopGymError as error:
        sys.stdout.flush()
        where = "" if str(error).startswith(str(options.script)) or isinstance(error, CatalogError) else options.script
        print(f"error: {where}{': ' if where else ''}{error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
