"""The viewer's addresses: what there is, episodes with filters, one step by step, two side by side, a run's curve.

Everything is read from the files anew or from a small cache that knows when they change; nothing is ever written.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from flask import Blueprint, current_app, render_template, request, url_for
from werkzeug.exceptions import NotFound

from webshop_env.errors import ShopGymError
from webshop_env.pages import SEP
from webshop_env.site.catalogues import Catalogues
from webshop_env.site.curves import charts
from webshop_env.site.places import Places, read_metrics
from webshop_env.site.recorded import RecordedFile, ShownEpisode, Summary, World, open_recorded, reply_parts
from webshop_env.site.replay import replay
from webshop_env.site.shown import show

PAGE_SIZE = 50
MAX_TEXT_BYTES = 2 * 1024 * 1024
NUM_MARKS = 8
"""Colours of shared anchors."""
_ORDERS = {
    "number": lambda summary: summary.number,
    "score": lambda summary: (-summary.score, -summary.won, summary.length),
    "worst": lambda summary: (summary.score, summary.won, -summary.length),
    "longest": lambda summary: -summary.length,
    "invalid": lambda summary: -summary.num_invalid,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which episodes to list; an empty text or None lets all pass."""

    won: str = ""
    min_score: float | None = None
    max_score: float | None = None
    min_length: float | None = None
    max_length: float | None = None
    invalid: str = ""
    goal: str = ""
    group: float | None = None

    def lets_pass(self, summary: Summary) -> bool:
        bounds = (
            (self.min_score, summary.score, 1),
            (self.max_score, summary.score, -1),
            (self.min_length, summary.length, 1),
            (self.max_length, summary.length, -1),
        )
        return (
            (not self.won or summary.won == (self.won == "yes"))
            and (not self.invalid or bool(summary.num_invalid) == (self.invalid == "yes"))
            and all(bound is None or sign * value >= sign * bound - 1e-9 for bound, value, sign in bounds)
            and (self.group is None or summary.group == self.group)
            and all(word in f"{summary.goal} {summary.goal_index}".lower() for word in self.goal.lower().split())
        )


def viewer_pages(view: Path) -> Blueprint:
    """The blueprint over a directory or file.

    Raises:
        ShopGymError: It does not exist.
    """
    pages = Blueprint("viewer", "webshop_env.site")
    places = Places(view)

    def find(name: str = "source") -> tuple[str, Path]:
        place = request.args.get(name, "")
        try:
            return place, places.find(place)
        except ShopGymError as error:
            raise NotFound(str(error)) from None

    def opened() -> tuple[str, RecordedFile]:
        place, path = find()
        try:
            return place, open_recorded(path)
        except ShopGymError as error:
            raise NotFound(str(error).replace(str(path), place)) from None
        except OSError as error:
            raise NotFound(f"{place}: cannot be read: {error.strerror}") from None

    @pages.get("/")
    def sources() -> str:
        found = places.look()
        return render_template("sources.html", found=found, root=places.root.name, only=places.only)

    @pages.get("/episodes")
    def episodes() -> str:
        place, file = opened()
        filters = _filters()
        order = request.args.get("order", "number")
        summaries = [s for s in _with_goals(file) if filters.lets_pass(s)]
        summaries.sort(key=_ORDERS.get(order, _ORDERS["number"]))
        number = max(_whole("page", 1), 1)
        last = max(-(-len(summaries) // PAGE_SIZE), 1)
        return render_template(
            "episodes.html",
            source=place,
            world=file.world,
            filters=filters,
            order=order if order in _ORDERS else "number",
            summaries=summaries[(min(number, last) - 1) * PAGE_SIZE : min(number, last) * PAGE_SIZE],
            num=len(summaries),
            num_all=len(file.summaries()),
            share_won=sum(s.won for s in summaries) / len(summaries) if summaries else 0.0,
            mean_score=sum(s.score for s in summaries) / len(summaries) if summaries else 0.0,
            page=min(number, last),
            last=last,
            address=_address_of_page,
        )

    @pages.get("/episode")
    def episode() -> str:
        place, file = opened()
        shown = _episode(file, "id")
        played = replay(shown, _catalogues())
        num_pages = len(shown.steps) + (1 if played.pages or shown.last_page is not None else 0)
        at = min(max(_whole("step", 1), 1), max(num_pages, 1))
        step = shown.steps[at - 1] if at <= len(shown.steps) else None
        seen = step.page if step else shown.last_page
        page = played.pages[at - 1] if played.pages else None
        numbers = [s.number for s in file.summaries()]
        where = numbers.index(shown.summary.number)
        siblings = [s for s in file.summaries() if s.group == shown.summary.group and s.number != shown.summary.number]
        return render_template(
            "episode.html",
            source=place,
            episode=shown,
            summary=replace(shown.summary, goal=shown.summary.goal or played.instruction),
            at=at,
            num_pages=num_pages,
            step=step,
            seen=seen if seen is not None else (page.text if page else ""),
            segments=_segments(seen or "", step.actions if step else None),
            reply=reply_parts(step.reply) if step and step.reply is not None else None,
            person=show(page, played.shop) if page and played.shop else None,
            picked=_picked(page, step.action) if page and step else None,
            problem=played.problem,
            before=numbers[where - 1] if where else None,
            after=numbers[where + 1] if where + 1 < len(numbers) else None,
            siblings=siblings[:32],
        )

    @pages.get("/compare")
    def compare() -> str:
        place, file = opened()
        pair = (_episode(file, "a"), _episode(file, "b"))
        shared = {step.page for step in pair[0].steps} & {step.page for step in pair[1].steps}
        marks: dict[str, int] = {}
        for one in pair:
            for step in one.steps:
                if step.page in shared:
                    marks.setdefault(step.page, len(marks))
        goal = pair[0].summary.goal or _goal_text(file.world, pair[0].summary.goal_index)
        is_group = pair[0].summary.group == pair[1].summary.group
        return render_template(
            "compare.html", source=place, pair=pair, anchors=marks, num_marks=NUM_MARKS, goal=goal, is_group=is_group
        )

    @pages.get("/run")
    def run() -> str:
        place, _ = find()
        metrics = _metrics(places, place)
        found = places.look().under(place)
        return render_template(
            "run.html",
            source=place,
            root=places.root.name,
            found=found,
            charts=charts(metrics),
            **_progress(metrics),
            total=_total(places, place),
        )

    @pages.get("/curve")
    def curve() -> str:
        """The changing part of `run`, for its script to fetch."""
        place, _ = find()
        metrics = _metrics(places, place)
        return render_template(
            "curve.html", source=place, charts=charts(metrics), **_progress(metrics), total=_total(places, place)
        )

    @pages.get("/text")
    def text() -> str:
        place, path = find()
        if place not in places.look().texts:
            raise NotFound("There is no report of that name here.")
        try:
            with open(path, "rb") as file:
                content = file.read(MAX_TEXT_BYTES)
        except OSError:
            raise NotFound("It cannot be read.") from None
        return render_template("text.html", source=place, content=content.decode("utf-8", "replace"))

    return pages


def _address_of_page(number: int) -> str:
    """The list as it is filtered now, at another page; only names that the list knows come along."""
    known = ("source", "order", *(field.name for field in fields(Filters)))
    kept: dict[str, Any] = {name: request.args[name] for name in known if name in request.args}
    return url_for("viewer.episodes", **kept, page=number)


def _catalogues() -> Catalogues:
    catalogues: Catalogues = current_app.extensions["catalogues"]
    return catalogues


def _episode(file: RecordedFile, name: str) -> ShownEpisode:
    try:
        return file.episode(_whole(name, -1))
    except ShopGymError as error:
        raise NotFound(str(error)) from None


def _metrics(places: Places, place: str) -> list[dict[str, float]]:
    try:
        return read_metrics(places.find(f"{place}/metrics.jsonl"))
    except ShopGymError:
        raise NotFound("This is no run of training: it has no metrics.jsonl.") from None


def _progress(metrics: list[dict[str, float]]) -> dict[str, Any]:
    """What the heading of a run says."""
    checks = [line for line in metrics if "validation/success_frac" in line]
    return {
        "num_updates": int(max((line["update"] for line in metrics), default=0)),
        "validation": checks[-1] if checks else None,
        "first_validation": checks[0] if len(checks) > 1 else None,
    }


def _total(places: Places, place: str) -> int | None:
    """How many updates the run is to do, from its settings; None where they do not say."""
    try:
        with open(places.find(f"{place}/settings.yaml"), encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "trainer.total_updates" and value.strip().isdigit():
                    return int(value)
    except (ShopGymError, OSError):
        return None
    return None


def _with_goals(file: RecordedFile) -> list[Summary]:
    """The summaries, with the goals' texts where the file or the shop has them."""
    summaries = file.summaries()
    if all(summary.goal for summary in summaries):
        return list(summaries)
    world = file.world
    shop = _catalogues().shop(world.env_id, world.settings, world.catalogue_hash)
    if shop is None:
        return list(summaries)
    goals = shop.goals
    return [
        replace(s, goal=goals[s.goal_index].instruction_text) if 0 <= s.goal_index < len(goals) else s
        for s in summaries
    ]


def _goal_text(world: World, goal_index: int) -> str:
    shop = _catalogues().shop(world.env_id, world.settings, world.catalogue_hash)
    return shop.goals[goal_index].instruction_text if shop and 0 <= goal_index < len(shop.goals) else ""


def _segments(page: str, actions: tuple[str, ...] | None) -> list[tuple[str, bool]]:
    """The texts of a page and whether each is one that can be clicked; [] for a page that is no row of texts."""
    if SEP not in page:
        return []
    offered = {
        " ".join(action[len("click[") : -1].split()).lower() for action in actions or () if action[:6] == "click["
    }
    texts = [
        segment[1:-1] if len(segment) > 1 and segment[0] == segment[-1] == "'" else segment
        for segment in page.split(SEP)
    ]
    return [(text, " ".join(text.split()).lower() in offered) for text in texts]


def _picked(page: Any, action: str) -> int | None:
    """Which of the page's clicks an action is."""
    actions = [each.lower() for each in page.body.actions if each.startswith("click[")]
    wanted = action.strip().lower()
    return actions.index(wanted) if wanted in actions else None


def _filters() -> Filters:
    args = request.args
    return Filters(
        won=args.get("won", "") if args.get("won") in ("yes", "no") else "",
        invalid=args.get("invalid", "") if args.get("invalid") in ("yes", "no") else "",
        goal=args.get("goal", "")[:200],
        **{name: _number(name) for name in ("min_score", "max_score", "min_length", "max_length", "group")},
    )


def _number(name: str) -> float | None:
    try:
        value = float(request.args.get(name, ""))
    except ValueError:
        return None
    return value if abs(value) < 1e15 else None


def _whole(name: str, default: int) -> int:
    text = request.args.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else default
