"""The multi-turn loop on real environments."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from small_lm import small_model, small_tokenizer

from env_manager import EnvConfig, EnvManager, PageView, get_env_spec, register_env
from rollout import CollectorConfig, SamplingParams, StepBatch, TrajectoryCollector
from rollout.constrained import ActionGrammar
from rollout.engines.hf import HFEngine
from rollout.engines.scripted import EOS, ScriptedPolicy
from rollout.flatten import concatenate
from rollout.types import Generation
from trainers.ranks import start_ranks
from trainers.rollouts import failed_episodes
from trainers.settings import DataSettings, EnvSettings, SettingsError
from trainers.worlds import make_grammar
from webshop_env.errors import ShopGymError

PATH = ["down", "down", "right", "right", "down", "right"]
PARAMS = SamplingParams(max_tokens=24)


def step_number(prompt: str) -> int:
    found = re.search(r"Steps taken so far: (\d+)", prompt)
    return int(found.group(1)) if found else 0


def cross(prompt: str, admissible: tuple[str, ...] | None) -> str:
    return f"<action>{PATH[step_number(prompt)]}</action>"


def shop_batch(
    num_envs: int, max_batch_tokens: int | None = None, first_episode: int = 0, goals=(3, 4, 5)
) -> StepBatch:
    tokenizer = small_tokenizer()
    grammar = ActionGrammar(tokenizer, max_tokens=24)
    engine = HFEngine(small_model(tokenizer), tokenizer, grammar=grammar, max_batch_tokens=max_batch_tokens)
    config = EnvConfig(
        prompt="compact", max_steps=4, max_prompt_tokens=400, count_tokens=engine.count_tokens, success_reward=10.0
    )
    manager = EnvManager("WebShop-v1", num_envs, config)
    collector = TrajectoryCollector(manager, CollectorConfig(constrained=True))
    return collector.collect(goals, engine, PARAMS, group_size=2, update=1, seed=0, first_episode=first_episode)


def test_numbers_of_groups_episodes_and_steps() -> None:
    manager = EnvManager("FrozenLake-v1", 4)
    collector = TrajectoryCollector(manager)
    batch = collector.collect(
        [11, 12, 13], ScriptedPolicy(cross), SamplingParams(max_tokens=64), group_size=2, update=0, seed=0,
        first_episode=10,
    )  # fmt: skip
    assert len(batch) == 6 * 6
    assert batch.episode_id[::6].tolist() == [10, 11, 12, 13, 14, 15]
    assert batch.group_id[::6].tolist() == [5, 5, 6, 6, 7, 7]
    assert batch.goal_index[::6].tolist() == [11, 11, 12, 12, 13, 13]
    assert batch.step_index[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.reward[:6].tolist() == [0, 0, 0, 0, 0, 1]
    assert batch.episode_return.tolist() == [1.0] * 36
    assert batch.won.all() and not batch.truncated.any()
    assert len(batch.anchor_texts) == 6, "all episodes see the same six pages"
    assert bytes(batch.reply_ids[0][:-1].astype(np.uint8)).decode() == "<action>down</action>"
    assert batch.reply_ids[0][-1] == EOS
    figures = collector.statistics
    assert figures["rollout/success_frac"] == 1.0
    assert figures["rollout/step_group_size"] == 2.0
    times = {key for key in figures if key.startswith("time/")}
    assert times == {"time/generate_s", "time/env_s", "time/prompt_s", "time/flatten_s"}
    assert all(figures[key] >= 0 for key in figures)
    assert collector.pop_seconds() == pytest.approx({key: figures[key] for key in times})
    assert set(collector.pop_seconds().values()) == {0.0}, "told once"


def test_only_live_environments_are_asked() -> None:
    asked = []

    class Counting(ScriptedPolicy):
        def generate(self, requests, params):
            asked.append(sorted(request.noise.episode for request in requests))
            assert len({request.noise.step for request in requests}) == 1
            return super().generate(requests, params)

    policy = Counting(cross)
    manager = EnvManager("FrozenLake-v1", 2, EnvConfig(max_steps=10))
    episodes_that_fall = {1}
    generate = policy.generate

    def generate_with_falls(requests, params):
        answers = generate(requests, params)
        for i, request in enumerate(requests):
            if request.noise.episode in episodes_that_fall:
                move = ("right", "down")[request.noise.step]
                answers[i] = Generation(answers[i].reply_ids, answers[i].log_probs, f"<action>{move}</action>", False)
        return answers

    policy.generate = generate_with_falls
    batch = TrajectoryCollector(manager).collect(
        [0], policy, SamplingParams(max_tokens=64), group_size=2, update=0, seed=0
    )
    assert asked == [[0, 1]] * 2 + [[0]] * 4
    assert batch.episode_length.tolist() == [6] * 6 + [2] * 2
    assert batch.terminated.all()


def test_malformed_replies_are_rows_like_others() -> None:
    manager = EnvManager("FrozenLake-v1", 2, EnvConfig(max_steps=3))
    policy = ScriptedPolicy(lambda prompt, admissible: "down" if step_number(prompt) == 1 else "<action>fly</action>")
    batch = TrajectoryCollector(manager).collect(
        [0], policy, SamplingParams(max_tokens=64), group_size=2, update=0, seed=0
    )
    assert batch.format_valid.tolist() == [True, False, True] * 2
    assert batch.action_possible.tolist() == [False, True, False] * 2
    assert batch.action.tolist() == ["fly", "down", "fly"] * 2
    assert batch.truncated.all()
    assert batch.admissible.tolist() == [None] * 6


def test_what_is_sampled_does_not_depend_on_environments_or_batches() -> None:
    batches = [shop_batch(6), shop_batch(2), shop_batch(5, max_batch_tokens=50)]
    one = batches[0]
    assert len(one) > 12
    for other in batches[1:]:
        assert [ids.tolist() for ids in one.reply_ids] == [ids.tolist() for ids in other.reply_ids]
        assert one.episode_id.tolist() == other.episode_id.tolist()
        assert one.anchor_texts == other.anchor_texts
        for mine, theirs in zip(one.rollout_log_probs, other.rollout_log_probs, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_ranks_that_share_the_goals_collect_the_rows_of_one() -> None:
    whole = shop_batch(6, goals=(3, 4, 5))
    parts = concatenate([shop_batch(2, goals=(5,), first_episode=4), shop_batch(4, goals=(3, 4), first_episode=0)])
    assert [ids.tolist() for ids in whole.reply_ids] == [ids.tolist() for ids in parts.reply_ids]
    assert whole.group_id.tolist() == parts.group_id.tolist()
    assert whole.anchor_id.tolist() == parts.anchor_id.tolist()


def test_constrained_replies_are_well_formed_offered_and_replayable() -> None:
    batch = shop_batch(6)
    assert batch.format_valid.all() and batch.action_possible.all()
    grammar = ActionGrammar(small_tokenizer(), max_tokens=24)
    for admissible, reply in zip(batch.admissible, batch.reply_ids, strict=True):
        assert len(grammar.allowed_ids(admissible, reply)) == len(reply)
    assert all(len(ids) <= 400 for ids in batch.prompt_ids)


def test_stale_weights_are_an_error() -> None:
    class Reloading(ScriptedPolicy):
        def generate(self, requests, params):
            self.weight_version += 1
            return super().generate(requests, params)

    manager = EnvManager("FrozenLake-v1", 1)
    with pytest.raises(RuntimeError, match="weights 1, expected 0"):
        TrajectoryCollector(manager).collect(
            [0], Reloading(cross), SamplingParams(max_tokens=64), group_size=1, update=0, seed=0
        )


def test_a_policy_that_did_not_take_the_expected_weights_is_an_error() -> None:
    policy = ScriptedPolicy(cross)
    collector = TrajectoryCollector(EnvManager("FrozenLake-v1", 1))
    how = {"group_size": 1, "update": 1, "seed": 0}
    params = SamplingParams(max_tokens=64)
    with pytest.raises(RuntimeError, match="the engine has weights 0, expected 1"):
        collector.collect([0], policy, params, **how, weight_version=1)
    policy.weight_version = 1
    assert len(collector.collect([0], policy, params, **how, weight_version=1)) == 6


@pytest.mark.parametrize(
    ("goals", "settings", "message"),
    [
        ([], {"group_size": 1}, "at least one goal"),
        ([0], {"group_size": 0}, "at least 1"),
        ([0], {"group_size": 3}, "does not fit into 2"),
        ([0], {"group_size": 2, "first_episode": 3}, "multiple"),
    ],
)
def test_wrong_calls_are_refused(goals: list[int], settings: dict[str, int], message: str) -> None:
    collector = TrajectoryCollector(EnvManager("FrozenLake-v1", 2))
    with pytest.raises(ShopGymError, match=message):
        collector.collect(goals, ScriptedPolicy(cross), PARAMS, update=0, seed=0, **settings)


def test_a_collection_that_is_lost_as_a_whole_says_why() -> None:
    manager = EnvManager("FrozenLake-v1", 2)
    step = manager.step

    def lost(replies, slots=None, **kwargs):
        result = step(replies, slots, **kwargs)
        result.failed[:] = result.truncated[:] = True
        result.reasons = ["ZeroDivisionError: the trap\nhas sprung"] * len(result.slots)
        result.observations.is_live[:] = False
        return result

    manager.step = lost  # type: ignore[method-assign]
    with pytest.raises(ShopGymError, match=r"were lost twice, at last by ZeroDivisionError: the trap has sprung;"):
        TrajectoryCollector(manager).collect([0], ScriptedPolicy(cross), PARAMS, group_size=2, update=0, seed=0)


def test_constrained_replies_need_a_page_that_offers_something() -> None:
    spec = replace(get_env_spec("FrozenLake-v1"), full_view=lambda page, info: PageView("Cross.", page, (page,)))
    register_env(spec, name="SilentLake")
    with pytest.raises(SettingsError, match="the first page of SilentLake offers no actions"):
        make_grammar(small_tokenizer(), EnvSettings(env_name="SilentLake", prompt="no_think"), DataSettings())


@pytest.mark.parametrize("losses", [1, 2, 99])
def test_an_episode_whose_environment_is_lost_is_played_again_or_left_out(losses: int) -> None:
    manager = EnvManager("WebShop-v1", 4, EnvConfig(prompt="compact", max_steps=3))
    step, lost = manager.step, []

    def lossy(replies, slots=None, **kwargs):
        result = step(replies, slots, **kwargs)
        for s, slot in enumerate(result.slots):  # what a backend reports when an actor is gone for good
            if slot == 0 and len(lost) < losses:
                lost.append(slot)
                result.failed[s] = result.truncated[s] = True
                result.observations.is_live[slot] = False
        return result

    manager.step = lossy  # type: ignore[method-assign]
    collector = TrajectoryCollector(manager)
    search = ScriptedPolicy(lambda prompt, actions: "<action>search[mug]</action>")
    rows = collector.collect([3, 5], search, PARAMS, group_size=2, update=0, seed=0)
    assert collector.num_failed_episodes == (0 if losses == 1 else 1)
    assert failed_episodes(collector, start_ranks()) == {"rollout/failed_episodes": float(losses != 1)}
    assert failed_episodes(collector, start_ranks()) == {"rollout/failed_episodes": 0.0}, "told once"
    assert sorted(set(rows.episode_id.tolist())) == ([0, 1, 2, 3] if losses == 1 else [1, 2, 3])
    assert (rows.episode_length == 3).all()
