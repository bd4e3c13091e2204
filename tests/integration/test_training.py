"""The whole path with a small random policy: two processes equal one, and a killed run goes on to the same numbers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from rollout.engines.hf import HFEngine
from rollout.storage import load_batch
from trainers import gigpo_fsdp
from trainers.advantages import AdvantageConfig
from trainers.checkpoint import load_weights
from trainers.display import read_metrics
from trainers.errors import CheckpointError
from trainers.goals import training_goals
from trainers.models import load_model, load_tokenizer, make_small_policy, save_policy, train_tokenizer
from trainers.ranks import start_ranks
from trainers.run import open_learners
from trainers.settings import SettingsError, resolve
from trainers.worlds import make_manager, open_world
from webshop_env import open_shop
from webshop_env.errors import ShopGymError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "trainers" / "gigpo_fsdp.py"
UPDATES = 3

# The main loop as it is, with every batch of rows written down by the first rank.
RECORDER = """
import json, os, sys
from trainers import gigpo_fsdp
from trainers.ranks import leave_process

collect, rows = gigpo_fsdp.collect_over_ranks, []

def recording(*args, **kwargs):
    batch = collect(*args, **kwargs)
    rows.append([
        [int(batch.episode_id[i]), int(batch.step_index[i]), int(batch.goal_index[i]), int(batch.anchor_id[i]),
         float(batch.reward[i]), batch.action[i], batch.prompt_ids[i].tolist(), batch.reply_ids[i].tolist()]
        for i in range(len(batch))
    ])
    return batch

gigpo_fsdp.collect_over_ranks = recording
gigpo_fsdp.main(sys.argv[2:])
if os.environ.get("RANK", "0") == "0":
    with open(sys.argv[1], "w") as file:
        json.dump(rows, file)
leave_process()
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """A random policy with a tokenizer that knows the pages' words."""
    settings, _, _ = resolve([])
    shop = open_world(settings.env)
    manager = make_manager(settings.env, settings.data, 64, count_tokens=None)
    prompts = manager.reset(shop.split("train")[:64]).prompts
    pages = manager.step(["<action>search[gift]</action>"] * 64).observations
    tokenizer = train_tokenizer([*prompts, *pages.prompts, *(a for row in pages.admissible for a in row)], 900)
    model = make_small_policy(tokenizer, hidden=32, layers=2, heads=2)
    target = tmp_path_factory.mktemp("policy") / "small"
    made = {"environment": "WebShop-v1", "prompt_template_hash": manager.prompt_hash}
    save_policy(target, config=model.config, state_dict=model.state_dict(), tokenizer=tokenizer, made=made)
    return target


def words(policy: Path, run: Path) -> list[str]:
    """16 episodes an update, rewarded by the score, and a seed by which a random policy can learn."""
    return [
        f"actor_rollout_ref.model.path={policy}",
        f"trainer.output_dir={run}",
        f"trainer.total_updates={UPDATES}",
        "trainer.save_freq=1",
        "trainer.test_freq=100",
        "data.train_batch_size=4",
        "data.val_batch_size=6",
        "env.rollout.n=4",
        "env.max_steps=7",
        "env.reward=score",
        "trainer.seed=33",
        "actor_rollout_ref.actor.optim.lr=0.001",
        "actor_rollout_ref.actor.ppo_mini_batch_size=40",
        "actor_rollout_ref.actor.ppo_epochs=2",
    ]


def command(*arguments: str | Path, launcher: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *launcher, *map(str, arguments)]


def finished(arguments: list[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=200, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def metrics(run: Path) -> list[dict[str, float]]:
    """Lines of metrics.jsonl, times and memory aside."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(("time/", "memory/"))} for line in lines]


@pytest.fixture(scope="module")
def whole_run(policy, tmp_path_factory) -> Path:
    """One process, not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "recorder.py").write_text(RECORDER)
    out = finished(command(folder / "recorder.py", folder / "rows.json", *words(policy, folder / "run")))
    (folder / "out.txt").write_text(out)
    return folder


def test_a_run_learns_reports_and_leaves_everything_behind(whole_run):
    run, out = whole_run / "run", (whole_run / "out.txt").read_text()
    lines = metrics(run)
    assert [line["update"] for line in lines] == [0, 1, 2, 3, 3]
    updates = [line for line in lines if "actor/update_skipped" in line]
    assert [line["rollout/num_episodes"] for line in updates] == [16.0] * UPDATES
    learned = [line for line in updates if not line["actor/update_skipped"]]
    assert len(learned) > 1
    assert any(line["actor/grad_norm"] > 1e-3 for line in learned)
    assert learned[-1]["update"] == UPDATES and learned[-1]["actor/optimizer_steps"] > 2  # what is resumed below
    assert learned[0]["actor/kl_to_reference_nats"] < learned[-1]["actor/kl_to_reference_nats"]
    assert all(line["actor/engine_gap_max_nats"] < 1e-4 for line in learned)
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").iterdir())
    assert "paired difference of success" in out
    assert f"trainer.resume_from={run}" in out
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["update_000002", "update_000003"]
    exported = run / "checkpoints" / "update_000003" / "policy"
    assert load_tokenizer(str(exported)).eos_token == "<eos>"
    assert load_model(str(exported)).num_parameters() > 0


def test_two_processes_give_the_rows_and_losses_of_one(policy, whole_run, tmp_path):
    (tmp_path / "recorder.py").write_text(RECORDER)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    finished(
        command(
            *(tmp_path / "recorder.py", tmp_path / "rows.json"),
            *(*words(policy, tmp_path / "run"), "trainer.logger=[console]"),
            launcher=launcher,
        )
    )
    assert json.loads((tmp_path / "rows.json").read_text()) == json.loads((whole_run / "rows.json").read_text())
    for got, expected in zip(metrics(tmp_path / "run"), metrics(whole_run / "run"), strict=True):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert got[key] == pytest.approx(value, abs=1e-4, rel=1e-4), (expected["update"], key)
    require_equal_weights(tmp_path / "run", whole_run / "run")


def test_a_run_goes_on_with_another_number_of_processes(whole_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole_run / "run", run)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    finished(command(SCRIPT, f"trainer.resume_from={run / 'checkpoints' / 'update_000002'}", launcher=launcher))
    assert (run / "superseded" / "checkpoints" / "update_000003").is_dir()
    assert metrics(run)[-1] == pytest.approx(metrics(whole_run / "run")[-1], abs=1e-4, rel=1e-4)
    require_equal_weights(run, whole_run / "run")


def require_equal_weights(run: Path, other: Path) -> None:
    """Up to rounding, but for the biases of keys: they shift all scores alike, and AdamW learns from noise alone."""
    last = Path("checkpoints") / f"update_{UPDATES:06d}"
    expected = load_weights(other / last)
    for name, tensor in load_weights(run / last).items():
        if not name.endswith("k_proj.bias"):
            assert (tensor - expected[name]).abs().max() < 1e-5, name


def test_a_run_killed_in_the_middle_goes_on_to_the_same_numbers(policy, whole_run, tmp_path):
    run = tmp_path / "run"
    with subprocess.Popen(
        command(SCRIPT, *words(policy, run), "trainer.logger=[console]"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            deadline = time.monotonic() + 150
            while not (run / "checkpoints" / "update_000001").is_dir() and time.monotonic() < deadline:
                assert process.poll() is None
                time.sleep(0.02)
        finally:
            process.kill()
    assert not (run / "checkpoints" / f"update_{UPDATES:06d}").is_dir()

    out = finished(command(SCRIPT, f"trainer.resume_from={run}"))
    assert "going on after update" in out
    assert metrics(run) == metrics(whole_run / "run")
    last = Path("checkpoints") / f"update_{UPDATES:06d}"
    expected = load_weights(whole_run / "run" / last)
    for name, tensor in load_weights(run / last).items():
        assert tensor.equal(expected[name]), name


def test_one_of_two_processes_is_asked_to_stop_and_one_process_goes_on(policy, whole_run, tmp_path):
    run = tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    changes = ["trainer.logger=[console]", "trainer.total_updates=1000", "trainer.save_freq=1000"]
    with subprocess.Popen(
        command(SCRIPT, *words(policy, run), *changes, launcher=launcher),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + 150
            while not has_learnt(run) and time.monotonic() < deadline:
                assert process.poll() is None
                time.sleep(0.02)
            os.kill(process_of_rank(process.pid, 1), signal.SIGTERM)
            out, errors = process.communicate(timeout=150)
        finally:
            process.kill()
    assert process.returncode == 0, errors[-3000:]
    assert errors.count("SIGTERM: the run ends after the update at hand") == 1
    assert f"trainer.resume_from={run}\n" in out
    (left,) = (run / "checkpoints").iterdir()
    assert left.name in ("update_000001", "update_000002", f"update_{UPDATES:06d}")

    finished(command(SCRIPT, f"trainer.resume_from={run}", f"trainer.total_updates={UPDATES}"))
    require_equal_weights(run, whole_run / "run")


def has_learnt(run: Path) -> bool:
    """Whether the first update of a run is written down."""
    file = run / "metrics.jsonl"
    return file.is_file() and '"update": 1,' in file.read_text()


def process_of_rank(launcher: int, rank: int) -> int:
    """The id of a rank's process among a launcher's children."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"the launcher has no rank {rank}")


def test_an_update_without_any_advantage_is_skipped_and_said(policy, tmp_path, capsys):
    run = tmp_path / "run"
    # Nothing can be bought within two steps: no group differs, however often it is tried.
    gigpo_fsdp.main(
        [
            *words(policy, run),
            "trainer.val_before_train=false",
            "trainer.logger=[console]",
            "trainer.total_updates=1",
            "env.reward=sparse",
            "env.max_steps=2",
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.max_num_gen_batches=3",
        ]
    )
    assert "no update: every advantage is 0" in capsys.readouterr().out
    line = next(line for line in metrics(run) if "actor/update_skipped" in line)
    assert line["actor/update_skipped"] == 1.0
    assert line["rollout/truncated_frac"] == 1.0
    assert line["filter/num_tries"] == 3.0
    assert line["filter/num_groups_played"] == 12.0
    assert line["filter/num_groups_trained_on"] == 4.0
    assert line["rollout/num_episodes"] == 48.0 and line["trained/num_episodes"] == 16.0
    assert line["rollout/num_groups"] == 12.0 and line["trained/num_groups"] == 4.0
    assert line["rollout/generated_tokens"] > line["trained/generated_tokens"] > 0
    before = load_model(str(policy)).state_dict()
    for name, tensor in load_weights(run / "checkpoints" / "update_000001").items():
        assert tensor.equal(before[name]), name
    told = (run / "validations" / "update_000001.txt").read_text()
    assert "out of steps" in told and "-> search[" in told and "First prompt:\n    | task: " in told
    for place in ("validations", "rollouts"):  # whole episodes, for the viewer
        path = run / place / "update_000001.parquet"
        table = pyarrow.parquet.read_table(path).to_pydict()
        assert all("task: " in prompt for prompt in table["prompt"])
        assert all(action in reply.lower() for action, reply in zip(table["action"], table["reply"], strict=True))
        world = json.loads(pyarrow.parquet.read_schema(path).metadata[b"shopgym_step_batch"])["world"]
        assert (world["env_id"], world["catalogue_hash"]) == ("WebShop-v1", open_shop().catalogue_hash)
        assert len(load_batch(path)) == len(table["prompt"]) > 0
    parts = [np.asarray(table[name]) for name in ("episode_advantage", "step_advantage", "advantage")]
    assert np.abs(parts[0] + parts[1] - parts[2]).max() < 1e-5


def test_two_processes_filter_groups_as_one_does(policy, tmp_path):
    (tmp_path / "recorder.py").write_text(RECORDER)
    rows, lines = [], []
    for launcher in ((), ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")):
        name = f"{len(rows)}"
        arguments = [
            *words(policy, tmp_path / name),
            "trainer.total_updates=1",
            "trainer.val_before_train=false",
            "trainer.test_freq=0",
            "trainer.logger=[console]",
            "algorithm.filter_groups.enable=true",
            "env.max_steps=4",
            "algorithm.filter_groups.outcome=task_score",
            "algorithm.filter_groups.max_num_gen_batches=2",
            "data.gen_batch_size=6",
        ]
        finished(command(tmp_path / "recorder.py", tmp_path / f"{name}.json", *arguments, launcher=launcher))
        rows.append(json.loads((tmp_path / f"{name}.json").read_text()))
        lines.append(next(line for line in metrics(tmp_path / name) if "filter/num_tries" in line))
    assert rows[0] == rows[1]
    assert len(rows[0]) == lines[0]["filter/num_tries"]
    first_episodes = [min(row[0] for row in attempt) for attempt in rows[0]]
    assert first_episodes == [24 * attempt for attempt in range(len(rows[0]))], "tries are numbered differently"
    assert lines[0]["filter/num_groups_played"] == 6 * len(rows[0])
    figures = [{key: value for key, value in line.items() if key.startswith("filter/")} for line in lines]
    assert figures[0] == figures[1]


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("actor_rollout_ref.model.path=/no/such/policy", "/no/such/policy"),
        ("trainer.resume_from=/no/such/run", "holds no run"),
        ("env.webshop.data_dir=/no/such/catalogue", "/no/such/catalogue"),
        ("env.prompt=no_think", "prompt template hash"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(policy, tmp_path, word, complaint):
    run = tmp_path / "run"
    arguments = [text for text in words(policy, run) if "resume" not in word or "output_dir" not in text]
    with pytest.raises(ShopGymError, match=complaint) as caught:
        gigpo_fsdp.main([*arguments, word])
    assert "\n" not in str(caught.value)
    assert not run.exists()


def test_the_kl_in_the_reward_needs_a_reference_and_leaves_the_loss_alone(policy, tmp_path):
    run, settings = tmp_path / "run", ["actor_rollout_ref.actor.use_kl_loss=false", "algorithm.use_kl_in_reward=true"]
    one_step = ["actor_rollout_ref.actor.ppo_mini_batch_size=1000", "actor_rollout_ref.actor.ppo_epochs=1"]
    quick = [
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        "trainer.logger=[console]",
        "trainer.total_updates=2",
    ]
    gigpo_fsdp.main([*words(policy, run), *quick, *one_step, *settings, "algorithm.kl_ctrl.kl_coef=0.5"])
    lines = metrics(run)
    assert lines[0]["rollout/reward_kl_nats"] == pytest.approx(0.0, abs=1e-6)
    assert max(abs(line["rollout/reward_kl_nats"]) for line in lines) > 1e-4
    # One optimizer step an update: while it is computed, the weights are those that the reward was made with.
    learnt = [line for line in lines if "actor/loss" in line]
    assert any(line["actor/kl_to_reference_nats"] > 1e-6 for line in learnt)
    kind = "actor_rollout_ref.actor.kl_loss_type=kl"
    gigpo_fsdp.main([*words(policy, tmp_path / "kl"), *quick, *one_step, *settings, kind])
    for line in metrics(tmp_path / "kl"):
        assert line["actor/kl_to_reference_nats"] == pytest.approx(line["rollout/reward_kl_nats"], abs=1e-5)
    gigpo_fsdp.main([*words(policy, tmp_path / "none"), *quick, *one_step, settings[0]])
    assert not any("actor/kl_to_reference_nats" in line for line in metrics(tmp_path / "none"))


def test_an_engine_that_keeps_old_weights_stops_the_run(policy, tmp_path, monkeypatch):
    load = HFEngine.load_weights

    def load_once(engine, weights, version):
        if version == 0:
            load(engine, weights, version)

    monkeypatch.setattr(HFEngine, "load_weights", load_once)
    quick = ["trainer.val_before_train=false", "trainer.logger=[console]"]
    with pytest.raises(RuntimeError, match="the engine has weights 0, expected 1"):
        gigpo_fsdp.main([*words(policy, tmp_path / "rollout"), *quick, "trainer.test_freq=0"])
    with pytest.raises(RuntimeError, match="the engine has weights 0, expected 1"):
        gigpo_fsdp.main([*words(policy, tmp_path / "check"), *quick, "trainer.test_freq=1"])


@pytest.mark.parametrize(("in_loss", "in_reward"), [(False, False), (True, False), (False, True), (True, True)])
def test_there_is_a_reference_only_where_a_kl_needs_it(policy, tmp_path, in_loss, in_reward):
    settings, *_ = resolve(
        [
            *words(policy, tmp_path),
            f"actor_rollout_ref.actor.use_kl_loss={in_loss}",
            f"algorithm.use_kl_in_reward={in_reward}",
        ]
    )
    tokenizer = load_tokenizer(str(policy))
    actor, reference = open_learners(settings, start_ranks(), load_model(str(policy)), tokenizer, None)
    assert (reference is not None) == (in_loss or in_reward)
    assert actor.config.loss.use_kl_loss == in_loss
    assert AdvantageConfig.of(settings).use_kl_in_reward == in_reward


def test_another_batch_size_goes_on_with_the_next_goals_and_tells_what_changed(whole_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole_run / "run", run)
    settings, state_file = (run / "settings.yaml").read_text(), run / "checkpoints" / "update_000003" / "state.json"
    state = json.loads(state_file.read_text())
    assert state.pop("goals_played") == 12
    order = training_goals(open_shop(), resolve(["data.train_batch_size=4", "trainer.seed=33"])[0])
    for number, saved in enumerate([state, state | {"goals_played": 21}]):  # of before, and one that says it
        state_file.write_text(json.dumps(saved))
        words = ["trainer.total_updates=4", "trainer.test_freq=0", "trainer.logger=[console]"]
        gigpo_fsdp.main([f"trainer.resume_from={state_file.parent}", "data.train_batch_size=3", *words])
        first = (12, 21)[number]
        after = json.loads((run / "checkpoints" / "update_000004" / "state.json").read_text())
        assert after["goals_played"] == first + 3
        goals = dict.fromkeys(load_batch(run / "rollouts" / "update_000004.parquet").goal_index.tolist())
        places = [goal for update in range(7) for goal in order.batch(update).tolist()]
        assert list(goals) == places[first : first + 3]
        if number == 0:
            told = capsys.readouterr().out
            assert "note: data.train_batch_size 4 -> 3 from update 4 on" in told
            assert "note: trainer.total_updates 3 -> 4 from update 4 on" in told
            assert (run / "settings.000003.yaml").read_text() == settings
    assert " -> " not in capsys.readouterr().out.split("actor_rollout_ref")[0], "nothing changed this time"
    gigpo_fsdp.main([f"trainer.resume_from={run}", "trainer.total_updates=5", "trainer.seed=1", "trainer.test_freq=0"])
    assert "note: with another trainer.seed the goal order is another" in capsys.readouterr().out
    assert [line["update"] for line in read_metrics(run / "superseded" / "metrics.000004.jsonl")][-1] == 4


def test_boards_that_cannot_be_opened_leave_no_half_run_and_close_the_engine(policy, whole_run, tmp_path, monkeypatch):
    closed = []

    def refuse(*_):
        raise SettingsError("no such account")

    monkeypatch.setattr(HFEngine, "close", lambda engine: closed.append(engine))
    monkeypatch.setattr("trainers.run.open_boards", refuse)
    with pytest.raises(SettingsError, match="no such account"):
        gigpo_fsdp.main(words(policy, tmp_path / "new"))
    assert not (tmp_path / "new").exists() and len(closed) == 1
    run = tmp_path / "run"
    shutil.copytree(whole_run / "run", run)
    files = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(SettingsError, match="no such account"):
        gigpo_fsdp.main([f"trainer.resume_from={run / 'checkpoints' / 'update_000002'}", "trainer.seed=1"])
    assert {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_checkpoints_of_something_else_are_refused_before_an_engine_starts(policy, tmp_path, monkeypatch):
    run, kind, model = tmp_path / "run", "env.env_name=WebShop-v0", tmp_path / "policy"
    shutil.copytree(policy, model, ignore=shutil.ignore_patterns("provenance.json"))  # else it is of v1 alone
    quick = ["trainer.val_before_train=false", "trainer.test_freq=0", "trainer.logger=[console]", "env.max_steps=2"]
    gigpo_fsdp.main([*words(model, run), *quick, kind, "trainer.total_updates=1"])
    monkeypatch.setattr("trainers.run.open_engine", lambda *_: pytest.fail("an engine was started"))
    with pytest.raises(CheckpointError, match="environment seed 0, this run has 7"):
        gigpo_fsdp.main([f"trainer.resume_from={run}", "env.seed=7"])
    with pytest.raises(ShopGymError, match="prompt template hash"):
        gigpo_fsdp.main([f"trainer.resume_from={run}", "env.prompt=no_think"])
