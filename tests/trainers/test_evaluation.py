"""What an evaluation says, keeps and compares, and the command, a model behind an endpoint included."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from endpoint import serving
from pyarrow import parquet

from env_manager import EnvConfig, EnvManager
from rollout import SamplingParams, TrajectoryCollector
from rollout.engines.scripted import ScriptedPolicy
from trainers import evaluation as command
from trainers.errors import TrainingError
from trainers.evaluation import (
    Evaluation,
    GoalList,
    goal_list_of,
    load_evaluation,
    paired_differences,
    pairing_notes,
    read_evaluation,
    save_evaluation,
    save_results,
    setup_of,
)
from trainers.ranks import start_ranks
from trainers.run import refuse_other_validations
from trainers.settings import SettingsError, resolve
from trainers.worlds import open_world
from webshop_env.errors import ShopGymError
from webshop_env.shop import open_shop

GOALS = {
    "environment": "WebShop-v1",
    "variant": None,
    "goals": "synthetic",
    "split_by": "goal",
    "catalogue_hash": "c",
    "env_seed": 0,
}


def evaluation(won: list[bool], **changes) -> Evaluation:
    fields = {
        "policy": "embedded",
        "goal_list": GoalList(**GOALS),
        "split": "eval",
        "temperature": 0.4,
        "seed": 0,
        "setup": {"env.max_steps": 15},
        "goal_index": list(range(len(won))),
        "goal_id": [f"g{i}" for i in range(len(won))],
        "product": [f"p{i // 2}" for i in range(len(won))],
        "won": won,
        "task_score": [1.0 if w else 0.5 for w in won],
        "episode_length": [4] * len(won),
    }
    return Evaluation(**(fields | changes))


def test_the_interval_of_a_score_is_no_wider_than_scores_can_be():
    high, low = evaluation([True, True, False]).score, evaluation([False] * 3, task_score=[0.0, 0.0, 0.3]).score
    assert (high.high, low.low) == (1.0, 0.0)
    assert high.low > 0 and low.high < 1


def test_paired_difference_sees_what_two_separate_intervals_hide():
    before = evaluation([True] * 50 + [False] * 50)
    after = evaluation([True] * 60 + [False] * 40)
    difference = paired_differences(before, after)["success"]
    assert difference.mean == pytest.approx(0.1)
    assert difference.low > 0
    assert before.success.high > after.success.low


def test_other_goals_or_catalogues_are_not_compared():
    before = evaluation([True, False])
    with pytest.raises(SettingsError, match="different goals"):
        paired_differences(before, evaluation([True, False], goal_index=[0, 2]))


def test_goals_whose_environment_was_lost_are_left_out_of_a_comparison():
    whole = evaluation([True, False, True, False])
    lost = evaluation([True, True, False], goal_index=[0, 1, 3], lost_goals=[2])
    for before, after, gain in ((whole, lost, 1 / 3), (lost, whole, -1 / 3)):
        difference = paired_differences(before, after)["success"]
        assert (difference.mean, difference.num) == (pytest.approx(gain), 3)
        assert pairing_notes(before, after) == ["1 of 4 goals are not compared: their environments were lost"]
    other = evaluation([True, True, False], goal_index=[0, 1, 3], lost_goals=[4])
    with pytest.raises(SettingsError, match="different goals"):
        paired_differences(whole, other)
    halves = [evaluation([True], goal_index=[i], lost_goals=[1 - i]) for i in (0, 1)]
    with pytest.raises(SettingsError, match="no goal in common whose environment was not lost"):
        paired_differences(*halves)


def test_a_goal_whose_environment_is_lost_twice_is_named_and_a_run_can_go_on():
    settings = resolve([])[0]
    world = open_world(settings.env)
    goals, goal_list = world.split("eval")[:3], goal_list_of(settings.env, world.catalogue_hash)
    manager = EnvManager("WebShop-v1", 3, EnvConfig(prompt="compact", max_steps=2), {"shop": world})
    step, losses = manager.step, []

    def lossy(replies, slots=None, **kwargs):
        result = step(replies, slots, **kwargs)
        for s, slot in enumerate(result.slots):
            if slot == 0 and len(losses) < 2:  # the first goal's, then its again
                losses.append(slot)
                result.failed[s] = result.truncated[s] = True
                result.observations.is_live[slot] = False
        return result

    manager.step = lossy
    found = command.evaluate(
        *(TrajectoryCollector(manager), ScriptedPolicy(lambda prompt, actions: "<action>search[mug]</action>"), goals),
        *(SamplingParams(max_tokens=64), start_ranks("cpu")),
        **{"seed": 0, "world": world, "goal_list": goal_list, "split": "eval", "setup": {}, "name": "a script"},
    )
    assert (found.goal_index, found.lost_goals) == (goals[1:].tolist(), goals[:1].tolist())
    assert read_evaluation(json.loads(json.dumps(asdict(found)))) == found
    refuse_other_validations(asdict(found), goal_list, goals)
    with pytest.raises(SettingsError, match="different goals"):
        refuse_other_validations(asdict(found), goal_list, goals[1:])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("environment", "WebShop-v0"),
        ("variant", "verl"),
        ("goals", "human"),
        ("split_by", "product"),
        ("catalogue_hash", "d"),
        ("env_seed", 1),
    ],
)
def test_goals_from_elsewhere_are_not_compared(name, value):
    other = evaluation([True, False], goal_list=GoalList(**(GOALS | {name: value})))
    with pytest.raises(SettingsError, match=f"differ in their {name.replace('_', ' ')}, .* and {value}"):
        paired_differences(evaluation([True, False]), other)


def test_prices_and_caps_of_another_seed_are_other_goals_in_v0_alone():
    drawn = [resolve([f"env.env_name=WebShop-v{v}", f"env.seed={seed}"])[0].env for v in (0, 1) for seed in (0, 7)]
    lists = [goal_list_of(env, "c") for env in drawn]
    with pytest.raises(SettingsError, match="differ in their env seed, 0 and 7"):
        paired_differences(evaluation([True], goal_list=lists[0]), evaluation([True], goal_list=lists[1]))
    assert lists[2] == lists[3] != lists[0]
    before = replace(lists[0], env_seed=None)  # a file of before, which does not say it
    assert paired_differences(evaluation([True], goal_list=before), evaluation([True], goal_list=lists[1]))


def test_what_a_prompt_loses_and_what_is_malformed_are_part_of_the_setup():
    words = ["env.history_overflow=all", "env.memory_tokens=100", "env.projection.reject_chinese=false"]
    plain, other = (resolve(given)[0] for given in ([], words))
    setups = [setup_of(settings.env, settings.data, constrained=False) for settings in (plain, other)]
    first, second = (evaluation([True], setup=setup) for setup in setups)
    noted = pairing_notes(first, second)
    assert len(noted) == len(words)
    for word, note in zip(words, noted, strict=True):
        assert word.partition("=")[0] in note
    of_before = evaluation([True], setup={"env.max_steps": plain.env.max_steps})
    assert pairing_notes(of_before, second) == [], "what it does not say is no difference"


def test_what_else_differs_is_noted():
    first = evaluation([True])
    assert pairing_notes(first, evaluation([True])) == []
    assert pairing_notes(first, evaluation([True], temperature=0.0, seed=1, setup={"env.max_steps": 9})) == [
        "the earlier evaluation had temperature 0.4, this one has 0.0",
        "the earlier evaluation had seed 0, this one has 1",
        "the earlier evaluation had env.max_steps 15, this one has 9",
    ]


def test_splits_between_products_are_judged_by_product():
    by_product = {"goal_list": GoalList(**(GOALS | {"split_by": "product"}))}
    before, after = evaluation([False] * 4, **by_product), evaluation([True, True, True, False], **by_product)
    assert set(evaluation([True]).estimates()) == {"success", "score"}
    found = after.estimates()["success by product"]
    assert (found.mean, found.num) == (0.75, 2)
    differences = paired_differences(before, after)
    assert differences["success by product"].mean == 0.75
    assert differences["score by product"].mean == pytest.approx(0.375)
    elsewhere = evaluation([True], product=[None], **by_product)
    assert "success by product" not in elsewhere.estimates()


def test_a_saved_evaluation_comes_back(tmp_path):
    first = evaluation([True, False])
    save_evaluation(first, tmp_path / "e.json")
    assert load_evaluation(tmp_path / "e.json") == first
    summary = json.loads((tmp_path / "e.json").read_text())["summary"]
    assert summary["success"]["mean"] == 0.5 and summary["success"]["num"] == 2
    assert summary["goals_hash"] == first.goals_hash != evaluation([True]).goals_hash
    (tmp_path / "bad.json").write_text("{}")
    for name in ("bad.json", "none.json"):
        with pytest.raises(SettingsError, match=name):
            load_evaluation(tmp_path / name)


def test_results_of_each_goal_are_rows_of_a_table(tmp_path):
    first = evaluation([True, False])
    save_results(first, tmp_path / "e.parquet")
    table = parquet.read_table(tmp_path / "e.parquet")
    assert table.to_pydict() == {
        "goal_index": [0, 1],
        "goal_id": ["g0", "g1"],
        "product": ["p0", "p0"],
        "won": [True, False],
        "task_score": [1.0, 0.5],
        "episode_length": [4, 4],
    }
    about = json.loads(table.schema.metadata[b"shopgym_evaluation"])
    assert (about["seed"], about["goal_list"], about["goals_hash"]) == (0, GOALS, first.goals_hash)


def test_an_endpoint_and_the_embedded_policy_are_compared_goal_by_goal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", "sk-mine")
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    command.main(["goals=8", f"out={here}"])
    with serving() as server:
        server.delay_s = 0.01
        words = [
            *("goals=8", f"out={there}", f"baseline={here}", "model=shopper", f"endpoint.base_url={server.base_url}"),
            *("endpoint.api_key_env=MY_KEY", "endpoint.num_parallel=4", "env.prompt=think"),
            *("data.max_prompt_length=2000", "data.max_response_length=64", "endpoint.tokenizer=embedded"),
        ]
        command.main(words)
        assert server.keys == {"Bearer sk-mine"}
        assert 2 <= server.most_running <= 4, "no lock-step, and no more than allowed"
        assert {body["max_tokens"] for body in server.seen} == {64}
    printed = capsys.readouterr().out
    assert re.search(r"paired difference of success -?\d\.\d{3} \[.*\] \(n=8\)", printed)
    assert "note: the earlier evaluation had constrained True, this one has False" in printed
    first, second = load_evaluation(here), load_evaluation(there)
    assert second.policy.startswith("shopper at http://127.0.0.1:")
    assert first.goal_id == second.goal_id and first.goals_hash in printed
    goals = open_shop().goals
    assert first.product == [goals[i].asin for i in first.goal_index]
    assert first.goal_id == [goals[i].goal_id for i in first.goal_index]
    assert parquet.read_table(there.with_suffix(".parquet")).column("won").to_pylist() == second.won
    command.main(["compare", str(here), str(there)])
    compared = capsys.readouterr().out.splitlines()
    assert compared[-1] in printed and compared[0].startswith("shopper at ")


def test_an_endpoint_that_refuses_leaves_nothing_behind(tmp_path):
    with serving() as server, pytest.raises(ShopGymError, match="HTTP 404") as caught:
        command.main(["goals=2", "model=other", f"endpoint.base_url={server.base_url}", f"out={tmp_path / 'e.json'}"])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("endpoint.base_url=http://127.0.0.1:9/v1", "constrained=true"), "cannot be held"),
        (("endpoint.base_url=localhost",), "no address such as"),
        (("out=results.parquet",), "name it .json"),
        (("compare",), "compare takes two files"),
    ],
)
def test_what_cannot_be_is_refused(words, complaint):
    with pytest.raises(ShopGymError, match=complaint):
        command.main(list(words))


def test_evaluations_of_other_goals_are_not_compared_by_the_command(tmp_path):
    paths: list[Path] = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, catalogue in zip(paths, "cd", strict=True):
        save_evaluation(evaluation([True], goal_list=GoalList(**(GOALS | {"catalogue_hash": catalogue}))), path)
    with pytest.raises(SettingsError, match="differ in their catalogue hash, c and d"):
        command.main(["compare", *map(str, paths)])


def test_no_memory_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "run", lambda *_: np.empty(10**15))
    with pytest.raises(TrainingError, match=r"the machine is out of memory: lower num_envs \(128\)"):
        command.main([f"out={tmp_path / 'out.json'}", "device=cpu"])
    assert list(tmp_path.iterdir()) == []
