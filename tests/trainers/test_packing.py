"""Packed rows: the numbers of padded ones, with no token computed for nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_rows import rows

from trainers.actor import Actor, ActorConfig, UpdateTotals
from trainers.losses import LossConfig
from trainers.models import make_small_policy, train_tokenizer
from trainers.packing import balanced_micro_batches, flash_attention, is_packed, pack_sequences, packed_attention
from trainers.ranks import start_ranks
from trainers.sharding import checkpoint_layers
from webshop_env.errors import ShopGymError


def make_actor(*, is_packed: bool, **changes) -> Actor:
    tokenizer = train_tokenizer(["click[buy now] search[red mug]"] * 5, 300)
    model = make_small_policy(tokenizer, hidden=32, layers=2, heads=4).requires_grad_(True)
    if is_packed:
        pack_sequences(model)
    checkpoint_layers(model)
    config = ActorConfig(loss=LossConfig(use_kl_loss=False), **changes)
    return Actor(model, start_ranks("cpu"), config, pad_id=0)


def gradients(actor: Actor) -> dict[str, torch.Tensor]:
    actor.accumulate_gradients(rows(0), UpdateTotals())
    return {name: parameter.grad.full_tensor() for name, parameter in actor.trained_weights()}


@pytest.mark.parametrize("changes", [{}, {"micro_batch_size": 3}, {"max_tokens": 20}])
def test_packed_rows_give_the_numbers_of_padded_ones(changes):
    padded, packed = make_actor(is_packed=False), make_actor(is_packed=True, **changes)
    expected, got = padded.log_probs(rows(0)), packed.log_probs(rows(0))
    assert np.allclose(np.concatenate(got), np.concatenate(expected), atol=1e-6)
    right = gradients(padded)
    for name, gradient in gradients(packed).items():
        assert torch.allclose(gradient, right[name], atol=1e-7), name


def test_packed_rows_hold_no_padding():
    actor, seen = make_actor(is_packed=True, max_tokens=20), []
    collate = actor.collate

    def watching(pairs, chosen):
        seen.append((collate(pairs, chosen), int(pairs.lengths[chosen].sum())))
        return seen[-1][0]

    actor.collate = watching
    actor.log_probs(rows(0))
    assert len(seen) > 1
    for batch, num_tokens in seen:
        assert batch.input_ids.shape == (1, num_tokens)
        assert batch.packed.begins[-1] == num_tokens
        assert batch.packed.positions.max() < batch.packed.longest


def test_passes_are_few_and_alike_within_both_limits():
    lengths = np.random.default_rng(0).integers(10, 200, 100)
    for max_rows, max_tokens in ((8, 10_000), (100, 600), (7, 900)):
        found = balanced_micro_batches(lengths, max_rows=max_rows, max_tokens=max_tokens)
        assert sorted(np.concatenate(found).tolist()) == list(range(100))
        assert all(len(part) <= max_rows and lengths[part].sum() <= max_tokens for part in found)
        fewest = max(100 / max_rows, lengths.sum() / max_tokens)
        assert len(found) <= 1.1 * fewest + 1
    loads = [lengths[part].sum() for part in balanced_micro_batches(lengths, max_rows=100, max_tokens=3000)]
    assert max(loads) - min(loads) < 100
    assert [part.tolist() for part in balanced_micro_batches(np.array([90]), max_rows=1, max_tokens=50)] == [[0]]


def test_a_model_with_windows_is_refused():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=1,
    )
    with pytest.raises(ShopGymError, match="use_remove_padding: Qwen2ForCausalLM cannot take its sequences"):
        pack_sequences(Qwen2ForCausalLM(config).eval())


def test_a_model_whose_layers_alone_know_of_a_window_is_refused():
    """Its configuration lists no kinds of layers, and two short sequences would not show the difference."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    windowed, plain = (
        MistralForCausalLM._from_config(MistralConfig(**sizes, **heads, sliding_window=window)).eval()
        for window in (64, None)
    )
    with pytest.raises(ShopGymError, match="use_remove_padding: MistralForCausalLM cannot take its sequences"):
        pack_sequences(windowed)
    pack_sequences(plain)
    assert is_packed(plain)


def test_the_kernel_of_a_gpu_takes_what_the_layers_give():
    """Shapes and types alone: this needs no GPU."""
    kind = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    query, key, value = (torch.empty(1, heads, 100, 64, **kind) for heads in (6, 2, 2))
    begins = torch.empty(4, device="meta", dtype=torch.int32)
    out = flash_attention(query, key, value, begins, 50, 0.1)
    assert (out.shape, out.dtype) == ((1, 100, 6, 64), torch.bfloat16)
    out.sum().backward()
    assert (query.grad.shape, key.grad.shape, value.grad.shape) == (query.shape, key.shape, value.shape)


@pytest.mark.gpu
def test_the_kernel_of_a_gpu_gives_the_numbers_of_the_loop():
    torch.manual_seed(0)
    states = [torch.randn(1, heads, 100, 64, device="cuda") for heads in (6, 2, 2)]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [state.to(dtype, copy=True).requires_grad_(True) for state in states]
        begins = torch.tensor([0, 30, 33, 100], device="cuda", dtype=torch.int32)
        out, _ = packed_attention(
            torch.nn.Identity(), *inputs, None, scaling=0.1, cu_seq_lens_q=begins, max_length_q=67
        )
        (out.float() * torch.linspace(-1, 1, 100, device="cuda")[:, None, None]).sum().backward()
        found.append([out, *(state.grad for state in inputs)])
    for exact, quick in zip(*found, strict=True):
        assert torch.allclose(exact, quick.float(), atol=3e-2, rtol=3e-2)
