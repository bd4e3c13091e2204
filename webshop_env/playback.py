"""Record, play, check and read episodes: `python -m webshop_env.playback run examples/scripts/buy_one.json`.

    record SOURCE --out FILE    plays a script, or an episode file's actions, and keeps what happens
    run SOURCE                  plays and shows every page
    verify FILE                 plays recorded episodes again and tells the first step that differs; exit code 1 if any
    show FILE                   prints recorded episodes without playing them
    convert LOG ... --out FILE  makes episodes of the logs that people's sessions left in the original

A script is JSON: `{"env": "WebShop-v1", "goal_index": 3, "actions": ["search[red mug]", ...]}`, with optional
`"settings"` for `gymnasium.make` and `"seed"`; or a bare list of actions for goal 0 of WebShop-v1. An episode file is
JSON lines (`webshop_env/episodes.py`).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from webshop_env.command_line import run_safely, say
from webshop_env.episodes import MAX_NUMBER, Episode, EpisodeRecorder, read_episode, read_episodes, write_episodes
from webshop_env.errors import CatalogError, ShopGymError
from webshop_env.human_logs import convert_logs
from webshop_env.text_env import WebShopTextEnv

ENV_IDS = ("WebShop-v0", "WebShop-v1")


@dataclass(frozen=True, kw_only=True)
class Script:
    """What to play, and where."""

    actions: tuple[str, ...]
    env_id: str = "WebShop-v1"
    reset_options: dict[str, Any] = field(default_factory=lambda: {"goal_index": 0})
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def open(self, data_dir: str | None = None) -> WebShopTextEnv:
        """The environment to play in.

        Args:
            data_dir: Catalogue to use instead of the script's own.
        """
        settings = self.settings | ({"data_dir": data_dir} if data_dir else {})
        return WebShopTextEnv(version=self.env_id.removeprefix("WebShop-"), **settings)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that is not as recorded."""

    where: str
    """"the reset", "step 3", "the end"."""
    name: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        """A line of where and what, then both values, long ones from shortly before they part."""
        recorded, now = _around_difference(self.recorded, self.now)
        return f"{self.where}: {self.name} differs\n    recorded {recorded}\n    now      {now}"


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
    known = ("env", "goal_index", "goal_id", "actions", "settings", "seed")
    unknown = sorted(content.keys() - set(known))
    if unknown:
        raise ShopGymError(f"{path}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    actions, settings = content.get("actions"), content.get("settings", {})
    if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
        raise ShopGymError(f"{path}: actions must be a list of texts")
    if not isinstance(settings, dict):
        raise ShopGymError(f"{path}: settings must be an object")
    if "version" in settings:
        raise ShopGymError(f"{path}: settings: the version is that of env, {' or '.join(ENV_IDS)}")
    _check_settings(settings, where=str(path))
    env_id, seed = content.get("env", "WebShop-v1"), content.get("seed")
    if env_id not in ENV_IDS:
        raise ShopGymError(f"{path}: env must be one of {', '.join(ENV_IDS)}, got {env_id!r}")
    if isinstance(seed, bool) or not isinstance(seed, int | None) or (seed or 0) < 0:
        raise ShopGymError(f"{path}: seed must be a whole number of at least 0, got {seed!r}")
    named = {name: content[name] for name in ("goal_index", "goal_id") if name in content}
    return Script(
        actions=tuple(actions),
        env_id=env_id,
        reset_options=named or {"goal_index": 0},
        settings=settings,
        seed=seed,
    )


def script_of(episode: Episode, *, where: str) -> Script:
    """What was done in an episode, to do it again.

    Raises:
        ShopGymError: It was recorded in an environment that playback does not know.
    """
    if episode.env_id not in ENV_IDS:
        raise ShopGymError(f"{where}: env_id must be one of {', '.join(ENV_IDS)}, got {episode.env_id!r}")
    if "version" in episode.settings:
        raise ShopGymError(f"{where}: settings: the version is that of env_id")
    _check_settings(episode.settings, where=where)
    return Script(
        actions=tuple(step.action for step in episode.steps),
        env_id=episode.env_id,
        reset_options=episode.reset_options,
        settings=episode.settings,
        seed=episode.seed,
    )


def _check_settings(settings: dict[str, Any], *, where: str) -> None:
    """Refuses what a file can hold and no setting can be; which values a setting takes, the environment says."""
    for name, value in settings.items():
        here = f"{where}: settings: {shortened(name)}"
        if isinstance(value, list | dict):
            raise ShopGymError(f"{here} must be a single value, got {shortened(repr(value))}")
        if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
            raise ShopGymError(f"{here} must be a number from -2^53 to 2^53, got {shortened(repr(value))}")
        if name == "data_dir" and isinstance(value, str):
            try:
                is_path = b"\0" not in os.fsencode(value)
            except UnicodeEncodeError:
                is_path = False
            if not is_path:
                raise ShopGymError(f"{here} must be a directory's path, got {shortened(repr(value))}")


def read_source(path: Path) -> Iterator[Script]:
    """The scripts of a file: a script's own, or one for each recorded episode."""
    if _holds_episodes(path):
        for number, episode in enumerate(read_episodes(path), start=1):
            yield script_of(episode, where=f"{path}: episode {number}")
    else:
        yield read_script(path)


def _holds_episodes(path: Path) -> bool:
    """Whether the first line is an episode; what cannot be read is left to `read_script` to complain about."""
    try:
        with open(path, encoding="utf-8") as file:
            read_episode(json.loads(file.readline()), where=str(path))
    except (OSError, ValueError, RecursionError):
        return False
    return True


def record(script: Script, data_dir: str | None = None) -> Episode:
    """Plays a script to its end and keeps everything; what a page refuses is kept with its reason."""
    recorder = EpisodeRecorder(
        script.open(data_dir), made_by="script", seed=script.seed, reset_options=script.reset_options
    )
    for action in script.actions:
        recorder.step(action)
    return recorder.episode()


def play(script: Script, data_dir: str | None = None) -> Iterator[str]:
    """Lines for people: each page, then the action, its reward and how it ended.

    Raises:
        ShopGymError: An action is not possible on its page (after the lines before it).
    """
    recorder = EpisodeRecorder(
        script.open(data_dir), made_by="script", seed=script.seed, reset_options=script.reset_options
    )
    info = recorder.info
    yield f"goal {info['goal_index']} ({info['goal_id']}): {info['instruction_text']}"
    for number, action in enumerate(script.actions, start=1):
        available = ", ".join(recorder.info["available_actions"])
        yield f"\n{recorder.observation}\navailable: {available}"
        step = recorder.step(action)
        if step.reason:
            raise ShopGymError(
                f"action {number}, {shortened(action)}: {shortened(step.reason)}; available: {available or 'none'}"
            )
        ended = ", terminated" if step.terminated else ", truncated" if step.truncated else ""
        yield f"\n[{number}] {action}: reward {step.reward}{ended}"
    yield f"\n{recorder.observation}\n\n{_outcome(recorder.episode())}"


def told(episode: Episode) -> Iterator[str]:
    """An episode as lines for people, from the record alone."""
    yield f"{episode.env_id}, goal {episode.goal_index} ({episode.goal_id}): {episode.instruction_text}"
    yield f"played by {episode.made_by}, catalogue {episode.catalogue_hash[:12]}"
    yield from (f"note: {note}" for note in episode.notes)
    for number, step in enumerate(episode.steps, start=1):
        yield f"\n{step.observation}\navailable: {', '.join(step.available_actions)}"
        ended = ", terminated" if step.terminated else ", truncated" if step.truncated else ""
        refused = f", not taken: {step.reason}" if step.reason else ""
        yield f"\n[{number}] {step.action}: reward {step.reward}{ended}{refused}"
    yield f"\n{episode.observation}\n\n{_outcome(episode)}"


def _outcome(episode: Episode) -> str:
    return f"sum of rewards {episode.episode_return}, score {episode.task_score}, won {episode.won}"


def verify(episode: Episode, data_dir: str | None = None, *, where: str = "episode") -> Difference | None:
    """Plays a recorded episode again.

    Returns:
        The first thing that differs, None if nothing does. Observations, actions, rewards and ends are compared, not
        the wording of reasons.
    """
    again = record(script_of(episode, where=where), data_dir)
    for name in ("goal_id", "instruction_text"):
        if getattr(episode, name) != getattr(again, name):
            return Difference("the reset", name, getattr(episode, name), getattr(again, name))
    for number, (old, new) in enumerate(zip(episode.steps, again.steps, strict=True), start=1):
        before = "the reset" if number == 1 else f"step {number - 1}, {shortened(episode.steps[number - 2].action)}"
        for name in ("observation", "available_actions"):
            if getattr(old, name) != getattr(new, name):
                return Difference(before, name, getattr(old, name), getattr(new, name))
        here = f"step {number}, {shortened(old.action)}"
        if bool(old.reason) != bool(new.reason):
            return Difference(here, "whether the action is possible", old.reason or "yes", new.reason or "yes")
        for name in ("reward", "terminated", "truncated"):
            if getattr(old, name) != getattr(new, name):
                return Difference(here, name, getattr(old, name), getattr(new, name))
    for name in ("observation", "available_actions", "task_score", "won", "reward_breakdown"):
        if getattr(episode, name) != getattr(again, name):
            return Difference("the end", name, getattr(episode, name), getattr(again, name))
    if episode.catalogue_hash != again.catalogue_hash:
        return Difference("the catalogue", "catalogue_hash", episode.catalogue_hash, again.catalogue_hash)
    return None


def _around_difference(recorded: Any, now: Any) -> tuple[str, str]:
    if not (isinstance(recorded, str) and isinstance(now, str)):
        return shortened(repr(recorded), 400), shortened(repr(now), 400)
    pairs = enumerate(zip(recorded, now, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(recorded), len(now)))
    start = max(first - 40, 0)
    return tuple(("…" if start else "") + repr(text[start : start + 160]) for text in (recorded, now))  # type: ignore[return-value]


def shortened(text: str, max_chars: int = 200) -> str:
    """The text on one line, its end left out where it is very long."""
    text = " ".join(text.split())
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def _record_command(options: argparse.Namespace) -> int:
    _refuse_existing(options.out)
    count = write_episodes(options.out, (record(script, options.data) for script in read_source(options.file)))
    print(f"{_counted(count, 'episode')} in {options.out}")
    return 0


def _run_command(options: argparse.Namespace) -> int:
    for script in read_source(options.file):
        for line in play(script, options.data):
            print(line)
    return 0


def _verify_command(options: argparse.Namespace) -> int:
    num_steps = num_episodes = num_differing = 0
    cut: list[int] = []
    for number, episode in enumerate(read_episodes(options.file, on_cut=lambda: cut.append(1)), start=1):
        where = f"{options.file}: episode {number}"
        difference = verify(episode, options.data, where=where)
        num_episodes, num_steps = number, num_steps + len(episode.steps)
        if difference is not None:
            num_differing += 1
            say(f"{where} (goal {episode.goal_index}): {difference}")
    if num_episodes == 0:
        raise ShopGymError(f"{options.file}: holds no {'whole ' if cut else ''}episode")
    if cut:
        say(f"{options.file}: the last line is cut off; its episode was not played again")
    played = f"{_counted(num_episodes, 'episode')}, {_counted(num_steps, 'step')} played again"
    say(f"{played}, {num_differing} differ{'s' if num_differing == 1 else ''}")
    return 1 if num_differing or cut else 0


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _show_command(options: argparse.Namespace) -> int:
    cut: list[int] = []
    episodes = read_episodes(options.file, on_cut=lambda: cut.append(1))
    if options.episode is not None:
        if options.episode < 1:
            raise ShopGymError(f"--episode counts from 1, got {options.episode}")
        number = min(options.episode, sys.maxsize)  # `islice` counts no further; no file holds so many
        episodes = islice(episodes, number - 1, number)
    shown = 0
    for episode in episodes:
        if shown:
            print(f"\n{'=' * 100}\n")
        for line in told(episode):
            print(line)
        shown += 1
    if not shown:
        raise ShopGymError(
            f"{options.file}: holds no {'whole ' if cut else ''}episode {options.episode or ''}".rstrip()
        )
    if cut:
        print(f"\n{options.file}: the last line is cut off; its episode is not shown", file=sys.stderr)
    return 0


def _convert_command(options: argparse.Namespace) -> int:
    _refuse_existing(options.out)
    report = convert_logs(options.logs, data_dir=options.data, goals=options.goals)
    if not report.episodes:
        first, *others = options.logs
        more = f" and {len(others)} more" if others else ""
        reasons = "; ".join(f"{_counted(count, 'line')}: {reason}" for reason, count in report.skipped.most_common())
        raise ShopGymError(
            f"{first}{more}: no episode in {_counted(report.num_lines, 'line')}{f' ({reasons})' if reasons else ''}; "
            "give logs of the original, and as --data and --goals the shop that people had"
        )
    write_episodes(options.out, report.episodes)
    for line in report.lines():
        print(line)
    print(f"written to {options.out}")
    return 0


def _refuse_existing(path: Path) -> None:
    """Before long work, what `write_episodes` would refuse after it."""
    if path.exists():
        raise ShopGymError(f"{path}: is there already; name another file")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m webshop_env.playback", description="Record, play, check and read episodes."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="record|run|verify|show|convert")
    for name, function, text in (
        ("record", _record_command, "play a script or an episode file's actions, keep what happens"),
        ("run", _run_command, "play and show every page"),
        ("verify", _verify_command, "play recorded episodes again, tell the first step that differs"),
        ("show", _show_command, "print recorded episodes"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        kind = "episode file" if name in ("verify", "show") else "JSON file with actions, or an episode file"
        command.add_argument("file", type=Path, help=kind)
        if name == "record":
            command.add_argument("--out", type=Path, required=True, metavar="FILE", help="episode file to write")
        if name == "show":
            command.add_argument("--episode", type=int, metavar="N", help="only the N-th, from 1")
        else:
            command.add_argument("--data", metavar="DIR", help="catalogue to use instead of the embedded one")
    text = "make episodes of WebShop-v0 of the logs that people's sessions left in the original"
    convert = commands.add_parser("convert", help=text, description=text)
    convert.set_defaults(function=_convert_command, file=None)
    convert.add_argument("logs", type=Path, nargs="+", help="JSON lines files, or directories of them")
    convert.add_argument("--out", type=Path, required=True, metavar="FILE", help="episode file to write")
    convert.add_argument("--data", metavar="DIR", help="the catalogue that people shopped in (default: the embedded)")
    convert.add_argument("--goals", choices=("human", "synthetic"), default="human", help="whose instructions they had")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # actions may hold what no terminal can show
    return run_safely(lambda: _run_named(options))


def _run_named(options: argparse.Namespace) -> int:
    """The command; what it refuses names the file that it was given."""
    try:
        code: int = options.function(options)
        return code
    except ShopGymError as error:
        if options.file is None or str(error).startswith(str(options.file)) or isinstance(error, CatalogError):
            raise
        raise ShopGymError(f"{options.file}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
