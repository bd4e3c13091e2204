"""Sequences one after the other in a single row, without padding: every token that a pass computes is one of the text.

transformers hands the lengths down to the attention, which is ours: a token sees those of its own sequence alone. On a
GPU that is one kernel for all sequences (torch's own flash attention, in bfloat16); elsewhere, sequence by sequence,
the same numbers slowly.

Dimensions: U sequences of a pass, T their tokens, A attention heads, K key-value heads, D width of a head.
"""

from __future__ import annotations

import heapq
import itertools
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "shopgym_packed"
"""Of the attention among those of transformers."""
MORE_THAN_CAUSAL = ("sliding_window", "softcap", "s_aux")
"""What layers of some models ask of an attention besides (a window, bounded scores, sinks), and ours does not do."""


@torch.no_grad()
def pack_sequences(policy: PreTrainedModel) -> None:
    """Makes a model take packed rows, and no others.

    Raises:
        ShopGymError: Its attention is more than causal, or it does not hand the lengths down.
    """
    from transformers import AttentionInterface

    config = policy.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    lengths, device = [5, 3], policy.device
    ids = (torch.arange(sum(lengths), device=device)[None] * 37 + 3) % int(config.vocab_size)
    apart = [policy.base_model(input_ids=part, use_cache=False).last_hidden_state for part in ids.split(lengths, dim=1)]
    AttentionInterface.register(NAME, packed_attention)
    policy.set_attn_implementation(NAME)
    together = None
    if kinds == {"full_attention"}:
        places = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
        begins = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
        with suppress(TypeError):  # the lengths did not arrive, or the layers ask for more than the attention does
            together = hidden_states(policy, ids, places, begins, max(lengths))
    if together is None or not torch.allclose(together, torch.cat(apart, dim=1), rtol=1e-3, atol=1e-3):
        raise ShopGymError(
            f"actor_rollout_ref.model.use_remove_padding: {type(policy).__name__} cannot take its sequences one after "
            "the other in a row; leave it out"
        )


def is_packed(policy: PreTrainedModel) -> bool:
    """Whether a model takes packed rows."""
    return bool(policy.config.get_text_config()._attn_implementation == NAME)


def hidden_states(
    policy: PreTrainedModel, input_ids: torch.Tensor, positions: torch.Tensor, begins: torch.Tensor, longest: int
) -> torch.Tensor:
    """What a model that takes packed rows makes of one.

    Args:
        policy: After `pack_sequences`.
        input_ids: int64 [1, T].
        positions: int64 [1, T], of each token in its own sequence.
        begins: int32 [U + 1], where each sequence begins, and T.
        longest: Tokens of the longest.

    Returns:
        [1, T, H].
    """
    lengths = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": longest, "max_length_k": longest}
    return policy.base_model(input_ids=input_ids, position_ids=positions, use_cache=False, **lengths).last_hidden_state


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence.

    Args:
        module: The attention layer; not looked at.
        query: [1, A, T, D].
        key: [1, K, T, D], K a divisor of A.
        value: [1, K, T, D].
        attention_mask: None; the lengths say it all.
        scaling: Multiplies the scores.
        cu_seq_lens_q: int32 [U + 1], where each sequence begins, and T.
        max_length_q: Tokens of the longest sequence.
        kwargs: What transformers has for other kinds of attention.

    Returns:
        [1, T, A, D], and no weights.

    Raises:
        TypeError: The layer asks for more than causal attention.
    """
    if more := [name for name in MORE_THAN_CAUSAL if kwargs.get(name) is not None]:
        raise TypeError(f"packed attention is causal and no more, a layer asks for {more[0]}")
    if query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        return flash_attention(query, key, value, cu_seq_lens_q, max_length_q, scaling), None
    parts = [
        functional.scaled_dot_product_attention(
            query[:, :, start:stop],
            key[:, :, start:stop],
            value[:, :, start:stop],
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for start, stop in itertools.pairwise(cu_seq_lens_q.tolist())
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begins: torch.Tensor, longest: int, scaling: float
) -> torch.Tensor:
    """`packed_attention` as one kernel: [1, T, A, D]."""
    rows = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]  # [T, A or K, D]
    out, *_ = torch.ops.aten._flash_attention_forward(
        *rows, begins, begins, longest, longest, 0.0, True, False, scale=scaling
    )
    return out.unsqueeze(0)


def balanced_micro_batches(lengths: np.ndarray, *, max_rows: int, max_tokens: int) -> list[np.ndarray]:
    """Deals sequences to the fewest passes that hold them, all of about the same number of tokens.

    Args:
        lengths: int [U], tokens of each sequence.
        max_rows: Sequences of one pass, at most.
        max_tokens: Tokens of one pass, at most; a longer sequence gets one for itself.

    Returns:
        Arrays of positions in `lengths` that together hold each position once.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    fewest = max(-(-len(order) // max_rows), -(-int(np.sum(lengths)) // max_tokens), 1)
    for num_passes in range(min(fewest, len(order)), len(order) + 1):
        passes: list[list[int]] = [[] for _ in range(num_passes)]
        loads = [(0, number) for number in range(num_passes)]
        for position in order:  # the longest that is left to the pass that has least
            load, number = heapq.heappop(loads)
            passes[number].append(position)
            if len(passes[number]) < max_rows:
                heapq.heappush(loads, (load + int(lengths[position]), number))
        if all(len(part) == 1 or int(np.sum(lengths[part])) <= max_tokens for part in passes):
            return [np.asarray(part) for part in passes]
    return []
