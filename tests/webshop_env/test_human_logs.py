"""Logs in the original's format become episodes that play to the same pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from webshop_env import WebShopTextEnv
from webshop_env.conformance import read_records
from webshop_env.episodes import read_episodes
from webshop_env.goals import original_record
from webshop_env.human_logs import AFTER_PURCHASE, NO_GOAL, NO_PAGE, NO_WAY, SAME_PAGE, convert_logs
from webshop_env.playback import main, verify
from webshop_env.policies import OraclePolicy

PAGE_NAMES = {"start": "index", "results": "search_results", "item": "item_page", "sub_page": "item_sub_page"}


def log_line(env: WebShopTextEnv) -> str:
    """What the original writes when it serves the page that an environment is on."""
    session = env.session
    content: dict[str, Any] = {}
    if session.page_kind == "results":
        content = {"keywords": list(session.keywords), "search_result_asins": [], "page": session.page_number}
    elif session.page_kind != "start":
        content = {"asin": session.asin, "options": dict(session.options)}
        if session.page_kind != "done":
            content |= {"keywords": list(session.keywords), "page": session.page_number}
    line = {
        "page": PAGE_NAMES.get(session.page_kind, "done"),
        "url": env.page.url,
        "goal": original_record(session.goal),
        "content": content,
    }
    if session.page_kind == "done":
        line |= {"reward": session.score, "reward_info": session.reward_breakdown}
    return json.dumps(line)


def log_of(env: WebShopTextEnv, actions: Sequence[str]) -> list[str]:
    """The lines of a session that was just reset."""
    lines = [log_line(env)]
    for action in actions:
        _, _, _, _, info = env.step(action)
        assert info["action_possible"], info["reason"]
        lines.append(log_line(env))
    return lines


def oracle_log(goal_index: int, env: WebShopTextEnv) -> tuple[list[str], list[str]]:
    """Lines and actions of a purchase."""
    observation, info = env.reset(options={"goal_index": goal_index})
    act, lines, actions = OraclePolicy(env.shop).act, [log_line(env)], []
    while not env.session.is_done:
        actions.append(act(observation, info))
        observation, _, _, _, info = env.step(actions[-1])
        lines.append(log_line(env))
    return lines, actions


@pytest.fixture(scope="module")
def env() -> WebShopTextEnv:
    return WebShopTextEnv(version="v0", goals="human", show_attrs=True)


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def actions_of(report: Any, number: int = 0) -> list[str]:
    return [step.action for step in report.episodes[number].steps]


def test_a_purchase_becomes_the_episode_that_it_was(env, tmp_path):
    lines, actions = oracle_log(7, env)
    report = convert_logs([write(tmp_path / "a.jsonl", lines)])
    assert actions_of(report) == actions and not report.skipped
    episode = report.episodes[0]
    assert (episode.made_by, episode.goal_index, episode.won) == ("human", 7, True)
    assert episode.steps[-1].reward == env.session.score
    assert verify(episode) is None


def test_paging_sub_pages_and_a_second_look_are_followed(env, tmp_path):
    env.reset(options={"goal_index": 3})
    env.step("search[lamp]")
    env.step("click[next >]")
    first = env.page.body.clicks[3]
    env.reset(options={"goal_index": 3})
    actions = [
        *("search[lamp]", "click[next >]", "click[< prev]", "click[next >]", f"click[{first}]", "click[description]"),
        *("click[< prev]", "click[features]", "click[< prev]", "click[attributes]", "click[< prev]", "click[< prev]"),
        *("click[back to search]", "search[red shoes]", "click[back to search]", "search[lamp]"),
    ]
    report = convert_logs([write(tmp_path / "a.jsonl", log_of(env, actions))])
    assert actions_of(report) == actions and not report.skipped


def test_what_the_browser_did_is_bridged_or_skipped_with_its_reason(env, tmp_path):
    lines, actions = oracle_log(7, env)
    kinds = [json.loads(line)["page"] for line in lines]
    results = lines[kinds.index("search_results")]
    item = kinds.index("item_page")
    elsewhere = json.loads(lines[item])
    elsewhere["content"]["asin"] = "B000000000"
    odd = [
        *(lines[0], lines[0], "{", '"text"', '{"page": "index"}', '{"page": "index", "goal": {}}'),
        *(lines[1], results, lines[item], json.dumps(elsewhere), lines[item]),
        *(lines[item + 1 :]),
        *(results, lines[item]),
    ]
    report = convert_logs([write(tmp_path / "a.jsonl", odd)])
    assert actions_of(report) == actions
    assert dict(report.skipped) == {"not JSON": 1, NO_PAGE: 3, SAME_PAGE: 3, NO_WAY: 1, AFTER_PURCHASE: 2}
    assert report.num_lines == len(odd)


def test_the_browsers_back_button_from_a_sub_page_to_the_results_takes_two_clicks(env, tmp_path):
    env.reset(options={"goal_index": 3})
    env.step("search[lamp]")
    first = env.page.body.clicks[2]
    env.reset(options={"goal_index": 3})
    lines = log_of(env, ["search[lamp]", f"click[{first}]", "click[features]"])
    report = convert_logs([write(tmp_path / "a.jsonl", [*lines, lines[1]])])
    assert actions_of(report)[-3:] == ["click[features]", "click[< prev]", "click[< prev]"]


def test_goals_of_another_catalogue_are_counted_and_other_price_caps_are_none(env, tmp_path):
    lines, actions = oracle_log(7, env)
    instruction = env.session.goal.instruction_text
    assert "price lower than" in instruction
    cheaper = [line.replace("price lower than ", "price lower than 1") for line in lines]
    stranger = [line.replace(env.session.goal.asin, "B0STRANGER") for line in lines]
    report = convert_logs([write(tmp_path / "a.jsonl", cheaper), write(tmp_path / "b.jsonl", stranger)])
    assert actions_of(report) == actions and len(report.episodes) == 1
    assert report.skipped[NO_GOAL] == len(stranger)


def test_a_file_may_hold_several_sessions(env, tmp_path):
    first, first_actions = oracle_log(7, env)
    second, second_actions = oracle_log(40, env)
    report = convert_logs([write(tmp_path / "a.jsonl", [*first, *second, *first])])
    assert [actions_of(report, i) for i in range(3)] == [first_actions, second_actions, first_actions]


def test_another_score_in_the_log_is_noted(env, tmp_path):
    lines, _ = oracle_log(7, env)
    last = json.loads(lines[-1]) | {"reward": 0.25}
    report = convert_logs([write(tmp_path / "a.jsonl", [*lines[:-1], json.dumps(last)])])
    assert report.episodes[0].notes == (
        "from the log a.jsonl",
        "the log has the score 0.25, with price caps of its own",
    )


def test_the_command_writes_episodes_and_counts(env, tmp_path, capsys):
    logs = tmp_path / "logs"
    logs.mkdir()
    lines, actions = oracle_log(7, env)
    write(logs / "a.jsonl", [*lines, "{"])
    out = tmp_path / "episodes.jsonl"
    assert main(["convert", str(logs), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert (
        f"1 logs, {len(lines) + 1} lines: 1 episodes with {len(actions)} steps, 1 with a purchase; 1 lines" in printed
    )
    assert "1 lines: not JSON" in printed
    assert main(["verify", str(out)]) == 0
    assert next(read_episodes(out)).won


@pytest.mark.parametrize("change", [{"goal_options": 5}, {"goal_options": True}, {"goal_options": 1.5}])
def test_a_goal_with_odd_options_is_an_unusable_line(env, tmp_path, change):
    lines, actions = oracle_log(7, env)
    odd = json.loads(lines[1])
    odd["goal"] |= change
    report = convert_logs([write(tmp_path / "a.jsonl", [lines[0], json.dumps(odd), *lines[1:]])])
    assert actions_of(report) == actions and dict(report.skipped) == {NO_PAGE: 1}


def test_a_reward_past_all_numbers_is_an_unusable_line(env, tmp_path):
    lines, actions = oracle_log(7, env)
    odd = json.dumps(json.loads(lines[-1]) | {"reward": 10**400})
    report = convert_logs([write(tmp_path / "a.jsonl", [*lines[:-1], odd])])
    assert actions_of(report) == actions[:-1] and dict(report.skipped) == {NO_PAGE: 1}


@pytest.mark.parametrize(
    ("content", "told"), [("", "no episode in 0 lines; "), ("{", "in 1 line (1 line: not JSON); ")]
)
def test_a_conversion_that_finds_nothing_is_one_clear_line_and_no_file(tmp_path, capsys, content, told):
    log, out = tmp_path / "a.jsonl", tmp_path / "e.jsonl"
    log.write_text(content)
    assert main(["convert", str(log), "--out", str(out)]) == 2
    printed, error = capsys.readouterr()
    assert printed == "" and error.startswith(f"error: {log}: no episode") and told in error
    assert error.count("\n") == 1 and not out.exists()


def test_a_missing_log_is_one_clear_line(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "no"), "--out", str(tmp_path / "e.jsonl")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'no'}: does not exist\n"


def test_recorded_sessions_of_the_original_are_followed(reference_dir, tmp_path):
    """The golden sessions on human goals, written as the original logs them."""
    golden, data = reference_dir / "golden", reference_dir / "webshop-1k"
    played = WebShopTextEnv(version="v0", data_dir=data, goals="human", show_attrs=True)
    expected = []
    for number, record in enumerate(read_records(golden / "human_mode.jsonl.gz")[1:]):
        played.reset(options={"goal_index": record["session"]})
        lines, kept = [log_line(played)], []
        for step in record["steps"]:
            if played.session.is_done:
                break
            before = log_line(played)
            played.step(step["action"])
            if log_line(played) != before:
                kept.append(step["action"])
            lines.append(log_line(played))
        write(tmp_path / f"{number:03}.jsonl", lines)
        expected.append(kept)
    report = convert_logs([tmp_path], data_dir=data)
    assert [actions_of(report, i) for i in range(len(report.episodes))] == [actions for actions in expected if actions]
    assert set(report.skipped) <= {SAME_PAGE}
