"""Playing on until groups differ: which groups, how long, what is trained on."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.filters import FilterConfig, collect_until_groups_differ, groups_that_differ
from rollout.flatten import EpisodeRecord, StepRecord, flatten
from rollout.types import Generation, GenerationRequest, NoiseKey, StepBatch

DIFFERENT, LOST, WON = (True, False), (False, False), (True, True)


def episode(number: int, won: bool, *, score: float | None = None) -> EpisodeRecord:
    """Two steps; lost ones are shaped differently, so that only the outcome is alike."""
    step = StepRecord(
        request=GenerationRequest(np.zeros(1, np.int32), NoiseKey(0, 0, number, 0)),
        generation=Generation(np.zeros(1, np.int32), np.zeros(1, np.float32), "", False),
        anchor=f"page {number}", action="", problem=None, reason="", reward=float(number), action_possible=True,
        prompt_is_cut=False,
    )  # fmt: skip
    return EpisodeRecord(
        episode_id=number, group_id=number // 2, goal_index=0, steps=[step, step], won=won,
        task_score=float(won) if score is None else score,
    )  # fmt: skip


def tries_of(*tries: list[tuple[bool, bool]]):
    """Plays the given groups, try by try, and remembers how many tries it was asked for."""
    asked: list[int] = []

    def collect(attempt: int) -> StepBatch:
        asked.append(attempt)
        first = 2 * sum(len(groups) for groups in tries[:attempt])
        outcomes = [won for group in tries[attempt] for won in group]
        return flatten([episode(first + i, won) for i, won in enumerate(outcomes)])

    return collect, asked


def groups(batch: StepBatch) -> list[int]:
    return np.unique(batch.group_id).tolist()


def test_the_outcome_decides_and_not_the_return() -> None:
    batch = tries_of([LOST, DIFFERENT, WON, DIFFERENT])[0](0)
    assert len(set(batch.episode_return.tolist())) == 8
    assert groups_that_differ(batch).tolist() == [1, 3]


def test_the_score_can_decide_too() -> None:
    batch = flatten([episode(0, False, score=0.2), episode(1, False, score=0.7), episode(2, False), episode(3, False)])
    assert groups_that_differ(batch).tolist() == []
    assert groups_that_differ(batch, "task_score").tolist() == [0]
    assert groups_that_differ(flatten([episode(0, True)])).tolist() == [], "a lone episode differs from nothing"


def test_off_is_one_try_with_all_groups() -> None:
    collect, asked = tries_of([LOST, WON])
    batch, figures = collect_until_groups_differ(collect, FilterConfig(), num_groups=2)
    assert (asked, groups(batch), figures) == ([0], [0, 1], {})


def test_it_plays_on_until_enough_groups_differ() -> None:
    collect, asked = tries_of([LOST, DIFFERENT], [WON, LOST], [DIFFERENT, DIFFERENT], [DIFFERENT, DIFFERENT])
    batch, figures = collect_until_groups_differ(collect, FilterConfig(enable=True), num_groups=2)
    assert asked == [0, 1, 2]
    assert groups(batch) == [1, 4], "the first two that differ"
    assert batch.episode_id.tolist() == [2, 2, 3, 3, 8, 8, 9, 9]
    assert [batch.anchor_texts[a] for a in batch.anchor_id[::2]] == ["page 2", "page 3", "page 8", "page 9"]
    assert figures == {
        "filter/num_tries": 3.0,
        "filter/num_groups_played": 6.0,
        "filter/num_groups_trained_on": 2.0,
        "filter/different_frac": 0.5,
    }


def test_at_the_bound_other_groups_of_the_last_try_make_up_what_is_missing() -> None:
    collect, asked = tries_of([LOST, DIFFERENT, LOST], [WON, LOST, WON], [DIFFERENT, DIFFERENT, DIFFERENT])
    batch, figures = collect_until_groups_differ(
        collect, FilterConfig(enable=True, max_num_gen_batches=2), num_groups=3
    )
    assert asked == [0, 1]
    assert groups(batch) == [1, 3, 4]
    assert figures["filter/num_tries"] == 2.0 and figures["filter/num_groups_trained_on"] == 3.0
    collect, _ = tries_of([LOST, WON, DIFFERENT, LOST, DIFFERENT])
    batch, _ = collect_until_groups_differ(collect, FilterConfig(enable=True, max_num_gen_batches=1), num_groups=3)
    assert groups(batch) == [0, 2, 4], "those that differ come before all others"


def test_a_policy_that_never_wins_ends_after_ten_tries() -> None:
    collect, asked = tries_of(*[[LOST, LOST]] * 12)
    batch, _ = collect_until_groups_differ(collect, FilterConfig(enable=True), num_groups=2)
    assert asked == list(range(10))
    assert groups(batch) == [18, 19]


def test_enough_in_the_last_try_is_as_in_any_other() -> None:
    collect, _ = tries_of([DIFFERENT, LOST], [LOST, DIFFERENT])
    config = FilterConfig(enable=True, max_num_gen_batches=2)
    assert groups(collect_until_groups_differ(collect, config, num_groups=2)[0]) == [0, 3]


def test_a_try_may_play_more_groups_than_are_wanted() -> None:
    collect, asked = tries_of([LOST, DIFFERENT, WON, DIFFERENT, DIFFERENT], [DIFFERENT] * 5)
    batch, figures = collect_until_groups_differ(collect, FilterConfig(enable=True), num_groups=2)
    assert asked == [0]
    assert groups(batch) == [1, 3], "the first two that differ; those that do not are not learnt from"
    assert figures["filter/num_groups_played"] == 5.0 and figures["filter/num_groups_trained_on"] == 2.0
    collect, asked = tries_of([LOST, DIFFERENT, WON, WON, WON], [WON, DIFFERENT, DIFFERENT, LOST, LOST])
    assert groups(collect_until_groups_differ(collect, FilterConfig(enable=True), num_groups=2)[0]) == [1, 6]
    assert asked == [0, 1]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_gen_batches must be at least 1, got 0"):
        FilterConfig(max_num_gen_batches=0)
    with pytest.raises(ValueError, match="outcome must be one of won, task_score, got 'reward'"):
        FilterConfig(outcome="reward")
