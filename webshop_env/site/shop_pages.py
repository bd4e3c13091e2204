"""The shop's addresses: a start page, and one address for each visitor's session, whatever page it is on.

Every control of a page is one of the page's actions, so people and agents do exactly the same things.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from flask import Blueprint, Response, current_app, redirect, render_template, request, url_for
from werkzeug.exceptions import BadRequest, NotFound
from werkzeug.wrappers import Response as AnyResponse

from webshop_env.errors import ShopGymError
from webshop_env.score_report import explain
from webshop_env.site.sessions import SessionStore, ShopSession
from webshop_env.site.shown import show, tint_of

STALE = "That page was from before. Here is where you are now."

shop_pages = Blueprint("shop", "webshop_env.site")


def _store() -> SessionStore:
    store: SessionStore = current_app.extensions["store"]
    return store


def _session(session_id: str) -> ShopSession:
    session = _store().find(session_id)
    if session is None:
        raise NotFound("There is no such shopping session, or it had to make room for others. Please start a new one.")
    return session


@shop_pages.get("/")
def home() -> str:
    """Where a visitor takes a goal."""
    shop = _store().shop
    return render_template("home.html", shop=shop, num_goals=len(shop.goals), problem="", goal="")


@shop_pages.post("/shop")
def begin() -> AnyResponse | tuple[str, int]:
    """Takes a goal, named by its number or drawn."""
    store = _store()
    text = request.form.get("goal", "").strip()
    try:
        if text and not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ShopGymError(f"A goal is a number from 0 to {len(store.shop.goals) - 1}.")
        options: dict[str, Any] = {"goal_index": int(text)} if text else {}
        session = store.begin(lambda: options or _drawn_goal(store))
    except ShopGymError as error:
        page = render_template(
            "home.html", shop=store.shop, num_goals=len(store.shop.goals), problem=str(error), goal=text[:20]
        )
        return page, 400
    return redirect(url_for("shop.page", session_id=session.session_id), code=303)


def _drawn_goal(store: SessionStore) -> dict[str, Any]:
    indexes = store.shop.split(store.settings.get("split") or "all")
    if len(indexes) == 0:
        raise ShopGymError(f"The split {store.settings['split']} of this catalogue has no goals.")
    return {"goal_index": int(indexes[secrets.randbelow(len(indexes))])}


@shop_pages.get("/shop/<session_id>")
def page(session_id: str) -> str:
    """The page that the session is on."""
    session = _session(session_id)
    with session.lock:
        notice, session.notice = session.notice, ""
        env = session.env
        context: dict[str, Any] = {
            "session_id": session_id,
            "step": session.num_steps,
            "max_steps": env.settings.max_steps,
            "is_over": session.is_over,
            "notice": notice,
            "last_click": session.last_click,
            "info": session.recorder.info,
            "page_data": _page_data(session),
            "shown": show(env.page, env.shop),
            "is_recorded": session.is_kept,
        }
        if env.session.is_done and env.page.kind == "done" and env.session.asin:
            report = explain(env.shop, env.session.goal, env.session.asin, env.session.options)
            context |= {"report": report, "wanted_tint": tint_of(report.wanted) if report.wanted else 0}
            return render_template("score.html", **context)
        return render_template("shop.html", **context)


def _page_data(session: ShopSession) -> str:
    """What programs that drive a browser want to know beside the texts and controls of the page, as JSON."""
    names = ("goal_index", "goal_id", "instruction_text", "page_kind", "asin", "selected_options", "task_score", "won",
             "reason", "reward_breakdown")  # fmt: skip
    info = {name: session.recorder.info[name] for name in names}
    return json.dumps({"step": session.num_steps, "is_over": session.is_over, "info": info})


@shop_pages.post("/shop/<session_id>")
def act(session_id: str) -> AnyResponse:
    """Takes one of the page's actions: `click` is its number among the page's clicks, `query` a search."""
    session = _session(session_id)
    with session.lock:
        number = request.form.get("step", "")
        if number != str(session.num_steps):
            session.notice = STALE
        elif session.is_over:
            session.notice = "This episode is over."
        else:
            _take(session)
    return redirect(url_for("shop.page", session_id=session_id), code=303)


def _take(session: ShopSession) -> None:
    body, text = session.env.page.body, request.form.get("click")
    clicks = body.clicks
    if text is None and body.has_search_bar:
        action = f"search[{request.form.get('query', '')}]"
        session.last_click = None
    elif text is not None and text.isascii() and text.isdigit() and len(text) < 6 and int(text) < len(clicks):
        action = f"click[{clicks[int(text)]}]"
        session.last_click = int(text)
    else:
        raise BadRequest("This page has no such control.")
    step = session.recorder.step(action)
    if step.reason:
        session.notice = f"Nothing happened: {step.reason}."
    if step.terminated or step.truncated:
        _store().keep(session)


@shop_pages.get("/robots.txt")
def robots() -> Response:
    """Nothing here is for search engines."""
    return Response("User-agent: *\nDisallow: /\n", mimetype="text/plain")
