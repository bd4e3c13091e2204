"""LoRA: only adapters are trained and saved, the reference is the base, and what is exported computes the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from extra import require_extra
from safetensors.torch import load_file
from small_rows import rows

from rollout.types import StepBatch
from trainers import gigpo_fsdp
from trainers.actor import Actor, ActorConfig, Reference, UpdateTotals, WithoutAdapter
from trainers.checkpoint import RunState, load_weights, restore, save_checkpoint
from trainers.errors import CheckpointError
from trainers.export import export
from trainers.lora import add_adapter, is_adapter_weight
from trainers.losses import LossConfig
from trainers.models import load_model, load_tokenizer, make_small_policy, save_policy, train_tokenizer, weights_hash
from trainers.ranks import start_ranks
from trainers.settings import ModelSettings, SettingsError, build
from trainers.sharding import ShardingConfig, checkpoint_layers

require_extra("lora", "peft")

ROOT = Path(__file__).resolve().parents[2]
LORA = ModelSettings(lora_rank=2, lora_alpha=6.0)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["click[buy now] search[red mug]"] * 5, 300)


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory) -> Path:
    model = make_small_policy(tokenizer, hidden=16, layers=2, heads=2)
    target = tmp_path_factory.mktemp("base") / "policy"
    save_policy(target, config=model.config, state_dict=model.state_dict(), tokenizer=tokenizer, made={})
    return target


def new_actor(base: Path, *, adapter: ModelSettings | None = LORA, **changes) -> Actor:
    model = load_model(str(base))
    if changes.pop("checkpointed", False):
        checkpoint_layers(model)
    if adapter:
        add_adapter(model, adapter, base=str(base), seed=0)
    config = ActorConfig(**({"lr": 1e-2, "loss": LossConfig(use_kl_loss=False)} | changes))
    return Actor(model.requires_grad_(True) if adapter is None else model, start_ranks(), config, pad_id=0)


def flat(found) -> np.ndarray:
    return np.concatenate(list(found))


def of_model(model, batch: StepBatch) -> np.ndarray:
    """Log-probs of a plain transformers or peft model, row by row."""
    found = []
    for prompt, reply in zip(batch.prompt_ids, batch.reply_ids, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))
        with torch.no_grad():
            log_probs = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found.append(log_probs[torch.arange(len(reply)), torch.from_numpy(reply.astype(np.int64))].numpy())
    return np.concatenate(found)


def test_nothing_changes_until_it_is_trained_and_then_only_the_adapter_does(base):
    actor, plain = new_actor(base), new_actor(base, adapter=None)
    assert np.array_equal(flat(actor.log_probs(rows(0))), flat(plain.log_probs(rows(0))))
    before = {name: tensor.clone() for name, tensor in actor.scorer.state_dict().items()}
    actor.update(rows(0))
    changed = {name for name, tensor in actor.scorer.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and all(is_adapter_weight(name) for name in changed)
    assert {name for name, _ in actor.trained_weights()} == {
        name.removeprefix("policy.") for name in before if is_adapter_weight(name)
    }
    assert len(actor.optimizer.state) == len(list(actor.trained_weights()))


def test_the_reference_is_the_base_whatever_the_adapter_learnt(base):
    actor = new_actor(base)
    frozen = Reference(
        load_model(str(base)), start_ranks(), pad_id=0, temperature=1.0, grammar=None, max_rows=8, max_tokens=1000
    )
    reference = WithoutAdapter(actor, max_rows=3)
    expected = flat(frozen.with_log_probs(rows(9)).ref_log_probs)
    for seed in range(3):  # the reference goes first: gradients must not be lost by that
        assert np.array_equal(flat(reference.with_log_probs(rows(9)).ref_log_probs), expected)
        assert actor.update(rows(seed))["actor/grad_norm"] > 1e-4
    assert np.abs(flat(actor.log_probs(rows(9))) - expected).max() > 1e-3


def test_the_gradient_is_that_of_the_adapter_in_a_plain_model(base):
    actor = new_actor(base, lr=0.0, loss=LossConfig(use_kl_loss=False, entropy_coeff=0.0))
    actor.load_trained_weights({name: torch.full_like(p.full_tensor(), 0.1) for name, p in actor.trained_weights()})
    batch = rows(0)
    actor.accumulate_gradients(batch, UpdateTotals())
    plain = load_model(str(base))
    add_adapter(plain, LORA, base=str(base), seed=0)
    named = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in named.values():
            parameter.fill_(0.1)
    total, count = torch.zeros(()), sum(len(reply) for reply in batch.reply_ids)
    for prompt, reply, advantage in zip(batch.prompt_ids, batch.reply_ids, batch.advantage, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))
        log_probs = plain(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = log_probs[torch.arange(len(reply)), torch.from_numpy(reply.astype(np.int64))]
        total = total - float(advantage) * chosen.sum() / count
    total.backward()
    assert max(float(p.grad.abs().max()) for p in named.values()) > 1e-4
    for name, parameter in actor.trained_weights():
        assert torch.allclose(parameter.grad.full_tensor(), named[name].grad, atol=1e-6), name


@pytest.mark.parametrize(
    "changes",
    [
        {"sharding": ShardingConfig(param_offload=True)},
        {"optimizer_offload": True},
        {"checkpointed": True},
    ],
)
def test_other_savings_go_with_it(base, changes):
    expected, actor = new_actor(base), new_actor(base, **changes)
    for learner in (expected, actor):
        learner.update(rows(0))
    got = actor.full_state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.full_state_dict().items())


def test_what_engines_and_exports_get_computes_what_the_adapter_does(base, tokenizer, tmp_path):
    actor = new_actor(base)
    for seed in range(3):
        actor.update(rows(seed))
    expected = flat(actor.log_probs(rows(9)))
    engine = load_model(str(base))
    assert not engine.load_state_dict(actor.full_state_dict(), strict=False).unexpected_keys
    assert np.abs(of_model(engine, rows(9)) - expected).max() < 1e-5
    assert np.abs(of_model(load_model(str(base)), rows(9)) - expected).max() > 1e-3

    checkpoint = save_checkpoint(tmp_path, actor, RunState(updates_done=3), tokenizer=tokenizer, made={"x": 1})
    assert not (checkpoint / "policy").exists()
    from peft import PeftModel

    with_peft = PeftModel.from_pretrained(load_model(str(base)), str(checkpoint / "adapter"))
    assert np.abs(of_model(with_peft, rows(9)) - expected).max() < 1e-5
    export(checkpoint, tmp_path / "out")
    assert np.abs(of_model(load_model(str(tmp_path / "out")), rows(9)) - expected).max() < 1e-5
    assert load_tokenizer(str(tmp_path / "out")).get_vocab() == tokenizer.get_vocab()


def test_the_step_after_loading_equals_the_step_without(base, tokenizer, tmp_path):
    actor = new_actor(base)
    actor.update(rows(0))
    checkpoint = save_checkpoint(tmp_path, actor, RunState(updates_done=1), tokenizer=tokenizer, made={})
    num_saved = sum(tensor.numel() for tensor in load_weights(checkpoint).values())
    assert num_saved == sum(parameter.numel() for _, parameter in actor.trained_weights())
    actor.update(rows(1))
    resumed = new_actor(base)
    restore(checkpoint, resumed)
    resumed.update(rows(1))
    got = resumed.full_state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in actor.full_state_dict().items())


def test_an_adapter_goes_into_no_other(base, tokenizer, tmp_path):
    checkpoint = save_checkpoint(tmp_path, new_actor(base), RunState(updates_done=1), tokenizer=tokenizer, made={})
    for other, why in (
        (None, "lora_rank"),
        (replace(LORA, lora_rank=3), r"lora_rank 2, this run has 3: go on with .*lora_rank=2"),
        (replace(LORA, lora_alpha=3.0), r"lora_alpha 6\.0, this run has 3\.0: go on with .*lora_alpha=6\.0"),
        (replace(LORA, target_modules=("q_proj", "v_proj")), r"target_modules ask for: .*\.lora_A\..* does not fit"),
    ):
        with pytest.raises(CheckpointError, match=why):
            restore(checkpoint, new_actor(base, adapter=other))


def test_an_adapter_is_merged_into_the_policy_it_was_trained_on_alone(base, tokenizer, tmp_path):
    start = tmp_path / "start"
    shutil.copytree(base, start)
    made = {"start_policy_hash": weights_hash(load_model(str(start)).state_dict())}
    checkpoint = save_checkpoint(tmp_path, new_actor(start), RunState(updates_done=1), tokenizer=tokenizer, made=made)
    export(checkpoint, tmp_path / "out")
    other = make_small_policy(tokenizer, hidden=16, layers=2, heads=2, seed=1)
    save_policy(start, config=other.config, state_dict=other.state_dict(), tokenizer=tokenizer, made={})
    with pytest.raises(CheckpointError, match=rf"policy of hash {made['start_policy_hash']}, that in {start} has"):
        export(checkpoint, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["provenance.json", "adapter_config.json", "adapter_model.safetensors"])
def test_damaged_adapters_are_told_in_one_line(base, tokenizer, tmp_path, name):
    checkpoint = save_checkpoint(tmp_path, new_actor(base), RunState(updates_done=1), tokenizer=tokenizer, made={})
    file = checkpoint / "adapter" / name
    for content in (b"{}" if name == "adapter_config.json" else b"[", None):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"cannot be read .*{name}") as caught:
            export(checkpoint, tmp_path / "out")
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_the_same_seed_makes_the_same_adapter_and_leaves_the_generator_alone(base):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = new_actor(base), new_actor(base)
    assert torch.equal(torch.rand(1), expected)
    for (name, one), (_, two) in zip(first.trained_weights(), second.trained_weights(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor()), name


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        (("no_such_layer",), "name linear layers"),
        (("lm_head",), "lm_head is another"),
        (("embed_tokens",), r"model\.embed_tokens is another"),
        (("q_proj", "embed_tokens"), r"model\.embed_tokens is another"),
    ],
)
def test_layers_that_cannot_have_an_adapter_are_refused(base, targets, why):
    with pytest.raises(SettingsError, match=why):
        new_actor(base, adapter=replace(LORA, target_modules=targets))


def test_sharded_checkpoints_of_adapters_are_refused():
    with pytest.raises(SettingsError, match=r"trainer\.checkpoint_format"):
        build({"actor_rollout_ref.model.lora_rank": 4, "trainer.checkpoint_format": "sharded"})


WORDS = [
    "trainer.total_updates=2",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.save_freq=1",
    "trainer.logger=[console]",
    "data.train_batch_size=4",
    "env.rollout.n=4",
    "env.reward=score",
    "env.max_steps=6",
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.target_modules=[q_proj,v_proj]",
]


def test_a_run_of_two_processes_goes_on_in_one_to_the_same_adapter(tmp_path):
    """The embedded policy, two updates, and the second again after the checkpoint of the first."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    gigpo_fsdp.main([*WORDS, f"trainer.output_dir={whole}"])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [*WORDS, f"trainer.output_dir={run}", "trainer.total_updates=1"]
    command = [*launcher, str(ROOT / "trainers" / "gigpo_fsdp.py"), *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    gigpo_fsdp.main([f"trainer.resume_from={run}", "trainer.total_updates=2"])
    found = [
        load_file(path / "checkpoints" / "update_000002" / "adapter" / "adapter_model.safetensors")
        for path in (whole, run)
    ]
    assert any(float(tensor.abs().max()) > 0 for name, tensor in found[0].items() if "lora_B" in name)
    for name, tensor in found[0].items():
        assert torch.allclose(found[1][name], tensor, atol=1e-5), name
