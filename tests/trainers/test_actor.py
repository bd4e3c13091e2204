"""Gradients and log-probs: independent of micro-batches, masks as the engine had them, on-policy ratio 1."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from rollout.constrained import ActionGrammar
from rollout.engines.hf import HFEngine
from rollout.types import GenerationRequest, NoiseKey, SamplingParams, StepBatch, ragged
from trainers.actor import Actor, ActorConfig, NotFinite, Reference, UpdateTotals
from trainers.learning_rate import RateSchedule
from trainers.losses import LossConfig
from trainers.models import make_small_policy, train_tokenizer
from trainers.packing import pack_sequences
from trainers.ranks import start_ranks
from trainers.scoring import (
    MicroBatch,
    TokenMask,
    TokenScorer,
    cheapest_micro_batches,
    distinct_pairs,
    micro_batches,
    micro_batches_for,
    require_plain_logits,
)
from trainers.sharding import checkpoint_layers, compile_layers, layers, require_compiler
from webshop_env.errors import ShopGymError

PAGES = [
    ("search[<your query>]",),
    ("click[buy now]", "click[< prev]", "click[red]", "click[dark red]"),
    ("click[back to search]", "click[b07x1]", "click[b07x2]"),
]
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def ranks():
    return start_ranks()


@pytest.fixture(scope="module")
def tokenizer():
    texts = [f"task: a dark red mug {n}\npage: {' '.join(page)}" for n in range(30) for page in PAGES]
    return train_tokenizer(texts, 400)


@pytest.fixture(scope="module")
def grammar(tokenizer):
    return ActionGrammar(tokenizer, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_small_policy(tokenizer, hidden=32, layers=2, heads=2)


@pytest.fixture(scope="module")
def batch(model, tokenizer, grammar) -> StepBatch:
    """24 rows that the engine really sampled, two of them equal, with made-up advantages."""
    rng = np.random.default_rng(0)
    num = 24
    engine = HFEngine(model, tokenizer, grammar=grammar)
    pages = [PAGES[i % 3] for i in range(num)]
    texts = [f"task: a dark red mug {'nice ' * int(rng.integers(0, 30))}\npage: {page[-1]}" for page in pages]
    texts[3] = texts[0]
    requests = [
        GenerationRequest(engine.encode(text), NoiseKey(0, 0, 0 if i in (0, 3) else i, 0), page)
        for i, (text, page) in enumerate(zip(texts, pages, strict=True))
    ]
    written = engine.generate(requests, SamplingParams(max_tokens=MAX_TOKENS))
    return StepBatch(
        prompt_ids=ragged([r.prompt_ids for r in requests]),
        reply_ids=ragged([g.reply_ids for g in written]),
        rollout_log_probs=ragged([g.log_probs for g in written]),
        admissible=ragged(pages),
        group_id=np.zeros(num, np.int64),
        episode_id=np.arange(num),
        anchor_id=np.zeros(num, np.int64),
        step_index=np.zeros(num, np.int32),
        goal_index=np.zeros(num, np.int32),
        reward=np.zeros(num, np.float32),
        episode_return=np.zeros(num, np.float32),
        episode_length=np.ones(num, np.int32),
        format_valid=np.ones(num, bool),
        action_possible=np.ones(num, bool),
        won=np.zeros(num, bool),
        truncated=np.zeros(num, bool),
        task_score=np.zeros(num, np.float32),
        row_weight=np.ones(num, np.float32),
        advantage=rng.normal(size=num).astype(np.float32),
    )


@pytest.fixture
def make_actor(model, ranks, tokenizer, grammar):
    def make(**changes) -> Actor:
        fields = {"lr": 1e-3, "mini_batch_size": 1000, "micro_batch_size": 8, "log_prob_micro_batch_size": 8}
        config = ActorConfig(**(fields | changes))
        return Actor(
            copy.deepcopy(model).requires_grad_(True), ranks, config, pad_id=tokenizer.pad_token_id, grammar=grammar
        )

    return make


@pytest.fixture
def reference(model, ranks, tokenizer, grammar) -> Reference:
    other = make_small_policy(tokenizer, hidden=32, layers=2, heads=2, seed=1)
    return Reference(
        other, ranks, pad_id=tokenizer.pad_token_id, temperature=1.0, grammar=grammar, max_rows=8, max_tokens=4096
    )


def gradients(actor: Actor, rows: StepBatch) -> dict[str, torch.Tensor]:
    actor.accumulate_gradients(rows, UpdateTotals())
    found = {}
    for name, parameter in actor.scorer.named_parameters():
        grad = parameter.grad
        found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
    return found


def test_the_engine_and_the_trainer_speak_of_one_distribution(make_actor, batch):
    found = make_actor().log_probs(batch)
    for got, expected in zip(found, batch.rollout_log_probs, strict=True):
        assert got == pytest.approx(expected, abs=2e-5)
    assert any((np.asarray(row) < -0.1).any() for row in found)


def test_they_do_when_rows_are_packed(model, ranks, tokenizer, grammar, batch):
    packed = copy.deepcopy(model)
    pack_sequences(packed)
    config = ActorConfig(log_prob_micro_batch_size=5)
    actor = Actor(packed.requires_grad_(True), ranks, config, pad_id=tokenizer.pad_token_id, grammar=grammar)
    for got, expected in zip(actor.log_probs(batch), batch.rollout_log_probs, strict=True):
        assert got == pytest.approx(expected, abs=2e-5)


def test_they_do_at_another_temperature_too(model, ranks, tokenizer, grammar, batch):
    engine = HFEngine(model, tokenizer, grammar=grammar)
    requests = [
        GenerationRequest(prompt, NoiseKey(1, 0, i, 0), page)
        for i, (prompt, page) in enumerate(zip(batch.prompt_ids, batch.admissible, strict=True))
    ]
    written = engine.generate(requests, SamplingParams(temperature=0.7, max_tokens=MAX_TOKENS))
    rows = replace(
        batch,
        reply_ids=ragged([g.reply_ids for g in written]),
        rollout_log_probs=ragged([g.log_probs for g in written]),
    )
    differences = {}
    for temperature in (0.7, 1.0):
        actor = Actor(
            copy.deepcopy(model).requires_grad_(True),
            ranks,
            ActorConfig(),
            pad_id=tokenizer.pad_token_id,
            temperature=temperature,
            grammar=grammar,
        )
        found = np.concatenate(list(actor.log_probs(rows)))
        differences[temperature] = np.abs(found - np.concatenate(list(rows.rollout_log_probs))).max()
    assert differences[0.7] < 2e-5
    assert differences[1.0] > 1e-3


def test_entropy_and_its_gradient_are_those_of_the_allowed_tokens_alone():
    """A vocabulary of four, one token of it forbidden: by hand, H = -sum p ln p and dH/dz = -p (ln p + H)."""
    logits = torch.tensor([1.0, -0.5, 3.0, 0.25], requires_grad=True)

    class Fixed(torch.nn.Module):
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=4))

        def base_model(self, input_ids, use_cache):
            return SimpleNamespace(last_hidden_state=torch.ones(1, input_ids.shape[1], 1))

        def get_output_embeddings(self):
            return lambda hidden: hidden * logits

    one = torch.tensor([0])
    mask = TokenMask(rows=torch.tensor([0, 0, 0]), ids=torch.tensor([0, 1, 3]), num_sets=1, set_of_token=one)
    row = MicroBatch(input_ids=torch.tensor([[5, 1]]), positions=one, targets=torch.tensor([1]), mask=mask)
    log_prob, entropy = TokenScorer(Fixed(), temperature=0.5)(row)
    weights = np.exp(np.array([1.0, -0.5, 0.25]) / 0.5)
    shares = weights / weights.sum()
    expected = -(shares * np.log(shares)).sum()
    assert log_prob.item() == pytest.approx(np.log(shares[1]), abs=1e-6)
    assert entropy.item() == pytest.approx(expected, abs=1e-6)
    entropy.sum().backward()
    slopes = -shares * (np.log(shares) + expected) / 0.5
    assert logits.grad.numpy() == pytest.approx([slopes[0], slopes[1], 0.0, slopes[2]], abs=1e-6)


def test_log_probs_do_not_depend_on_micro_batches_or_order(make_actor, batch):
    expected = make_actor(log_prob_micro_batch_size=1).log_probs(batch)
    order = np.random.default_rng(1).permutation(len(batch))
    got = make_actor(log_prob_micro_batch_size=7, max_tokens=300).log_probs(batch.select(order))
    for row, number in zip(got, order, strict=True):
        assert row == pytest.approx(expected[number], abs=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_gradients_do_not_depend_on_the_size_of_micro_batches(make_actor, reference, batch, mode):
    rows = reference.with_log_probs(batch)
    loss = LossConfig(loss_agg_mode=mode, entropy_coeff=0.1, kl_loss_coef=0.5)
    expected = gradients(make_actor(micro_batch_size=1, loss=loss), rows)
    assert max(float(grad.abs().max()) for grad in expected.values()) > 1e-3
    for size, tokens in ((24, 100_000), (5, 200)):
        got = gradients(make_actor(micro_batch_size=size, max_tokens=tokens, loss=loss), rows)
        for name, grad in got.items():
            assert torch.allclose(grad, expected[name], atol=1e-6, rtol=1e-5), name


def test_the_gradient_is_that_of_the_formula(make_actor, batch, model, tokenizer):
    """Against autograd on the plain loss, row by row, without packing, sharing or masks rebuilt in bulk."""
    rows = batch.select(np.arange(len(batch)) % 3 == 1)
    actor = make_actor(loss=LossConfig(use_kl_loss=False, entropy_coeff=0.0))
    got = gradients(actor, rows)
    plain = copy.deepcopy(model).requires_grad_(True)
    total, count = torch.zeros(()), sum(len(reply) for reply in rows.reply_ids)
    for prompt, reply, page, advantage in zip(
        rows.prompt_ids, rows.reply_ids, rows.admissible, rows.advantage, strict=True
    ):
        ids = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))
        logits = plain(ids[None]).logits[0, len(prompt) - 1 : -1]
        mask = torch.from_numpy(actor.collate.grammar.allowed_mask(page, reply, logits.shape[-1]))
        log_probs = logits.masked_fill(~mask, float("-inf")).log_softmax(-1)
        chosen = log_probs[torch.arange(len(reply)), torch.from_numpy(reply.astype(np.int64))]
        total = total - float(advantage) * (chosen - chosen.detach()).exp().sum() / count
    total.backward()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(got[f"policy.{name}"], parameter.grad, atol=1e-6), name


def test_checkpointed_layers_run_twice_without_dropout_and_give_the_same_gradient(ranks, tokenizer, grammar, batch):
    calls, found = [], []
    for is_checkpointed in (False, True):
        model = make_small_policy(tokenizer, hidden=32, layers=2, heads=2)
        for layer in layers(model):
            layer.self_attn.attention_dropout = 0.5
        if is_checkpointed:
            checkpoint_layers(model)
        calls.append([])
        for layer in layers(model):
            layer.mlp.register_forward_pre_hook(lambda *_, count=calls[-1]: count.append(1))
        config = ActorConfig(micro_batch_size=1000, loss=LossConfig(use_kl_loss=False))
        actor = Actor(model.requires_grad_(True), ranks, config, pad_id=tokenizer.pad_token_id, grammar=grammar)
        found.append(gradients(actor, batch))
    plain, checkpointed = found
    assert len(calls[0]) > 0
    assert len(calls[1]) == 2 * len(calls[0])
    for name, grad in checkpointed.items():
        assert torch.equal(grad, plain[name]), name


def test_compiled_layers_are_traced_once_for_all_and_give_the_same_gradient(ranks, tokenizer, grammar, batch):
    traced: list[int] = []

    def counting(graph, _):
        traced.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    found = []
    for is_compiled in (False, True):
        model = make_small_policy(tokenizer, hidden=32, layers=3, heads=2)
        if is_compiled:
            compile_layers(model, backend=counting)
            checkpoint_layers(model)
        config = ActorConfig(micro_batch_size=3, loss=LossConfig(use_kl_loss=False))
        actor = Actor(model.requires_grad_(True), ranks, config, pad_id=tokenizer.pad_token_id, grammar=grammar)
        found.append(gradients(actor, batch))
    assert len(traced) <= 2, "three layers, micro-batches of several lengths; one row alone is traced for itself"
    for name, grad in found[1].items():
        assert torch.equal(grad, found[0][name]), name


def test_layers_are_not_compiled_where_nothing_can_be():
    def without_compiler(graph, inputs):
        raise OSError("no g++ here")

    torch._dynamo.reset()
    require_compiler(torch.device("cpu"), backend=lambda graph, inputs: graph.forward)
    torch._dynamo.reset()
    with pytest.raises(ShopGymError, match=r"use_torch_compile: .* nothing for cpu here \(.*no g\+\+ here"):
        require_compiler(torch.device("cpu"), backend=without_compiler)


def test_a_model_that_names_no_layers_cannot_be_checkpointed_or_compiled(tokenizer):
    model = make_small_policy(tokenizer, hidden=32, layers=1, heads=2)
    model._no_split_modules = None
    with pytest.raises(ShopGymError, match="enable_gradient_checkpointing: Qwen2ForCausalLM names no layers"):
        checkpoint_layers(model)
    with pytest.raises(ShopGymError, match="use_torch_compile: Qwen2ForCausalLM names no layers to compile"):
        compile_layers(model)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Granite", {"logits_scaling": 8.0}),
        ("Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 16, "query_pre_attn_scalar": 16}),
        ("Cohere", {"logit_scale": 0.0625}),
    ],
)
def test_a_model_that_changes_its_logits_after_the_output_layer_is_refused(kind, changes):
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=100, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes, **changes
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)
    with pytest.raises(ShopGymError, match=f"actor_rollout_ref.model.path: {kind}ForCausalLM changes its logits"):
        require_plain_logits(model)


def test_a_model_whose_output_layer_is_the_last_word_is_taken(model):
    require_plain_logits(model)


def test_padding_rows_change_no_gradient(make_actor, reference, batch):
    rows = reference.with_log_probs(batch)
    padded = rows.select(np.r_[np.arange(len(rows)), [2, 5, 7]])
    padded.row_weight[-3:] = 0
    padded.advantage[-3:] = 100.0
    expected, got = gradients(make_actor(), rows), gradients(make_actor(), padded)
    for name, grad in got.items():
        assert torch.allclose(grad, expected[name], atol=1e-7), name


def test_padding_rows_change_no_bit_of_an_update(make_actor, reference, batch):
    found = []
    for padding in ([], [2, 5, 7]):
        rows = reference.with_log_probs(batch.select(np.r_[np.arange(len(batch)), padding].astype(int)))
        rows.row_weight[len(batch) :] = 0
        actor = make_actor(mini_batch_size=10)
        metrics = actor.update(actor.with_old_log_probs(rows))
        found.append((metrics, actor.full_state_dict()))
    assert found[0][0] == found[1][0]
    for name, tensor in found[0][1].items():
        assert torch.equal(tensor, found[1][1][name]), name


def test_one_step_needs_no_pass_for_old_log_probs_and_gives_the_same_numbers(make_actor, reference, batch):
    rows = reference.with_log_probs(batch)
    short, long = make_actor(), make_actor()
    assert short.with_old_log_probs(rows).old_log_probs is None
    with_old = rows.select(np.arange(len(rows)))
    with_old.old_log_probs = long.log_probs(rows)
    first, second = short.update(rows), long.update(with_old)
    assert first["actor/ratio_max"] == 1.0
    assert first["actor/first_ratio_distance"] == 0.0
    assert first["actor/loss"] == pytest.approx(second["actor/loss"], abs=1e-6)
    for name, tensor in short.full_state_dict().items():
        assert torch.allclose(tensor, long.full_state_dict()[name], atol=1e-6), name


def test_mini_batches_are_optimizer_steps_and_the_first_is_on_policy(make_actor, reference, batch):
    actor = make_actor(mini_batch_size=10, epochs=2)
    rows = actor.with_old_log_probs(reference.with_log_probs(batch))
    assert rows.old_log_probs is not None
    metrics = actor.update(rows, seed=0, update=3)
    assert metrics["actor/optimizer_steps"] == 6  # 10 + 10 + 4 rows, twice
    assert metrics["actor/ratio_max"] > 1.0
    assert metrics["actor/first_ratio_distance"] < 1e-5
    assert metrics["actor/skipped_steps"] == 0


def test_an_update_has_the_learning_rate_of_its_number(make_actor, batch):
    rate = RateSchedule(shape="cosine", num_steps=4, num_rising=1, lowest=0.0)
    actor = make_actor(lr=0.01, rate=rate, weight_decay=0.0, loss=LossConfig(use_kl_loss=False))
    moved = []
    for number in (1, 4):
        before = {name: weight.clone() for name, weight in actor.full_state_dict().items()}
        metrics = actor.update(batch, update=number)
        moved.append(
            max(float((weight - before[name]).abs().max()) for name, weight in actor.full_state_dict().items())
        )
        assert metrics["actor/lr"] == 0.01 * rate.share(number)
    assert moved[0] == pytest.approx(0.01, rel=0.01), "AdamW's first step"
    assert moved[1] == 0.0, "the cosine has arrived"


def test_learning_makes_the_rewarded_reply_likelier(make_actor, batch):
    actor = make_actor(loss=LossConfig(use_kl_loss=False, entropy_coeff=0.0))
    rows = batch.select(np.array([1, 4]))
    rows.advantage = np.float32([1.0, -1.0])
    before = [float(np.sum(row)) for row in actor.log_probs(rows)]
    for _ in range(5):
        actor.update(rows)
    after = [float(np.sum(row)) for row in actor.log_probs(rows)]
    assert after[0] > before[0]
    assert after[1] < before[1]


def spoilt(rows: StepBatch, value: float) -> StepBatch:
    """The first four rows, one with an advantage that is no number to learn from."""
    rows = rows.select(np.arange(4))
    rows.advantage = np.float32([1.0, value, 1.0, 1.0])
    return rows


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_leaves_the_weights_alone(make_actor, batch, value):
    actor = make_actor(loss=LossConfig(use_kl_loss=False))
    before = {name: tensor.clone() for name, tensor in actor.full_state_dict().items()}
    metrics = actor.update(spoilt(batch, value))
    assert (metrics["actor/skipped_steps"], metrics["actor/optimizer_steps"]) == (1, 0)
    assert np.isnan(metrics["actor/loss"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.full_state_dict().items())


def test_a_step_that_is_skipped_does_not_count_in_the_figures_of_the_others(make_actor, batch):
    actor = make_actor(mini_batch_size=12, loss=LossConfig(use_kl_loss=False))
    rows = actor.with_old_log_probs(batch)
    rows.advantage = rows.advantage.copy()
    rows.advantage[5] = np.nan
    metrics = actor.update(rows)
    assert (metrics["actor/skipped_steps"], metrics["actor/optimizer_steps"]) == (1, 1)
    assert np.isfinite([value for name, value in metrics.items() if name.startswith("actor/")]).all()


def test_skipped_steps_in_a_row_end_the_run_and_one_that_is_taken_starts_the_count_again(make_actor, batch):
    actor = make_actor(max_nan_steps=2, loss=LossConfig(use_kl_loss=False))
    for rows in (spoilt(batch, np.nan), batch, spoilt(batch, np.nan)):
        actor.update(rows)
    with pytest.raises(NotFinite, match="2 optimizer steps in a row"):
        actor.update(spoilt(batch, np.nan))


def test_old_log_probs_are_taken_where_something_else_needs_them(make_actor, batch):
    actor = make_actor()
    assert actor.with_old_log_probs(batch).old_log_probs is None
    assert len(actor.with_old_log_probs(batch, always=True).old_log_probs) == len(batch)


def test_equal_rows_are_computed_once(batch):
    pairs = distinct_pairs(batch)
    assert len(pairs) == len(batch) - 1
    assert pairs.of_row[3] == pairs.of_row[0]


def test_micro_batches_hold_every_row_once_within_both_limits():
    lengths = np.random.default_rng(0).integers(10, 200, 100)
    found = micro_batches(lengths, max_rows=8, max_tokens=600)
    assert sorted(np.concatenate(found).tolist()) == list(range(100))
    for part in found:
        assert len(part) <= 8
        assert len(part) * lengths[part].max() <= 600
        assert lengths[part].min() >= 0.75 * lengths[part].max()
    assert [len(part) for part in micro_batches(np.array([1000]), max_rows=8, max_tokens=600)] == [1]


def test_a_gpu_makes_fewer_passes_of_rows_that_differ_in_length():
    lengths = np.array([100, 50, 10])
    found = {
        kind: micro_batches_for(torch.device(kind), lengths, max_rows=8, max_tokens=600, width=8_192)
        for kind in ("cpu", "cuda")
    }
    assert (len(found["cpu"]), len(found["cuda"])) == (3, 1)


def test_a_narrow_model_makes_fewer_passes_on_a_gpu_since_each_waits_for_its_launch():
    lengths = np.repeat([6_000, 3_000], 4)
    found = {
        width: micro_batches_for(torch.device("cuda"), lengths, max_rows=8, max_tokens=65_536, width=width)
        for width in (256, 8_192)
    }
    assert (len(found[256]), len(found[8_192])) == (1, 2)


def test_no_other_micro_batches_of_like_lengths_cost_less():
    rng = np.random.default_rng(0)
    for pass_tokens, launch_tokens in ((0, 0), (20, 0), (500, 0), (20, 120), (0, 200)):
        lengths = rng.integers(1, 100, 9)
        found = cheapest_micro_batches(
            lengths, max_rows=4, max_tokens=250, pass_tokens=pass_tokens, launch_tokens=launch_tokens
        )
        assert sorted(np.concatenate(found).tolist()) == list(range(9))
        falling = np.sort(lengths)[::-1]
        costs = []
        for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, 9), k) for k in range(9)):
            parts = np.split(falling, cuts)
            if all(len(part) <= 4 and len(part) * part[0] <= 250 for part in parts):
                costs.append(sum(max(len(part) * part[0], launch_tokens) + pass_tokens for part in parts))
        got = sum(max(len(part) * lengths[part].max(), launch_tokens) + pass_tokens for part in found)
        assert got == min(costs)
    assert len(cheapest_micro_batches(np.array([1000]), max_rows=8, max_tokens=600, pass_tokens=9)) == 1


def test_several_steps_without_old_log_probs_are_refused(make_actor, reference, batch):
    rows = reference.with_log_probs(batch)
    for changes in ({"mini_batch_size": 10}, {"epochs": 2}):
        with pytest.raises(ValueError, match="fill old_log_probs"):
            make_actor(**changes).update(rows)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_loss_that_is_reported_is_the_one_that_is_minimised(make_actor, batch, mode):
    """On-policy, without KL and entropy, the loss of a token is minus its row's advantage."""
    actor = make_actor(loss=LossConfig(use_kl_loss=False, entropy_coeff=0.0, loss_agg_mode=mode))
    lengths = np.array([len(reply) for reply in batch.reply_ids])
    expected = {
        "token-mean": np.sum(lengths * batch.advantage) / np.sum(lengths),
        "seq-mean-token-sum": np.mean(lengths * batch.advantage),
        "seq-mean-token-mean": np.mean(batch.advantage),
    }[mode]
    metrics = actor.update(batch)
    assert metrics["actor/loss"] == pytest.approx(-expected, rel=1e-5)
    assert metrics["actor/policy_loss"] == pytest.approx(-expected, rel=1e-5)


def test_the_gap_between_engine_and_trainer_is_measured_and_corrected_where_asked(make_actor, batch):
    """The engine is made to have thought each token exp(-0.5) times as likely, those of the last row exp(-0.05)."""
    actor = make_actor(loss=LossConfig(use_kl_loss=False, entropy_coeff=0.0))
    rows = actor.with_old_log_probs(batch)
    shifts = np.r_[np.full(len(rows) - 1, 0.5), 0.05]
    rows = replace(
        rows, rollout_log_probs=ragged([row - shift for row, shift in zip(actor.log_probs(rows), shifts, strict=True)])
    )
    lengths = np.array([len(reply) for reply in rows.reply_ids])
    share = lengths[-1] / lengths.sum()
    metrics = actor.update(rows)
    assert metrics["actor/engine_gap_mean_nats"] == pytest.approx(0.5 - 0.45 * share, abs=1e-5)
    assert metrics["actor/engine_gap_max_nats"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["actor/engine_gap_large_frac"] == pytest.approx(1 - share, abs=1e-6)
    assert "actor/importance_weight_mean" not in metrics

    loss = LossConfig(use_kl_loss=False, entropy_coeff=0.0, tis_imp_ratio_cap=1.25)
    corrected = make_actor(loss=loss).update(rows)
    assert corrected["actor/importance_capped_frac"] == pytest.approx(1 - share, abs=1e-6)
    expected = 1.25 * (1 - share) + np.exp(0.05) * share
    assert corrected["actor/importance_weight_mean"] == pytest.approx(expected, abs=1e-5)
    weights = np.r_[np.full(len(rows) - 1, 1.25), np.exp(0.05)]
    scaled = replace(rows, advantage=(rows.advantage * weights).astype(np.float32))
    plain = gradients(make_actor(loss=LossConfig(use_kl_loss=False, entropy_coeff=0.0)), scaled)
    for name, grad in gradients(make_actor(loss=loss), rows).items():
        assert torch.allclose(grad, plain[name], atol=1e-6), name


def test_an_engine_without_log_probs_leaves_no_figure_of_a_gap(make_actor, batch):
    rows = replace(batch, rollout_log_probs=ragged([np.full(len(row), np.nan, np.float32) for row in batch.reply_ids]))
    loss = LossConfig(use_kl_loss=False, tis_imp_ratio_cap=1.25)
    metrics = make_actor(loss=loss).update(rows)
    assert not any("gap" in key or "importance" in key for key in metrics)
    expected = make_actor(loss=LossConfig(use_kl_loss=False)).update(batch)
    assert metrics["actor/loss"] == expected["actor/loss"]


def test_the_first_of_several_mini_batches_has_ratio_1_and_a_later_one_has_not(make_actor, batch, monkeypatch):
    largest = []
    add = UpdateTotals.add

    def recording(self, losses, entropy, weights, to_old, gap):
        largest.append((self.num_mini_batches, float((losses.ratio[weights > 0] - 1).abs().max())))
        add(self, losses, entropy, weights, to_old, gap)

    monkeypatch.setattr(UpdateTotals, "add", recording)
    actor = make_actor(mini_batch_size=10, loss=LossConfig(use_kl_loss=False))
    actor.update(actor.with_old_log_probs(batch))
    first = [gap for number, gap in largest if number == 1]
    assert len(first) > 1 and max(first) < 2e-6
    assert max(gap for number, gap in largest if number == 3) > 1e-3
