"""Chunks of logits: the numbers of the whole at once, in a bounded part of its memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainers.output_layer import token_scores
from trainers.scoring import TokenMask

VOCABULARY, WIDTH, TOKENS = 300, 16, 50


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any tensor made while it is active has."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return result


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, VOCABULARY)


def scores(layer, hidden, targets, mask, *, max_logits: int, with_entropy: bool = True):
    """Log-probs, entropies, and the gradients of a sum that weighs each token differently."""
    hidden = hidden.clone().requires_grad_(True)
    layer.zero_grad()
    chosen, entropy = token_scores(
        layer,
        hidden,
        targets,
        vocabulary=layer.out_features,
        temperature=0.7,
        forbidden=None if mask is None else lambda start, stop: mask.forbidden(layer.out_features, start, stop),
        with_entropy=with_entropy,
        max_logits=max_logits,
    )
    weights = torch.linspace(-1, 2, len(targets))
    total = (chosen * weights).sum()
    if entropy is not None:
        total = total + (entropy * weights.flip(0)).sum()
    total.backward()
    return [chosen, entropy, hidden.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]


def some_mask() -> TokenMask:
    """Three sets of allowed tokens, one of a single token; targets below are in all of them."""
    sets = [[7], [7, 9, 250], list(range(5, 200))]
    return TokenMask(
        rows=torch.tensor([number for number, ids in enumerate(sets) for _ in ids]),
        ids=torch.tensor([i for ids in sets for i in ids]),
        num_sets=3,
        set_of_token=torch.arange(TOKENS) % 3,
    )


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("tokens_of_a_chunk", [1, 7, 49])
def test_chunks_give_the_numbers_and_gradients_of_the_whole(layer, is_masked, with_entropy, tokens_of_a_chunk):
    hidden = torch.randn(TOKENS, WIDTH)
    targets = torch.full((TOKENS,), 7) if is_masked else torch.arange(TOKENS) * 5 % VOCABULARY
    mask = some_mask() if is_masked else None
    expected = scores(layer, hidden, targets, mask, max_logits=10**9, with_entropy=with_entropy)
    got = scores(layer, hidden, targets, mask, max_logits=tokens_of_a_chunk * VOCABULARY, with_entropy=with_entropy)
    assert expected[0].min().item() < -1.0
    for found, wanted in zip(got, expected, strict=True):
        if wanted is not None:
            assert torch.allclose(found, wanted, atol=2e-6, rtol=1e-6)
    assert (got[1] is None) is not with_entropy


def test_no_tensor_is_larger_than_a_chunk_in_either_pass():
    """128 tokens of a vocabulary of 150,000 would be 19 million logits."""
    layer = nn.Linear(4, 150_000)
    limit = 8 * 150_000
    with LargestTensor() as seen:
        scores(layer, torch.randn(128, 4), torch.arange(128), None, max_logits=limit)
    assert 600_000 <= seen.num_elements <= limit  # the weight's gradient has 600,000
    with LargestTensor() as seen:
        scores(layer, torch.randn(16, 4), torch.arange(16), None, max_logits=10**9)
    assert seen.num_elements == 16 * 150_000


def test_a_frozen_layer_gets_no_gradient_and_passes_one_on(layer):
    layer.requires_grad_(False)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    chosen, _ = token_scores(
        layer,
        hidden,
        torch.arange(TOKENS),
        vocabulary=VOCABULARY,
        temperature=1.0,
        forbidden=None,
        with_entropy=False,
        max_logits=VOCABULARY,
    )
    chosen.sum().backward()
    assert float(hidden.grad.abs().max()) > 0.01
    assert layer.weight.grad is None


def test_the_weight_gradient_of_many_chunks_is_added_up_in_float32():
    """In bfloat16 a sum of 256 equal terms stops growing."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, 8, bias=False, dtype=torch.bfloat16)
    hidden, targets = torch.randn(1, WIDTH, dtype=torch.bfloat16).repeat(1024, 1), torch.zeros(1024, dtype=torch.long)
    found = []
    for max_logits in (8, 10**6):
        layer.zero_grad()
        chosen, _ = token_scores(
            layer,
            hidden,
            targets,
            vocabulary=8,
            temperature=1.0,
            forbidden=None,
            with_entropy=False,
            max_logits=max_logits,
        )
        chosen.sum().backward()
        found.append(layer.weight.grad.float())
    assert torch.allclose(found[0], found[1], rtol=0.02, atol=0.02 * float(found[1].abs().max()))
