"""Settings: where values come from, which keys are taken, what is refused and how."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

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
        ("actor_rollout_ref.actor.strategy=megatron", "must be one of fsdp2, fsdp"),
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


def test_aliases_of_published_keys():
    settings, notes, _ = resolve(
        [
            "trainer.total_epochs=150",
            "actor_rollout_ref.actor.clip_ratio=0.3",
            "env.env_name=Webshop",
            "env.webshop.human_goals=True",
            "data.truncation=error",
        ]
    )
    assert settings.trainer.total_updates == 150
    actor = settings.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.3)
    assert (settings.env.env_name, settings.env.variant, settings.env.webshop.goals) == ("WebShop-v0", "verl", "human")
    assert any("data.truncation" in note for note in notes)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.5", "the hf engine takes"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "the hf engine uses one"),
        ("actor_rollout_ref.rollout.enforce_eager=true", "the hf engine has none"),
        ("actor_rollout_ref.model.use_remove_padding=false", "share a micro-batch"),
        ("env.seed=3", "WebShop-v1 draws nothing"),
    ],
)
def test_a_setting_without_effect_is_noted_where_it_is_chosen(word, why):
    assert resolve([])[1] == []
    settings, notes, sources = resolve([word])
    assert [note for note in notes if note.startswith(f"{word} does nothing here: ") and why in note] == notes != []
    if not word.startswith("env.seed"):
        assert f"{word}\n" in explain(settings, sources) and f"does nothing: {notes[0].split(': ', 1)[1]}" in explain(
            settings, sources
        )


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


def test_every_packaged_recipe_is_complete_and_valid():
    assert resolve(["recipe=tiny"])[0].recipe == "tiny"
    assert set(load_recipe("tiny")) <= {key for key, _, _ in leaves(Settings())}


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
