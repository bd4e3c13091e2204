"""The site in a real headless Chromium: a purchase, the viewer, hostile text, a phone, and WebShopSite-v0."""

# ruff: noqa: E402  (what needs the extras comes after asking for them)

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gymnasium
import pytest
from contracts import check_env
from extra import require_extra

require_extra("site", "flask", "waitress", "pyarrow")
require_extra("browser", "selenium")

from selenium.webdriver import ActionChains, Chrome, Keys
from site_visitor import click, step_is, until
from test_site import EVIL, hostile_catalogue
from test_viewer import ROLLOUT, batch, run_dir  # noqa: F401  (fixtures)

import webshop_env  # noqa: F401  (registers the ids)
from webshop_env import WebShopTextEnv, open_shop
from webshop_env.conformance import read_records
from webshop_env.errors import ShopGymError
from webshop_env.policies import OraclePolicy
from webshop_env.site.app import SiteConfig, create_app
from webshop_env.site.browser import open_browser
from webshop_env.site.browser_env import WebShopSiteEnv
from webshop_env.site.server import SiteServer

NUM_GOLDEN = 20
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
BUY = ("b0pa24va31", "blush", "3 x 5 feet", "features", "< prev", "buy now")


@pytest.fixture(scope="module")
def shop_server():
    with SiteServer(create_app(SiteConfig())) as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    browser = open_browser()
    yield browser
    browser.quit()


@pytest.fixture
def phone(browser: Chrome):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


FAULTS = """
const bright = (c) => { const v = c.match(/[\\d.]+/g).slice(0, 3).map((x) => { x /= 255;
  return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; });
  return 0.2126*v[0] + 0.7152*v[1] + 0.0722*v[2]; };
const back = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (!/, 0\\)$/.test(c) && c !== 'transparent') return c; } return 'rgb(255, 255, 255)'; };
const bad = [];
for (const e of document.querySelectorAll('input:not([type=hidden]), select')) {
  if (!e.labels.length && !e.getAttribute('aria-label')) bad.push('no label: ' + e.name); }
for (const e of document.querySelectorAll('button')) if (!e.textContent.trim()) bad.push('no name: ' + e.outerHTML);
const headings = document.querySelectorAll('h1:not(.person h1)').length;
if (headings !== 1) bad.push('headings: ' + headings);
if (!document.documentElement.lang || !document.title) bad.push('no language or title');
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) { const e = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !e.offsetParent || e.closest('svg')) continue;
  const a = bright(getComputedStyle(e).color), b = bright(back(e));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) bad.push(ratio.toFixed(2) + ' ' + walker.currentNode.data.trim()); }
return bad;
"""
"""What a page lacks for those who see little or nothing: names, a heading, a contrast of 4.5 to 1 (WCAG AA)."""


def in_both_schemes(browser: Chrome, check: Callable[[], None]) -> None:
    """Does it with a light and with a dark screen."""
    try:
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            check()
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def complaints(browser: Chrome) -> list[str]:
    """What the browser did not like, a breach of the content policy above all."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def begin(browser: Chrome, server: SiteServer, goal: int = 3) -> None:
    browser.get(server.url)
    browser.find_element("id", "goal").send_keys(str(goal))
    browser.find_element("css selector", "form.start button").click()
    until(browser, step_is(0))


def search(browser: Chrome, words: str) -> None:
    browser.find_element("id", "query").send_keys(words)
    browser.find_element("css selector", "[data-search]").click()
    until(browser, step_is(1))


def test_a_whole_purchase(browser, shop_server):
    begin(browser, shop_server)
    search(browser, "pet friendly rug floral print")
    assert len(browser.find_elements("css selector", ".hit")) == 10
    for text in BUY:
        click(browser, text)
    assert browser.find_element("css selector", "h1").text == "Just what was wanted"
    assert browser.find_element("css selector", ".ring").get_attribute("aria-label") == "Score 1.000 of 1"
    assert len(browser.find_elements("css selector", "tr.met")) == 6
    assert not browser.find_elements("css selector", "tr.unmet")
    assert not complaints(browser)
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(address.startswith(shop_server.url) for address in loaded), "nothing from elsewhere"


def test_a_purchase_with_the_keyboard_alone(browser, shop_server):
    begin(browser, shop_server)
    keys = lambda *text: ActionChains(browser).send_keys(*text).perform()  # noqa: E731
    keys("pet friendly rug floral print", Keys.ENTER)  # the search field has the focus
    until(browser, step_is(1))
    keys("n")
    until(browser, step_is(2))
    keys("p")
    until(browser, step_is(3))
    step = 4

    def tab_to(text: str) -> None:
        for _ in range(60):
            keys(Keys.TAB)
            if browser.execute_script("return document.activeElement.dataset.click") == text:
                return
        raise AssertionError(f"the keyboard does not come to {text}")

    for text in ("b0pa24va31", "blush", "3 x 5 feet", "buy now"):
        tab_to(text)
        outline = browser.execute_script(
            "const e = document.activeElement;"
            "return [getComputedStyle(e).outlineStyle, getComputedStyle(e, '::after').outlineStyle]"
        )
        assert "solid" in outline, "one can see where the keyboard is"
        keys(Keys.ENTER)
        until(browser, step_is(step))
        if text == "blush":
            assert browser.execute_script("return document.activeElement.dataset.click") == "blush", "it stays there"
        step += 1
    assert browser.find_element("css selector", "h1").text == "Just what was wanted"


def test_every_page_of_the_shop_has_names_and_contrast(browser, shop_server):
    def check() -> None:
        begin(browser, shop_server)
        assert browser.execute_script(FAULTS) == []
        search(browser, "pet friendly rug floral print")
        assert browser.execute_script(FAULTS) == []
        for text in BUY:
            click(browser, text)
            assert browser.execute_script(FAULTS) == [], text

    in_both_schemes(browser, check)


def test_every_page_of_the_viewer_has_names_and_contrast(browser, run_dir):  # noqa: F811
    pages = [f"{name}?source={ROLLOUT}&id={i}&a=0&b=1&step={step}" for name in ("episodes", "episode", "compare")
             for i, step in ((0, 1), (1, 3), (2, 9))]  # fmt: skip
    with SiteServer(create_app(SiteConfig(view=run_dir))) as server:

        def check() -> None:
            for page in ("", "run?source=tiny", "text?source=tiny/validations/update_000003.txt", *pages):
                browser.get(f"{server.url}view/{page}")
                assert browser.execute_script(FAULTS) == [], page

        in_both_schemes(browser, check)


def test_a_phone_sized_window_needs_no_sideways_scrolling(phone, shop_server):
    def fits() -> bool:
        wide = phone.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1] == PHONE["width"], wide
        small = phone.execute_script(
            "return [...document.querySelectorAll('main button')].filter((e) => e.offsetParent && "
            "!e.classList.contains('asin') && e.getBoundingClientRect().height < 40).map((e) => e.textContent)"
        )
        return not small

    begin(phone, shop_server)
    assert fits()
    search(phone, "pet friendly rug floral print")
    assert fits()
    for text in BUY:
        if text == "buy now":
            place = phone.find_element("css selector", ".buy").rect
            scrolled = phone.execute_script("return window.scrollY")
            assert place["y"] + place["height"] - scrolled <= PHONE["height"], "buying needs no scrolling"
        click(phone, text)
        assert fits()
    assert phone.find_element("css selector", "h1").text == "Just what was wanted"


def test_a_hostile_catalogue_runs_nothing(browser, tmp_path):
    folder = hostile_catalogue(tmp_path)
    with SiteServer(create_app(SiteConfig(data_dir=str(folder), show_attrs=True))) as server:
        begin(browser, server, goal=0)
        titles = [browser.title]
        search(browser, f"{EVIL} mug")
        for text in (
            "b000000001",
            None,
            "description",
            "< prev",
            "features",
            "< prev",
            "attributes",
            "< prev",
            "buy now",
        ):
            if text is None:
                values = browser.find_elements("css selector", "button.value")
                text = values[0].get_attribute("data-click")
            click(browser, text)
            titles.append(browser.title)
        assert "<script>" in browser.find_element("css selector", "body").text
        assert not any("broken" in title for title in titles)
        assert not complaints(browser)
        assert (
            browser.execute_script(
                "return document.images.length + document.querySelectorAll('script:not([src])').length"
            )
            == 0
        )


def test_the_browsers_own_back_button_does_no_harm(browser, shop_server):
    begin(browser, shop_server)
    search(browser, "pet friendly rug floral print")
    click(browser, "b0pa24va31")
    browser.back()
    until(browser, "document.getElementById('main')?.dataset.page")
    assert json.loads(browser.execute_script("return document.getElementById('main').dataset.page"))["step"] == 2
    click(browser, "blush")


def test_the_viewer(browser, run_dir):  # noqa: F811
    with SiteServer(create_app(SiteConfig(view=run_dir))) as server:
        browser.get(f"{server.url}view/")
        browser.find_element("css selector", "a.block").click()
        until(browser, "document.querySelector('[data-curve]')")
        assert "update 5 of 30" in browser.find_element("css selector", ".facts").text
        with open(run_dir / "tiny" / "metrics.jsonl", "a") as file:
            file.write('"}\n{"update": 8, "rollout/success_frac": 0.9}\n')
        until(browser, "document.querySelector('.facts').textContent.includes('update 8 of 30')")  # live
        browser.get(f"{server.url}view/episodes?source={ROLLOUT}")
        browser.find_element("css selector", "select[name=invalid]").send_keys("some")
        browser.find_element("css selector", ".filters button").click()
        until(browser, "location.search.includes('invalid=yes')")
        rows = browser.find_elements("css selector", "tr.linked")
        assert 0 < len(rows) < 12
        browser.get(f"{server.url}view/episode?source={ROLLOUT}&id=0&step=1")
        assert browser.find_element("css selector", ".reply .think").text.startswith("<think>it says rug")
        ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
        until(browser, "location.search.includes('step=2') && document.querySelector('[data-picked]')")
        picked = browser.find_element("css selector", "[data-picked] .asin")
        assert f"click[{picked.text.lower()}]" in browser.find_element("css selector", ".reply .action").text
        assert not browser.execute_script(
            "return [...document.querySelectorAll('.person button')].some((b) => b.matches(':enabled'))"
        )
        browser.find_element("css selector", "form[action*=compare] button").click()
        until(browser, "document.querySelectorAll('.track').length === 2")
        assert len(browser.find_elements("css selector", "[class*=shared-]")) >= 4
        assert not complaints(browser)


# WebShopSite-v0


def accepted_sessions(reference_dir: Path) -> list[dict]:
    """Golden sessions in which v0 accepts every action, typed where there is a search bar."""
    shop = open_shop(reference_dir / "webshop-1k", version="v0")
    kept = []
    for session in read_records(reference_dir / "golden" / "sessions.jsonl.gz"):
        env = WebShopTextEnv(version="v0", shop=shop)
        env.reset(options={"goal_index": session["session"]})
        is_accepted = not session["env_kwargs"]
        for step in session["steps"]:
            is_typed = not step["action"].startswith("search") or env.page.body.has_search_bar
            is_accepted = is_accepted and is_typed and "seed_before" not in step
            is_accepted = is_accepted and env.step(step["action"])[4]["action_possible"]
        if is_accepted:
            kept.append(session)
    return kept


def test_the_browser_shows_what_the_original_showed(reference_dir):
    """Texts, actions, rewards and ends of 20 golden sessions, of all kinds and spread over the file."""
    sessions = accepted_sessions(reference_dir)
    assert len(sessions) > 90
    chosen = sessions[:: len(sessions) // NUM_GOLDEN][:NUM_GOLDEN]
    assert len(chosen) == NUM_GOLDEN and len({session["policy"] for session in chosen}) > 1
    env = WebShopSiteEnv(version="v0", data_dir=str(reference_dir / "webshop-1k"))
    try:
        for session in chosen:
            observation, info = env.reset(options={"goal_index": session["session"]})
            assert observation == session["reset"]["obs_text"]
            for step in session["steps"]:
                observation, reward, terminated, _, info = env.step(step["action"])
                assert info["action_possible"], (session["id"], step["action"], info["reason"])
                assert observation == step["obs_text"], (session["id"], step["action"])
                assert (reward, terminated) == (step["reward"], step["done"])
                clicks = [f"click[{text}]" for text in step["available_actions"]["clickables"] if text != "search"]
                assert [action for action in info["available_actions"] if action[:6] == "click["] == clicks
    finally:
        env.close()


@pytest.fixture(scope="module")
def site_env():
    env = gymnasium.make("WebShopSite-v0", version="v1", max_steps=12, disable_env_checker=True)
    yield env
    env.close()


def test_it_goes_as_the_corrected_text_environment_goes(site_env):
    text_env = WebShopTextEnv(max_steps=12)
    oracle = OraclePolicy(text_env.shop)
    odd = ["search[lamp]", "click[nothing]", "nonsense", "search[a] click[b]", "search[ ]", "Click[ Next > ]",
           "search[é \U0001f642 \"quoted\" <b> & 'it']", "click[< prev]", "search[again]", "click[back to search]",
           "search[  two   blanks ]", "click[next >]"]  # fmt: skip
    for goal, script in ((0, None), (700, None), (3, odd)):
        expected, expected_info = text_env.reset(options={"goal_index": goal})
        observation, info = site_env.reset(options={"goal_index": goal})
        is_over, actions = False, iter(script or ())
        while not is_over:
            assert observation == expected
            assert info.keys() == expected_info.keys()
            for name in info.keys() - {"reason"}:
                assert info[name] == expected_info[name], name
            assert bool(info["reason"]) == bool(expected_info["reason"])
            action = next(actions) if script else oracle.act(expected, expected_info)
            expected, *outcome, expected_info = text_env.step(action)
            observation, *got, info = site_env.step(action)
            assert got == outcome, action
            is_over = outcome[1] or outcome[2]
        assert observation == expected
    assert site_env.step("search[lamp]")[4]["reason"] == "the episode is over"


def test_it_keeps_the_contract_of_text_environments():
    check_env(lambda: WebShopSiteEnv(version="v1"), seed=1, num_steps=8)


def test_wrong_settings_are_refused_before_a_browser_starts():
    with pytest.raises(ShopGymError, match="goal_index must be in 0 to"):
        env = WebShopSiteEnv(version="v1")
        try:
            env.reset(options={"goal_index": 10**6})
        finally:
            env.close()
    with pytest.raises(ShopGymError, match="version must be one of"):
        WebShopSiteEnv(version="v3")


def test_a_missing_chromium_is_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SHOPGYM_CHROMIUM", raising=False)
    with pytest.raises(ShopGymError, match="apt-get install chromium chromium-driver"):
        open_browser()
