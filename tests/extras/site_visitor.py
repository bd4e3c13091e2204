"""A visitor of the site for tests: without a browser through Flask's test client, and with one through Chromium."""

from __future__ import annotations

import contextlib
import html
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flask import Flask

from webshop_env.pages import SEP

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


class Visitor:
    """Shops through the addresses of the site, as a browser's forms do."""

    def __init__(self, app: Flask, goal: int | str = "") -> None:
        self.client = app.test_client()
        answer = self.client.post("/shop", data={"goal": str(goal)})
        assert answer.status_code == 303, answer.text
        self.address = answer.location
        self.look()

    def look(self) -> str:
        answer = self.client.get(self.address)
        assert answer.status_code == 200, answer.text
        self.page = answer.text
        return self.page

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(html.unescape(re.search(r'data-page="([^"]*)"', self.page)[1]))

    @property
    def clicks(self) -> dict[str, str]:
        """What each control names -> the number that its form sends."""
        found = re.findall(r'<button type="submit" name="click" value="(\d+)"[^>]*? data-click="([^"]*)"', self.page)
        return {html.unescape(text): number for number, text in found}

    @property
    def text(self) -> str:
        """The agent's text, from the markup."""
        pieces = re.findall(r'data-n="(\d+)"[^>]*>([^<]*)<', self.page)
        return SEP.join(html.unescape(text).strip() for _, text in sorted(pieces, key=lambda piece: int(piece[0])))

    def send(self, **form: str) -> str:
        answer = self.client.post(self.address, data={"step": str(self.data["step"]), **form})
        assert answer.status_code == 303, answer.text
        return self.look()

    def act(self, action: str) -> str:
        """Takes an action of the text environment that the page offers."""
        if action.startswith("search["):
            return self.send(query=action[len("search[") : -1])
        return self.send(click=self.clicks[action[len("click[") : -1]])


def until(browser: Chrome, script: str, timeout_s: float = 90.0) -> None:
    """Waits until the script says true on a page that is whole."""
    from selenium.common.exceptions import WebDriverException

    deadline = time.monotonic() + timeout_s

    def holds() -> bool:
        with contextlib.suppress(WebDriverException):  # between two pages
            return browser.execute_script(f"return document.readyState === 'complete' && Boolean({script})")
        return False

    while not holds():
        assert time.monotonic() < deadline, f"{script} never became true on {browser.current_url}"
        time.sleep(0.02)


def step_is(number: int) -> str:
    """For `until`: the session has come to this step."""
    return f"document.getElementById('main')?.dataset.page?.includes('\"step\": {number},')"


def click(browser: Chrome, text: str) -> None:
    """Clicks a control of the shop by what it names, and waits for the next page."""
    before = json.loads(browser.execute_script("return document.getElementById('main').dataset.page"))["step"]
    buttons = browser.find_elements("css selector", "button[data-click]")
    button = next(button for button in buttons if button.get_attribute("data-click") == text)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)  # a phone's bar may lie over it
    button.click()
    until(browser, step_is(before + 1))


def write_catalogue(folder: Path, rows: Sequence[dict[str, Any]], wishes: dict[str, Any]) -> Path:
    """A catalogue's four files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "items_shuffle.json").write_text(json.dumps(rows))
    (folder / "items_ins_v2.json").write_text(json.dumps(wishes))
    (folder / "items_human_ins.json").write_text("{}")
    (folder / "name_nouns.json").write_text(json.dumps({row["asin"]: ["mug"] for row in rows}))
    return folder
