"""Settings: where values come from, which keys are taken, what is refused and how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainers import gigpo_fsdp
from trainers import settings as settings_module
from trainers.evaluation import EvaluationSettings
from trainers.settings import Settings, SettingsError, explain, flatten, leaves, load_recipe, resolve
from trainers.sft import SftSettings


def test_defaults_then_recipe_then_command_line(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("env: {max_steps: 7, history_length: 1}\n")
    settings, _, sources = resolve([f"recipe={recipe}", "env.history_length=4"])
    assert (settings.env.max_steps, settings.env.history_length, settings.env.rollout.n) == (7, 4, 8)
    assert sources["env.history_length"] == "command line"
    assert sources["env.max_steps"] == f"recipe {recipe}"
    assert "env.rollout.n" not in sources


def test_a_recipe_goes_over_the_one_that_it_names(tmp_path):
    (tmp_path / "mine.yaml").write_text("recipe: base.yaml\nenv: {max_steps: 7}\n")
    (tmp_path / "base.yaml").write_text("recipe: frozenlake\nenv: {max_steps: 8, history_length: 1}\n")
    settings, notes, _ = resolve([f"recipe={tmp_path / 'mine.yaml'}"])
    frozen = resolve(["recipe=frozenlake"])[0]
    assert (settings.env.env_name, settings.env.max_steps, settings.env.history_length) == ("FrozenLake-v1", 7, 1)
    assert settings.trainer == frozen.trainer
    assert settings.recipe == str(tmp_path / "mine.yaml") and notes == []

    (tmp_path / "base.yaml").write_text("recipe: mine.yaml\n")
    with pytest.raises(SettingsError, match=r"mine\.yaml: is a recipe over itself; take its line .recipe"):
        resolve([f"recipe={tmp_path / 'mine.yaml'}"])


def test_a_runs_settings_are_a_recipe_without_the_one_that_they_came_from(tmp_path):
    gone = {**flatten(resolve(["env.max_steps=7"])[0]), "recipe": str(tmp_path / "gone.yaml")}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(gone))
    assert resolve([f"recipe={tmp_path / 'settings.yaml'}"])[0].env.max_steps == 7


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_recipe_leaves_the_defaults(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    assert resolve([f"recipe={tmp_path / 'mine.yaml'}"])[0].env == Settings().env


def test_no_value_of_a_recipe_is_lost_to_another(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {total_updates: 7}\nenv: {max_steps: 5}\ntrainer: {seed: 1}\n")
    with pytest.raises(SettingsError, match=r"mine\.yaml: 'trainer' stands there twice, in line 3 again"):
        resolve([f"recipe={tmp_path / 'mine.yaml'}"])


def test_the_default_recipe_is_tiny():
    settings, _, _ = resolve([])
    assert settings.env.prompt == "compact"
    assert settings.actor_rollout_ref.rollout.constrained
    assert settings.actor_rollout_ref.model.path == "embedded"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("actor_rollout_ref.actor.optm.lr", "actor_rollout_ref.actor.optim.lr"),
        ("env.maxsteps", "env.max_steps"),
        ("trainer.totalupdates", "trainer.total_updates"),
        ("gamma", "algorithm.gamma"),
    ],
)
def test_an_unknown_key_names_the_nearest(wrong, meant):
    with pytest.raises(SettingsError, match=f"unknown setting '{wrong}'.*{meant}"):
        resolve([f"{wrong}=1"])


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("algorithm.gamma=1.5", "algorithm.gamma must be at most 1"),
        ("env.rollout.n=0", "env.rollout.n must be at least 1"),
        ("env.rollout.n=two", "env.rollout.n must be a whole number"),
        ("env.rollout.n=true", "env.rollout.n must be a whole number"),
        ("env.max_steps=null", "env.max_steps must be a whole number"),
        ("actor_rollout_ref.rollout.n=4", "env.rollout.n"),
        ("actor_rollout_ref.actor.strategy=megatron", "must be fsdp2, got megatron: models are those of transformers"),
        ("trainer.logger=[console,mlflow]", "mlflow"),
        ("algorithm.filter_groups.max_num_gen_batches=0", "max_num_gen_batches must be at least 1, got 0"),
        ("algorithm.filter_groups.outcome=reward", "algorithm.filter_groups.outcome must be one of won, task_score"),
        ("env.max_steps", "not key=value"),
        ("recipe=nonsense", "tiny"),
    ],
)
def test_bad_values_are_refused_in_one_line(word, complaint):
    with pytest.raises(SettingsError) as caught:
        resolve([word])
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_filtering_groups_of_one_episode_is_refused():
    assert resolve(["algorithm.filter_groups.enable=true"])[0].algorithm.filter_groups.outcome == "won"
    with pytest.raises(SettingsError, match=r"env\.rollout\.n=2 or more"):
        resolve(["algorithm.filter_groups.enable=true", "env.rollout.n=1"])


def test_playing_fewer_goals_than_are_learnt_from_is_refused():
    words = ["algorithm.filter_groups.enable=true", "data.train_batch_size=8"]
    assert resolve([*words, "data.gen_batch_size=64"])[0].goals_of_a_try == 64
    assert resolve(["data.train_batch_size=8", "data.gen_batch_size=64"])[0].goals_of_a_try == 8, "noted: no filter"
    with pytest.raises(SettingsError, match=r"data\.gen_batch_size=7 is less than data\.train_batch_size=8, "):
        resolve([*words, "data.gen_batch_size=7"])


def test_numbers_as_published_scripts_write_them():
    settings, _, _ = resolve(["actor_rollout_ref.actor.optim.lr=1e-6", "trainer.logger=['console']"])
    assert settings.actor_rollout_ref.actor.optim.lr == 1e-6
    assert settings.trainer.logger == ("console",)


def test_a_number_may_begin_with_zeros():
    settings = resolve(["trainer.total_updates=010", "env.success_reward=007"])[0]
    assert (settings.trainer.total_updates, settings.env.success_reward) == (10, 7.0)


@pytest.mark.parametrize(
    "text", ["0012", "1.10", "12:30", "1_000", "0x1F", "on", "no", "~", "2025-01-31", "run #3", "a: b", " x "]
)
def test_texts_are_taken_as_they_were_typed(text):
    settings = resolve([f"trainer.experiment_name={text}", f"trainer.output_dir={text}", f"data.val_files={text}"])[0]
    assert (settings.trainer.experiment_name, settings.trainer.output_dir, settings.data.val_files) == (text,) * 3


def test_a_text_can_be_quoted_and_taken_back():
    settings = resolve(["trainer.experiment_name='run #3'", 'trainer.output_dir="null"', "data.val_files=null"])[0]
    assert (settings.trainer.experiment_name, settings.trainer.output_dir) == ("run #3", "null")
    assert settings.data.val_files is None
    with pytest.raises(SettingsError, match=r"trainer\.experiment_name.*got \['a'\]"):
        resolve(["trainer.experiment_name=[a]"])


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_the_shops_ids_can_be_named_as_gymnasium_names_them(version):
    assert resolve([f"env.env_name=webshop_env:WebShop-{version}"])[0].env.env_name == f"WebShop-{version}"


def test_the_default_run_has_nothing_to_note():
    assert resolve([])[1] == []


ACTOR, ROLLOUT, GIGPO = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.gigpo"
VLLM = (f"{ROLLOUT}.name=vllm",) * 2
KL_IN_REWARD = ("algorithm.use_kl_in_reward=true",) * 2
FILTER = ("algorithm.filter_groups.enable=true",) * 2
PENALTY = (f"{ACTOR}.use_invalid_action_penalty=true",) * 2
LORA = ("actor_rollout_ref.model.lora_rank above 0", "actor_rollout_ref.model.lora_rank=4")
REFERENCE = (
    f"a reference ({ACTOR}.use_kl_loss=true or algorithm.use_kl_in_reward=true)",
    f"{ACTOR}.use_kl_loss=true",
)
ESTIMATORS = ("algorithm.adv_estimator=gigpo or grpo", "algorithm.adv_estimator=grpo")
SHOP = ("a shop (env.env_name=WebShop-v1, say)", "env.env_name=WebShop-v1")


@pytest.mark.parametrize(
    ("word", "beside", "counts_with", "cure"),
    [
        (f"{ROLLOUT}.gpu_memory_utilization=0.5", "", *VLLM),
        (f"{ROLLOUT}.enforce_eager=true", "", *VLLM),
        (f"{ROLLOUT}.free_cache_engine=false", "", *VLLM),
        (f"{ROLLOUT}.seeded_replies=false", "", *VLLM),
        (f"{ROLLOUT}.kv_cache_memory_bytes=1000000000", "", *VLLM),
        (f"{ROLLOUT}.val_kwargs.temperature=0.7", f"{ROLLOUT}.val_kwargs.do_sample=false")
        + (f"{ROLLOUT}.val_kwargs.do_sample=true",) * 2,
        (f"{ACTOR}.kl_loss_coef=0.5", f"{ACTOR}.use_kl_loss=false", *(f"{ACTOR}.use_kl_loss=true",) * 2),
        (f"{ACTOR}.kl_loss_type=mse", f"{ACTOR}.use_kl_loss=false", *(f"{ACTOR}.use_kl_loss=true",) * 2),
        (f"{ACTOR}.invalid_action_penalty_coef=0.5", f"{ACTOR}.use_invalid_action_penalty=false", *PENALTY),
        ("env.projection.strict=true", f"{ACTOR}.use_invalid_action_penalty=false", *PENALTY),
        (f"{ACTOR}.fsdp_config.optimizer_offload=true", f"{ACTOR}.fsdp_config.param_offload=true")
        + (f"{ACTOR}.fsdp_config.param_offload=false",) * 2,
        ("actor_rollout_ref.ref.fsdp_config.param_offload=true", f"{ACTOR}.use_kl_loss=false", *REFERENCE),
        ("actor_rollout_ref.ref.fsdp_config.param_offload=true", "actor_rollout_ref.model.lora_rank=4")
        + ("actor_rollout_ref.model.lora_rank=0",) * 2,
        ("actor_rollout_ref.model.lora_alpha=8.0", "", *LORA),
        ("actor_rollout_ref.model.target_modules=[q_proj]", "", *LORA),
        ("algorithm.filter_groups.max_num_gen_batches=3", "", *FILTER),
        ("algorithm.filter_groups.outcome=task_score", "", *FILTER),
        ("data.gen_batch_size=64", "", *FILTER),
        ("algorithm.kl_penalty=mse", "", *KL_IN_REWARD),
        ("algorithm.kl_ctrl.kl_coef=0.01", "", *KL_IN_REWARD),
        (f"{GIGPO}.similarity_thresh=0.5", "", *(f"{GIGPO}.enable_similarity=true",) * 2),
        (f"{GIGPO}.mode=mean_std_norm", "algorithm.adv_estimator=rloo", *ESTIMATORS),
        ("env.success_reward=3.0", "env.reward=score", *("env.reward=sparse",) * 2),
        ("env.memory_tokens=50", "", "env.memory=full, or a memory of your own", "env.memory=full"),
        ("env.webshop.num_products=50", "env.env_name=FrozenLake-v1", *SHOP),
        ("env.webshop.search=pyserini", "env.env_name=FrozenLake-v1", *SHOP),
        ("env.seed=3", "", *("env.env_name=WebShop-v0",) * 2),
        ("env.resources_per_worker.num_cpus=0.5", "", *("env.backend=ray",) * 2),
        ("trainer.project_name=mine", "", *("trainer.logger=[console,wandb]",) * 2),
    ],
)
def test_a_setting_that_counts_with_another_is_noted_without_it(word, beside, counts_with, cure):
    others = [beside] if beside else []
    settings, notes, sources = resolve([word, *others])
    assert notes == [f"{word} does nothing here: it counts with {counts_with}"]
    assert f"; counts with {counts_with}" in explain(settings, sources)
    assert resolve([word, *others, cure])[1] == []


@pytest.mark.parametrize("recipe", sorted(path.stem for path in settings_module.RECIPES.glob("*.yaml")))
@pytest.mark.parametrize("kind", [Settings, SftSettings, EvaluationSettings])
def test_recipes_need_no_notes(kind, recipe):
    notes = resolve([f"recipe={recipe}"], kind)[1]
    assert [note for note in notes if "does nothing here" in note] == []


@pytest.mark.parametrize(
    ("kind", "words", "why"),
    [
        (SftSettings, ["env.rollout.n=4"], "it is for training by reward"),
        (SftSettings, ["data.train_batch_size=4"], "it is for training by reward"),
        (SftSettings, ["hidden=64", "init=embedded"], "it counts with init=null"),
        (SftSettings, ["noise=0.5", "source=a.parquet"], "it counts with a source that plays"),
        (SftSettings, ["eval_temperature=1.0", "eval_goals=0"], "it counts with eval_goals above 0"),
        (EvaluationSettings, ["env.reward=score"], "it is for training by reward"),
        (EvaluationSettings, ["data.train_files=a.parquet"], "nothing is learnt"),
        (EvaluationSettings, ["goals=4", "data.val_files=a.parquet"], "it counts with data.val_files=null"),
        (EvaluationSettings, ["endpoint.max_tries=2"], "it counts with endpoint.base_url"),
        (EvaluationSettings, ["engine=vllm", "endpoint.base_url=http://x/v1"], "it counts with endpoint.base_url=null"),
        (EvaluationSettings, ["gpu_memory_utilization=0.4"], "it counts with engine=vllm"),
    ],
)
def test_what_does_nothing_in_another_command_is_noted_there(kind, words, why):
    settings, notes, sources = resolve(words, kind)
    assert notes == [f"{words[0]} does nothing here: {why}"]
    assert why.removeprefix("it counts with") in explain(settings, sources)


def test_the_seed_of_v0_has_an_effect():
    assert resolve(["env.env_name=WebShop-v0", "env.seed=3"])[1] == []


def test_the_saved_configuration_gives_the_same_settings(tmp_path):
    settings, _, _ = resolve(["env.max_steps=9", "trainer.logger=[console]"])
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(flatten(settings)))
    (tmp_path / "checkpoints" / "update_000001").mkdir(parents=True)
    for place in (tmp_path, tmp_path / "checkpoints" / "update_000001"):
        resumed, _, _ = resolve([f"resume={place}"])
        expected = flatten(settings) | {"trainer.resume_from": str(place)}
        assert flatten(resumed) == expected
    with pytest.raises(SettingsError, match="holds no run"):
        resolve([f"trainer.resume_from={tmp_path / 'nowhere' / 'at' / 'all'}"])


def test_all_mistakes_are_told_at_once_a_line_for_each():
    with pytest.raises(SettingsError) as caught:
        resolve(["env.maxsteps=3", "actor_rollout_ref.actor.strategy=megatron", "alone", "env.rollout.n=0"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    for line, start in zip(
        lines, ("'alone' is not", "unknown setting 'env.maxsteps'", "env.rollout.n must"), strict=False
    ):
        assert line.startswith(start)
    assert lines[3].startswith("actor_rollout_ref.actor.strategy must be fsdp2")


def test_mistakes_of_a_recipe_name_the_recipe_on_each_line(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("env: {maxsteps: 7, history_length: -1}\n")
    with pytest.raises(SettingsError) as caught:
        resolve([f"recipe={recipe}"])
    assert [line.startswith(f"recipe {recipe}: ") for line in str(caught.value).splitlines()] == [True, True]


RECIPES = sorted(path.stem for path in (Path(settings_module.__file__).parent / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_packaged_recipe_is_complete_and_valid(name, capsys):
    settings, notes, sources = resolve([f"recipe={name}"])
    assert settings.recipe == name and notes == []
    assert set(load_recipe(name)) <= {key for key, _, _ in leaves(Settings())}
    assert sources["trainer.total_updates"] == f"recipe {name}"
    gigpo_fsdp.main(["--explain", f"recipe={name}"])
    assert f"(from recipe {name})" in capsys.readouterr().out
    policy = settings.actor_rollout_ref
    # Rows must fit into a pass, and the published order of sizes must hold.
    longest = settings.data.max_prompt_length + settings.data.max_response_length
    assert policy.actor.ppo_max_token_len_per_gpu >= longest


def test_the_recipes_of_the_readme_are_all_there():
    assert RECIPES == ["frozenlake", "tiny", "webshop_qwen2.5_1.5b", "webshop_smollm2_135m"]


def test_the_published_recipe_has_the_published_values():
    settings = resolve(["recipe=webshop_qwen2.5_1.5b"])[0]
    env, data, trainer, policy = settings.env, settings.data, settings.trainer, settings.actor_rollout_ref
    actor, rollout, gigpo = policy.actor, policy.rollout, settings.algorithm.gigpo
    assert policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (rollout.name, rollout.gpu_memory_utilization) == ("vllm", 0.6)
    assert (env.env_name, env.variant, env.history_length, env.max_steps) == ("WebShop-v0", "verl", 2, 15)
    assert (data.train_batch_size, env.rollout.n, data.val_batch_size) == (16, 8, 2 * 128)
    assert (data.max_prompt_length, data.max_response_length, rollout.temperature) == (4096, 512, 1.0)
    assert (actor.optim.lr, actor.optim.weight_decay, actor.grad_clip, actor.ppo_epochs) == (1e-6, 0.01, 1.0, 1)
    assert (actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu) == (64, 8)
    assert rollout.log_prob_micro_batch_size_per_gpu == policy.ref.log_prob_micro_batch_size_per_gpu == 16
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.2, 3.0)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.01, "low_var_kl")
    assert (actor.entropy_coeff, actor.invalid_action_penalty_coef) == (0.001, 0.1)
    assert actor.use_invalid_action_penalty
    assert (settings.algorithm.gamma, gigpo.step_advantage_w, gigpo.mode, gigpo.baseline) == (
        0.95,
        1.0,
        "mean_norm",
        "step",
    )
    assert (trainer.n_gpus_per_node, trainer.total_updates, trainer.test_freq) == (2, 150, 5)
    assert trainer.val_before_train and rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0.4


def test_explain_names_value_meaning_and_source_of_every_setting():
    settings, _, sources = resolve(["env.max_steps=9"])
    text = explain(settings, sources)
    assert "env.max_steps=9\n    steps after which an episode is truncated (from command line)" in text
    assert all(f"{key}=" in text for key, _, _ in leaves(settings))


def test_the_command_ends_with_one_line_and_exit_code_2():
    done = subprocess.run(
        [sys.executable, "trainers/gigpo_fsdp.py", "env.maxsteps=3"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == ["error: unknown setting 'env.maxsteps'; did you mean 'env.max_steps'?"]


def test_products_are_kept_apart_by_any_number_of_cuts() -> None:
    assert resolve(["env.webshop.split_by=product:12"])[0].env.webshop.split_by == "product:12"
    for wrong in ("products", "product:x", "goal:1"):
        with pytest.raises(SettingsError, match=r"env.webshop.split_by must be goal, product, or product:NUMBER"):
            resolve([f"env.webshop.split_by={wrong}"])
