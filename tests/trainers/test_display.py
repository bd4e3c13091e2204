"""What a run leaves behind: metrics, a curve, and nothing from after the checkpoint that it goes on from."""

from __future__ import annotations

import json

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


def open_log(folder, *, lines=(), is_first=True) -> RunLog:
    return RunLog(folder, total_updates=5, loggers=("console",), lines=list(lines), is_first=is_first)


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


def test_an_update_without_learning_is_told(tmp_path, capsys):
    log = open_log(tmp_path)
    log.log(1, {key: value for key, value in UPDATE.items() if "actor" not in key} | {"actor/update_skipped": 1.0})
    assert "no update: every advantage is 0" in capsys.readouterr().out


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


def test_the_curve_is_a_picture_even_without_validations(tmp_path):
    for name, lines in (("both", [VALIDATION, UPDATE, VALIDATION]), ("rollouts", [UPDATE]), ("empty", [])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"update": i, **line}) + "\n" for i, line in enumerate(lines)))
        assert draw_curve(path, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
