"""From hidden states to log-probs and entropies, a few tokens at a time where all of them would take too much memory.

Dimensions: T reply tokens, C tokens of a chunk, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

MAX_LOGITS = 2**25
"""Logits of one chunk: 128 MiB in float32, 220 tokens of a vocabulary of 152,000."""
MAX_LOGITS_GPU = 2**28
"""The same on a GPU, 1 GiB in float32, about five times that with what is computed from them: small chunks would be
many short kernels, and each adds to a gradient of the size of the output layer."""

Forbidden = Callable[[int, int], torch.Tensor]
"""(first token, one past the last) -> bool [C, V]: what could not have been sampled."""


def token_scores(
    output: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int,
    temperature: float,
    forbidden: Forbidden | None,
    with_entropy: bool,
    max_logits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target and entropy at its place.

    Where all logits fit into `max_logits`, autograd does the rest. Beyond that neither pass ever holds more than a
    chunk of them: the backward pass computes them again.

    Args:
        output: The model's output layer.
        hidden: [T, H].
        targets: int64 [T].
        vocabulary: V.
        temperature: Divides the logits.
        forbidden: Masks of constrained decoding; None: nothing is forbidden.
        with_entropy: False spares its work.
        max_logits: Logits held at once, None: what suits the device; layers that are not plain linear ones are not
            cut.

    Returns:
        float32 [T], and float32 [T] or None.
    """
    if max_logits is None:
        max_logits = MAX_LOGITS_GPU if hidden.device.type == "cuda" else MAX_LOGITS
    size = max(1, max_logits // vocabulary)
    if len(targets) <= size or not isinstance(output, nn.Linear):
        mask = None if forbidden is None else forbidden(0, len(targets))
        log_probs = _log_probs(output(hidden), temperature, mask)
        return _chosen(log_probs, targets), _entropy(log_probs, mask) if with_entropy else None
    scores, entropy = _InChunks.apply(
        hidden, output.weight, output.bias, targets, temperature, forbidden, with_entropy, size
    )
    return scores, entropy if with_entropy else None


class _InChunks(torch.autograd.Function):
    """`token_scores` with a backward pass by hand: dlogits = g (e_target - p) - h p (log p + H), over the temperature.

    g and h are the gradients of log-prob and entropy. The gradient of the weight is added up in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        forbidden: Forbidden | None,
        with_entropy: bool,
        size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(chosen)
        for chunk, mask in _chunks(len(targets), size, forbidden):
            log_probs = _log_probs(functional.linear(hidden[chunk], weight, bias), temperature, mask)
            chosen[chunk] = _chosen(log_probs, targets[chunk])
            if with_entropy:
                entropy[chunk] = _entropy(log_probs, mask)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.rest = temperature, forbidden, with_entropy, size
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        temperature, forbidden, with_entropy, size = ctx.rest
        of_chosen, of_entropy = gradients
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        for chunk, mask in _chunks(len(targets), size, forbidden):
            log_probs = _log_probs(functional.linear(hidden[chunk], weight, bias), temperature, mask)
            slopes = log_probs.exp()  # [C, V], from here on in place
            if with_entropy:
                finite = log_probs if mask is None else log_probs.masked_fill_(mask, 0.0)
                finite += entropy[chunk, None]
                slopes *= -of_chosen[chunk, None] - of_entropy[chunk, None] * finite
            else:
                slopes *= -of_chosen[chunk, None]
            slopes.scatter_add_(1, targets[chunk, None], of_chosen[chunk, None])
            slopes /= temperature
            if of_bias is not None:
                of_bias += slopes.sum(dim=0)
            slopes = slopes.to(weight.dtype)
            of_hidden[chunk] = slopes @ weight
            if of_weight is not None:
                of_weight += slopes.T @ hidden[chunk]
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            *[None] * 5,
        )


def _chunks(total: int, size: int, forbidden: Forbidden | None) -> Iterator[tuple[slice, torch.Tensor | None]]:
    for start in range(0, total, size):
        stop = min(start + size, total)
        yield slice(start, stop), None if forbidden is None else forbidden(start, stop)


def _log_probs(logits: torch.Tensor, temperature: float, mask: torch.Tensor | None) -> torch.Tensor:
    scaled = logits.float() / temperature
    if mask is not None:
        scaled = scaled.masked_fill(mask, float("-inf"))
    return torch.log_softmax(scaled, dim=-1)


def _chosen(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return log_probs[torch.arange(len(targets), device=log_probs.device), targets]


def _entropy(log_probs: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    finite = log_probs if mask is None else log_probs.masked_fill(mask, 0.0)
    return -(log_probs.exp() * finite).sum(dim=-1)
