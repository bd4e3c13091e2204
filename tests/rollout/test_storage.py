"""A batch in a file, and back."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_manager import EnvConfig, EnvManager
from rollout import CollectorConfig, SamplingParams, StepBatch, TrajectoryCollector, load_batch, save_batch
from rollout.engines.scripted import ScriptedPolicy
from rollout.types import ragged
from webshop_env.errors import ShopGymError


def assert_equal(one: StepBatch, other: StepBatch) -> None:
    """Every column, down to the types of numbers and what kind of None, tuple or text a cell is."""
    assert one.anchor_texts == other.anchor_texts
    for name in (f.name for f in fields(StepBatch) if f.name != "anchor_texts"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine is None or theirs is None:
            assert mine is theirs, name
            continue
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, name
        if mine.dtype != object:
            assert mine.tobytes() == theirs.tobytes(), name
            continue
        for a, b in zip(mine, theirs, strict=True):
            assert type(a) is type(b), name
            if isinstance(a, np.ndarray):
                assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name
            else:
                assert a == b, name


def shop_batch() -> StepBatch:
    """Two goals, constrained and malformed replies, pages with characters beyond ASCII."""

    def script(prompt: str, admissible: tuple[str, ...] | None) -> str:
        return "<action>search[café ☕]</action>" if len(prompt) % 3 else "no action at all"

    manager = EnvManager("WebShop-v1", 4, EnvConfig(prompt="no_think", max_steps=3))
    collector = TrajectoryCollector(manager, CollectorConfig(constrained=True))
    return collector.collect(
        [0, 1], ScriptedPolicy(script), SamplingParams(max_tokens=64), group_size=2, update=3, seed=0
    )


def made_batch(lengths: list[int], *, seed: int = 0) -> StepBatch:
    rng = np.random.default_rng(seed)
    num = len(lengths)
    return StepBatch(
        prompt_ids=ragged([rng.integers(0, 9, n).astype(np.int32) for n in lengths]),
        reply_ids=ragged([rng.integers(0, 9, n + 1).astype(np.int32) for n in lengths]),
        rollout_log_probs=ragged([rng.normal(size=n + 1).astype(np.float32) for n in lengths]),
        admissible=ragged([None if n % 2 else ("click[a]",) * n for n in lengths]),
        group_id=np.arange(num) // 2,
        episode_id=np.arange(num),
        anchor_id=rng.integers(0, 3, num),
        step_index=np.zeros(num, np.int32),
        goal_index=np.zeros(num, np.int32),
        reward=rng.normal(size=num).astype(np.float32),
        episode_return=np.zeros(num, np.float32),
        episode_length=np.ones(num, np.int32),
        format_valid=rng.random(num) < 0.5,
        action_possible=rng.random(num) < 0.5,
        won=rng.random(num) < 0.5,
        truncated=np.zeros(num, bool),
        task_score=np.full(num, np.nan, np.float32),
        row_weight=np.ones(num, np.float32),
        anchor_texts=("", "page\none", "page ☃"),
    )


def test_a_rollout_comes_back_as_it_was(tmp_path) -> None:
    batch = shop_batch()
    assert {p is None for p in batch.problem} == {True, False}
    assert batch.admissible[0]
    path = save_batch(batch, tmp_path / "new" / "rollout.parquet")
    assert_equal(load_batch(path), batch)
    assert [p.name for p in path.parent.iterdir()] == ["rollout.parquet"]


def test_what_the_trainer_filled_in_comes_back_too(tmp_path) -> None:
    batch = made_batch([2, 0, 5])
    batch = replace(batch, advantage=batch.reward, old_log_probs=batch.rollout_log_probs)
    loaded = load_batch(save_batch(batch, tmp_path / "b.parquet"))
    assert_equal(loaded, batch)
    assert loaded.ref_log_probs is None
    loaded.advantage[0] = 7.0  # columns can be written to


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=8), st.integers(0, 99))
def test_any_lengths_and_no_rows_at_all_come_back(tmp_path_factory, lengths, seed) -> None:
    batch = made_batch(lengths, seed=seed)
    assert_equal(load_batch(save_batch(batch, tmp_path_factory.mktemp("b") / "b.parquet")), batch)


def test_rows_left_out_do_not_renumber_pages(tmp_path) -> None:
    batch = made_batch([1, 2, 3, 4]).select(np.array([2]))
    assert_equal(load_batch(save_batch(batch, tmp_path / "b.parquet")), batch)


def test_half_a_surrogate_pair_of_an_odd_catalogue_is_a_question_mark(tmp_path) -> None:
    batch = shop_batch()
    odd = replace(
        batch,
        anchor_texts=tuple(f"{text} \ud83d" for text in batch.anchor_texts),
        admissible=ragged([None if row is None else (*row, "click[red \ud83d]") for row in batch.admissible]),
        action=ragged([None if action is None else "click[\ud83d]" for action in batch.action]),
    )
    back = load_batch(save_batch(odd, tmp_path / "rows.parquet"))
    assert back.anchor_texts[0] == f"{batch.anchor_texts[0]} ?"
    assert back.admissible[0][-1] == "click[red ?]" and "click[?]" in back.action.tolist()


def test_other_tools_can_read_it(tmp_path) -> None:
    batch = shop_batch()
    table = pyarrow.parquet.read_table(save_batch(batch, tmp_path / "b.parquet"))
    assert table.column("action").to_pylist() == batch.action.tolist()
    assert table.column("anchor")[0].as_py() == batch.anchor_texts[batch.anchor_id[0]]
    assert table.column("prompt_ids")[1].as_py() == batch.prompt_ids[1].tolist()


def test_a_failed_write_leaves_the_file_of_before(tmp_path, monkeypatch) -> None:
    batch = made_batch([1, 2])
    path = save_batch(batch, tmp_path / "b.parquet")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", fail)
    with pytest.raises(ShopGymError, match=r"b\.parquet cannot be written \(No space left"):
        save_batch(made_batch([3]), path)
    assert [p.name for p in tmp_path.iterdir()] == ["b.parquet"]
    monkeypatch.undo()
    assert_equal(load_batch(path), batch)


def test_files_that_are_no_rollout_are_named(tmp_path) -> None:
    (tmp_path / "text.parquet").write_text("hello")
    whole = save_batch(made_batch([4, 4]), tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "half.parquet").write_bytes(whole[: len(whole) // 2])
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "table.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "whole.parquet")
    pyarrow.parquet.write_table(table.drop_columns(["reward"]), tmp_path / "lacking.parquet")
    for name, reason in [
        ("none", "No such file"),
        ("text", "no whole Parquet file"),
        ("half", "no whole Parquet file"),
        ("table", "another kind of table"),
        ("lacking", "lacks the column reward"),
    ]:
        with pytest.raises(ShopGymError, match=reason) as caught:
            load_batch(tmp_path / f"{name}.parquet")
        assert f"{name}.parquet" in str(caught.value) and "\n" not in str(caught.value)


def test_rows_of_two_types_are_refused(tmp_path) -> None:
    batch = made_batch([1, 2])
    batch.reply_ids[1] = batch.reply_ids[1].astype(np.int64)
    with pytest.raises(ValueError, match="reply_ids: rows hold int32 and int64"):
        save_batch(batch, tmp_path / "b.parquet")
