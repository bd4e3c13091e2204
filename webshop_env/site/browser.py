"""A headless Chromium of the system's, driven by Selenium (extra `browser`)."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
)


def open_browser(*, size: tuple[int, int] = (1280, 900), timeout_s: float = 60.0) -> Chrome:
    """A new Chromium; `quit()` ends it.

    Args:
        size: Width and height of the window, in pixels.
        timeout_s: Longest wait for a page.

    Raises:
        ShopGymError: Selenium, Chromium or its driver is not installed, or Chromium does not start.
    """
    try:
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver import Chrome, ChromeOptions
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        raise ShopGymError("the browser needs Selenium: pip install 'shopgym[browser]'") from None
    binary = os.environ.get("SHOPGYM_CHROMIUM") or next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = os.environ.get("SHOPGYM_CHROMEDRIVER") or shutil.which("chromedriver")
    if binary is None or driver is None:
        raise ShopGymError(
            f"no {'Chromium' if binary is None else 'chromedriver'} is installed: apt-get install chromium "
            "chromium-driver, or name them in SHOPGYM_CHROMIUM and SHOPGYM_CHROMEDRIVER"
        )
    options = ChromeOptions()
    options.binary_location = binary
    for flag in (*_FLAGS, f"--window-size={size[0]},{size[1]}"):
        options.add_argument(flag)
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # its sandbox refuses to run as root
        options.add_argument("--no-sandbox")
    try:
        browser = Chrome(options=options, service=Service(driver))
        browser.set_page_load_timeout(timeout_s)
        browser.set_script_timeout(timeout_s)
    except WebDriverException as error:
        raise ShopGymError(f"{binary} does not start: {(error.msg or '').splitlines()[0]}") from None
    return browser
