"""WebShopSite-v0: the shop as an agent meets it in a real Chromium, with the text environment's actions and texts.

Searches are typed, controls are clicked; what is seen is read from the page that the browser shows. Slow beside the
text environment (about a tenth of a second a step), and there to show that the two are one shop.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import gymnasium

from webshop_env.actions import SEARCH_HINT, match_key, parse_v0, parse_v1
from webshop_env.errors import ShopGymError
from webshop_env.pages import SEP
from webshop_env.shop import check_whole
from webshop_env.spaces import TextSpace
from webshop_env.text_env import options_dict

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

_READ_PAGE = """
const main = document.getElementById("main");
if (document.readyState !== "complete" || !main) return null;
if (main.dataset.error) return {error: main.dataset.error};
if (!main.dataset.page) return null;
const texts = [...document.querySelectorAll("[data-n]")].map((e) => [Number(e.dataset.n), e.textContent]);
const clicks = [...document.querySelectorAll("button[data-click]")].map((e) => [Number(e.value), e.dataset.click]);
return {data: main.dataset.page, texts, clicks, hasSearch: document.querySelector("[data-search]") !== null};
"""


class WebShopSiteEnv(gymnasium.Env[str, str]):
    """One session at a time in a Chromium of its own, against a server of its own.

    An action that the page does not offer does nothing, with the reason in `info`. A search needs a search bar: where
    WebShop-v0 searches from any page, this environment refuses, because there is nothing to type into. Infos have the
    keys of the text environment's.

    Args:
        version: Of the shop: "v0" or "v1".
        data_dir: Folder of the catalogue; None is the embedded one.
        goals: "synthetic" or "human".
        split: Where `reset` draws goals from when it is given none.
        max_steps: Steps after which an episode is truncated; None for no limit.
        show_attrs: Items have a page with their attributes.
        timeout_s: Longest wait for a page.

    Raises:
        ShopGymError: The extras `site` and `browser`, or Chromium, are missing.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  (as Gymnasium declares it)

    def __init__(
        self,
        *,
        version: str = "v0",
        data_dir: str | None = None,
        goals: str = "synthetic",
        split: str = "all",
        max_steps: int | None = 100,
        show_attrs: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        try:
            from webshop_env.site.app import SiteConfig, create_app
            from webshop_env.site.server import SiteServer
        except ModuleNotFoundError as error:
            raise ShopGymError(f"WebShopSite-v0 needs {error.name}: pip install 'shopgym[site,browser]'") from None
        if max_steps is not None:
            check_whole("max_steps", max_steps, 1)
        self.version = version
        self.observation_space = TextSpace()
        self.action_space = TextSpace()
        self._max_steps, self._split, self._timeout_s = max_steps, split, timeout_s
        self._parse = parse_v0 if version == "v0" else parse_v1
        config = SiteConfig(
            version=version, data_dir=str(data_dir) if data_dir else None, goals=goals, split=split, max_steps=None,
            show_attrs=show_attrs,
        )  # fmt: skip
        self.shop = config.open_shop()
        self._server = SiteServer(create_app(config)).__enter__()
        self._browser: Chrome | None = None
        self._page: dict[str, Any] | None = None
        self._num_steps, self._is_over = 0, False
        self._reason = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode: open the shop's first page, enter the goal's number, start.

        Args:
            seed: Of the draws of goals from here on.
            options: `{"goal_index": i}` or `{"goal_id": id}`; without, a goal of the split is drawn.
        """
        super().reset(seed=seed)
        goal_index = self._pick_goal(options_dict(options))
        browser = self._open()
        browser.get(self._server.url)
        browser.find_element("id", "goal").send_keys(str(goal_index))
        browser.find_element("css selector", "form.start button").click()
        self._num_steps, self._is_over, self._reason = 0, False, ""
        self._page = self._read(step=0)
        return self._observation(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do what the action says, as a visitor would.

        Returns:
            Observation, reward (the score on purchase, else 0), terminated, truncated, info.
        """
        if self._page is None:
            raise ShopGymError("call reset before step")
        if not isinstance(action, str):
            raise ShopGymError(f"an action is a text such as 'search[red mug]', got {type(action).__name__}")
        is_done_before = self._data["info"]["page_kind"] == "done"
        if self._is_over:
            self._reason = "the episode is over"
            return self._observation(), 0.0, is_done_before, not is_done_before, self._info()
        self._reason = self._act(action)
        self._num_steps += 1
        info = self._info()
        is_done = info["page_kind"] == "done"
        truncated = not is_done and self._max_steps is not None and self._num_steps >= self._max_steps
        self._is_over = is_done or truncated
        return self._observation(), float(info["task_score"]) if is_done else 0.0, is_done, truncated, info

    def close(self) -> None:
        """Ends browser and server."""
        if self._browser is not None:
            self._browser.quit()
            self._browser = None
        self._server.close()

    @property
    def browser(self) -> Chrome:
        """The browser, for whoever wants to look over the agent's shoulder."""
        return self._open()

    def _open(self) -> Chrome:
        if self._browser is None:
            from webshop_env.site.browser import open_browser

            self._browser = open_browser(timeout_s=self._timeout_s)
        return self._browser

    def _pick_goal(self, options: dict[str, Any]) -> int:
        if options.keys() - {"goal_index", "goal_id"} or len(options) > 1:
            raise ShopGymError(f"reset options are one of goal_index, goal_id, got {', '.join(map(str, options))}")
        if options.get("goal_index") is not None:
            return self.shop.goal_at(options["goal_index"]).goal_index
        if options.get("goal_id") is not None:
            return self.shop.goal_by_id(options["goal_id"]).goal_index
        indexes = self.shop.split(self._split)
        if len(indexes) == 0:
            raise ShopGymError(f"the split {self._split!r} of this catalogue has no goals")
        return int(indexes[self.np_random.integers(len(indexes))])

    def _act(self, action: str) -> str:
        """Does it; returns why nothing happened, "" when something did."""
        assert self._page is not None
        parsed = self._parse(action)
        if parsed.kind is None:
            return parsed.problem
        before = self._data["step"]
        browser = self._open()
        if parsed.kind == "search":
            if not self._page["hasSearch"]:
                return "there is no search bar on this page"
            field = browser.find_element("id", "query")
            # Typing drops what keyboards lack, so the text is put in as pasting would.
            browser.execute_script("arguments[0].value = arguments[1]", field, parsed.argument)
            browser.find_element("css selector", "[data-search]").click()
        else:
            wanted = parsed.argument
            same = (lambda text: text == wanted) if self.version == "v0" else (lambda text: match_key(text) == wanted)
            number = next((number for number, text in self._page["clicks"] if same(text)), None)
            if number is None:
                return f"this page does not offer click[{wanted if len(wanted) <= 60 else wanted[:57] + '...'}]"
            button = browser.find_element("css selector", f'button[data-click][value="{number}"]')
            browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
            button.click()
        self._page = self._read(step=before + 1)
        return str(self._data["info"]["reason"])

    def _read(self, step: int) -> dict[str, Any]:
        """The page that the browser shows once the session has come to a step."""
        from selenium.common.exceptions import WebDriverException

        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                page = self._open().execute_script(_READ_PAGE)
            except WebDriverException:  # between two pages
                page = None
            if page is not None and "error" in page:
                raise RuntimeError(f"the site answered with an error: {page['error']}")
            if page is not None and json.loads(page["data"])["step"] == step:
                return dict(page)
            if time.monotonic() > deadline:
                raise RuntimeError(f"the browser did not show step {step} within {self._timeout_s} s")
            time.sleep(0.005)

    @property
    def _data(self) -> dict[str, Any]:
        assert self._page is not None
        data: dict[str, Any] = json.loads(self._page["data"])
        return data

    def _observation(self) -> str:
        assert self._page is not None
        texts = dict(self._page["texts"])
        return SEP.join(texts[number].strip() for number in sorted(texts))

    def _info(self) -> dict[str, Any]:
        assert self._page is not None
        clicks = dict(self._page["clicks"])
        actions = [SEARCH_HINT] if self._page["hasSearch"] else []
        actions += [f"click[{clicks[number]}]" for number in sorted(clicks)]
        return {
            **self._data["info"],
            "available_actions": tuple(actions),
            "action_possible": not self._reason,
            "reason": self._reason,
        }
