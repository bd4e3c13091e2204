"""Episodes to imitate: which policies can show them, which of them are kept, and what a rollout's file must have."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout.collector import CollectorConfig, TrajectoryCollector
from rollout.engines.hf import HFEngine
from rollout.storage import load_batch, save_batch
from rollout.types import SamplingParams, ragged
from trainers import sft
from trainers.demonstrations import demonstrate, encode, make_source, recorded
from trainers.models import load_model, load_tokenizer, make_small_policy, save_policy, train_tokenizer
from trainers.settings import SettingsError, resolve
from trainers.sft import SftSettings
from trainers.worlds import make_grammar, make_manager, open_world
from webshop_env.errors import ShopGymError
from webshop_env.policies import RulePolicy

TINY = ["goals=20", "epochs=2", "batch_rows=16", "eval_goals=0", "device=cpu", "lr=0.01"]
NEW = ["hidden=32", "layers=1", "heads=2", "vocab_size=800"]

MODULE = """
class Searcher:
    def __init__(self, world):
        self.num_goals = len(world.goals)

    def act(self, observation, info):
        listed = [a for a in info["available_actions"] if a.startswith("click[b")]
        return "click[buy now]" if "click[buy now]" in info["available_actions"] else (listed or ["search[gift]"])[0]

class Talker(Searcher):
    def act(self, observation, info):
        self.thought = "on the <start> page" if info["page_kind"] == "start" else None
        return super().act(observation, info)

def right(world):
    class Right:
        def act(self, observation, info):
            return "right"
    return Right()

nothing = 3
"""


@pytest.fixture(scope="module")
def settings():
    return resolve(["out=unused"], SftSettings)[0]


@pytest.fixture(scope="module")
def shop(settings):
    return open_world(settings.env)


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_shoppers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_shoppers", None)


def test_episodes_are_kept_by_what_became_of_them(settings, shop):
    manager = make_manager(settings.env, settings.data, 8, count_tokens=None)
    shown = demonstrate(manager, RulePolicy(), shop.split("train")[:20])
    assert 0 < shown.num_won < shown.num_episodes == 20, "a rule wins some and loses others"
    won, good = shown.keep(won_only=True), shown.keep(min_score=0.7)
    assert won.num_episodes == won.num_won == shown.num_won
    assert shown.num_won <= good.num_episodes < 20 and min(good.score) >= 0.7
    assert len(won.actions) == len(won.prompts) == len(won.admissible) == sum(shown.won[e] for e in shown.episode)
    assert sorted(set(won.episode)) == list(range(won.num_episodes))
    assert shown.keep() == shown


@pytest.mark.parametrize("name", ["guided", "reading"])
def test_who_remembers_what_it_saw_plays_many_sessions_at_once_as_one_by_one(settings, shop, name):
    goals = np.repeat(shop.split("train")[:12], 2)  # the same goal in two sessions
    source = make_source(name, shop, settings.env)
    shown = [
        demonstrate(make_manager(settings.env, settings.data, num_envs, count_tokens=None), source, goals, noise=0.3)
        for num_envs in (24, 1)
    ]
    actions = [
        [[action for action, e in zip(one.actions, one.episode, strict=True) if e == episode] for episode in range(24)]
        for one in shown
    ]
    assert actions[0] == actions[1] and shown[0].won == shown[1].won
    assert any("click[< prev]" in episode for episode in actions[0])


def test_who_looks_buys_within_the_steps_of_an_episode(reference_dir):
    words = ["out=x", f"env.webshop.data_dir={reference_dir / 'webshop-1k'}", "env.max_steps=8"]
    env, data = (getattr(resolve(words, SftSettings)[0], name) for name in ("env", "data"))
    shop = open_world(env)
    for name in ("guided", "looking", "reading"):
        manager = make_manager(env, data, 16, count_tokens=None)
        shown = demonstrate(manager, make_source(name, shop, env), shop.split("train")[:60])
        last = {episode: action for episode, action in zip(shown.episode, shown.actions, strict=True)}
        assert set(last.values()) == {"click[buy now]"}, name


@pytest.mark.usefixtures("own_module")
def test_policies_of_ones_own_show_it_by_name(settings, shop):
    assert isinstance(make_source("rule", shop, settings.env), RulePolicy)
    assert make_source("my_shoppers:Searcher", shop, settings.env).num_goals == len(shop.goals)
    for name, message in (
        ("nobody", "no policy is called 'nobody'; there are oracle, guided, rule, looking, reading, module:name"),
        ("my_shoppers:nothing", "must be called with the world and return an object with act"),
        ("my_shoppers:absent", "must be called with the world"),
        ("no_such_module:x", "PYTHONPATH"),
    ):
        with pytest.raises(ShopGymError, match=message):
            make_source(name, shop, settings.env)
    lake = resolve(["out=x", "env.env_name=FrozenLake-v1"], SftSettings)[0].env
    with pytest.raises(SettingsError, match="plays shops, and env"):
        make_source("oracle", open_world(lake), lake)


def test_reasons_are_imitated_and_shown_again_where_the_template_thinks(reference_dir, start):
    words = [f"env.webshop.data_dir={reference_dir / 'webshop-1k'}", "env.history_length=15", "out=x"]
    words += ["env.prompt=compact_thinking", "data.max_response_length=160"]  # a tokenizer of 800 tokens
    env, data = (getattr(resolve(words, SftSettings)[0], name) for name in ("env", "data"))
    shop = open_world(env)
    plain = [int(goal) for goal in shop.split("train") if not shop.goals[goal].options][:12]
    shown = demonstrate(make_manager(env, data, 12, count_tokens=None), make_source("reading", shop, env), plain)
    verdicts = [row for row, thought in enumerate(shown.thoughts) if ": yes" in thought]
    assert {shown.prompts[row].partition("page: ")[2][:4] for row in verdicts} == {"item", "sub "}
    assert not any(
        thought for thought, prompt in zip(shown.thoughts, shown.prompts, strict=True) if "page: res" in prompt
    )
    num_shown_again = 0
    for row in verdicts:
        later = [r for r in range(row + 1, len(shown.prompts)) if shown.episode[r] == shown.episode[row]]
        num_shown_again += len(later)
        assert all(f"{shown.actions[row]} ({shown.thoughts[row]})" in shown.prompts[r] for r in later)
    assert num_shown_again
    tokenizer = load_tokenizer(str(start))
    grammar = make_grammar(tokenizer, env, data)
    lesson = encode(shown, HFEngine(load_model(str(start)), tokenizer, grammar=grammar), grammar)
    assert lesson.num_left_out == 0
    assert [tokenizer.decode(reply, skip_special_tokens=True) for reply in lesson.rows.replies] == [
        f"<think>{thought}</think><action>{action}</action>"
        for thought, action in zip(shown.thoughts, shown.actions, strict=True)
    ]
    assert shown.keep() == shown


@pytest.mark.usefixtures("own_module")
def test_reasons_cannot_end_their_own_tags(settings, shop):
    manager = make_manager(settings.env, settings.data, 4, count_tokens=None)
    shown = demonstrate(manager, make_source("my_shoppers:Talker", shop, settings.env), shop.split("train")[:4])
    assert shown.thoughts[0] == "on the  start  page" and "None" not in shown.thoughts
    assert len(shown.thoughts) == len(shown.actions)


@pytest.mark.usefixtures("own_module")
def test_an_environment_that_is_no_shop_is_imitated_too(tmp_path, capsys):
    lake = ["env.env_name=FrozenLake-v1", "env.prompt=no_think", "env.max_steps=4", "data.max_prompt_length=900"]
    sft.main([f"out={tmp_path / 'p'}", "source=my_shoppers:right", *TINY, *NEW, *lake])
    assert "20 episodes" in capsys.readouterr().out
    made = json.loads((tmp_path / "p" / "provenance.json").read_text())
    assert made["environment"] == "FrozenLake-v1" and made["settings"]["source"] == "my_shoppers:right"


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A policy that has seen the shop."""
    directory = tmp_path_factory.mktemp("start") / "p"
    sft.main([f"out={directory}", *TINY, *NEW])
    return directory


@pytest.fixture(scope="module")
def episodes(tmp_path_factory, settings, shop, start) -> Path:
    """Its episodes on train and eval goals, as a rollout's file; some are called won, so that there are any."""
    tokenizer = load_tokenizer(str(start))
    grammar = make_grammar(tokenizer, settings.env, settings.data)
    engine = HFEngine(load_model(str(start)), tokenizer, grammar=grammar, copy_model=False)
    manager = make_manager(settings.env, settings.data, 12, count_tokens=engine.count_tokens)
    goals = [*shop.split("train")[:10], *shop.split("eval")[:2]]
    batch = TrajectoryCollector(manager, CollectorConfig(constrained=True)).collect(
        goals, engine, SamplingParams(max_tokens=settings.data.max_response_length), group_size=1, update=0, seed=0
    )
    batch.won[np.isin(batch.episode_id, [1, 4, 11])] = True
    return save_batch(batch, tmp_path_factory.mktemp("episodes") / "episodes.parquet")


def test_recorded_episodes_are_imitated_token_for_token(settings, shop, start, episodes):
    tokenizer = load_tokenizer(str(start))
    engine = HFEngine(load_model(str(start)), tokenizer, copy_model=False)
    manager = make_manager(settings.env, settings.data, 4, count_tokens=engine.count_tokens)
    batch, goals = load_batch(episodes), shop.split("train")
    limit = settings.data.max_response_length
    lesson = recorded(str(episodes), goals, manager, engine, max_tokens=limit)
    is_train = np.isin(batch.goal_index, goals)
    assert 0 < is_train.sum() < len(batch)
    assert (lesson.num_episodes, lesson.num_won, lesson.num_left_out) == (10, 2, 0)
    expected = batch.select(np.flatnonzero(is_train))
    for mine, theirs in ((lesson.rows.prompts, expected.prompt_ids), (lesson.rows.replies, expected.reply_ids)):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert lesson.rows.admissible == list(expected.admissible)

    won = recorded(str(episodes), goals, manager, engine, won_only=True, max_tokens=limit)
    assert (won.num_episodes, won.num_won) == (2, 2)
    short = recorded(str(episodes), goals, manager, engine, max_tokens=int(min(map(len, expected.reply_ids))))
    assert short.num_left_out == len(expected) - len(short.rows) > 0


def test_a_policy_learns_recorded_episodes_and_loads_where_checkpoints_do(tmp_path, start, episodes, capsys):
    words = [f"source={episodes}", f"init={start}", *TINY, "epochs=20"]
    sft.main([f"out={tmp_path / 'p'}", *words])
    assert "of 10 episodes, 2 of them won" in capsys.readouterr().out
    made = json.loads((tmp_path / "p" / "provenance.json").read_text())
    assert made["num_rows"] == int(np.isin(load_batch(episodes).episode_id, range(10)).sum())
    weights = load_model(str(tmp_path / "p")).state_dict()
    assert not all(weights[name].equal(tensor) for name, tensor in load_model(str(start)).state_dict().items())
    once = tmp_path / "once"
    sft.main([f"out={once}", *words, "epochs=0.1"])
    before = json.loads((once / "provenance.json").read_text())["figures"]["loss"]
    assert made["figures"]["loss"] < before


def test_recorded_episodes_that_do_not_belong_to_the_run_are_refused(tmp_path, start, episodes):
    other = tmp_path / "other"
    tokenizer = train_tokenizer(["other words for a red mug"] * 3, 400)
    model = make_small_policy(tokenizer, hidden=16, layers=1, heads=2)
    save_policy(other, config=model.config, state_dict=model.state_dict(), tokenizer=tokenizer, made={})
    batch = load_batch(episodes)
    batch.admissible[:] = ragged([None] * len(batch))
    free = save_batch(batch, tmp_path / "free.parquet")

    def complaint(*words: str) -> str:
        with pytest.raises(ShopGymError) as caught:
            sft.main([f"out={tmp_path / 'p'}", *TINY, *words])
        assert "\n" not in str(caught.value) and not (tmp_path / "p").exists()
        return str(caught.value)

    file, init = f"source={episodes}", f"init={start}"
    assert "name the policy (init) or tokenizer" in complaint(file)
    assert "is not the one that this run makes" in complaint(file, f"init={other}", "data.max_response_length=60")
    assert "is not the one that this run makes" in complaint(file, init, "env.prompt=no_think")
    assert "set masked=false" in complaint(f"source={free}", init)
    assert "nothing is left to imitate (0 rows of 0 episodes" in complaint(file, init, "won_only=true", "min_score=1")
    assert "cannot be read as a rollout" in complaint(f"source={tmp_path / 'none.parquet'}", init)
    sft.main([f"out={tmp_path / 'p'}", *TINY, f"source={free}", init, "masked=false"])
