"""The published script's overrides, pasted: each key is taken, mapped, or refused with its reason."""

from __future__ import annotations

import pytest
import yaml

from data.prepare import main as prepare
from trainers.models import make_small_policy, save_policy, train_tokenizer
from trainers.published import ALIASES, NOT_NEEDED
from trainers.ranks import start_ranks, stop_ranks
from trainers.run import Run, open_run
from trainers.settings import SettingsError, explain, flatten, resolve

PUBLISHED = """
algorithm.adv_estimator=gigpo
data.train_files=$HOME/data/verl-agent/text/train.parquet
data.val_files=$HOME/data/verl-agent/text/test.parquet
data.train_batch_size=16
data.val_batch_size=128
data.max_prompt_length=4096
data.max_response_length=512
data.filter_overlong_prompts=True
data.truncation=error
data.return_raw_chat=True
actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=64
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.01
actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.enable_chunked_prefill=False
actor_rollout_ref.rollout.enforce_eager=False
actor_rollout_ref.rollout.free_cache_engine=False
actor_rollout_ref.rollout.val_kwargs.temperature=0.4
actor_rollout_ref.rollout.val_kwargs.do_sample=True
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.ref.fsdp_config.param_offload=True
actor_rollout_ref.actor.use_invalid_action_penalty=True
actor_rollout_ref.actor.invalid_action_penalty_coef=0.1
algorithm.use_kl_in_reward=False
algorithm.gamma=0.95
algorithm.gigpo.step_advantage_w=1.0
algorithm.gigpo.mode=mean_norm
env.env_name=Webshop
env.seed=0
env.max_steps=15
env.rollout.n=8
env.resources_per_worker.num_cpus=0.1
trainer.critic_warmup=0
trainer.logger=['console','wandb']
trainer.project_name=verl_agent_webshop
trainer.experiment_name=gigpo_qwen2.5_1.5b
trainer.n_gpus_per_node=2
trainer.nnodes=1
trainer.save_freq=-1
trainer.test_freq=5
trainer.total_epochs=150
trainer.val_before_train=True
"""
WORDS = [line for line in PUBLISHED.splitlines() if line]


def refusal(*words: str) -> list[str]:
    """The lines with which some words are refused; none where they are taken."""
    try:
        resolve(words)
    except SettingsError as error:
        return str(error).splitlines()
    return []


MAY_BE_REFUSED = {"actor_rollout_ref.rollout.name", "trainer.logger"}
"""What needs an engine or a service that an installation may lack; the rest is always taken."""
REFUSED = {word.split("=")[0]: refusal(word) for word in WORDS if refusal(word)}
MAPPED = {
    "trainer.total_epochs": {"trainer.total_updates": 150},
    "env.env_name": {"env.env_name": "WebShop-v0", "env.variant": "verl"},
}
"""Keys that mean something else here."""
SMALLER = {
    "data.train_batch_size": 6,
    "data.max_prompt_length": 2048,
    "data.max_response_length": 256,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
}
"""Sizes of a public copy of the script."""


def taken(**changes: object) -> list[str]:
    """The pasted words without those that are refused, with other values for some."""
    words = dict(word.split("=", 1) for word in WORDS)
    words = {key: value for key, value in words.items() if key not in REFUSED} | {k: str(v) for k, v in changes.items()}
    return [f"{key}={value}" for key, value in words.items()]


def test_all_refusals_of_the_pasted_script_are_told_at_once():
    assert set(REFUSED) <= MAY_BE_REFUSED
    lines = refusal(*WORDS, "actor_rollout_ref.actor.strategy=megatron")
    assert len(lines) == len(REFUSED) + 1
    for key, told_alone in REFUSED.items():
        assert len(told_alone) == 1 and told_alone[0].startswith(key) and told_alone[0] in lines
    assert any("Megatron" in line for line in lines)


@pytest.mark.parametrize("sizes", [{}, SMALLER], ids=["published", "public copy"])
def test_every_pasted_key_is_taken_mapped_or_said_to_do_nothing(sizes):
    settings, notes, sources = resolve(taken(**sizes))
    values = flatten(settings)
    for word in taken(**sizes):
        key, text = word.split("=", 1)
        if key in NOT_NEEDED:
            assert any(note == f"{key} does nothing here: {NOT_NEEDED[key]}" for note in notes), key
        elif key == "data.truncation":
            assert any("data.truncation=error is checked at start" in note for note in notes)
        elif key in MAPPED:
            assert {own: values[own] for own in MAPPED[key]} == MAPPED[key]
            assert any(note.startswith(f"{key}=") and "is taken as" in note for note in notes), key
        else:
            expected = yaml.safe_load(text)
            if isinstance(values[key], float):
                expected = float(expected)
            assert values[key] == expected, key
            assert sources[key] == "command line"
    told = explain(settings, sources)
    assert "trainer.total_updates=150" in told and "(from command line, as trainer.total_epochs)" in told
    assert "env.variant=verl" in told and "(from command line, as env.env_name)" in told


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A random policy that takes prompts of any recipe."""
    tokenizer = train_tokenizer(["search for a red mug and click buy now, back to search"] * 3, 300)
    model = make_small_policy(tokenizer, hidden=16, layers=1, heads=2, max_positions=8192)
    directory = tmp_path_factory.mktemp("policy") / "p"
    save_policy(directory, config=model.config, state_dict=model.state_dict(), tokenizer=tokenizer, made={})
    return directory


def opened(words: list[str]) -> Run:
    """A run on one rank, opened and closed again."""
    ranks = start_ranks("cpu")
    try:
        run = open_run(resolve(words)[0], ranks)
        run.log.close()
    finally:
        stop_ranks()
    return run


def here(policy, directory) -> dict[str, object]:
    """What every machine has."""
    return {
        "actor_rollout_ref.model.path": policy,
        "trainer.output_dir": directory,
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "[console]",
        "actor_rollout_ref.rollout.name": "hf",
    }


def test_the_pasted_script_opens_a_run_with_lists_and_a_model_that_are_there(tmp_path, monkeypatch, policy):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare(["--mode", "text", "--train_data_size", "16", "--val_data_size", "256"]) == 0
    run = opened(taken(**here(policy, tmp_path / "run")))
    assert (len(run.goals.goals), len(run.validation_goals)) == (16, 256)
    assert not set(run.goals.goals.tolist()) & set(run.validation_goals.tolist())
    saved = yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text())
    assert saved["data.train_files"] == str(tmp_path / "data" / "verl-agent" / "text" / "train.parquet")
    resumed = flatten(resolve([f"trainer.resume_from={tmp_path / 'run'}"])[0])
    assert resumed == saved | {"trainer.resume_from": str(tmp_path / "run")}


@pytest.mark.parametrize("recipe", ["frozenlake", "webshop_qwen2.5_1.5b", "webshop_smollm2_135m"])
def test_a_recipe_lacks_nothing_but_its_model_and_its_catalogue(tmp_path, policy, recipe):
    values = here(policy, tmp_path / "run")
    if recipe != "webshop_qwen2.5_1.5b":  # the random policy has few tokens, which say less each
        values |= {"data.max_prompt_length": 4096, "data.max_response_length": 128}
    run = opened([f"recipe={recipe}", *(f"{key}={value}" for key, value in values.items())])
    assert len(run.goals.batch(0)) == run.settings.goals_of_a_try
    assert len(run.validation_goals) == run.settings.data.val_batch_size


def test_other_names_of_keys():
    settings = resolve(
        [
            "trainer.total_training_steps=7",
            "actor_rollout_ref.actor.clip_ratio=0.3",
            "env.webshop.human_goals=True",
            "env.webshop.use_small=True",
        ]
    )[0]
    actor = settings.actor_rollout_ref.actor
    assert settings.trainer.total_updates == 7
    assert (actor.clip_ratio_low, actor.clip_ratio_high, settings.env.webshop.goals) == (0.3, 0.3, "human")
    assert set(ALIASES) & {"trainer.resume_from_path", "trainer.total_epochs", "resume"}


def test_steps_count_before_epochs_in_either_order():
    epochs, steps = "trainer.total_epochs=150", "trainer.total_training_steps=7"
    for words in ([epochs, steps], [steps, epochs]):
        settings, notes, _ = resolve(words)
        assert settings.trainer.total_updates == 7
        assert any("total_training_steps is given too" in note for note in notes)
    assert resolve([epochs, "trainer.total_training_steps=null"])[0].trainer.total_updates == 150


def test_fsdp_is_taken_as_fsdp2_and_said_once():
    settings, notes, _ = resolve(["actor_rollout_ref.actor.strategy=fsdp"])
    assert settings.actor_rollout_ref.actor.strategy == "fsdp2"
    assert len(notes) == 1 and notes[0].startswith("actor_rollout_ref.actor.strategy=fsdp is taken as fsdp2")


def test_a_truncation_that_is_not_done_here_is_noted():
    assert "data.truncation=left does nothing here" in resolve(["data.truncation=left"])[1][0]


def test_published_keys_of_a_recipe_are_told_too(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("trainer: {total_epochs: 3, critic_warmup: 0}\n")
    settings, notes, _ = resolve([f"recipe={recipe}"])
    assert settings.trainer.total_updates == 3
    assert [note.split("=")[0].split(" ")[0] for note in notes] == ["trainer.total_epochs", "trainer.critic_warmup"]
