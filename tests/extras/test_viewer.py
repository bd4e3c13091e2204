"""The viewer without a browser: it shows what was recorded, and nothing that lies elsewhere."""

# ruff: noqa: E402  (what needs the extra comes after asking for it)

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from extra import require_extra

require_extra("site", "flask", "waitress", "pyarrow")

import pyarrow
import pyarrow.parquet
from test_site import EVIL, assert_only_own_markup, hostile_catalogue

from env_manager import EnvConfig, EnvManager
from rollout import SamplingParams, StepBatch, TrajectoryCollector, load_batch, save_batch
from rollout.engines.scripted import ScriptedPolicy
from trainers.advantages import AdvantageConfig, with_advantages
from webshop_env import open_shop
from webshop_env.episodes import write_episodes
from webshop_env.errors import ShopGymError
from webshop_env.playback import Script, record
from webshop_env.site.app import SiteConfig, create_app
from webshop_env.site.curves import charts
from webshop_env.site.recorded import open_recorded, reply_parts

THOUGHT = "<think>it says rug, so I look for a rug</think>"


def play(num_goals: int = 3, group_size: int = 4, **settings) -> StepBatch:
    """Groups of four: two episodes buy after a search, one writes nonsense, one clicks what is not there."""
    manager = EnvManager("WebShop-v1", num_goals * group_size, EnvConfig(prompt="think", max_steps=5), settings or None)
    count = iter(range(10_000))

    def reply(prompt: str, admissible: tuple[str, ...] | None) -> str:
        number = next(count)
        actions = re.findall(r"'((?:click|search)\[.*?\])'", prompt.rpartition("one of the following:")[2])
        if "search[<your query>]" in actions:
            return f"{THOUGHT}<action>search[{'rug' if number % 4 < 3 else 'lamp'}]</action>"
        products = [a for a in actions if re.fullmatch(r"click\[b0[0-9a-z]{8}\]", a)]
        if number % 4 == 2:
            return "I would rather not say"
        if products:
            return f"{THOUGHT}<action>{products[0]}</action>"
        return "<think>done</think><action>click[buy now]</action>" if number % 4 != 3 else "<action>click[x]</action>"

    collector = TrajectoryCollector(manager)
    batch = collector.collect(
        range(num_goals), ScriptedPolicy(reply), SamplingParams(max_tokens=200), group_size=group_size, update=0, seed=0
    )
    return with_advantages(batch, AdvantageConfig())


def text_of(ids: np.ndarray) -> str:
    return bytes(i for i in ids.tolist() if i < 256).decode()


def save(batch: StepBatch, path: Path, **world) -> Path:
    """As training saves it, with the scripted policy's bytes as tokens."""
    extra = {"prompt": [text_of(ids) for ids in batch.prompt_ids], "reply": [text_of(ids) for ids in batch.reply_ids]}
    extra["episode_advantage"] = np.full(len(batch), 1.25, dtype=np.float32)
    settings = {"goals": "synthetic", "split_by": "goal", "preseed": 0, "max_steps": 5}
    made = {"env_id": "WebShop-v1", "settings": settings, "catalogue_hash": open_shop().catalogue_hash} | world
    return save_batch(batch, path, extra=extra, world=made)


@pytest.fixture(scope="module")
def batch() -> StepBatch:
    return play()


@pytest.fixture
def run_dir(tmp_path, batch) -> Path:
    """A directory like that of a training that is still going on, beside one that is not to be seen."""
    (tmp_path / "secret.jsonl").write_text('{"shopgym_episode": 1, "secret": "of others"}\n')
    (tmp_path / "secret").mkdir()
    save(batch, tmp_path / "secret" / "a.parquet")
    run = tmp_path / "outputs" / "tiny"
    save(batch, run / "rollouts" / "update_000003.parquet")
    (run / "validations").mkdir()
    (run / "validations" / "update_000003.txt").write_text(f"Place 1 of 3 {EVIL}")
    (run / "settings.yaml").write_text("env.seed: 0\ntrainer.total_updates: 30\n")
    lines = [
        {"update": 0, "validation/success_frac": 0.25, "validation/success_low_frac": 0.1,
         "validation/success_high_frac": 0.5, "validation/task_score": 0.5},
        *({"update": i, "rollout/success_frac": i / 10, "rollout/episode_length_steps": 4 + i} for i in range(1, 6)),
        {"update": 5, "validation/success_frac": 0.75, "validation/success_low_frac": 0.6,
         "validation/success_high_frac": 0.9, "validation/task_score": 0.8},
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"update": 6, "rol')
    return run.parent


@pytest.fixture
def client(run_dir):
    return create_app(SiteConfig(view=run_dir)).test_client()


ROLLOUT = "tiny/rollouts/update_000003.parquet"


def rows(page: str) -> list[int]:
    """Numbers of the listed episodes."""
    return [int(number) for number in re.findall(r'<th scope="row"><a href="[^"]*">(\d+)</a>', page)]


def test_everything_is_found_and_listed(client):
    page = client.get("/view/").text
    for place in ("tiny", ROLLOUT):
        assert f"<strong>{place}</strong>" in page
    assert "secret" not in page


def test_the_list_is_filtered(client, batch):
    list_ = lambda **query: rows(client.get("/view/episodes", query_string={"source": ROLLOUT} | query).text)  # noqa: E731
    episodes, firsts = np.unique(batch.episode_id, return_index=True)
    of = {name: dict(zip(episodes.tolist(), getattr(batch, name)[firsts].tolist(), strict=True))
          for name in ("won", "task_score", "episode_length", "group_id")}  # fmt: skip
    bad = set(batch.episode_id[~batch.format_valid | ~batch.action_possible].tolist())
    everything = episodes.tolist()
    assert list_() == everything
    assert list_(won="yes") == [e for e in everything if of["won"][e]]
    assert list_(won="no") == [e for e in everything if not of["won"][e]]
    assert list_(min_score="0.4") == [e for e in everything if of["task_score"][e] >= 0.4]
    assert list_(max_length="3") == [e for e in everything if of["episode_length"][e] <= 3]
    assert list_(invalid="no") == [e for e in everything if e not in bad]
    assert list_(invalid="yes") == [e for e in everything if e in bad]
    assert 0 < len(bad) < len(everything)
    assert list_(group="1") == [e for e in everything if of["group_id"][e] == 1]
    words = open_shop().goals[2].instruction_text.split()
    assert list_(goal=f"{words[-5].upper()} {words[3]} 2 ") and set(
        list_(goal=open_shop().goals[2].instruction_text)
    ) == {e for e in everything if of["group_id"][e] == 2}
    assert list_(goal="no such words") == []
    assert list_(order="longest")[0] == max(everything, key=lambda e: (of["episode_length"][e], -e))
    for odd in ("nan", "x", "1e999", "-1"):
        assert client.get("/view/episodes", query_string={"source": ROLLOUT, "min_score": odd}).status_code == 200


def test_a_long_list_has_pages_that_keep_the_filters_and_nothing_else(tmp_path):
    episode = record(Script(actions=("search[rug]",)))
    write_episodes(tmp_path / "e.jsonl", [episode] * 120)
    client = create_app(SiteConfig(view=tmp_path)).test_client()
    odd = "&_external=1&_scheme=javascript&_anchor=x&endpoint=y&values=z&page_size=1"
    page = client.get("/view/episodes?source=e.jsonl&won=no&goal=a&page=2" + odd).text
    assert rows(page) == list(range(51, 101))
    links = re.findall(r'<a class="button" href="([^"]*)">(\w+)</a>', page)
    expected = "/view/episodes?source=e.jsonl&amp;won=no&amp;goal=a&amp;page="
    assert links == [(f"{expected}1", "Previous"), (f"{expected}3", "Next")]
    assert rows(client.get(links[1][0].replace("&amp;", "&")).text) == list(range(101, 121))
    assert rows(client.get("/view/episodes?source=e.jsonl&page=99").text) == list(range(101, 121))


def test_an_episode_is_shown_step_by_step(client, batch):
    number = int(batch.episode_id[0])
    mine = np.flatnonzero(batch.episode_id == number)
    for at, row in enumerate(mine, start=1):
        page = client.get(f"/view/episode?source={ROLLOUT}&id={number}&step={at}").text
        assert_only_own_markup(page)
        reply = text_of(batch.reply_ids[row])
        assert "rug" in reply or at > 1
        marked = re.search(r'<p class="reply">(.*?)</p>', page, re.S)[1]
        shown = re.sub(r"<[^>]+>", "", marked).replace("&lt;", "<").replace("&gt;", ">").replace("&#39;", "'")
        assert shown == reply
        if "<think>" in reply:
            assert re.search(r'<span class="think">&lt;think&gt;.*?&lt;/think&gt;</span>', marked)
        assert f"<dd>{batch.reward[row]:.3f}</dd>" in page
        assert f"<dd>{batch.advantage[row]:+.3f}</dd>" in page and "<dd>+1.250</dd>" in page
        assert "You are a skilled assistant" in page
        assert "other pages than those of the record" not in page
        assert "As a person sees it" in page and 'class="still" disabled' in page
    last = client.get(f"/view/episode?source={ROLLOUT}&id={number}&step={len(mine) + 1}").text
    assert ("receipt as the agent reads it" in last) == bool(batch.terminated[mine[0]])
    assert client.get(f"/view/episode?source={ROLLOUT}&id=999").status_code == 404


def test_what_was_wrong_is_said(client, batch):
    row = int(np.flatnonzero(~batch.format_valid)[0])
    page = client.get(
        f"/view/episode?source={ROLLOUT}&id={batch.episode_id[row]}&step={batch.step_index[row] + 1}"
    ).text
    assert "Malformed: no &lt;action&gt;" in page


def test_two_of_a_group_share_anchors(client, batch):
    first = batch.episode_id[batch.group_id == 1]
    a, b = (int(e) for e in np.unique(first)[:2])
    pages = {e: {batch.anchor_texts[i] for i in batch.anchor_id[batch.episode_id == e]} for e in (a, b)}
    page = client.get(f"/view/compare?source={ROLLOUT}&a={a}&b={b}").text
    shared = pages[a] & pages[b]
    assert len(shared) >= 1 and f"{len(shared)} shared anchors" in page
    num_marked = sum(batch.anchor_texts[i] in shared for e in (a, b) for i in batch.anchor_id[batch.episode_id == e])
    assert page.count(", in both</span>") == num_marked
    assert "not of one group" not in page
    other = int(batch.episode_id[batch.group_id == 2][0])
    assert "not of one group" in client.get(f"/view/compare?source={ROLLOUT}&a={a}&b={other}").text


def test_a_running_training_is_drawn_as_it_grows(client, run_dir):
    page = client.get("/view/run?source=tiny").text
    assert "update 5 of 30" in page and "success 75.0 % [60.0, 90.0]" in page and "at first 25.0 %" in page
    assert "badge live" in page and "<polyline" in page
    assert ROLLOUT in page and "validations/update_000003.txt" in page
    with open(run_dir / "tiny" / "metrics.jsonl", "a") as file:
        file.write('lout/success_frac": 0.6}\n{"update": 7, "rollout/success_frac": 0.7}\n')
    again = client.get("/view/curve?source=tiny").text
    assert "update 7 of 30" in again and "rollouts 0.7" in again and "<html" not in again
    assert client.get("/view/run?source=tiny/rollouts").status_code == 404


def test_a_report_is_text(client):
    page = client.get("/view/text?source=tiny/validations/update_000003.txt").text
    assert "Place 1 of 3 &lt;script&gt;" in page
    assert_only_own_markup(page)
    assert client.get("/view/text?source=tiny/settings.yaml").status_code == 404


@pytest.mark.parametrize(
    "place",
    ["../secret.jsonl", "../secret/a.parquet", "tiny/../../secret.jsonl", "/etc/passwd", "//etc/passwd", "..", "",
     "tiny/\0", "link.jsonl", "linked/a.parquet", "x" * 3000, "tiny/settings.yaml", "%2e%2e/secret.jsonl",
     "..\\secret.jsonl", "loop"],
)  # fmt: skip
def test_nothing_of_elsewhere_is_read(client, run_dir, place):
    os.symlink(run_dir.parent / "secret.jsonl", run_dir / "link.jsonl")
    os.symlink(run_dir.parent / "secret", run_dir / "linked")
    os.symlink(run_dir / "loop", run_dir / "loop")
    for page in ("episodes", "episode", "compare", "run", "curve", "text"):
        answer = client.get(f"/view/{page}", query_string={"source": place, "id": 1, "a": 1, "b": 1})
        assert answer.status_code == 404, (page, place)
        assert "of others" not in answer.text and "root:" not in answer.text
    assert "source=link" not in client.get("/view/").text


def test_one_file_is_all_that_is_seen_where_one_is_named(run_dir):
    client = create_app(SiteConfig(view=run_dir / ROLLOUT)).test_client()
    (run_dir / "tiny" / "rollouts" / "update_000004.parquet").write_bytes((run_dir / ROLLOUT).read_bytes())
    assert client.get("/view/episodes?source=update_000003.parquet").status_code == 200
    assert client.get("/view/episodes?source=update_000004.parquet").status_code == 404
    assert "update_000004" not in client.get("/view/").text


def test_a_link_within_the_directory_is_followed(client, run_dir):
    os.symlink(run_dir / ROLLOUT, run_dir / "latest.parquet")
    assert client.get("/view/episodes?source=latest.parquet").status_code == 200


def test_a_catalogue_is_never_opened_because_a_file_names_it(tmp_path, batch):
    folder = hostile_catalogue(tmp_path / "elsewhere")
    other = open_shop(folder)
    world = {"catalogue_hash": other.catalogue_hash, "settings": {"data_dir": str(folder), "shop": "x", "search": "y"}}
    save(batch, tmp_path / "view" / "a.parquet", **world)
    page = create_app(SiteConfig(view=tmp_path / "view")).test_client().get("/view/episode?source=a.parquet&id=0").text
    assert f"the catalogue {other.catalogue_hash[:12]} is not here" in page
    known = create_app(SiteConfig(view=tmp_path / "view", data_dir=str(folder))).test_client()
    assert "other pages than those of the record" in known.get("/view/episode?source=a.parquet&id=0").text


def test_an_episode_of_no_shop_is_shown_without_a_page_for_people(tmp_path, batch):
    save(batch, tmp_path / "a.parquet", env_id="FrozenLake-v1")
    page = create_app(SiteConfig(view=tmp_path)).test_client().get("/view/episode?source=a.parquet&id=0").text
    assert "FrozenLake-v1 is no shop" in page and "As the agent sees it" in page


def test_damaged_and_foreign_files_are_said_to_be_so(tmp_path, batch):
    whole = save(batch, tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    most = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")  # all before the footer
    (tmp_path / "flipped.parquet").write_bytes(whole[:4] + bytes(255 - b for b in whole[4:most]) + whole[most:])
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "other.parquet")
    (tmp_path / "bad.jsonl").write_text('{"shopgym_episode": 1, "steps": 3}\n')
    (tmp_path / "odd.jsonl").write_text('{"shopgym_episode": 77}\n')
    client = create_app(SiteConfig(view=tmp_path)).test_client()
    assert client.get("/view/episodes?source=whole.parquet").status_code == 200
    for name, message in (
        ("cut.parquet", "no whole Parquet file"),
        ("flipped.parquet", "This Parquet file is damaged"),
        ("other.parquet", "it lacks the column"),
        ("bad.jsonl", "steps must be a list"),
        ("odd.jsonl", "format 77"),
    ):
        answer = client.get(f"/view/episodes?source={name}")
        assert answer.status_code == 404 and message in answer.text, name
        assert str(tmp_path) not in answer.text, "no place of the machine is told"


def test_other_parquet_files_are_not_listed_and_no_other_file_is_taken_by_name(tmp_path, batch):
    save(batch, tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"goal_id": ["a"], "won": [True]}), tmp_path / "results.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-9])
    (tmp_path / "empty.parquet").touch()
    page = create_app(SiteConfig(view=tmp_path)).test_client().get("/view/").text
    assert "rows.parquet" in page and "results.parquet" not in page
    assert "cut.parquet" in page and "empty.parquet" in page, "what is damaged is listed, and says so when it is opened"
    (tmp_path / "notes.md").touch()
    for name in ("results.parquet", "notes.md"):
        with pytest.raises(ShopGymError, match=f"{name}: is none of the files that are shown here"):
            create_app(SiteConfig(view=tmp_path / name))


def test_columns_of_other_kinds_are_said_to_be_so(tmp_path, batch):
    table = pyarrow.parquet.read_table(save(batch, tmp_path / "whole.parquet"))
    client = create_app(SiteConfig(view=tmp_path)).test_client()
    for name in ("episode_id", "won", "task_score", "anchor", "step_index"):
        place = table.schema.get_field_index(name)
        for number, column in enumerate(([[1]] * len(table), [{"a": 1}] * len(table), [None] * len(table))):
            changed = table.set_column(place, name, pyarrow.array(column))
            pyarrow.parquet.write_table(changed, tmp_path / f"{name}{number}.parquet")
            answer = client.get(f"/view/episodes?source={name}{number}.parquet")
            assert answer.status_code == 404 and "no rollout" in answer.text, (name, number)


def test_a_file_of_anything_breaks_no_page(tmp_path):
    """Values of every kind in every place of an episode: shown or refused, never an error of the server."""
    rng = random.Random(0)
    script = Script(actions=("search[rug]", "click[next >]"), reset_options={"goal_index": 3})
    whole = json.loads(record(script).to_line())
    client = create_app(SiteConfig(view=tmp_path)).test_client()
    (tmp_path / os.fsdecode(b"name\xff.jsonl")).write_text(json.dumps(whole))
    assert client.get("/view/").status_code == 200
    odd: list = [None, True, -1, 0, 10**400, -(10**20), 1e308, float("nan"), float("inf")]
    odd += ["", EVIL, "\0", "\ud83d", [], [1], {}, {"goal_index": 10**30}, {"goal_id": []}, {"session": {}}]
    odd += [{"goals": []}, {"num_products": "x"}, {"variant": {}}, {"split_by": []}, {"preseed": 10**30}]
    odd += [{"max_steps": -1}, {"page_size": 0}, {"search": "pyserini"}]
    statuses = set()
    for number in range(150):
        episode = json.loads(json.dumps(whole))
        place = episode if rng.random() < 0.6 else rng.choice(episode["steps"])
        name = rng.choice(list(place))
        place[name] = rng.choice(odd)
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(episode) + "\n")
        for page in ("episodes?", "episode?id=1&step=2&", "episode?id=1&step=99&", "compare?a=1&b=1&"):
            answer = client.get(f"/view/{page}source={path.name}")
            assert answer.status_code in (200, 404), (name, place[name], answer.text[-300:])
            statuses.add(answer.status_code)
            if answer.status_code == 200:
                assert_only_own_markup(answer.text)
    assert statuses == {200, 404}


def test_a_rollout_without_extras_is_shown_with_what_it_has(tmp_path, batch):
    plain = replace(batch, step_return=None, advantage=None, action=None, problem=None, reason=None, terminated=None,
                    prompt_is_cut=None, reply_is_cut=None)  # fmt: skip
    save_batch(plain, tmp_path / "a.parquet")
    client = create_app(SiteConfig(view=tmp_path)).test_client()
    assert len(rows(client.get("/view/episodes?source=a.parquet").text)) == 12
    page = client.get("/view/episode?source=a.parquet&id=0").text
    assert "advantage" not in page and "the environment is no shop" in page


def test_what_was_added_for_readers_does_not_come_back(tmp_path, batch):
    loaded = load_batch(save(batch, tmp_path / "a.parquet"))
    assert (loaded.action == batch.action).all() and loaded.anchor_texts == batch.anchor_texts
    with pytest.raises(ValueError, match="extra column 'reward'"):
        save_batch(batch, tmp_path / "b.parquet", extra={"reward": [1.0] * len(batch)})


def test_hostile_replies_prompts_and_pages_are_text(tmp_path, batch):
    evil = batch.select(np.flatnonzero(batch.episode_id < 2))
    evil.action[:] = EVIL
    evil.anchor_texts = tuple(f"{EVIL} [SEP] {text}" for text in evil.anchor_texts)
    evil = replace(evil, reason=evil.action, problem=evil.action)
    extra = {name: [f"<think>{EVIL}</think><action>{EVIL}"] * len(evil) for name in ("prompt", "reply")}
    save_batch(evil, tmp_path / "a.parquet", extra=extra, world={"env_id": EVIL, "catalogue_hash": EVIL})
    client = create_app(SiteConfig(view=tmp_path)).test_client()
    for page in ("episodes?", "episode?id=0&", "compare?a=0&b=1&", "episodes?goal=%3Cscript%3E&"):
        answer = client.get(f"/view/{page}source=a.parquet")
        assert answer.status_code == 200
        assert_only_own_markup(answer.text)
        assert "<script>d" not in answer.text


def test_playback_and_people_are_shown_like_rollouts(tmp_path):
    script = Script(actions=("search[rug]", "click[nothing]", "click[next >]"), reset_options={"goal_index": 3})
    write_episodes(tmp_path / "e.jsonl", [record(script), record(replace(script, actions=()))])
    client = create_app(SiteConfig(view=tmp_path)).test_client()
    assert rows(client.get("/view/episodes?source=e.jsonl").text) == [1, 2]
    page = client.get("/view/episode?source=e.jsonl&id=1&step=2").text
    assert "this page does not offer click[nothing]" in page and "played by script" in page
    end = client.get("/view/episode?source=e.jsonl&id=1&step=9").text
    assert 'aria-current="step">end</a>' in end and "Page 2 (Total results" in end
    assert client.get("/view/episode?source=e.jsonl&id=2").status_code == 200
    assert client.get("/view/episode?source=e.jsonl&id=3").status_code == 404


def test_a_file_that_changes_is_read_anew(tmp_path):
    path = tmp_path / "e.jsonl"
    script = Script(actions=("search[rug]",))
    write_episodes(path, [record(script)])
    assert len(open_recorded(path).summaries()) == 1
    path.write_text(path.read_text() * 3)
    assert len(open_recorded(path).summaries()) == 3


@pytest.mark.parametrize(
    ("reply", "parts"),
    [
        ("", []),
        ("hm", [("", "hm")]),
        (
            "<think>a</think> <action>b</action>!",
            [("think", "<think>a</think>"), ("", " "), ("action", "<action>b</action>"), ("", "!")],
        ),
        ("<THINK>a<action>b", [("think", "<THINK>a<action>b")]),
        ("İ<action>x</action>", [("", "İ"), ("action", "<action>x</action>")]),
        ("</think><action>", [("", "</think>"), ("action", "<action>")]),
    ],
)
def test_a_reply_is_cut_into_thinking_and_action(reply, parts):
    assert reply_parts(reply) == parts
    assert "".join(text for _, text in parts) == reply


def test_charts_have_round_ticks_and_bounded_lines():
    lines = [{"update": u, "rollout/success_frac": u / 40, "actor/grad_norm": 3.0} for u in range(1, 41)]
    main, grad = charts(lines)
    assert [label for _, label in main.y_ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert [label for _, label in main.x_ticks] == ["10", "20", "30", "40"]
    assert len(main.series) == 1 and len(main.series[0].path.split()) == 40
    assert grad.title == "Gradient norm" and len(grad.y_ticks) > 1, "a constant has a range too"
    assert charts([]) == [] and charts([{"update": 0}])[0].series == ()
