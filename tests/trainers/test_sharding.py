"""What is kept elsewhere or computed in another precision: the same numbers, exactly or within its precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_rows import rows
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rollout.types import StepBatch
from trainers.actor import Actor, ActorConfig, Reference
from trainers.losses import LossConfig
from trainers.models import make_small_policy, train_tokenizer
from trainers.offload import state_on
from trainers.ranks import start_ranks
from trainers.sharding import ShardingConfig, full, like

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["click[buy now] search[red mug]"] * 5, 300)


@pytest.fixture
def make_actor(tokenizer):
    def make(device: str = "cpu", **changes) -> Actor:
        model = make_small_policy(tokenizer, hidden=32, layers=2, heads=2).requires_grad_(True)
        config = ActorConfig(**({"lr": 1e-2, "loss": LossConfig(use_kl_loss=False)} | changes))
        return Actor(model, start_ranks(device), config, pad_id=0)

    return make


def learnt(actor: Actor, batches: list[StepBatch]) -> dict[str, torch.Tensor]:
    for batch in batches:
        actor.update(batch)
    return {name: tensor.cpu() for name, tensor in actor.full_state_dict().items()}


def test_weights_are_gathered_one_by_one_and_converted_on_the_way(make_actor):
    actor = make_actor()
    gathered = []
    for name, tensor in actor.full_weights(torch.bfloat16):
        gathered.append((name, tensor))
        if len(gathered) == 1:
            assert actor.full_state_dict()[name].dtype == torch.float32, "the actor's own stay as they are"
    expected = actor.full_state_dict()
    assert [name for name, _ in gathered] == list(expected) and "lm_head.weight" in expected
    for name, tensor in gathered:
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name


@pytest.mark.parametrize(
    "changes",
    [
        {"sharding": ShardingConfig(param_offload=True)},
        {"optimizer_offload": True},
        {"sharding": ShardingConfig(param_offload=True), "optimizer_offload": True},
    ],
)
def test_offloading_changes_no_bit(make_actor, changes):
    expected = learnt(make_actor(), [rows(0), rows(1)])
    actor = make_actor(**changes)
    got = learnt(actor, [rows(0), rows(1)])
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    actor.load_trained_weights(expected)
    for name, tensor in actor.full_state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_reference_on_the_cpu_gives_the_same_log_probs(tokenizer):
    found = []
    for param_offload in (False, True):
        model = make_small_policy(tokenizer, hidden=32, layers=2, heads=2)
        limits = {"max_rows": 8, "max_tokens": 100, "sharding": ShardingConfig(param_offload=param_offload)}
        reference = Reference(model, start_ranks(), pad_id=0, temperature=1.0, grammar=None, **limits)
        found.append(np.concatenate(list(reference.with_log_probs(rows(0)).ref_log_probs)))
    assert np.array_equal(found[0], found[1])
    assert found[0].min() < -1.0


def test_bfloat16_passes_train_float32_weights_to_about_the_same_log_probs(make_actor):
    actors = [make_actor(sharding=ShardingConfig(dtype=dtype), lr=1e-3) for dtype in ("float32", "bfloat16")]
    steps = [rows(seed) for seed in range(3)]
    weights = [learnt(actor, steps) for actor in actors]
    assert {tensor.dtype for tensor in weights[1].values()} == {torch.float32}
    assert {value.dtype for state in actors[1].optimizer.state.values() for value in state.values()} == {torch.float32}
    exact, rough = (np.concatenate(list(actor.log_probs(rows(9)))) for actor in actors)
    assert 1e-5 < np.abs(exact - rough).max() < 0.05  # eight bits of precision, and they were used


def test_auto_is_float32_on_a_cpu(make_actor):
    plain, auto = make_actor(sharding=ShardingConfig(dtype="float32")), make_actor()
    assert np.array_equal(*(np.concatenate(list(actor.log_probs(rows(9)))) for actor in (plain, auto)))


def test_state_visits_a_device_and_comes_back():
    """`meta` stands for a device other than the CPU: what was there arrives as such, and has lost its values."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    before = dict(optimizer.state[weight])
    with state_on(optimizer, CPU):
        assert optimizer.state[weight]["exp_avg"] is before["exp_avg"]
    with pytest.raises(NotImplementedError, match="meta"), state_on(optimizer, torch.device("meta")):
        assert optimizer.state[weight]["exp_avg"].device.type == "meta"
        assert optimizer.state[weight]["step"].device.type == "cpu"


def test_a_whole_tensor_takes_the_place_and_type_of_a_parameter(make_actor):
    _, parameter = next(make_actor().trained_weights())
    value = torch.randn(parameter.shape, dtype=torch.float64)
    got = like(parameter, value)
    assert (got.dtype, got.placements) == (parameter.dtype, parameter.placements)
    assert isinstance(got, DTensor) and torch.equal(full(got), value.float())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes", [{"sharding": ShardingConfig(dtype="float32", param_offload=True)}, {"optimizer_offload": True}]
)
def test_offloading_leaves_the_gpu_and_gives_its_numbers(make_actor, changes):
    plain = {"sharding": ShardingConfig(dtype="float32")}
    expected = learnt(make_actor("cuda", **plain), [rows(0), rows(1)])
    actor = make_actor("cuda", **(plain | changes))
    got = learnt(actor, [rows(0), rows(1)])
    assert {value.device.type for state in actor.optimizer.state.values() for value in state.values()} == {"cpu"}
    if actor.config.sharding.param_offload:
        assert {parameter.device.type for parameter in actor.scorer.parameters()} == {"cpu"}
    for name, tensor in expected.items():
        if not name.endswith("k_proj.bias"):  # shifts all scores alike: its gradient is rounding, which AdamW blows up
            assert torch.allclose(got[name], tensor, atol=1e-4), name


def test_a_single_rank_has_one_unit_unless_the_model_is_large_beside_its_gpu(make_actor, monkeypatch):
    num_units, expected = {}, None
    for memory in (0, 10**9, 1000):
        monkeypatch.setattr("trainers.sharding.memory_of", lambda device, memory=memory: memory)
        actor = make_actor()
        num_units[memory] = sum(isinstance(module, FSDPModule) for module in actor.scorer.modules())
        got = learnt(actor, [rows(0)])
        expected = expected or got
        assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    assert num_units == {0: 1, 10**9: 1, 1000: 3}, "two layers and the root"


def test_weights_that_are_gathered_once_are_the_newest_and_leave_no_copies(make_actor, monkeypatch):
    plain, actor = (make_actor(log_prob_micro_batch_size=1, micro_batch_size=1, mini_batch_size=2) for _ in range(2))
    collate, are_whole = actor.collate, []

    def watching(pairs, chosen):
        layer = actor.scorer.policy.model.layers[0]
        are_whole.append(not any(isinstance(parameter, DTensor) for parameter in layer.parameters()))
        return collate(pairs, chosen)

    def learnt_from(learner: Actor, number: int) -> tuple[StepBatch, dict[str, float]]:
        batch = learner.with_old_log_probs(rows(number))
        return batch, learner.update(batch)

    watching.forget = collate.forget
    actor.collate = watching
    for number in range(2):
        monkeypatch.setattr("trainers.sharding.memory_of", lambda device: 0)
        expected, figures = learnt_from(plain, number)
        monkeypatch.setattr("trainers.sharding.memory_of", lambda device: 10**9)
        got, same = learnt_from(actor, number)
        assert np.array_equal(np.concatenate(got.old_log_probs), np.concatenate(expected.old_log_probs))
        assert same == figures and figures["actor/optimizer_steps"] == 2
        assert all(isinstance(parameter, DTensor) for parameter in actor.scorer.parameters()), "sharded again"
        first_of_a_phase = [False, *[True] * (len(rows(number)) - 1)]
        assert are_whole == first_of_a_phase + [False, True] * 2, "log-probs, and two steps of two passes"
        are_whole.clear()
    whole = plain.full_state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in actor.full_state_dict().items())
