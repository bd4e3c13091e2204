"""Takes the pictures of shop, score page and viewer: `python docs/take_screenshots.py RUN [FOLDER]`.

RUN is the directory of a training run. Needs the extras `site` and `browser`, and the system's Chromium. Writes
docs/site_*.png anew; every page, on desk and phone, where another FOLDER is named.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from selenium.webdriver import Chrome

from webshop_env.site.app import SiteConfig, create_app
from webshop_env.site.browser import open_browser
from webshop_env.site.server import SiteServer

DOCS = Path(__file__).resolve().parent
GOAL = "3"
QUERY = "pet friendly rug floral print"
IN_DOCS = ("results", "score", "run", "episode", "compare", "phone_item")
"""What the README shows."""


def until(browser: Chrome, script: str, timeout_s: float = 60.0) -> None:
    """Waits for a page on which the script says true."""
    deadline = time.monotonic() + timeout_s
    while not browser.execute_script(f"return document.readyState === 'complete' && Boolean({script})"):
        if time.monotonic() > deadline:
            raise TimeoutError(script)
        time.sleep(0.05)


def step_is(number: int) -> str:
    return f"document.getElementById('main')?.dataset.page?.includes('\"step\": {number},')"


def shop(browser: Chrome, url: str, shoot: Callable[[str], None]) -> None:
    """A whole purchase, with a picture of each kind of page."""
    browser.get(url)
    browser.find_element("id", "goal").send_keys(GOAL)
    browser.find_element("css selector", "form.start button").click()
    until(browser, step_is(0))
    browser.find_element("id", "query").send_keys(QUERY)
    browser.find_element("css selector", "[data-search]").click()
    until(browser, step_is(1))
    shoot("results")
    for number, click in enumerate(("b0pa24va31", "blush", "4 x 6 feet", "buy now"), start=2):
        if click == "buy now":
            shoot("item")
        browser.find_element("css selector", f'[data-click="{click}"]').click()
        until(browser, step_is(number))
    shoot("score")


def viewer(browser: Chrome, url: str, run: Path, shoot: Callable[[str], None]) -> None:
    """A run's curve, the episodes of an update, one of them, two of them."""
    browser.get(f"{url}view/run?source=.")
    shoot("run")
    last = sorted((run / "rollouts").glob("*.parquet"))[-1].relative_to(run)
    source = f"source={last}"
    browser.get(f"{url}view/episodes?{source}&won=yes&order=longest")
    shoot("episodes")
    first = browser.find_element("css selector", "tbody tr.linked th a").get_attribute("href")
    browser.get(f"{first}&step=2")
    until(browser, "document.querySelector('[data-picked]')")
    shoot("episode")
    browser.find_element("css selector", "form[action*=compare] button").click()
    until(browser, "document.querySelector('.track')")
    shoot("compare")


def main(run: Path, out: Path = DOCS) -> None:
    """All pictures, on a desk and on a phone."""
    with SiteServer(create_app(SiteConfig(view=run))) as server:
        browser = open_browser(size=(1280, 900))
        try:
            for name, width, height, scale in (("", 1280, 860, 1), ("phone_", 390, 844, 1)):
                browser.execute_cdp_cmd(
                    "Emulation.setDeviceMetricsOverride",
                    {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": bool(name)},
                )

                def shoot(page: str, lead: str = name) -> None:
                    if out != DOCS or lead + page in IN_DOCS:
                        browser.save_screenshot(str(out / f"site_{lead}{page}.png"))

                shop(browser, server.url, shoot)
                viewer(browser, server.url, run, shoot)
        finally:
            browser.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(Path, sys.argv[2:3]))
