"""Rows of episodes, and batches put together."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.flatten import EpisodeRecord, StepRecord, concatenate, flatten
from rollout.statistics import batch_statistics, with_statistics
from rollout.types import Generation, GenerationRequest, NoiseKey


def step(anchor: str, reward: float = 0.0, *, problem: str | None = None, tokens: int = 2) -> StepRecord:
    return StepRecord(
        request=GenerationRequest(np.arange(3, dtype=np.int32), NoiseKey(0, 0, 0, 0), ("click[a]",)),
        generation=Generation(
            np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), "click[a]", is_cut=tokens > 3
        ),
        anchor=anchor, action="click[a]", problem=problem, reason="" if problem is None else "no such button",
        reward=reward, action_possible=problem is None, prompt_is_cut=False,
    )  # fmt: skip


def episodes() -> list[EpisodeRecord]:
    """Group 2: one won after three steps, one truncated after two; group 3: one that bought the wrong thing."""
    return [
        EpisodeRecord(episode_id=4, group_id=2, goal_index=17, steps=[step("start"), step("item"), step("item", 10.0)],
                      won=True, terminated=True, task_score=1.0),
        EpisodeRecord(episode_id=5, group_id=2, goal_index=17, truncated=True,
                      steps=[step("start"), step("results", problem="no <action>…</action>", tokens=4)]),
        EpisodeRecord(episode_id=6, group_id=3, goal_index=9, terminated=True, task_score=0.5, steps=[step("start")]),
    ]  # fmt: skip


def test_one_row_per_step_with_the_figures_of_its_episode() -> None:
    batch = flatten(episodes())
    assert len(batch) == 6
    assert batch.episode_id.tolist() == [4, 4, 4, 5, 5, 6]
    assert batch.group_id.tolist() == [2, 2, 2, 2, 2, 3]
    assert batch.step_index.tolist() == [0, 1, 2, 0, 1, 0]
    assert batch.goal_index.tolist() == [17, 17, 17, 17, 17, 9]
    assert batch.reward.tolist() == [0, 0, 10, 0, 0, 0]
    assert batch.episode_return.tolist() == [10, 10, 10, 0, 0, 0]
    assert batch.episode_length.tolist() == [3, 3, 3, 2, 2, 1]
    assert batch.won.tolist() == [True] * 3 + [False] * 3
    assert batch.truncated.tolist() == [False] * 3 + [True] * 2 + [False]
    assert batch.task_score.tolist() == [1, 1, 1, 0, 0, 0.5]
    assert batch.format_valid.tolist() == [True] * 4 + [False, True]
    assert [batch.anchor_texts[a] for a in batch.anchor_id] == ["start", "item", "item", "start", "results", "start"]
    assert [len(ids) for ids in batch.reply_ids] == [2, 2, 2, 2, 4, 2]
    dtypes = {name: getattr(batch, name).dtype for name in ("group_id", "step_index", "reward", "won", "anchor_id")}
    assert dtypes == {
        "group_id": np.int64, "step_index": np.int32, "reward": np.float32, "won": np.bool_, "anchor_id": np.int64,
    }  # fmt: skip


def test_batches_come_together_as_if_one_had_collected_them() -> None:
    whole = flatten(episodes())
    first, second, third = (flatten([episode]) for episode in episodes())
    for parts in ([first, second, third], [third, first, second]):
        joined = concatenate(parts)
        assert joined.anchor_texts == whole.anchor_texts
        for name in ("episode_id", "step_index", "anchor_id", "reward", "group_id", "task_score"):
            assert getattr(joined, name).tolist() == getattr(whole, name).tolist()
        assert [ids.tolist() for ids in joined.reply_ids] == [ids.tolist() for ids in whole.reply_ids]
        assert joined.advantage is None


def test_half_filled_columns_are_refused() -> None:
    first, second, _ = (flatten([episode]) for episode in episodes())
    first.advantage = np.zeros(len(first), np.float32)
    with pytest.raises(ValueError, match="advantage"):
        concatenate([first, second])
    with pytest.raises(ValueError, match="at least one"):
        concatenate([])


def test_statistics_by_hand() -> None:
    figures = batch_statistics(flatten(episodes()))
    expected = {
        "rollout/success_frac": 1 / 3,
        "rollout/task_score": 0.5,
        "rollout/episode_return": 10 / 3,
        "rollout/episode_length_steps": 2.0,
        "rollout/truncated_frac": 1 / 3,
        "rollout/purchase_frac": 2 / 3,
        "rollout/num_episodes": 3,
        "rollout/num_steps": 6,
        "rollout/num_groups": 2,
        "rollout/mixed_group_frac": 0.5,
        "rollout/invalid_format_frac": 1 / 6,
        "rollout/invalid/no_action_action_frac": 1 / 6,
        "rollout/impossible_action_frac": 1 / 6,
        "rollout/generated_tokens": 14,
        "rollout/reply_length_max_tokens": 4,
        "rollout/cut_reply_frac": 1 / 6,
        "rollout/cut_prompt_frac": 0.0,
        # Step groups: start of group 2 twice, item twice, results once, start of group 3 once.
        "rollout/step_group_size": 1.5,
        "rollout/singleton_step_frac": 2 / 6,
        "rollout/step_group_max_size": 2,
        "rollout/step_group_of_2_to_4_frac": 4 / 6,
        "rollout/step_group_of_5_to_8_frac": 0.0,
        "rollout/step_group_over_8_frac": 0.0,
        "rollout/impossible/no_such_button_frac": 1 / 6,
        "rollout/purchase_score": 0.75,
        # In lock-step, all three would have been asked three times.
        "rollout/lock_step_frac": 6 / 9,
    }
    for key, value in expected.items():
        assert figures[key] == pytest.approx(value), key
    assert batch_statistics(flatten([])) == {}
    assert "rollout/step_credit_frac" not in figures


def test_step_credit_is_where_the_same_page_went_on_differently() -> None:
    batch = flatten(episodes())
    batch.step_return = np.float32([8, 9, 10, 0, 0, 0])
    assert batch_statistics(batch)["rollout/step_credit_frac"] == pytest.approx(4 / 6), "start and item of group 2"
    batch.step_return = np.float32([8, 10, 10, 0, 0, 0])
    assert batch_statistics(batch)["rollout/step_credit_frac"] == pytest.approx(2 / 6), "start of group 2"


def test_reasons_are_counted_by_kind_not_by_what_was_refused() -> None:
    batch = flatten(episodes())
    batch.action_possible[:3] = False
    batch.reason[:3] = ["this page does not offer click[red]", "this page does not offer click[blue]", "it failed: 42"]
    figures = batch_statistics(batch)
    assert figures["rollout/impossible/this_page_does_not_offer_click_frac"] == pytest.approx(2 / 6)
    assert figures["rollout/impossible/it_failed_frac"] == pytest.approx(1 / 6)


def test_what_was_played_and_what_is_learnt_from_have_names_of_their_own() -> None:
    played = flatten(episodes())
    figures = batch_statistics(played)
    learnt = played.select(np.r_[0, 0, 0, np.arange(len(played))])
    learnt.step_return = learnt.reward
    told = with_statistics(learnt, figures | {"filter/num_tries": 2.0})
    assert {name: told[name] for name in figures} == figures, "copies were not generated"
    assert told["trained/num_steps"] == figures["rollout/num_steps"] + 3
    assert told["trained/generated_tokens"] == figures["rollout/generated_tokens"] + 3 * len(played.reply_ids[0])
    assert told["filter/num_tries"] == 2.0 and "rollout/step_credit_frac" in told
    assert with_statistics(played, {"time/env_s": 1.0}) == figures | {"time/env_s": 1.0}
