"""The web application: settings, security headers, limits and errors. The pages are in `shop_pages.py`, `viewer.py`.

Everything that comes from a catalogue, a visitor or a policy is data: templates escape it, no path and no format
string is made of it, and no script can stand in a page because the page may only load the site's own files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flask import Flask, Response, render_template, request
from markupsafe import Markup, escape
from werkzeug.exceptions import Forbidden, HTTPException, RequestURITooLarge, SecurityError

from webshop_env.shop import Shop, open_shop
from webshop_env.site.catalogues import Catalogues
from webshop_env.site.sessions import EpisodeLog, SessionStore, StoreLimits
from webshop_env.site.shop_pages import shop_pages
from webshop_env.site.viewer import viewer_pages

MAX_BODY_BYTES = 256 * 1024
"""More than the longest action, quoted for a form, needs."""
MAX_QUERY_BYTES = 4096
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, kw_only=True)
class SiteConfig:
    """What the site serves."""

    data_dir: str | None = None
    """Catalogue of the shop; None is the embedded one."""
    version: str = "v1"
    goals: str = "synthetic"
    split: str = "all"
    """Where a goal is drawn from when a visitor names none."""
    max_steps: int | None = 100
    """Steps after which a visitor's episode ends; None is no limit."""
    show_attrs: bool = False
    env_settings: dict[str, Any] = field(default_factory=dict)
    """More settings of each visitor's environment."""
    view: Path | None = None
    """Directory or file of what the viewer shows; None turns it off."""
    record: Path | None = None
    """Directory for the episodes of visitors; None keeps none."""
    limits: StoreLimits = field(default_factory=StoreLimits)
    trusted_hosts: tuple[str, ...] | None = None
    """Names under which the site answers; None is any."""

    def open_shop(self) -> Shop:
        """The shop that visitors come to."""
        return open_shop(self.data_dir, version=self.version, goals=self.goals)  # type: ignore[arg-type]


def create_app(config: SiteConfig | None = None) -> Flask:
    """The application, ready to be served; `app.extensions["store"]` has to be closed after the last request.

    Raises:
        ShopGymError: The catalogue, the view or the place of the record is wrong.
    """
    config = config or SiteConfig()
    shop = config.open_shop()
    settings = {"show_attrs": config.show_attrs, "max_steps": config.max_steps, "split": config.split}
    log = EpisodeLog(config.record) if config.record else None
    app = Flask("webshop_env.site")
    app.jinja_options = {"finalize": sendable}
    app.config.update(
        MAX_CONTENT_LENGTH=MAX_BODY_BYTES,
        MAX_FORM_MEMORY_SIZE=MAX_BODY_BYTES,
        MAX_FORM_PARTS=20,
        TRUSTED_HOSTS=list(config.trusted_hosts) if config.trusted_hosts else None,
        SEND_FILE_MAX_AGE_DEFAULT=3600,
        PROPAGATE_EXCEPTIONS=False,
    )
    app.extensions["store"] = SessionStore(shop, settings | config.env_settings, config.limits, log)
    app.extensions["has_record"] = log is not None
    app.jinja_env.filters["exact"] = exact
    app.jinja_env.globals["has_viewer"] = config.view is not None
    app.register_blueprint(shop_pages)
    if config.view is not None:
        app.extensions["catalogues"] = Catalogues([config.data_dir] if config.data_dir else [])
        app.register_blueprint(viewer_pages(config.view), url_prefix="/view")
    app.before_request(_refuse_what_is_too_much)
    app.after_request(_with_headers)
    app.register_error_handler(HTTPException, _error_page)
    return app


_HALF_CHARACTERS = re.compile("[\ud800-\udfff]")


def sendable(value: Any) -> Any:
    """Halves of characters, which catalogues and policies may hold and UTF-8 may not, as the mark for such things."""
    if isinstance(value, str) and not value.isascii() and _HALF_CHARACTERS.search(value):
        return type(value)(_HALF_CHARACTERS.sub("\ufffd", value))
    return value


def exact(text: str) -> Markup:
    """Text as it is: a carriage return too, which a browser would turn into a line feed."""
    return Markup(str(escape(text)).replace("\r", "&#13;"))


def _refuse_what_is_too_much() -> None:
    if len(request.query_string) > MAX_QUERY_BYTES:
        raise RequestURITooLarge
    # Forms of other sites could not know a session's id, but could fill the store.
    if request.method == "POST" and request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        raise Forbidden


def _with_headers(response: Response) -> Response:
    response.headers.update(_HEADERS)
    if request.endpoint != "static":
        response.headers["Cache-Control"] = "no-store"
    return response


def _error_page(error: HTTPException) -> tuple[str, int]:
    if isinstance(error, SecurityError):  # under a name that is not trusted there are no addresses to link to
        return "This site does not answer to that name.\n", 400
    return render_template("error.html", code=error.code, name=error.name, text=error.description), error.code or 500
