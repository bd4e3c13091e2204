"""Settings: where values come from, which keys are taken, what is refused and how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainers import gigpo_fsdp
from trainers import settings as settings_module
from trainers.settings import Settings, SettingsError, explain, flatten, leaves, load_recipe, resolve


def test_defaults_then_recipe_then_command_line(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("env: {max_steps: 7, history_length: 1}\n")
    settings, _, sources = resolve([f"recipe={recipe}", "env.history_length=4"])
    assert (settings.env.max_steps, settings.env.history_length, settings.env.rollout.n) == (7, 4, 8)
    assert sources["env.history_length"] == "command line"
    assert sources["env.max_steps"] == f"recipe {recipe}"
    assert "env.rollout.n" not in sources


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


def test_numbers_as_published_scripts_write_them():
    settings, _, _ = resolve(["actor_rollout_ref.actor.optim.lr=1e-6", "trainer.logger=['console']"])
    assert settings.actor_rollout_ref.actor.optim.lr == 1e-6
    assert settings.trainer.logger == ("console",)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("actor_rollout_ref.model.use_remove_padding=false", "share a micro-batch"),
        ("env.seed=3", "WebShop-v1 draws nothing"),
        ("env.resources_per_worker.num_cpus=0.5", "environments run in this process"),
        ("algorithm.kl_penalty=mse", "use_kl_in_reward is false"),
        ("algorithm.kl_ctrl.kl_coef=0.01", "use_kl_in_reward is false"),
    ],
)
def test_a_setting_without_effect_is_noted_where_it_is_chosen(word, why):
    assert resolve([])[1] == []
    settings, notes, sources = resolve([word])
    assert [note for note in notes if note.startswith(f"{word} does nothing here: ") and why in note] == notes != []
    if not word.startswith(("env.", "algorithm.")):
        assert f"{word}\n" in explain(settings, sources) and f"does nothing: {notes[0].split(': ', 1)[1]}" in explain(
            settings, sources
        )


@pytest.mark.parametrize("word", ["gpu_memory_utilization=0.5", "enforce_eager=true", "free_cache_engine=false"])
def test_a_setting_of_one_engine_is_noted_beside_another(word):
    place, vllm = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.name=vllm"
    settings, notes, sources = resolve([f"{place}.{word}"])
    assert notes == [f"{place}.{word} does nothing here: it counts with {vllm}"]
    assert f"; counts with {vllm} (from command line)" in explain(settings, sources)
    assert resolve([f"{place}.{word}", vllm])[1] == []


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
