"""Log-probabilities of replies that were already written (teacher forcing), without padding to the longest row.

Rows of like length share a micro-batch; equal rows (siblings that wrote the same reply to the same prompt) are
computed once; only the positions that predict a reply token pass through the output layer, in chunks. Under constrained
decoding the masks of the engine are rebuilt from what each page allowed, so that both see one distribution.

Dimensions: U distinct (prompt, reply) pairs, B pairs of a micro-batch, L tokens of its longest, T its reply tokens,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn

from rollout.types import StepBatch
from trainers.output_layer import token_scores
from trainers.packing import balanced_micro_batches, hidden_states
from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Grammar(Protocol):
    """What a reply may go on with at each of its tokens; `rollout.constrained.ActionGrammar` is one."""

    def allowed_ids(self, admissible: tuple[str, ...], reply_ids: np.ndarray) -> list[np.ndarray]: ...


LEAST_FILL = 0.75
"""A sequence shorter than this part of the longest does not join its micro-batch: padding costs as much as text."""
PASS_TOKENS_GPU = 1024
"""What a pass costs on a GPU besides its tokens, in tokens: weights are gathered."""
LAUNCH_TOKENS_GPU = 13_000_000
"""Tokens times width that an H200 computes in the time that the host needs to launch a layer's kernels, both ways: a
smaller pass takes no less. Measured: 0.2 s for the 30 layers of SmolLM2-135M, enough for 23,000 tokens of width 576."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The distinct (prompt, reply) pairs of some rows, and where each row's is."""

    prompts: list[np.ndarray]
    replies: list[np.ndarray]
    admissible: list[tuple[str, ...] | None]
    of_row: np.ndarray
    """int64 [N]: number of each row's pair."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [U]: tokens of prompt and reply together."""
        sizes = [len(p) + len(r) for p, r in zip(self.prompts, self.replies, strict=True)]
        return np.asarray(sizes, dtype=np.int64)


def distinct_pairs(batch: StepBatch) -> Pairs:
    """Finds rows that ask the model the same question; the first of equal rows stands for all."""
    number: dict[tuple[bytes, bytes, tuple[str, ...] | None], int] = {}
    of_row = np.empty(len(batch), dtype=np.int64)
    pairs = Pairs([], [], [], of_row)
    for row in range(len(batch)):
        prompt, reply, admissible = batch.prompt_ids[row], batch.reply_ids[row], batch.admissible[row]
        key = (prompt.tobytes(), reply.tobytes(), admissible)
        if key not in number:
            number[key] = len(number)
            pairs.prompts.append(prompt)
            pairs.replies.append(reply)
            pairs.admissible.append(admissible)
        of_row[row] = number[key]
    return pairs


def micro_batches_for(
    device: torch.device, lengths: np.ndarray, *, max_rows: int, max_tokens: int, width: int, is_packed: bool = False
) -> list[np.ndarray]:
    """Shares sequences out as suits a device and a model of some width, or one that takes packed rows; see
    `micro_batches`."""
    if is_packed:
        return balanced_micro_batches(lengths, max_rows=max_rows, max_tokens=max_tokens)
    if device.type == "cuda":
        return cheapest_micro_batches(
            lengths,
            max_rows=max_rows,
            max_tokens=max_tokens,
            pass_tokens=PASS_TOKENS_GPU,
            launch_tokens=LAUNCH_TOKENS_GPU // width,
        )
    return micro_batches(lengths, max_rows=max_rows, max_tokens=max_tokens)


def cheapest_micro_batches(
    lengths: np.ndarray, *, max_rows: int, max_tokens: int, pass_tokens: int, launch_tokens: int = 0
) -> list[np.ndarray]:
    """Packs sequences so that tokens, padding counted, and passes together cost least, longest first.

    Some pass has the longest sequence and the next longest; what is left is the same question again. So it is answered
    from the end: U steps of at most `max_rows` choices.

    Args:
        lengths: int [U], tokens of each sequence.
        max_rows: Sequences of one micro-batch, at most.
        max_tokens: Tokens of one micro-batch, padding counted, at most; a longer sequence gets one for itself.
        pass_tokens: What a pass costs besides, in tokens.
        launch_tokens: A pass of fewer tokens costs as much as one of so many.

    Returns:
        Arrays of positions in `lengths` that together hold each position once.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    longest = np.maximum(np.asarray(lengths, dtype=np.int64)[order], 1)  # [U], of a pass that begins here
    cost_from = np.zeros(len(order) + 1, dtype=np.int64)
    size_from = np.ones(len(order), dtype=np.int64)
    for start in reversed(range(len(order))):
        most = max(1, min(max_rows, max_tokens // int(longest[start]), len(order) - start))
        sizes = np.arange(1, most + 1)
        tokens = np.maximum(launch_tokens, longest[start] * sizes)
        costs = pass_tokens + tokens + cost_from[start + 1 : start + 1 + most]
        best = int(costs.argmin())
        cost_from[start], size_from[start] = costs[best], sizes[best]
    batches: list[np.ndarray] = []
    start = 0
    while start < len(order):
        batches.append(order[start : start + size_from[start]])
        start += int(size_from[start])
    return batches


def micro_batches(
    lengths: np.ndarray, *, max_rows: int, max_tokens: int, least_fill: float = LEAST_FILL
) -> list[np.ndarray]:
    """Packs sequences of like length together, longest first.

    Args:
        lengths: int [U], tokens of each sequence.
        max_rows: Sequences of one micro-batch, at most.
        max_tokens: Tokens of one micro-batch, padding counted, at most; a longer sequence gets one for itself.
        least_fill: No sequence is shorter than this share of the longest beside it.

    Returns:
        Arrays of positions in `lengths` that together hold each position once.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    batches: list[np.ndarray] = []
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        alike = int(np.count_nonzero(np.asarray(lengths)[order[start:]] >= least_fill * longest))
        size = max(1, min(max_rows, max_tokens // max(1, longest), alike))
        batches.append(order[start : start + size])
        start += size
    return batches


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The vocabulary ids allowed at each reply token, as few distinct sets (many tokens share one)."""

    rows: torch.Tensor
    """int64 [M]: number of a set, with `ids` one allowed combination each."""
    ids: torch.Tensor
    """int64 [M]."""
    num_sets: int
    set_of_token: torch.Tensor
    """int64 [T]."""

    def forbidden(self, vocabulary: int, start: int, stop: int) -> torch.Tensor:
        """bool [stop - start, V]: what could not have been sampled at these tokens."""
        used, of_token = torch.unique(self.set_of_token[start:stop], return_inverse=True)
        place = torch.full((self.num_sets,), -1, device=used.device)
        place[used] = torch.arange(len(used), device=used.device)
        is_used = place[self.rows] >= 0
        sets = torch.ones(len(used), vocabulary, dtype=torch.bool, device=used.device)
        sets[place[self.rows[is_used]], self.ids[is_used]] = False
        return sets[of_token]


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the pairs of a micro-batch are that lie one after the other in a single row."""

    positions: torch.Tensor
    """int64 [1, L]: of each token in its own pair."""
    begins: torch.Tensor
    """int32 [U + 1]: where each pair begins, and L."""
    longest: int
    """Tokens of the longest pair."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Model input for some pairs: padded on the right, where a causal model never looks, or packed in a single row."""

    input_ids: torch.Tensor
    """int64 [B, L]; B is 1 where they are packed."""
    positions: torch.Tensor
    """int64 [T]: places in the flattened [B * L] whose output predicts a reply token."""
    targets: torch.Tensor
    """int64 [T]: those reply tokens."""
    mask: TokenMask | None
    """What the tokens were chosen from; None: the whole vocabulary."""
    packed: Packed | None = None
    """None: each pair has a row of its own."""


def on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array as a tensor where it is needed; nobody waits for a GPU that is still at work on earlier passes."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":  # from memory that can be swapped out a copy would wait for its turn
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Collator:
    """Makes micro-batches, remembering the masks of replies for the passes over the same rows that follow."""

    def __init__(self, pad_id: int, device: torch.device, grammar: Grammar | None, *, is_packed: bool = False) -> None:
        """`is_packed` is for models that take packed rows (`packing.pack_sequences`)."""
        self.pad_id, self.device, self.grammar, self.is_packed = pad_id, device, grammar, is_packed
        self._masks: dict[tuple[tuple[str, ...], bytes], list[np.ndarray]] = {}

    def __call__(self, pairs: Pairs, chosen: Sequence[int] | np.ndarray) -> MicroBatch:
        prompts = [pairs.prompts[u] for u in chosen]
        replies = [pairs.replies[u] for u in chosen]
        lengths = np.asarray([len(p) + len(r) for p, r in zip(prompts, replies, strict=True)])
        longest = int(lengths.max())
        begins = np.cumsum([0, *lengths]) if self.is_packed else np.arange(len(chosen) + 1) * longest
        input_ids = np.full(begins[-1], self.pad_id, dtype=np.int64)
        positions = []
        for begin, prompt, reply in zip(begins[:-1], prompts, replies, strict=True):
            input_ids[begin : begin + len(prompt)] = prompt
            input_ids[begin + len(prompt) : begin + len(prompt) + len(reply)] = reply
            positions.append(begin + len(prompt) - 1 + np.arange(len(reply)))
        packed = None
        if self.is_packed:
            own = np.concatenate([np.arange(length) for length in lengths])[None]
            packed = Packed(self._tensor(own), on_device(begins.astype(np.int32), self.device), longest)
        return MicroBatch(
            self._tensor(input_ids.reshape(1 if self.is_packed else len(chosen), -1)),
            self._tensor(np.concatenate(positions)),
            self._tensor(np.concatenate(replies)),
            self._mask(pairs, chosen),
            packed,
        )

    def forget(self) -> None:
        """Drops the remembered masks: the rows of the next update are others."""
        self._masks.clear()

    def _mask(self, pairs: Pairs, chosen: Sequence[int] | np.ndarray) -> TokenMask | None:
        if self.grammar is None:
            return None
        allowed = [ids for u in chosen for ids in self._allowed(self.grammar, pairs.admissible[u], pairs.replies[u])]
        number: dict[int, int] = {}  # by identity: the grammar hands out one array per set
        sets: list[np.ndarray] = []
        for ids in allowed:
            if id(ids) not in number:
                number[id(ids)] = len(sets)
                sets.append(ids)
        return TokenMask(
            self._tensor(np.repeat(np.arange(len(sets)), [len(ids) for ids in sets])),
            self._tensor(np.concatenate(sets)),
            len(sets),
            self._tensor(np.asarray([number[id(ids)] for ids in allowed])),
        )

    def _allowed(self, grammar: Grammar, admissible: tuple[str, ...] | None, reply: np.ndarray) -> list[np.ndarray]:
        if admissible is None:
            raise ValueError("the policy is constrained, but a row does not say what its page allowed")
        key = (admissible, reply.tobytes())
        if key not in self._masks:
            self._masks[key] = grammar.allowed_ids(admissible, reply)
        return self._masks[key]

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return on_device(np.ascontiguousarray(values, dtype=np.int64), self.device)


class TokenScorer(nn.Module):
    """A causal language model that answers one question: how probable was each token of these replies?"""

    def __init__(self, policy: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        self.policy = policy
        self.temperature = temperature
        self.max_logits: int | None = None
        """Logits that a pass holds at once; None: what suits the device."""

    def forward(self, batch: MicroBatch, *, with_entropy: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probability and entropy at each reply token, both float32 [T], of the distribution sampled from."""
        # No attention mask: padding is on the right, so that no reply token can see it.
        if batch.packed is None:
            hidden = self.policy.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state  # [B, L, H]
        else:
            where = batch.packed
            hidden = hidden_states(self.policy, batch.input_ids, where.positions, where.begins, where.longest)
        hidden = hidden.reshape(-1, hidden.shape[-1])[batch.positions]  # [T, H]
        vocabulary = int(self.policy.config.get_text_config().vocab_size)
        return token_scores(
            self.policy.get_output_embeddings(),
            hidden,
            batch.targets,
            vocabulary=vocabulary,
            temperature=self.temperature,
            forbidden=None if batch.mask is None else partial(batch.mask.forbidden, vocabulary),
            with_entropy=with_entropy,
            max_logits=self.max_logits,
        )


@torch.no_grad()
def require_plain_logits(policy: PreTrainedModel) -> None:
    """Refuses a model that does more to its logits than its output layer does, as `TokenScorer` would leave it out.

    Raises:
        ShopGymError: On one short prompt the two ways to the logits differ.
    """
    output = policy.get_output_embeddings()
    ids = (torch.arange(8, device=policy.device)[None] * 37 + 3) % int(policy.config.get_text_config().vocab_size)
    expected = policy(input_ids=ids, use_cache=False).logits
    if output is not None:
        got = output(policy.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        if got.shape == expected.shape and float((got - expected).abs().max()) <= 1e-4 * float(expected.abs().max()):
            return
    raise ShopGymError(
        f"actor_rollout_ref.model.path: {type(policy).__name__} changes its logits after the output layer (scales or "
        "caps them), which training does not do; take a model of another architecture"
    )
