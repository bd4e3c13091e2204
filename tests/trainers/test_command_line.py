"""What a user gets wrong at the trainers' command lines: one line, exit code 2, and no directory left behind."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.prepare import main as prepare
from rollout.engines import vllm_install
from trainers import evaluation, gigpo_fsdp, sft
from trainers.command import run_command
from trainers.directory import new_directory, only_writer, run_directory
from trainers.engines import require_equal_parts
from trainers.models import make_small_policy, save_policy, train_tokenizer
from trainers.ranks import Ranks
from trainers.run import check_ranks
from trainers.settings import SettingsError, resolve
from webshop_env.errors import ShopGymError
from webshop_env.shop import EMBEDDED_CATALOGUE

SMALL = [
    "trainer.total_updates=1",
    "data.train_batch_size=1",
    "env.rollout.n=2",
    "env.max_steps=2",
    "data.max_prompt_length=400",
    "data.max_response_length=60",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.logger=[console]",
]


def save(directory: Path, tokenizer, *, hidden: int = 16, layers: int = 1) -> Path:
    model = make_small_policy(tokenizer, hidden=hidden, layers=layers, heads=2)
    save_policy(directory, config=model.config, state_dict=model.state_dict(), tokenizer=tokenizer, made={})
    return directory


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["search for a red mug and click buy now, back to search"] * 3, 300)


@pytest.fixture(scope="module")
def policy(tmp_path_factory, tokenizer) -> Path:
    return save(tmp_path_factory.mktemp("policy"), tokenizer)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, policy) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "run"
    gigpo_fsdp.main([*SMALL, f"actor_rollout_ref.model.path={policy}", f"trainer.output_dir={directory}"])
    return directory


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def complaint(main, *words: str) -> str:
    """The one line with which a command refuses its words, having written nothing where it was called."""
    with pytest.raises(ShopGymError) as caught:
        main(list(words))
    assert "\n" not in str(caught.value)
    assert list(Path.cwd().iterdir()) == []
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("env=3", "'env' is a group of settings, not one: env.env_name"),
        ("actor_rollout_ref.actor.optim.lr=nan", "optim.lr must be a finite number"),
        ("env.success_reward=inf", "env.success_reward must be a finite number"),
        ("actor_rollout_ref.rollout.name=sglang", "rollout.name must be one of hf, vllm, got sglang"),
        ("data.train_files=a.parquet", "data.train_files: a.parquet cannot be read (No such file or directory)"),
        ("data.val_files=a.parquet", "data.val_files: a.parquet cannot be read (No such file or directory)"),
        ("trainer.nnodes=3", "3 machines cannot share the 1 ranks"),
        ("trainer.n_gpus_per_node=2", "ask for 2 ranks, there are 1"),
        ("data.train_batch_size=1000000", "is more than the"),
        ("data.max_prompt_length=20", "tokens of the template compact and the longest task"),
        ("data.max_prompt_length=1000", "are more than the 1024 positions of the policy"),
        ("data.max_response_length=8", "which no episode can do without"),
        ("env.webshop.data_dir=nowhere", "no such directory"),
        ("trainer.output_dir=/dev/null/run", "trainer.output_dir: /dev/null/run cannot be written"),
    ],
)
def test_a_wrong_setting_of_training_is_refused_before_anything_is_written(policy, word, message):
    assert message in complaint(gigpo_fsdp.main, *SMALL, f"actor_rollout_ref.model.path={policy}", word)


def test_an_engine_that_is_not_installed_is_refused_before_anything_is_written(policy, monkeypatch):
    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(vllm_install, "version", nothing)
    words = [*SMALL, f"actor_rollout_ref.model.path={policy}", "actor_rollout_ref.rollout.name=vllm"]
    assert "vLLM is not installed; install vllm==0.22.1 with torch 2.11 or" in complaint(gigpo_fsdp.main, *words)


def test_a_date_is_a_name_like_any_other(capsys):
    gigpo_fsdp.main(["--explain", "trainer.experiment_name=2025-01-31", "data.truncation=error"])
    shown = capsys.readouterr().out
    assert (
        "trainer.experiment_name=2025-01-31\n" in shown and "note: data.truncation=error is checked at start" in shown
    )


@pytest.mark.parametrize("main", [gigpo_fsdp.main, sft.main, evaluation.main])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"env: {foo: 1}", "unknown setting 'env.foo'"),
        (b"trainer: {foo: 1}", "unknown setting 'trainer.foo'"),
        (b"env: {max_steps: 0}", "env.max_steps must be at least 1"),
        (b"\xff\xfe", "not a YAML file"),
    ],
)
def test_a_mistake_in_a_recipe_names_the_recipe(tmp_path, main, content, message):
    recipe = tmp_path / "mine.yaml"
    recipe.write_bytes(content)
    error = complaint(main, "--explain", f"recipe={recipe}")
    assert message in error and str(recipe) in error


def break_weights(policy: Path) -> None:
    weights = policy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def deepen(policy: Path) -> None:
    file = policy / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}))


def widen(policy: Path) -> None:
    file = policy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 512}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_weights, "the model cannot be loaded"),
        (deepen, "the file of weights lacks model.layers.1."),
        (widen, "the weights have not the shapes that config.json says"),
        (lambda policy: (policy / "model.safetensors").unlink(), "the model cannot be loaded"),
        (lambda policy: (policy / "config.json").write_text("{"), "cannot be loaded"),
        (lambda policy: (policy / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda policy: (policy / "tokenizer.json").write_text("{}"), "the tokenizer cannot be loaded (KeyError"),
        (lambda policy: (policy / "tokenizer_config.json").write_text("{"), "the tokenizer cannot be loaded"),
        (lambda policy: (policy / "provenance.json").write_text("{"), "provenance.json: not JSON"),
        (lambda policy: (policy / "provenance.json").write_text("[]"), "provenance.json: not an object"),
    ],
)
def test_a_damaged_policy_is_refused_by_training_and_evaluation(tmp_path, policy, damage, message):
    broken = tmp_path / "broken"
    shutil.copytree(policy, broken)
    damage(broken)
    for main, key in ((gigpo_fsdp.main, "actor_rollout_ref.model.path"), (evaluation.main, "model")):
        words = SMALL if main is gigpo_fsdp.main else [word for word in SMALL if word.startswith(("env.m", "data.max"))]
        error = complaint(main, *words, f"{key}={broken}")
        assert message in error and str(broken) in error


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("state.json", "{", "cannot be read"),
        ("state.json", '{"updates_done": "x"}', "cannot be read (updates_done is 'x')"),
        ("state.json", '{"hashes": null}', "cannot be read"),
        ("state.json", '{"hashes": {"catalogue_hash": "aa"}}', "was made with catalogue hash aa"),
        ("state.json", '{"hashes": {"prompt_template_hash": "aa"}}', "was made with prompt template hash aa"),
        ("optimizer.safetensors", None, "cannot be read (optimizer.safetensors: "),
        ("optimizer.safetensors", "x" * 100, "cannot be read (optimizer.safetensors: "),
        ("policy/model.safetensors", None, "cannot be read (policy/model.safetensors: "),
        ("policy/model.safetensors", "x" * 100, "cannot be read (policy/model.safetensors: "),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, finished_run, file, content, message):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    checkpoint = run / "checkpoints" / "update_000001"
    (checkpoint / file).unlink() if content is None else (checkpoint / file).write_text(content)
    error = complaint(gigpo_fsdp.main, f"trainer.resume_from={run}", "trainer.total_updates=2")
    assert message in error and str(checkpoint) in error


def test_a_run_goes_on_with_its_own_model_in_its_own_place(tmp_path, finished_run, tokenizer):
    deeper = save(tmp_path / "deeper", tokenizer, layers=2)
    resume = f"trainer.resume_from={finished_run}"
    other = complaint(gigpo_fsdp.main, resume, f"actor_rollout_ref.model.path={deeper}")
    assert "was made with start policy hash" in other
    assert "with its own settings" in complaint(gigpo_fsdp.main, resume, "recipe=tiny")
    assert "in its own directory" in complaint(gigpo_fsdp.main, resume, "trainer.output_dir=elsewhere")


def test_a_run_that_goes_on_from_an_earlier_checkpoint_leaves_nothing_of_the_old_branch(tmp_path, policy):
    run = tmp_path / "run"
    words = [*SMALL, f"actor_rollout_ref.model.path={policy}", "data.val_batch_size=2", "trainer.save_freq=1"]
    often = ["trainer.total_updates=3", "trainer.test_freq=1"]
    gigpo_fsdp.main([*words, *often, f"trainer.output_dir={run}"])
    earlier = run / "checkpoints" / "update_000002"
    gigpo_fsdp.main(
        [
            f"trainer.resume_from={earlier}",
            "actor_rollout_ref.actor.optim.lr=0.5",
            "actor_rollout_ref.actor.grad_clip=7",
        ]
    )
    made = json.loads((run / "checkpoints" / "update_000003" / "policy" / "provenance.json").read_text())
    assert made["settings"]["actor_rollout_ref.actor.grad_clip"] == 7
    old = run / "superseded" / "checkpoints" / "update_000003" / "policy" / "provenance.json"
    assert json.loads(old.read_text())["settings"]["actor_rollout_ref.actor.grad_clip"] == 1
    assert (run / "superseded" / "validations" / "update_000003.json").is_file()
    assert (run / "validations" / "update_000003.json").is_file()


def test_a_full_disk_under_the_viewers_files_is_told_once_and_the_run_goes_on(tmp_path, policy, monkeypatch, capsys):
    def full(table, file, **options) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    words = [*SMALL, f"actor_rollout_ref.model.path={policy}", "data.val_batch_size=2", "trainer.test_freq=1"]
    gigpo_fsdp.main([*words, "trainer.total_updates=2", f"trainer.output_dir={tmp_path / 'run'}"])
    said = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ") and "No space" in line
    ]
    assert len(said) == 1 and "goes on without such files" in said[0]
    assert (tmp_path / "run" / "checkpoints" / "update_000002").is_dir()
    assert [path.suffix for path in sorted((tmp_path / "run" / "validations").iterdir())] == [".json", ".txt"] * 2
    assert list((tmp_path / "run" / "rollouts").iterdir()) == []


def test_a_run_does_not_go_on_to_validations_that_cannot_be_compared(tmp_path, policy):
    run = tmp_path / "run"
    words = [*SMALL, f"actor_rollout_ref.model.path={policy}", "data.val_batch_size=2", "trainer.test_freq=1"]
    gigpo_fsdp.main([*words, "trainer.val_before_train=true", f"trainer.output_dir={run}"])
    error = complaint(gigpo_fsdp.main, f"trainer.resume_from={run}", "data.val_batch_size=3")
    assert "different goals" in error and "leave data.val_batch_size" in error


def test_a_run_does_not_go_on_with_other_training_goals(tmp_path, policy):
    for name in ("lists", "others"):
        assert prepare(["--train_data_size", "4" if name == "lists" else "5", "--out", str(tmp_path / name)]) == 0
    run, train = tmp_path / "run", tmp_path / "lists" / "train.parquet"
    words = [*SMALL, f"actor_rollout_ref.model.path={policy}", f"data.train_files={train}"]
    gigpo_fsdp.main([*words, f"trainer.output_dir={run}"])
    resume = f"trainer.resume_from={run}"
    for word in ("data.train_files=null", f"data.train_files={tmp_path / 'others' / 'train.parquet'}"):
        assert "was made with train goals" in complaint(gigpo_fsdp.main, resume, "trainer.total_updates=2", word)
    assert "was made with train goals" in complaint(
        gigpo_fsdp.main, resume, "data.train_files=null", "env.webshop.split_by=product"
    )
    gigpo_fsdp.main([resume, "trainer.total_updates=2"])
    assert (run / "checkpoints" / "update_000002").is_dir()


def test_evaluation_says_all_once_on_the_first_rank_and_notes_other_noise(tmp_path, policy, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [
        f"model={policy}",
        "goals=2",
        "env.max_steps=2",
        "data.max_prompt_length=400",
        "data.max_response_length=60",
    ]
    evaluation.main([*words, "out=~/e.json"])
    assert {"e.json", "e.parquet"} <= {path.name for path in tmp_path.iterdir()}
    evaluation.main([*words, "baseline=~/e.json", "seed=1", "data.return_raw_chat=true"])
    assert not torch.distributed.is_initialized()
    shown = capsys.readouterr().out
    assert "note: data.return_raw_chat does nothing here" in shown
    assert "note: the earlier evaluation had seed 0, this one has 1" in shown
    assert "paired difference of success 0.000 [-0.658, 0.658] (n=2)" in shown


def test_evaluation_refuses_what_it_could_not_save_or_compare_before_it_plays(tmp_path, policy):
    words = [f"model={policy}", "goals=1"]
    saved = tmp_path / "saved.json"
    assert "out: " in complaint(evaluation.main, *words, "out=/dev/null/x.json")
    assert "is a directory; name a file" in complaint(evaluation.main, *words, f"out={tmp_path}")
    columns = {
        "goal_index": [1],
        "goal_id": ["g"],
        "product": ["p"],
        "won": [True],
        "task_score": [1.0],
        "episode_length": [3],
    }
    from_where = {"environment": "WebShop-v1", "variant": None, "goals": "synthetic", "split_by": "goal"}
    whole = {"goal_list": from_where | {"catalogue_hash": "aa"}, "split": "eval", "temperature": 0.4, "seed": 0}
    whole |= {"policy": "p", "setup": {}} | columns
    saved.write_text(json.dumps(whole))
    assert "differ in their catalogue hash" in complaint(evaluation.main, *words, f"baseline={saved}", "out=x.json")
    saved.write_text(json.dumps(whole | {"won": "x"}))
    assert "is no saved evaluation" in complaint(evaluation.main, *words, f"baseline={saved}", "out=x.json")
    if not torch.cuda.is_available():
        assert "there is no GPU" in complaint(evaluation.main, *words, "device=cuda")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out=/dev/null/policy"], "out: /dev/null/policy cannot be written"),
        (["out=p", "lr=nan"], "lr must be a finite number"),
        (["out=p", "hidden=18", "heads=6"], "hidden must be a multiple of twice the heads"),
        (["out=p", "max_positions=32"], "are more than the 32 positions"),
        (["out=p", "data.max_response_length=8"], "which no episode can do without"),
        (["out=p", "init=nowhere/at/all"], "does not exist"),
    ],
)
def test_imitation_refuses_before_it_begins(words, message):
    assert message in complaint(sft.main, "goals=1", "epochs=0.1", "hidden=16", "layers=1", "heads=2", *words)


def test_a_run_that_named_its_policy_from_its_folder_goes_on_from_another(tmp_path, policy, monkeypatch):
    monkeypatch.chdir(policy.parent)
    run = tmp_path / "run"
    gigpo_fsdp.main([*SMALL, f"actor_rollout_ref.model.path={policy.name}", f"trainer.output_dir={run}"])
    monkeypatch.chdir(tmp_path)
    gigpo_fsdp.main([f"trainer.resume_from={run}", "trainer.total_updates=2"])
    assert (run / "checkpoints" / "update_000002").is_dir()


def test_weights_that_are_no_numbers_are_not_saved(tmp_path, policy, monkeypatch, capsys):
    run, learn = tmp_path / "run", gigpo_fsdp.learn

    def to_nothing(run, update, batch):
        metrics = learn(run, update, batch)
        with torch.no_grad():
            next(run.actor.scorer.parameters()).fill_(float("nan"))
        return metrics

    monkeypatch.setattr(gigpo_fsdp, "learn", to_nothing)
    words = [*SMALL, f"actor_rollout_ref.model.path={policy}", f"trainer.output_dir={run}"]
    monkeypatch.setattr(sys, "argv", ["gigpo_fsdp.py", *words])
    with pytest.raises(SystemExit) as ended:
        run_command(gigpo_fsdp.main)
    assert ended.value.code == 1
    assert "after update 1 some weights are no numbers: they are not saved. Start again" in capsys.readouterr().err
    assert not list(run.glob("checkpoints/update_*"))


def test_a_new_run_does_not_begin_beside_checkpoints_of_another(tmp_path, monkeypatch):
    (tmp_path / "outputs" / "mine" / "checkpoints" / "update_000002").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    settings = resolve(["trainer.output_dir=outputs/mine"])[0]
    with pytest.raises(SettingsError, match="outputs/mine holds checkpoints of another run"):
        run_directory(settings)
    assert run_directory(resolve(["trainer.experiment_name=mine"])[0]) == Path("outputs/mine-2")


def test_the_curve_shows_updates_where_validations_are_off(tmp_path, policy, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(gigpo_fsdp, "draw_curve", lambda metrics, picture: drawn.append(metrics.read_text()))
    gigpo_fsdp.main([*SMALL, f"actor_rollout_ref.model.path={policy}", f"trainer.output_dir={tmp_path / 'run'}"])
    (text,) = drawn
    assert '"update": 1,' in text and "rollout/success_frac" in text


def test_a_run_that_is_being_written_is_not_gone_on_with(finished_run):
    with only_writer(finished_run, Ranks(0, 1, torch.device("cpu"), None)):
        error = complaint(gigpo_fsdp.main, f"trainer.resume_from={finished_run}")
    assert "is being written by another process" in error
    with only_writer(finished_run, Ranks(0, 1, torch.device("cpu"), None)):
        pass  # the refusal left no lock


@pytest.mark.parametrize("constrained", ["true", "false"])
def test_a_catalogue_with_halves_of_surrogate_pairs_is_trained_in(tmp_path, policy, constrained):
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(EMBEDDED_CATALOGUE, data, copy_function=shutil.copyfile)
    products = json.loads((data / "items_shuffle_1000.json").read_text())
    for product in products:
        product["name"] += " \ud83d"
        for choice in (choice for group in product["customization_options"].values() for choice in group):
            choice["value"] += "\ud83d"
    (data / "items_shuffle_1000.json").write_text(json.dumps(products))
    words = [*SMALL, f"env.webshop.data_dir={data}", "data.val_batch_size=2", "trainer.test_freq=1", "env.max_steps=5"]
    gigpo_fsdp.main(
        [
            *(*words, f"actor_rollout_ref.model.path={policy}", f"actor_rollout_ref.rollout.constrained={constrained}"),
            f"trainer.output_dir={run}",
        ]
    )
    kept = {path.name for path in run.glob("*/update_000001.*")}
    assert kept == {"update_000001.json", "update_000001.txt", "update_000001.parquet"}


def test_of_two_runs_that_begin_at_once_one_writes_to_a_directory(tmp_path, policy, monkeypatch):
    alone, place = Ranks(0, 1, torch.device("cpu"), None), tmp_path / "run"
    (tmp_path / "called").mkdir()
    monkeypatch.chdir(tmp_path / "called")
    named, unnamed = resolve([f"trainer.output_dir={place}"])[0], resolve(["trainer.experiment_name=mine"])[0]
    with ExitStack() as first, ExitStack() as second, ExitStack() as undo:
        assert new_directory(named, alone, first, undo) == place
        error = complaint(
            gigpo_fsdp.main, *SMALL, f"actor_rollout_ref.model.path={policy}", f"trainer.output_dir={place}"
        )
        assert f"{place} is being written by another process" in error
        assert [path.name for path in place.iterdir()] == [".lock"], "nothing of the first's is touched"
        assert new_directory(unnamed, alone, first, undo) == Path("outputs/mine")
        assert new_directory(unnamed, alone, second, undo) == Path("outputs/mine-2"), (
            "the first has no settings there yet"
        )
        (Path("outputs/mine") / "settings.yaml").touch()
    assert not place.exists() and not Path("outputs/mine-2").exists(), "what nobody wrote to is gone"
    assert Path("outputs/mine/settings.yaml").exists()
    place.mkdir()
    (place / "settings.yaml").touch()
    with ExitStack() as third, pytest.raises(SettingsError, match="run holds a run"):
        new_directory(named, alone, third, third)


def test_a_directory_that_became_a_runs_while_its_lock_was_waited_for_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = Ranks(0, 1, torch.device("cpu"), None)

    @contextmanager
    def after_another(directory, ranks):
        directory.mkdir(parents=True, exist_ok=True)
        if directory.name == "mine":
            (directory / "settings.yaml").touch()
        yield

    monkeypatch.setattr("trainers.directory.only_writer", after_another)
    with ExitStack() as held:
        found = new_directory(resolve(["trainer.experiment_name=mine"])[0], alone, held, held)
    assert found == Path("outputs/mine-2")


def test_of_many_ranks_the_first_one_refuses(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gigpo_fsdp.py", "env=3"])
    for rank, num_lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            run_command(gigpo_fsdp.main)
        assert ended.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == num_lines


def test_imitation_does_not_write_over_what_is_there(tmp_path, policy):
    before = sorted(path.name for path in policy.iterdir())
    assert "is not empty" in complaint(sft.main, f"out={policy}", "goals=1")
    assert sorted(path.name for path in policy.iterdir()) == before


def test_a_refusal_is_one_line_on_stderr_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gigpo_fsdp.py", "env=3"])
    with pytest.raises(SystemExit) as ended:
        run_command(gigpo_fsdp.main)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: 'env' is a group of settings")


def test_several_mistakes_are_a_line_each(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gigpo_fsdp.py", "env=3", "env.max_steps=0"])
    with pytest.raises(SystemExit) as ended:
        run_command(gigpo_fsdp.main)
    assert ended.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: 'env' is a group") and second.startswith("error: env.max_steps must be at least 1")


def test_ranks_that_are_on_other_machines_than_asked_for_are_refused(monkeypatch):
    ranks = Ranks(0, 4, torch.device("cpu"), None)
    two_machines = resolve(["trainer.nnodes=2", "trainer.n_gpus_per_node=2"])[0]
    check_ranks(two_machines, ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_ranks(two_machines, ranks)
    check_ranks(resolve(["trainer.nnodes=2"])[0], ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ShopGymError, match="this machine has 4 of the 4 ranks, it should have 2"):
        check_ranks(two_machines, ranks)


@pytest.mark.parametrize(("words", "fits"), [((), True), (("=3",), False), (("=2",), True), (("=8",), False)])
def test_ranks_that_engines_cannot_share_are_refused(words, fits):
    size = [f"actor_rollout_ref.rollout.tensor_model_parallel_size{word}" for word in words]
    ranks = Ranks(0, 4, torch.device("cpu"), None)
    check_ranks(resolve(size)[0], ranks)  # with transformers each rank has its own
    settings = resolve([*size, "actor_rollout_ref.rollout.name=vllm"])[0]
    if fits:
        check_ranks(settings, ranks)
    else:
        with pytest.raises(ShopGymError, match="do not divide the 4 ranks of a machine"):
            check_ranks(settings, ranks)


@pytest.mark.parametrize(("num_parts", "fits"), [(1, True), (2, True), (3, False), (4, True), (8, False)])
def test_models_whose_heads_cannot_be_shared_out_are_refused(num_parts, fits):
    policy = SimpleNamespace(config=SimpleNamespace(num_attention_heads=12, num_key_value_heads=2))
    if fits:
        require_equal_parts(policy, num_parts)
    else:
        with pytest.raises(ShopGymError, match="cannot share out the model's 12 attention heads and 2 heads of keys"):
            require_equal_parts(policy, num_parts)


def test_a_place_without_permission_is_one_line(capsys):
    def main(words: list[str]) -> None:
        raise PermissionError(13, "Permission denied", "closed/file")

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: closed/file: permission denied; change its permissions or name another place\n"
    )
