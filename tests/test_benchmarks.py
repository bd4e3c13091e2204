"""Benchmarks run at a small size: their tables come out and their figures are those of something that happened."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


def run_benchmark(tmp_path: Path, script: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a benchmark prints and what it writes."""
    out = tmp_path / "result.json"
    command = (sys.executable, f"benchmarks/{script}", *arguments, "--out", str(out))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(out.read_text())


def test_environments(tmp_path: Path) -> None:
    printed, result = run_benchmark(tmp_path, "bench_env.py", "--small")
    assert "| WebShop-v1, warm |" in printed and "| the original | 44.3 |" in printed
    for version in ("v0", "v1"):
        measured = result["steps"][version]
        assert measured["num_sessions"] == 10 and measured["num_steps"] > 40
        assert measured["warm"]["ms"].keys() >= {"search", "item or option", "buy", "reset"}
        assert measured["warm"]["steps_per_s"] > 44.3, "slower than the original"
    assert [row["num_envs"] for row in result["memory"]] == [1, 64]
    assert len(result["workers"]["pss_bytes"]) == 2


def test_scale(tmp_path: Path) -> None:
    printed, result = run_benchmark(tmp_path, "bench_scale.py", "--small")
    assert "| embedded | 1,000 | 5,802 |" in printed
    (row,) = result["catalogues"]
    assert row["num_episodes"] == 20 and row["num_steps"] > 60 and not row["has_tagger"], "its nouns are compiled in"
    assert [row["num_envs"] for row in result["environments"]] == [1, 16]
    short, long = result["histories"]
    assert short["prompt_chars"] < long["prompt_chars"]
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


def test_rollouts(tmp_path: Path) -> None:
    printed, result = run_benchmark(
        tmp_path, "bench_rollout.py", "--templates", "compact", "--repeats", "1", "--policy", "none"
    )
    head, rule, row, *_ = printed.splitlines()
    assert head.count("|") == rule.count("|") == row.count("|") == 9
    (times,) = result["scripted"]
    parts = [times[f"{part}_s"]["mean"] for part in ("prompts", "tokenization", "stepping", "flattening")]
    assert times["all_s"]["mean"] == pytest.approx(sum(parts), abs=0.003)
    assert min(parts) > 0


def test_garbage(tmp_path: Path) -> None:
    small = ("data.train_batch_size=2", "env.rollout.n=2", "--rollouts", "1", "--turns", "1")
    printed, result = run_benchmark(tmp_path, "bench_garbage.py", *small)
    ways = result["ways"]
    assert list(ways) == ["as Python has it", "as training lets it"]
    for name, way in ways.items():
        assert f"| {name} | 1 |" in printed
        assert 0 < way["searching_s"] < way["rollout_s"] and way["rows"] >= 4
    assert ways["as training lets it"]["num_full"] == 0 and result["num_objects"] > 10_000


def test_search(tmp_path: Path) -> None:
    small = ("--no-lucene", "--num-queries", "5", "--repeats", "1")
    printed, result = run_benchmark(tmp_path, "bench_search.py", "webshop_env/assets/catalogue", *small)
    (figures,) = result["catalogues"]
    assert figures["num_products"] == 1000 and figures["num_postings"] > figures["num_terms"] > 500
    assert figures.keys() >= {"build_s", "build_peak_mb", "open_ms", "resident_mb"}
    assert set(figures["queries"]) == {"words of a title", "instructions", "common words"}
    for times in figures["queries"].values():
        assert times["num_queries"] > 0 and 0 < times["ours_p50_ms"] <= times["ours_p99_ms"]
    assert "| catalogue | products |" in printed and "| 1,000 | instructions |" in printed


def test_advantages(tmp_path: Path) -> None:
    arguments = ("--rows", "120", "300", "--groups", "1", "--repeats", "2")
    printed, result = run_benchmark(tmp_path, "bench_advantages.py", *arguments)
    assert "| gigpo | 300 |" in printed and "| reinforce++ | 120 |" in printed
    assert [row["num_rows"] for row in result["times"]] == [120, 300] * 4
    assert all(row["s"]["mean"] > 0 for row in result["times"])
    assert 1 < result["similarity"]["num_clusters"] <= result["similarity"]["num_pages"] <= 120


def test_the_speed_of_an_update(tmp_path: Path) -> None:
    printed, result = run_benchmark(tmp_path, "gpu/update_speed.py", "--learn-only", "--tiny", "--profile")
    assert "| recipe | learn |" in printed and "| 16k+plain+packed | reference |" in printed
    assert result["measured_rows"]["rows"] == result["update"]["rows"] > 12
    for measured in result["variants"].values():
        work = {phase: rate["model_tflop"] for phase, rate in measured["rates"].items()}
        assert work["learn"] == pytest.approx(3 * work["reference"], abs=2e-6), "a forward pass is a third of it"
        assert measured["kernels_of_learn"]["top"][0]["ms"] > 0
    losses = [measured["metrics"]["actor/loss"] for measured in result["variants"].values()]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5), "variants change the speed alone"
    padding = [measured["learn_padding_frac"] for measured in result["variants"].values()]
    assert padding[0] > 0 and padding[1] == 0


def test_the_speed_of_whole_updates(tmp_path: Path) -> None:
    printed, result = run_benchmark(tmp_path, "gpu/update_speed.py", "--tiny")
    assert "the first update" in printed and "| learn |" in printed
    first, second = result["updates"]
    assert first["size"]["episodes"] == 4 and first["size"]["rows"] > 8
    assert 10 < second["size"]["reply_tokens_mean"] < 40, "as long as was asked for, whatever the model would write"
    assert second["size"]["won_frac"] > 0 and second["metrics"]["actor/optimizer_steps"] > 1
    assert second["update_s"] >= sum(second["s"].values()) - 0.01


def test_several_gpus(tmp_path: Path) -> None:
    printed, result = run_benchmark(tmp_path, "gpu/several_gpus.py", "--tiny", "--ranks", "2", "--only", "losses")
    losses = result["answers"]["losses"]
    assert "| losses | 2 | loss differs by" in printed and losses["is_met"]
    assert losses["gap_of_all_ranks"]["grad_norm_share"] < 1e-3
    assert all(step["grad_norm"] > 0.1 for step in losses["all_ranks"]), "there was something to learn"
    assert losses["all_ranks"] != losses["one_rank"], "ranks add up in another order"


def write_run(folder: Path, estimator: str, seed: int, won: list[bool], share: float, **settings: Any) -> None:
    """A finished run of two updates, as training leaves it behind."""
    directory = folder / f"{estimator}_{seed}"
    (directory / "validations").mkdir(parents=True)
    saved = {"algorithm.adv_estimator": estimator, "trainer.seed": seed, "trainer.total_updates": 2} | settings
    (directory / "settings.yaml").write_text(yaml.safe_dump(saved))
    score = [1.0 if is_won else 0.5 for is_won in won]
    last = {"goal_list": {"catalogue_hash": "a"}, "goal_index": list(range(len(won))), "won": won, "task_score": score}
    (directory / "validations" / "update_000002.json").write_text(json.dumps(last))
    figures = {"validation/success_frac": sum(won) / len(won), "validation/task_score": sum(score) / len(score)}
    lines = [{"update": update, "rollout/success_frac": share} for update in (1, 2)] + [{"update": 2, **figures}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_comparing_estimators(tmp_path: Path) -> None:
    write_run(tmp_path, "grpo", 0, [True, False, False, False], 0.25)
    write_run(tmp_path, "gigpo", 0, [True, True, True, False], 0.5)
    write_run(tmp_path, "grpo", 1, [True, True, False, False], 0.5)
    write_run(tmp_path, "gigpo", 1, [True, True, False, False], 0.5)
    write_run(tmp_path, "grpo", 2, [True, True, False, False], 0.5)  # gigpo has not finished: no pair
    arguments = ("--runs", str(tmp_path), "--collect", "--picture", str(tmp_path / "curve.png"))
    printed, result = run_benchmark(tmp_path, "compare_estimators.py", *arguments)
    assert "| 0 | 25.0 | 75.0 | +50.0 [" in printed and "| 1 | 50.0 | 50.0 | +0.0 [" in printed
    assert [row["success_difference"]["mean"] for row in result["per_seed"]] == [0.5, 0.0]
    success = result["over_seeds"]["success_difference"]
    assert success["over_goals"]["num"] == 4 and success["over_goals"]["mean"] == 0.25  # of 0, 1/2, 1/2, 0
    assert success["over_goals"]["high"] == pytest.approx(0.25 + 1.96 * 0.288675 / 2, abs=1e-4)
    assert success["over_runs"]["num"] == 2 and success["over_runs"]["high"] == 1.0  # two runs say little
    assert result["over_seeds"]["score_difference"]["over_goals"]["mean"] == 0.125
    assert result["over_seeds"]["rollout_success_difference"]["over_runs"]["mean"] == 0.125
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_unlike_budgets_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path, "grpo", 0, [True], 0.5, **{"env.rollout.n": 8})
    write_run(tmp_path, "gigpo", 0, [True], 0.5, **{"env.rollout.n": 16})
    command = (sys.executable, "benchmarks/compare_estimators.py", "--runs", str(tmp_path), "--collect", "--seeds", "0")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: env.rollout.n: 8 with grpo, 16 with gigpo: not comparable\n"


def test_what_the_oracle_reaches(tmp_path: Path) -> None:
    printed, result = run_benchmark(tmp_path, "oracle_ceiling.py", "--small")
    assert "| product:0, v0 |" in printed and printed.count("| goal, v") == 2
    for split in result["splits"]:
        oracle, rule, looking, guided = (split[name] for name in ("oracle", "rule", "looking", "guided"))
        assert len(oracle["goals_not_won"]) == round((1 - oracle["success"]["mean"]) * split["num_test_goals"])
        assert rule["success"]["mean"] < oracle["success"]["mean"] <= oracle["success"]["high"] <= 1
        assert rule["success"]["mean"] <= looking["success"]["mean"] <= guided["success"]["mean"]
        assert split["split_by"] == "goal" or split["num_shared_products"] == 0
        if split["version"] == "v1":
            assert oracle["success"]["mean"] == 1.0, "with the goal's options its own product scores 1"


def learning(*arguments: str, code: int = 0) -> str:
    """What a command of the learning benchmark prints, or the line with which it refuses."""
    command = (sys.executable, "benchmarks/gpu/learning.py", *arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr[-3000:]
    assert code == 0 or done.stderr.count("\n") == 1
    return done.stderr if code else done.stdout


def test_learning_on_one_gpu(tmp_path: Path) -> None:
    start, out, runs = (str(tmp_path / name) for name in ("start", "out", "runs"))
    small = ("--tiny", "--test-goals", "4", "env.max_steps=4")
    learning("start", "--out", start, "--goals", "4", "--shown-steps", "6", *small)
    made = json.loads((tmp_path / "start" / "start.json").read_text())
    assert [m["constrained"] for m in made["measurements"]] == [True, False]
    assert max(max(m["episode_length"]) for m in made["measurements"]) <= 4
    imitated = json.loads((tmp_path / "start" / "policy" / "provenance.json").read_text())
    assert imitated["settings"]["env.max_steps"] == 6
    arm = ("arm", "gigpo", "--start", start, "--out", out, "--runs", runs, *small)
    learning(*arm, "--updates", "1")
    printed = learning(*arm, "--updates", "2", "--measure-updates", "1")
    assert "is an arm with env.max_steps=4; go on with the same words" in learning(*arm, "env.max_steps=5", code=2)
    result = json.loads((tmp_path / "out" / "gigpo_seed0.json").read_text())
    assert "gigpo: open after" in printed and "1 updates done" in printed, "it went on where it was stopped"
    updates = result["updates"]
    assert updates["update"] == [1, 2] and len(updates["rollout/success_frac"]) == 2
    assert all(0 < part <= whole for part, whole in zip(updates["time/collect_s"], updates["wall_s"], strict=True))
    assert [(m["updates"], m["constrained"]) for m in result["measurements"]] == [
        *[(0, True), (0, False), (1, True), (1, False), (2, True), (2, False)]
    ]
    last = result["measurements"][-2]
    assert result["measurements"][:2] == made["measurements"], "the start is not measured twice"
    assert last["train_s"] == pytest.approx(sum(updates["wall_s"]), abs=0.02)
    assert sum(last["lost"]["ends"].values()) == len(result["goals"]["goal_index"]) == 4
    assert result["ended"] == "finished" and [s["ended"] for s in result["sessions"]] == ["finished"] * 2
    assert str(tmp_path) not in json.dumps(result), "where things lay on the machine is nobody's business"
    printed = learning("report", f"{out}/gigpo_seed0.json", "--out", out)
    assert "| gigpo | 0 | published | 2 |" in printed and "| malformed (% of steps) |" in printed
    assert (tmp_path / "out" / "learning.png").read_bytes().startswith(b"\x89PNG")


def test_an_arm_learns_from_composed_instructions_and_is_tested_on_the_old_goals(
    tmp_path: Path, reference_dir: Path
) -> None:
    data, more = reference_dir / "webshop-1k", tmp_path / "more"
    words = ("--data", str(data), "--out", str(more), "--cuts", "1")
    compose = (sys.executable, "benchmarks/gpu/more_products.py", *words)
    printed = subprocess.run(compose, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200).stdout
    assert "227 instructions composed" in printed and "517 products (290 without" in printed
    old, new = (json.loads((place / "items_ins_v2_1000.json").read_text()) for place in (data, more))
    composed = {asin: new[asin] for asin in new if new[asin] != old[asin]}
    assert len(composed) == 227 and not any(old[asin].get("instruction") for asin in composed)
    assert composed["B07C8NSB75"]["instruction"] == "Find me highly pigmented lips makeup"
    for entry in composed.values():
        assert entry["instruction"].startswith("Find me ")
        assert all(attribute in entry["instruction"] for attribute in entry["instruction_attributes"])
    again = subprocess.run(compose, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert again.returncode == 2 and "is there already" in again.stderr

    small = ("--tiny", "--cut", "1", "--test-goals", "4", "env.max_steps=3", "--data", str(data))
    learning("start", "--place", "product", "--out", str(tmp_path / "start"), "--goals", "4", *small)
    places = ("--start", str(tmp_path / "start"), "--out", str(tmp_path), "--runs", str(tmp_path / "runs"))
    arm = (*places, *small, "--train-data", str(more))
    learning("arm", "product", *arm, "--updates", "1")
    assert "1 updates done" in learning("arm", "product", *arm, "--updates", "2"), "it goes on in the same catalogue"
    result = json.loads((tmp_path / "product_cut1_seed0.json").read_text())
    first = json.loads((tmp_path / "start" / "start.json").read_text())["measurements"]
    assert result["measurements"][:2] == first, "the same goals as those of the start"
    assert result["goals"]["catalogue_hash"] != result["hashes"]["catalogue_hash"]
    assert "--train-data MORE" in result["differs_in"] and str(tmp_path) not in json.dumps(result)
    assert "learns from another split" in learning("arm", "gigpo", *arm, code=2)


def write_arm(folder: Path, name: str, seed: int, won: list[int], **goals: Any) -> str:
    """What an arm of one update leaves behind: it wins nothing first, then these goals."""
    about = {"environment": "WebShop-v0", "split_by": "goal", "catalogue_hash": "c"} | goals
    count = len(won)
    about |= {"goal_id": [str(i) for i in range(count)], "product": [f"p{i // 3}" for i in range(count)]}
    played = [
        {"updates": n, "train_s": 2.0 * n, "constrained": True, "won": w, "task_score": [0.5 + 0.5 * x for x in w]}
        for n, w in ((0, [0] * count), (1, won))
    ]
    machine = {"date": "2026-11-29", "hardware": {"cpu": "a CPU"}, "versions": {"python": "3.12"}, "command": "python"}
    arm = {"arm": name, "seed": seed, "place": "published", "goals": about, "measurements": played} | machine
    arm |= {"settings": {"actor_rollout_ref.rollout.constrained": True}}
    arm["updates"] = {"update": [1], "wall_s": [2.0], "rollout/success_frac": [0.5]}
    path = folder / f"{name}_{seed}.json"
    path.write_text(json.dumps(arm))
    return str(path)


def test_a_report_compares_arms_goal_by_goal_and_products_where_they_are_kept_apart(tmp_path: Path) -> None:
    arms = [
        write_arm(tmp_path, "grpo", 0, [1, 0, 0, 0]),
        write_arm(tmp_path, "gigpo", 0, [1, 1, 0, 0]),
        write_arm(tmp_path, "gigpo", 1, [1, 1, 1, 0]),
        write_arm(tmp_path, "product_cut0", 0, [1, 1, 1, 0], split_by="product:0"),
        write_arm(tmp_path, "product_cut1", 0, [1, 1, 1, 1], split_by="product:1"),
        write_arm(tmp_path, "product_cut0_more", 0, [0, 0, 0, 0], split_by="product:0"),
    ]
    printed = learning("report", *arms, "--out", str(tmp_path / "report"))
    assert "| gigpo | 0 | published | 1 | 2.00 | 2 | 0.0 [0.0, 49.0] | 50.0 [15.0, 85.0] | 75.0" in printed
    assert re.search(r"\| -25.0 \[[^]]*\], after 1 updates", printed), "grpo against gigpo of one seed, of four goals"
    assert "| 50.0 [0.0, 100.0] over products | 75.0" in printed, "of two products, with three goals and one"
    assert "| gigpo | 2 | 62.5 | 50.0 to 75.0 |" in printed
    assert "| product | 0 | 2 | 75.0 [0.0, 100.0] | 50.0 to 100.0 |" in printed, "two cuts of one kind of arm"
    assert (tmp_path / "report" / "learning.md").read_text().strip() == printed.strip()
    longer = json.loads(Path(arms[1]).read_text())
    first, last = longer["measurements"]
    longer["measurements"] = [first | {"updates": n} for n in (0, 20)] + [last | {"updates": 40}]
    Path(arms[1]).write_text(json.dumps(longer))
    other = json.loads(Path(arms[0]).read_text())
    other["measurements"][1]["updates"] = 30
    Path(arms[0]).write_text(json.dumps(other))
    unlike = learning("report", *arms[:2], "--out", str(tmp_path / "unlike"))
    assert re.search(r"\| -25.0 \[[^]]*\], 30 against 40 updates", unlike), "where two are as near, with the later one"
    assert learning("report", arms[0], arms[0], "--out", str(tmp_path / "twice")).count("| grpo | 0 |") == 1
    copy = shutil.copy(arms[0], tmp_path / "copy.json")
    refusal = learning("report", arms[0], str(copy), "--out", str(tmp_path / "twice"), code=2)
    assert "are both of grpo, seed 0; leave one out" in refusal
    assert "--out: " in learning("report", arms[0], "--out", arms[1], code=2), "a file is no place for files"
    (tmp_path / "broken.json").write_text("{")
    refusal = learning("report", *arms, str(tmp_path / "broken.json"), "--out", str(tmp_path), code=2)
    assert "broken.json cannot be read as JSON" in refusal
