"""What a run leaves behind: metrics, a curve, and nothing from after the checkpoint that it goes on from."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import time

import pytest

from trainers.display import RunLog, draw_curve, read_metrics

UPDATE = {
    "rollout/success_frac": 0.25,
    "rollout/task_score": 0.5,
    "rollout/episode_length_steps": 4.0,
    "actor/kl_to_reference_nats": 0.01,
    "actor/entropy_nats": 1.0,
    "actor/ratio_clipped_frac": 0.0,
    "actor/grad_norm": 1.5,
}
VALIDATION = {
    "validation/success_frac": 0.4,
    "validation/success_low_frac": 0.3,
    "validation/success_high_frac": 0.5,
    "validation/task_score": 0.6,
    "validation/num_goals": 100.0,
}


def open_log(folder, *, lines=(), is_first=True, **more) -> RunLog:
    return RunLog(folder, total_updates=5, lines=list(lines), is_first=is_first, **more)


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


class Recorder:
    """A board that remembers what it was given."""

    def __init__(self) -> None:
        self.lines, self.is_closed = [], False

    def add(self, line) -> None:
        self.lines.append(line)

    def close(self) -> None:
        self.is_closed = True


def test_memory_is_noted_before_and_after_each_phase(tmp_path):
    sizes = iter([1.0, 2.5, 3.0, 3.25])
    log = open_log(tmp_path, console=False, memory=lambda: {"gpu": next(sizes)})
    for phase in ("collect", "learn"):
        with log.phase(phase, 0):
            pass
    log.log(1, {})
    log.log(2, {})
    log.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert {key: value for key, value in first.items() if key.startswith("memory/")} == {
        "memory/collect_before_gpu_gib": 1.0,
        "memory/collect_after_gpu_gib": 2.5,
        "memory/learn_before_gpu_gib": 3.0,
        "memory/learn_after_gpu_gib": 3.25,
    }
    assert not any(key.startswith("memory/") for key in second)


def test_each_line_has_the_update_its_figures_and_the_times_of_its_phases(tmp_path, capsys):
    log = open_log(tmp_path)
    with log.phase("collect", 0):
        pass
    with log.phase("collect", 0):
        pass
    log.log(1, UPDATE)
    log.log(1, VALIDATION)
    log.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first == {"update": 1, **UPDATE, "time/collect_s": pytest.approx(0, abs=0.1)}
    assert second == {"update": 1, **VALIDATION}
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("update 1/5  success 0.250")
    assert out[1].startswith("update 1/5  validation: success 0.400 [0.300, 0.500]")


def test_plain_lines_tell_speed_and_time_left(tmp_path, capsys):
    log = open_log(tmp_path)
    with log.phase("validate", 0):
        time.sleep(0.3)
    log.log(0, VALIDATION)
    with log.phase("collect", 0):
        time.sleep(0.05)
    log.log(1, UPDATE | {"rollout/generated_tokens": 1000.0})
    line = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert line["time/collect_tokens_per_s"] == pytest.approx(1000 / line["time/collect_s"], rel=0.01)
    told = capsys.readouterr().out.splitlines()[-1]
    assert re.search(rf"{line['time/collect_tokens_per_s']:.0f} tokens/s  \d+ s left$", told), told
    log.log(5, UPDATE)
    assert "left" not in capsys.readouterr().out, "nothing is left after the last update"


def test_a_terminal_shows_a_live_view_below_the_lines(tmp_path, monkeypatch):
    terminal = Tty()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    log = open_log(tmp_path, lines=[{"update": 2}])
    with log.phase("old_log_probs", 2):
        pass
    log.log(3, UPDATE | {"rollout/generated_tokens": 1000.0, "time/collect_s": 2.0})
    log.log(3, VALIDATION)
    log.say("a [word] in brackets")
    log.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "a [word] in brackets" in shown
    view = shown[shown.rindex("update 3/5") - 200 :]
    assert "old log probs" in view
    assert "success 0.250  score 0.500  KL 0.0100  clipped 0.000  entropy 1.000  tokens/s 500" in view
    assert "update 3: validation: success 0.400 [0.300, 0.500]" in view
    assert re.search(r"\d+ s left", view)


def test_boards_get_every_line_and_are_closed(tmp_path, capsys):
    board = Recorder()
    log = open_log(tmp_path, console=False, boards=[board])
    log.log(1, UPDATE)
    log.log(1, VALIDATION)
    log.close()
    assert board.lines == read_metrics(tmp_path / "metrics.jsonl")
    assert board.is_closed
    assert capsys.readouterr().out == ""


def test_troubles_are_told_once_even_without_a_console_and_after_going_on(tmp_path, capsys):
    bad = UPDATE | {"rollout/purchase_frac": 0.0}
    log = open_log(tmp_path, console=False)
    log.log(1, bad)
    log.log(2, bad)
    open_log(tmp_path, console=False, lines=log.lines).log(3, bad)
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith("warning: no purchase: ")


def test_an_update_without_learning_is_told(tmp_path, capsys):
    log = open_log(tmp_path)
    log.log(1, {key: value for key, value in UPDATE.items() if "actor" not in key} | {"actor/update_skipped": 1.0})
    assert "no update: every advantage is 0" in capsys.readouterr().out


def test_without_a_reference_no_kl_is_shown(tmp_path, capsys):
    log = open_log(tmp_path)
    log.log(1, {key: value for key, value in UPDATE.items() if key != "actor/kl_to_reference_nats"})
    assert "steps 4.0  entropy 1.000  clipped 0.000  grad 1.50" in capsys.readouterr().out


def test_figures_that_are_no_numbers_are_null_in_the_file_and_come_back(tmp_path):
    log = open_log(tmp_path, console=False)
    log.log(1, UPDATE | {"actor/grad_norm": float("nan"), "actor/ratio_max": float("inf")})
    log.close()
    open_log(tmp_path, console=False, lines=log.lines).close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    (text,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    line = json.loads(text, parse_constant=refuse)
    assert line["actor/grad_norm"] is None and line["actor/ratio_max"] is None
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[0]["actor/grad_norm"])


def test_going_on_drops_lines_from_after_the_checkpoint(tmp_path):
    log = open_log(tmp_path)
    for update in (1, 2, 3):
        log.log(update, UPDATE)
    log.close()
    resumed = open_log(tmp_path, lines=log.lines[:2])
    resumed.log(3, VALIDATION)
    assert [(line["update"], len(line)) for line in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, 8),
        (2, 8),
        (3, 6),
    ]


def test_other_ranks_print_and_write_nothing(tmp_path, capsys):
    log = open_log(tmp_path / "other", is_first=False)
    log.log(1, UPDATE)
    log.say("hello")
    log.close()
    assert len(log.lines) == 1
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "other").exists()


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    (tmp_path / "m.jsonl").write_text(json.dumps({"update": 1}) + "\n" + '{"update": 2, "a')
    assert read_metrics(tmp_path / "m.jsonl") == [{"update": 1}]


def test_the_curve_is_a_picture_even_without_validations_or_with_an_interval_that_was_rounded(tmp_path):
    none_won = {"validation/success_frac": 0.0, "validation/success_low_frac": 1e-18}
    all_won = {"validation/success_frac": 1.0, "validation/success_high_frac": 1 - 1e-16}
    for name, lines in (
        ("both", [VALIDATION, UPDATE, VALIDATION]),
        ("rollouts", [UPDATE]),
        ("empty", []),
        ("rounded", [VALIDATION | none_won, VALIDATION | all_won]),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"update": i, **line}) + "\n" for i, line in enumerate(lines)))
        assert draw_curve(path, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
