"""People's sessions in the original shop, from the logs that it wrote, as episodes of WebShop-v0.

The original wrote one JSON line for every page that it served: `page` (index, search_results, item_page,
item_sub_page, done), `url`, `goal`, `content`. What was done is what leads from one page to the next; every action is
played in WebShop-v0 and kept only if it leads to the page of the log. Lines for which there is no such action are
skipped and counted with the reason: people reload pages and use the browser's own buttons.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import unquote

from webshop_env.actions import SUB_PAGES
from webshop_env.episodes import MAX_NUMBER, Episode, EpisodeRecorder
from webshop_env.errors import ShopGymError
from webshop_env.shop import GoalKind, Shop, open_shop
from webshop_env.text_env import WebShopTextEnv
from webshop_env.types import Goal

SAME_PAGE = "the same page again (reloaded)"
NO_WAY = "no actions lead there from the page before"
AFTER_PURCHASE = "after the purchase"
NO_GOAL = "the goal is not in this catalogue"
NO_PAGE = "no page of the original"
MAX_ACTIONS = 60
"""Most actions that one line may stand for; more is no path that anybody took."""

_PRICE_TEXT = re.compile(r",? and price lower than [\d.]+ dollars$")
_SUB_PAGE = re.compile(rf"/({'|'.join(SUB_PAGES.values())})(?:/|$)")


@dataclass(frozen=True, slots=True)
class LoggedPage:
    """A page that was served."""

    kind: str
    """"start", "results", "item", "sub_page" or "done"."""
    keywords: tuple[str, ...] = ()
    page_number: int = 1
    asin: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    sub_page: str = ""
    reward: float | None = None
    """The score that the original gave; only on "done"."""


@dataclass(slots=True)
class ConversionReport:
    """The episodes that were found, and what was left out."""

    episodes: list[Episode] = field(default_factory=list)
    num_logs: int = 0
    num_lines: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> lines."""

    def lines(self) -> Iterator[str]:
        """The report for people."""
        num_steps = sum(len(episode.steps) for episode in self.episodes)
        bought = sum(1 for episode in self.episodes if episode.steps[-1].terminated)
        yield (
            f"{self.num_logs} logs, {self.num_lines} lines: {len(self.episodes)} episodes with {num_steps} steps, "
            f"{bought} with a purchase; {self.skipped.total()} lines skipped"
        )
        yield from (f"  {count} lines: {reason}" for reason, count in self.skipped.most_common())


def convert_logs(
    paths: Sequence[Path], *, data_dir: str | Path | None = None, goals: GoalKind = "human"
) -> ConversionReport:
    """Makes episodes of logs.

    Args:
        paths: JSON lines files, or directories that hold some (*.jsonl).
        data_dir: The catalogue that people shopped in; None is the embedded one.
        goals: Whose instructions they had: "human" in the published study, or "synthetic".

    Raises:
        ShopGymError: A path does not exist or holds no log.
    """
    shop = open_shop(data_dir, version="v0", goals=goals)
    known: dict[tuple[str, str, str], Goal] = {}
    for goal in shop.goals:
        known.setdefault(_goal_key(goal.asin, goal.instruction_text, goal.options), goal)
    report = ConversionReport()
    for path in _log_files(paths):
        report.num_logs += 1
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise ShopGymError(f"{path}: cannot be read: {error.strerror}") from None
        _convert_log(lines, path.name, shop, known, report)
    return report


def _log_files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(path.rglob("*.jsonl"))
            if not found:
                raise ShopGymError(f"{path}: holds no *.jsonl; name the directory of the logs")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise ShopGymError(f"{path}: does not exist")


def _convert_log(
    lines: Iterable[str],
    name: str,
    shop: Shop,
    known: Mapping[tuple[str, str, str], Goal],
    report: ConversionReport,
) -> None:
    """One file; a new goal, or the start page after a purchase, begins another episode."""
    session: _LoggedSession | None = None
    for line in lines:
        report.num_lines += 1
        read = _read_line(line)
        if isinstance(read, str):
            report.skipped[read] += 1
            continue
        key, page = read
        goal = known.get(key)
        if goal is None:
            report.skipped[NO_GOAL] += 1
            continue
        if session is None or session.goal is not goal or (session.is_over and page.kind == "start"):
            if session is not None:
                session.finish(report)
            session = _LoggedSession(shop, goal, name)
            if page.kind == "start":
                continue
        problem = session.follow(page)
        if problem:
            report.skipped[problem] += 1
    if session is not None:
        session.finish(report)


class _LoggedSession:
    """One person's session, played again as its pages are read."""

    def __init__(self, shop: Shop, goal: Goal, name: str) -> None:
        self.goal = goal
        self.is_over = False
        self._shop = shop
        self._name = name
        self._notes: list[str] = []
        self._recorder = self._begin(())

    def follow(self, page: LoggedPage) -> str:
        """Does what leads to the page; returns why that cannot be, "" when it was done."""
        if self.is_over:
            return AFTER_PURCHASE
        actions = self._way_to(page)
        if actions is None:
            return NO_WAY
        if not actions:
            return SAME_PAGE
        taken = tuple(step.action for step in self._recorder.steps)
        for action in actions:
            if self._recorder.step(action).reason:
                self._recorder = self._begin(taken)
                return NO_WAY
        if not self._is_at(page):
            self._recorder = self._begin(taken)
            return NO_WAY
        if page.kind == "done":
            self.is_over = True
            score = self._recorder.env.session.score
            if page.reward is not None and page.reward != score:
                self._notes.append(f"the log has the score {page.reward}, with price caps of its own")
        return ""

    def finish(self, report: ConversionReport) -> None:
        """Hands the episode over, if anything was done in it."""
        if self._recorder.steps:
            self._recorder.notes = [f"from the log {self._name}", *self._notes]
            report.episodes.append(self._recorder.episode())

    def _begin(self, actions: Iterable[str]) -> EpisodeRecorder:
        env = WebShopTextEnv(version="v0", shop=self._shop, show_attrs=True)
        recorder = EpisodeRecorder(env, made_by="human", reset_options={"goal_index": self.goal.goal_index})
        for action in actions:
            recorder.step(action)
        return recorder

    def _is_at(self, page: LoggedPage) -> bool:
        session = self._recorder.env.session
        if page.kind != session.page_kind:
            return False
        if page.kind == "results":
            return (page.keywords, page.page_number) == (session.keywords, session.page_number)
        if page.kind in ("item", "sub_page", "done"):
            is_same = page.asin == session.asin and dict(page.options) == session.options
            return is_same and (page.kind != "sub_page" or page.sub_page == session.sub_page)
        return True

    def _way_to(self, page: LoggedPage) -> list[str] | None:
        """Actions from where the session stands to the page; [] for the page itself, None where there are none.

        Whether they do lead there is seen by taking them.
        """
        if self._is_at(page):
            return []
        kind = self._recorder.env.session.page_kind
        if page.kind == "start":
            way = ["click[back to search]"] if kind != "start" else []
        elif page.kind == "results":
            way = self._way_to_results(page)
        else:
            way = self._way_to_item(page)
            if page.kind == "sub_page":
                way.append(f"click[{page.sub_page.lower()}]")
            elif page.kind == "done":
                way.append("click[buy now]")
        return way if len(way) <= MAX_ACTIONS else None

    def _way_to_results(self, page: LoggedPage) -> list[str]:
        session = self._recorder.env.session
        back = {"item": 1, "sub_page": 2}.get(session.page_kind, 0)
        if session.page_kind == "start" or session.keywords != page.keywords:
            way, number = [f"search[{' '.join(page.keywords)}]"], 1
        else:
            way, number = ["click[< prev]"] * back, session.page_number
        turn = "click[next >]" if page.page_number > number else "click[< prev]"
        return way + [turn] * min(abs(page.page_number - number), MAX_ACTIONS + 1)

    def _way_to_item(self, page: LoggedPage) -> list[str]:
        session = self._recorder.env.session
        is_there = session.asin == page.asin and session.page_kind in ("item", "sub_page")
        if is_there and session.options.keys() <= page.options.keys():
            way = ["click[< prev]"] if session.page_kind == "sub_page" else []
            chosen = session.options
        else:  # by the browser's own button, or from an option that was given up
            way = ["click[< prev]"] * {"item": 1, "sub_page": 2}.get(session.page_kind, 0)
            way.append(f"click[{page.asin.lower()}]")
            chosen = {}
        if page.kind == "sub_page" and not way and session.page_kind == "sub_page":
            way = ["click[< prev]"]
        return way + [f"click[{value}]" for name, value in page.options.items() if chosen.get(name) != value]


def _read_line(line: str) -> tuple[tuple[str, str, str], LoggedPage] | str:
    """Goal and page of a line, or why it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(record, dict) or not isinstance(record.get("goal"), dict):
        return NO_PAGE
    goal, content = record["goal"], record.get("content", {})
    page = _read_page(record, content if isinstance(content, dict) else {})
    texts = (goal.get("asin"), goal.get("instruction_text"))
    options = goal.get("goal_options") or ()
    if page is None or not all(isinstance(text, str) for text in texts):
        return NO_PAGE
    if not isinstance(options, list | tuple | dict):
        return NO_PAGE
    return _goal_key(texts[0], texts[1], options), page


def _read_page(record: Mapping[str, Any], content: Mapping[str, Any]) -> LoggedPage | None:
    name = record.get("page")
    if name == "index":
        return LoggedPage("start")
    if name == "search_results":
        keywords, number = content.get("keywords"), content.get("page")
        if not _are_texts(keywords) or not isinstance(number, int):
            return None
        return LoggedPage("results", keywords=tuple(keywords), page_number=number)
    kind = {"item_page": "item", "item_sub_page": "sub_page", "done": "done"}.get(str(name))
    asin, options = content.get("asin"), content.get("options")
    if (
        kind is None
        or not isinstance(asin, str)
        or not isinstance(options, dict)
        or not _are_texts([*options.values()])
    ):
        return None
    sub_page = ""
    if kind == "sub_page":  # the original logs its name in the address only
        found = _SUB_PAGE.findall(unquote(str(record.get("url", ""))))
        if not found:
            return None
        sub_page = found[-1]
    reward = record.get("reward")
    if isinstance(reward, int) and abs(reward) > MAX_NUMBER:
        return None
    return LoggedPage(
        kind,
        asin=asin,
        options=options,
        sub_page=sub_page,
        reward=float(reward) if isinstance(reward, int | float) else None,
    )


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _goal_key(asin: str, instruction: str, options: Any) -> tuple[str, str, str]:
    """What a goal is known by: everything but its price cap, which the original draws anew in every process."""
    wanted = sorted(options.items()) if isinstance(options, Mapping) else list(options or ())
    return asin, _PRICE_TEXT.sub("", instruction).strip(), json.dumps(wanted)
