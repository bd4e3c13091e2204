"""TensorBoard's files hold what metrics.jsonl holds; W&B is refused in one line where it is not installed."""

from __future__ import annotations

import sys

import pytest

from trainers.boards import TensorBoard, open_boards, require_boards
from trainers.settings import SettingsError, resolve


def test_tensorboard_gets_every_figure_and_drops_what_came_after_the_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, [])
    for update in (1, 2, 3):
        board.add({"update": update, "rollout/success_frac": update / 4})
    board.close()
    board = TensorBoard(tmp_path, [{"update": 1}])
    board.add({"update": 2, "rollout/success_frac": 0.9})
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("rollout/success_frac")] == [(1, 0.25), (2, 0.9)]
    assert events.Tags()["scalars"] == ["rollout/success_frac"]


def test_tensorboard_is_the_only_board_unless_others_are_asked_for(tmp_path):
    settings, _, _ = resolve([])
    (board,) = open_boards(settings, tmp_path, [])
    assert isinstance(board, TensorBoard)
    board.close()
    settings, _, _ = resolve(["trainer.logger=[console]"])
    assert open_boards(settings, tmp_path, []) == []


def test_wandb_that_is_not_installed_is_said_before_anything_is_written(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    require_boards(("console", "tensorboard"), is_first=True)
    with pytest.raises(SettingsError, match=r"wandb is not installed: pip install 'shopgym\[wandb\]'") as caught:
        require_boards(("console", "wandb"), is_first=True)
    assert "\n" not in str(caught.value)
