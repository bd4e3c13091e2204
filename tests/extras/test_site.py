"""The site without a browser: what it serves, what it refuses, what it keeps."""

# ruff: noqa: E402  (what needs the extra comes after asking for it)

from __future__ import annotations

import http.client
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from extra import require_extra

require_extra("site", "flask", "waitress", "pyarrow")

from site_visitor import Visitor, write_catalogue

from webshop_env import WebShopTextEnv, open_shop
from webshop_env.episodes import read_episodes
from webshop_env.playback import verify
from webshop_env.policies import OraclePolicy
from webshop_env.site.__main__ import main
from webshop_env.site.app import MAX_BODY_BYTES, SiteConfig, create_app
from webshop_env.site.server import SiteServer
from webshop_env.site.sessions import SessionStore, ShopSession, StoreLimits

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "<script>document.title='broken'</script>"
EVIL = f"{SCRIPT}\"'><img src=x onerror=alert(1)>{{{{7*7}}}}%s{{0}}../../etc/passwd"


@pytest.fixture(scope="module")
def app():
    return create_app(SiteConfig())


def hostile_catalogue(folder: Path) -> Path:
    """Script in every field that a catalogue has."""
    rows = [
        {
            "asin": f"B00000000{i}",
            "name": f"{EVIL} mug {i}",
            "full_description": f"mug {EVIL}",
            "small_description": [EVIL, f"mug {EVIL}"],
            "pricing": "$12.99",
            "images": [f"https://example.org/{EVIL}"],
            "category": EVIL,
            "query": EVIL,
            "product_category": f"{EVIL} › {EVIL} › c",
            "customization_options": {EVIL: [{"value": EVIL}, {"value": f"{EVIL} 2"}], "colour": [{"value": "red"}]},
        }
        for i in range(1, 4)
    ]
    wishes = {
        row["asin"]: {"attributes": [EVIL], "instruction": f"{EVIL} mug", "instruction_attributes": [EVIL]}
        for row in rows
    }
    return write_catalogue(folder, rows, wishes)


class _Tags(HTMLParser):
    """Collects what a browser would take for markup."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def assert_only_own_markup(page: str) -> None:
    """No script but the site's own files, no picture, nothing inline, no address of elsewhere."""
    parser = _Tags()
    parser.feed(page)
    assert parser.tags
    for tag, attributes in parser.tags:
        assert tag != "img" and not any(name.startswith("on") or name == "style" for name in attributes), tag
        if tag == "script":
            assert re.fullmatch(r"/static/\w+\.js", attributes["src"] or "")
        for name in ("href", "src", "action", "formaction"):
            assert (attributes.get(name) or "/").startswith(("/", "#")), attributes


# The shop


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_a_visitor_sees_what_the_text_environment_shows(version):
    app = create_app(SiteConfig(version=version))
    env = WebShopTextEnv(version=version, max_steps=None)
    oracle = OraclePolicy(env.shop)
    for goal in (0, 3, 700):
        visitor = Visitor(app, goal)
        observation, info = env.reset(options={"goal_index": goal})
        while not env.session.is_done:
            assert visitor.text == observation
            visitor.act(action := oracle.act(observation, info))
            observation, _, _, _, info = env.step(action)
        assert visitor.text == observation
        assert visitor.data["info"]["task_score"] == env.session.score
        assert visitor.data["info"]["reward_breakdown"] == info["reward_breakdown"]


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_odd_products_have_a_control_for_every_action(version, tmp_path):
    sys.path.insert(0, str(ROOT / "tests" / "webshop_env"))
    from odd_shop import write_odd_catalogue

    folder = write_odd_catalogue(tmp_path)
    app = create_app(SiteConfig(version=version, data_dir=str(folder), show_attrs=True, max_steps=None))
    env = WebShopTextEnv(version=version, data_dir=folder, show_attrs=True, max_steps=None)
    rng = random.Random(5)
    seen = set()
    for _ in range(12):
        visitor = Visitor(app, 0)
        observation, _ = env.reset(options={"goal_index": 0})
        for _ in range(12):
            assert visitor.text == observation
            clicks = [text for text in env.page.body.clicks if text != "search"]
            assert [text for text in visitor.clicks if text != "search"] == sorted(
                clicks, key=list(visitor.clicks).index
            )
            assert len(set(clicks)) == len(clicks) == len([text for text in visitor.clicks if text != "search"])
            if env.page.body.has_search_bar:
                action = "search[mug]"
            else:
                action = f"click[{rng.choice(clicks)}]"
            seen.add(env.page.kind)
            visitor.act(action)
            observation, _, terminated, _, _ = env.step(action)
            if terminated:
                break
    assert {"start", "results", "item", "sub_page"} <= seen


def test_every_control_names_one_of_the_pages_actions(app):
    visitor = Visitor(app, 3)
    visitor.act("search[rug]")
    shown = set(visitor.clicks)
    env = WebShopTextEnv()
    env.reset(options={"goal_index": 3})
    env.step("search[rug]")
    assert shown == set(env.page.body.clicks)
    assert all(f'value="{number}"' in visitor.page for number in visitor.clicks.values())


def test_the_score_page_says_what_counted_and_why(app):
    visitor = Visitor(app, 3)
    for action in ("search[pet friendly rug floral print]", "click[b0pa24va31]", "click[blush]", "click[4 x 6 feet]"):
        visitor.act(action)
    page = visitor.act("click[buy now]")
    assert visitor.data["info"]["task_score"] == 0.8
    rows = re.findall(r'<tr class="(met|unmet)">.*?<th scope="row">(.*?)<span.*?<td>(.*?)</td>\s*</tr>', page, re.S)
    assert ("unmet", "size: 3 x 5 feet", "you chose 4 x 6 feet") in rows
    assert ("met", "color: blush", "you chose color: blush") in rows
    assert ("met", "price lower than $80.00", "it costs $40.99") in rows
    assert sum(mark == "met" for mark, *_ in rows) == 5 and "4 of 5" in page and "0.800" in page


def test_what_does_nothing_says_why(app):
    visitor = Visitor(app, 3)
    page = visitor.send(query="")
    assert "Nothing happened: nothing between the brackets" in page
    assert "Nothing happened" not in visitor.look(), "told once"
    page = visitor.send(query="a] click[buy now")
    assert "Nothing happened: more than one action" in page


def test_a_page_from_before_does_nothing(app):
    visitor = Visitor(app, 3)
    old = str(visitor.data["step"])
    visitor.act("search[rug]")
    for _ in range(2):
        answer = visitor.client.post(visitor.address, data={"step": old, "query": "lamp"})
        assert answer.status_code == 303
    assert "That page was from before" in visitor.look()
    assert visitor.data["step"] == 1 and "lamp" not in visitor.page


def test_an_episode_ends_after_its_last_step():
    visitor = Visitor(create_app(SiteConfig(max_steps=2)), 3)
    visitor.act("search[rug]")
    page = visitor.act("click[next >]")
    assert "Out of steps" in page and "fieldset" in page
    visitor.send(click="0")
    assert visitor.data["step"] == 2


def test_goals_are_named_drawn_or_refused(app):
    drawn = {Visitor(app).data["info"]["goal_index"] for _ in range(12)}
    assert len(drawn) > 8
    last = len(open_shop().goals) - 1
    assert Visitor(app, last).data["info"]["goal_index"] == last
    for goal in (last + 1, "-1", "1e3", "٣", "x" * 5000, SCRIPT):
        answer = app.test_client().post("/shop", data={"goal": str(goal)})
        assert answer.status_code == 400 and 'role="alert"' in answer.text and "<script>d" not in answer.text
    test_split = create_app(SiteConfig(split="test"))
    indexes = set(open_shop().split("test").tolist())
    assert all(Visitor(test_split).data["info"]["goal_index"] in indexes for _ in range(5))


# Sessions


def test_sessions_are_unguessable_and_isolated(app):
    first, second = Visitor(app, 3), Visitor(app, 3)
    first_id, second_id = (visitor.address.rsplit("/", 1)[1] for visitor in (first, second))
    assert first_id != second_id and min(len(first_id), len(second_id)) >= 32
    first.act("search[rug]")
    second.look()
    assert (first.data["step"], second.data["step"]) == (1, 0)
    assert app.test_client().get(f"/shop/{first_id[:-1]}").status_code == 404
    assert app.test_client().post(f"/shop/{first_id[:-1]}", data={"step": "0", "query": "a"}).status_code == 404


def test_ten_thousand_abandoned_sessions_make_room_and_nothing_more():
    app = create_app(SiteConfig(limits=StoreLimits(max_sessions=500)))
    store: SessionStore = app.extensions["store"]
    faithful, forgotten = Visitor(app, 3), Visitor(app, 3)
    faithful.act("search[rug]")
    for i in range(9_900):
        store.begin(lambda i=i: {"goal_index": i % 50})
        if i % 100 == 0:
            faithful.look()
    for _ in range(100):
        Visitor(app)
    assert len(store) == 500
    assert faithful.act("click[next >]") and faithful.data["step"] == 2
    assert forgotten.client.get(forgotten.address).status_code == 404


def test_people_are_recorded_as_episodes_that_verify(tmp_path):
    app = create_app(SiteConfig(record=tmp_path / "people", limits=StoreLimits(max_sessions=3)))
    store: SessionStore = app.extensions["store"]
    buyer = Visitor(app, 3)
    for action in ("search[pet friendly rug floral print]", "click[b0pa24va31]", "click[blush]", "click[buy now]"):
        buyer.act(action)
    path = next((tmp_path / "people").iterdir())
    bought = list(read_episodes(path))
    assert [len(episode.steps) for episode in bought] == [4], "kept as soon as it has ended"
    looker = Visitor(app, 5)
    looker.act("search[lamp]")
    Visitor(app, 6)  # does nothing at all
    for goal in (7, 8, 9):
        Visitor(app, goal)
    assert len(list(read_episodes(path))) == 2, "kept when it had to make room"
    late = Visitor(app, 10)
    late.act("search[shoes]")
    store.close()
    episodes = list(read_episodes(path))
    assert [episode.goal_index for episode in episodes] == [3, 5, 10]
    assert {episode.made_by for episode in episodes} == {"human"}
    assert [verify(episode) for episode in episodes] == [None] * 3
    assert episodes[0].task_score == 0.8 and episodes[0].steps[-1].terminated


def test_a_record_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["--record", str(tmp_path / "file"), "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: --record: ")


def test_fifty_visitors_at_once_lose_nothing(tmp_path):
    """Over the real server: every step of every visitor is in the record, in order."""
    app = create_app(SiteConfig(record=tmp_path))
    num_visitors, num_steps = 50, 6
    queries = [[f"rug {visitor} {step}" for step in range(num_steps)] for visitor in range(num_visitors)]
    problems = []

    def shop(visitor: int) -> None:
        try:
            connection = http.client.HTTPConnection(host, timeout=120)

            def send(method: str, path: str, **form: str) -> tuple[http.client.HTTPResponse, str]:
                headers = {"Content-Type": "application/x-www-form-urlencoded"}
                connection.request(method, path, urlencode(form) if form else None, headers)
                answer = connection.getresponse()
                return answer, answer.read().decode()

            address = send("POST", "/shop", goal=str(visitor))[0].headers["Location"]
            for step, query in enumerate(queries[visitor]):
                assert send("POST", address, step=str(2 * step), query=query)[0].status == 303
                assert send("POST", address, step=str(2 * step + 1), click="0")[0].status == 303
            assert f"&#34;step&#34;: {2 * num_steps}," in send("GET", address)[1]
            connection.close()
        except Exception as error:
            problems.append(f"{visitor}: {error!r}")

    with SiteServer(app) as server:
        host = urlsplit(server.url).netloc
        threads = [threading.Thread(target=shop, args=(visitor,)) for visitor in range(num_visitors)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=200)
    assert not problems
    episodes = {episode.goal_index: episode for episode in read_episodes(next(tmp_path.iterdir()))}
    assert len(episodes) == num_visitors
    for visitor in range(num_visitors):
        actions = [step.action for step in episodes[visitor].steps]
        assert actions == [a for query in queries[visitor] for a in (f"search[{query}]", "click[back to search]")]


# Limits, headers, hostile data


def test_every_answer_has_the_security_headers(app):
    client = app.test_client()
    visitor = Visitor(app, 3)
    for path in ("/", visitor.address, "/shop/nobody", "/nowhere", "/static/site.css", "/robots.txt"):
        answer = client.get(path)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        if "static" not in path:
            assert answer.headers["Cache-Control"] == "no-store"
            assert "Set-Cookie" not in answer.headers
        if "<html" in answer.text:
            assert_only_own_markup(answer.text)


def test_what_is_too_much_is_refused(app):
    visitor = Visitor(app, 3)
    client = visitor.client
    too_long = {"step": "0", "query": "x" * (MAX_BODY_BYTES + 1)}
    assert client.post(visitor.address, data=too_long).status_code == 413
    assert client.get("/?" + "a" * 5000).status_code == 414
    assert client.post(visitor.address, data={"step": "0", "click": "99"}).status_code == 400
    for number in ("-1", "0x1", "1" * 4000, "²"):
        assert client.post(visitor.address, data={"step": "0", "click": number}).status_code == 400
    assert client.put(visitor.address).status_code == 405
    foreign = client.post("/shop", data={"goal": "3"}, headers={"Sec-Fetch-Site": "cross-site"})
    assert foreign.status_code == 403
    page = visitor.send(query="x" * 25_000)
    assert "characters, at most 20000 are read" in page


def test_only_its_own_names_are_answered_to():
    app = create_app(SiteConfig(trusted_hosts=("localhost", "127.0.0.1")))
    assert app.test_client().get("/", headers={"Host": "localhost:8000"}).status_code == 200
    assert app.test_client().get("/", headers={"Host": "evil.example"}).status_code == 400


def test_the_server_itself_bounds_bodies_and_hides_its_name(app):
    server = SiteServer(create_app(SiteConfig()))
    with server:
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as client:
            client.sendall(
                b"POST /shop HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"
                b"Content-Length: 999999999\r\n\r\ngoal=3"
            )
            answer = client.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413") and b"waitress" not in answer.split(b"\r\n\r\n")[0].lower()


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_a_hostile_catalogue_is_text(version, tmp_path):
    folder = hostile_catalogue(tmp_path)
    visitor = Visitor(create_app(SiteConfig(version=version, data_dir=str(folder), show_attrs=True)), 0)
    pages = [visitor.page, visitor.act(f"search[{EVIL} mug]")]
    pages.append(visitor.act("click[b000000001]"))
    option = next(text for text in visitor.clicks if "script" in text)
    pages.append(visitor.act(f"click[{option}]"))
    assert EVIL.lower()[:30] in visitor.data["info"]["selected_options"][EVIL.lower()].lower()
    for tab in ("description", "features", "reviews", "attributes"):
        pages += [visitor.act(f"click[{tab}]"), visitor.act("click[< prev]")]
    pages.append(visitor.act("click[buy now]"))
    for page in pages:
        assert_only_own_markup(page)
        assert "{{7*7}}" in page and "%s{0}" in page, "text as it is, no template, no format"


def test_half_a_character_is_shown_as_what_it_is(tmp_path):
    row = {
        "asin": "B000000001",
        "name": "mug \ud83d",
        "full_description": "\udc00 mug",
        "small_description": ["\ud83d"],
    }
    row |= {"pricing": "$1.00", "images": ["x"], "category": "c", "query": "q", "product_category": "a › b"}
    row |= {"customization_options": {"size": [{"value": "l\ud83d"}]}}
    wish = {"attributes": ["a"], "instruction": "a mug \ud83d", "instruction_attributes": ["a"]}
    folder = write_catalogue(tmp_path, [row], {"B000000001": wish})
    visitor = Visitor(create_app(SiteConfig(data_dir=str(folder), record=tmp_path / "r")), 0)
    for action in ("search[mug]", "click[b000000001]", "click[description]", "click[< prev]", "click[features]"):
        assert "\ufffd" in visitor.act(action)
    visitor.act("click[< prev]")
    visitor.send(click=next(n for text, n in visitor.clicks.items() if "\ufffd" in text))
    assert visitor.act("click[buy now]")
    assert visitor.data["info"]["task_score"] == 1.0
    episode = next(read_episodes(next((tmp_path / "r").iterdir())))
    assert "\ud83d" in episode.steps[0].observation, "the record has it as it is"


def test_a_hostile_query_is_text(app):
    visitor = Visitor(app, 3)
    page = visitor.send(query=EVIL)
    assert_only_own_markup(page)
    assert "&lt;script&gt;" in page


# The command


def test_the_command_refuses_with_one_line(tmp_path, capsys):
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    for arguments, message in (
        ([str(tmp_path / "no")], "does not exist"),
        (["--port", "70000"], "--port must be in 0 to 65535"),
        (["--port", port], "cannot listen on 127.0.0.1"),
        (["--data", str(tmp_path / "no")], str(tmp_path / "no")),
        (["--max-steps", "0", "--port", "0"], "--max-steps must be a whole number of at least 1"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1
    taken.close()


def test_the_command_serves_and_keeps_what_was_done_when_it_is_ended(tmp_path):
    command = [sys.executable, "-m", "webshop_env.site", "--port", "0", "--record", str(tmp_path / "r"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as serving:
        address = urlsplit(serving.stdout.readline().split()[1])
        assert address.hostname == "127.0.0.1"
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/shop", "goal=3", headers)
        answer = connection.getresponse()
        answer.read()
        connection.request("POST", answer.headers["Location"], "step=0&query=rug", headers)
        assert connection.getresponse().status == 303
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(timeout=60) == 0
    episodes = list(read_episodes(next((tmp_path / "r").iterdir())))
    assert [step.action for step in episodes[0].steps] == ["search[rug]"]
    assert verify(episodes[0]) is None


def test_the_command_can_be_ended_as_soon_as_it_has_told_its_address(tmp_path, monkeypatch):
    told = []

    def tell(line: str, **_: object) -> None:
        told.append(line)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("webshop_env.site.__main__.print", tell, raising=False)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert main(["--port", "0", "--record", str(tmp_path / "r")]) == 0
    assert len(told) == 1 and told[0].startswith("shop    http://127.0.0.1:")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert list(tmp_path.rglob("*.jsonl")) == [], "a record of nobody"


def test_a_session_remembers_its_end_only_once(tmp_path):
    app = create_app(SiteConfig(record=tmp_path, max_steps=1))
    store: SessionStore = app.extensions["store"]
    visitor = Visitor(app, 3)
    visitor.act("search[rug]")
    session = store.find(visitor.address.rsplit("/", 1)[1])
    assert isinstance(session, ShopSession) and session.is_over and session.is_kept
    store.close()
    assert len(list(read_episodes(next(tmp_path.iterdir())))) == 1
