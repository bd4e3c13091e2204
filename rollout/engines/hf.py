"""Generation with a transformers model, on CPU or one GPU: the default engine.

Prompts are sorted by length and cut into batches by a budget of tokens. Equal prompts (siblings of a group at their
first step) are run once. Tokens that the grammar forces cost no forward pass of their own: they wait and are fed
together with the next sampled token, and a reply whose rest is forced is finished at once.

Dimensions: B rows of a batch, P prompt tokens, T tokens of one feed, C places of the cache, V size of the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollout.constrained import ActionGrammar, Cursor
from rollout.engines.prompts import PromptEncoder, eos_ids
from rollout.noise import uniforms
from rollout.types import Generation, GenerationRequest, SamplingParams
from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DROP_BELOW = 0.75
"""Finished rows leave the batch when no more than this part of it is still alive."""


@dataclass(slots=True)
class _Row:
    """One reply that is being written."""

    request: GenerationRequest
    noise: np.ndarray
    cursor: Cursor | None
    reply: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    """Tokens that the model has not seen yet."""
    is_done: bool = False
    is_cut: bool = False


class HFEngine:
    """Answers prompts with its own copy of a causal language model."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        grammar: ActionGrammar | None = None,
        max_batch_tokens: int | None = None,
        copy_model: bool = True,
        device: str | torch.device | None = None,
    ) -> None:
        """Takes the model over.

        Args:
            model: Unsharded.
            tokenizer: Its chat template is used where it has one.
            grammar: Needed for requests that name their admissible actions.
            max_batch_tokens: Prompt tokens, padding included, that are run at once; None: 4,096 on CPU (what fits
                into its caches), 65,536 on a GPU.
            copy_model: Keep an own copy; False when nobody else trains or shards the model.
            device: Where to generate; None: where the model is.
        """
        self.model = copy.deepcopy(model) if copy_model else model
        self.model.requires_grad_(False).eval()
        if device is not None:
            self.model.to(device)  # type: ignore[arg-type]  # the stub forgets devices
        self.tokenizer = tokenizer
        self.grammar = grammar
        self.max_batch_tokens = max_batch_tokens or (4_096 if self.model.device.type == "cpu" else 65_536)
        self.notes: list[str] = []
        self.dtype = self.model.dtype
        self.weight_version = 0
        self.num_sampled_tokens = 0
        """Tokens of all replies so far."""
        self._eos_ids = eos_ids(self.model, tokenizer)
        self._prompts = PromptEncoder(tokenizer)

    def encode(self, prompt: str) -> np.ndarray:
        """One user message -> int32 [P] through the chat template, or the plain text where there is none."""
        return self._prompts.encode(prompt)

    def encode_all(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Several prompts, each as `encode` does it, which then finds them done; quicker than one by one."""
        return self._prompts.encode_all(prompts)

    def count_tokens(self, prompt: str) -> int:
        """Length of `encode(prompt)`; remembered, so that a prompt that was counted is not tokenised again."""
        return len(self.encode(prompt))

    def load_weights(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """Takes the actor's weights over, in place and one tensor after the other.

        Args:
            weights: Full tensors under the model's names; tied copies may be left out.
            version: Stamped on every reply from now on.

        Raises:
            ValueError: A name or shape does not fit the model. What fits was taken all the same.
        """
        own = self.model.state_dict()
        missing = own.keys() - self.model.all_tied_weights_keys.keys()
        unexpected = []
        with torch.no_grad():
            for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
                if name in own and own[name].shape == tensor.shape:
                    own[name].copy_(tensor)
                    missing.discard(name)
                else:
                    unexpected.append(name)
        if missing or unexpected:
            lacking = sorted(missing)
            raise ValueError(f"weights do not fit the engine's model: missing {lacking}, unlike it {unexpected}")
        self.weight_version = version

    def sleep(self) -> None:
        """Nothing: this engine holds little besides its weights."""

    def pop_seconds(self) -> dict[str, float]:
        """No stages to tell of."""
        return {}

    def close(self) -> None:
        """Nothing was started."""

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """Answers in the order of the requests; the noise of an answer does not depend on that order or on the batches.

        The logits do, in their last bits: a batch of another shape adds up in another order, and a draw that falls
        between two tokens may then take the other one.

        Raises:
            ShopGymError: `top_p` or `top_k` is set, or a request is constrained and the engine has no fitting grammar.
        """
        self._check(requests, params)
        rows = [
            _Row(
                request=request,
                noise=uniforms(request.noise, params.max_tokens),
                cursor=self._cursor(request),
            )
            for request in requests
        ]
        for batch in self._batches(rows):
            self._run(batch, params)
        self.num_sampled_tokens += sum(len(row.reply) for row in rows)
        return [self._generation(row) for row in rows]

    def _cursor(self, request: GenerationRequest) -> Cursor | None:
        if request.admissible is None or self.grammar is None:
            return None
        return self.grammar.start(request.admissible)

    def _check(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> None:
        if params.top_p != 1.0 or params.top_k != 0:
            raise ShopGymError(
                f"the hf engine samples from the whole distribution: top_p must be 1.0 and top_k 0 (off), "
                f"got {params.top_p} and {params.top_k}"
            )
        if any(request.admissible is not None for request in requests):
            if self.grammar is None:
                raise ShopGymError("constrained requests need an engine that was made with a grammar")
            self.grammar.require_room(params.max_tokens)

    def _batches(self, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
        """Rows of similar length, equal prompts side by side, within the token budget."""
        ordered = sorted(rows, key=lambda row: (len(row.request.prompt_ids), row.request.prompt_ids.tobytes()))
        batch: list[_Row] = []
        for row in ordered:
            if batch and (len(batch) + 1) * len(row.request.prompt_ids) > self.max_batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    @torch.inference_mode()
    def _run(self, rows: list[_Row], params: SamplingParams) -> None:
        """Writes the replies of one batch."""
        for row in rows:
            row.pending = list(row.request.prompt_ids)
            self._take_forced(row)
        rows = [row for row in rows if not row.is_done]
        if not rows:
            return
        state = _CachedModel(self.model)
        unique: dict[bytes, int] = {}
        copies = [unique.setdefault(np.asarray(row.pending, np.int64).tobytes(), len(unique)) for row in rows]
        firsts = [copies.index(i) for i in range(len(unique))]
        logits = state.feed([rows[i].pending for i in firsts])
        if len(unique) < len(rows):
            state.select(copies)
            logits = logits[torch.as_tensor(copies, device=logits.device)]
        while True:
            self._sample(rows, logits, params)
            alive = [i for i, row in enumerate(rows) if not row.is_done]
            if not alive:
                return
            if len(alive) <= _DROP_BELOW * len(rows):
                state.select(alive)
                rows = [rows[i] for i in alive]
            logits = state.feed([row.pending if not row.is_done else row.pending[-1:] for row in rows])

    def _sample(self, rows: Sequence[_Row], logits: torch.Tensor, params: SamplingParams) -> None:
        """Draws one token for every row that is not done."""
        free = [i for i, row in enumerate(rows) if not row.is_done and row.cursor is None]
        if free:
            numbers = np.asarray([rows[i].noise[len(rows[i].reply)] for i in free])
            tokens, log_probs = _draw_rows(logits[free], numbers, params.temperature)
            for i, token, log_prob in zip(free, tokens, log_probs, strict=True):
                self._take(rows[i], int(token), float(log_prob), params)
        masked = [(i, row, row.cursor) for i, row in enumerate(rows) if not row.is_done and row.cursor is not None]
        if masked:
            values = logits[[i for i, _, _ in masked]].float().cpu().numpy()
            for (_, row, cursor), row_logits in zip(masked, values, strict=True):
                allowed = cursor.allowed()
                at, log_prob = _draw(row_logits[allowed], row.noise[len(row.reply)], params.temperature)
                self._take(row, int(allowed[at]), log_prob, params)

    def _take(self, row: _Row, token: int, log_prob: float, params: SamplingParams) -> None:
        """Adds a sampled token and those that follow from it."""
        row.pending = []
        self._append(row, token, log_prob, params)
        self._take_forced(row)

    def _take_forced(self, row: _Row) -> None:
        if row.cursor is not None:
            forced = row.cursor.take_forced()
            row.reply += forced
            row.log_probs += [0.0] * len(forced)
            row.pending += forced
            row.is_done = row.cursor.is_done

    def _append(self, row: _Row, token: int, log_prob: float, params: SamplingParams) -> None:
        row.reply.append(token)
        row.log_probs.append(log_prob)
        row.pending.append(token)
        if row.cursor is not None:
            row.cursor.advance(token)
            row.is_done = row.cursor.is_done
        elif token in self._eos_ids:
            row.is_done = True
        elif len(row.reply) >= params.max_tokens:
            row.is_done = row.is_cut = True

    def _generation(self, row: _Row) -> Generation:
        return Generation(
            reply_ids=np.asarray(row.reply, dtype=np.int32),
            log_probs=np.asarray(row.log_probs, dtype=np.float32),
            text=str(self.tokenizer.decode(row.reply, skip_special_tokens=True, clean_up_tokenization_spaces=False)),
            is_cut=row.is_cut,
            weight_version=self.weight_version,
        )


class _CachedModel:
    """A model with the keys and values of what its rows have seen; rows may be fed different numbers of tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache: Any = None
        self._mask = torch.empty(0)
        """int64 [B, C], 0 at places of the cache that hold padding."""
        self._lengths = torch.empty(0)
        """int64 [B]: real tokens seen so far."""

    def feed(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Shows each row its next tokens, at least one.

        Returns:
            [B, V] logits after the last token of each row.
        """
        device = self._model.device
        num_rows, width = len(tokens), max(len(row) for row in tokens)
        ids = np.zeros((num_rows, width), dtype=np.int64)
        mask = np.zeros((num_rows, width), dtype=np.int64)
        for i, row in enumerate(tokens):
            ids[i, width - len(row) :] = row
            mask[i, width - len(row) :] = 1
        new_mask = torch.from_numpy(mask).to(device)
        if self._cache is None:
            self._mask, self._lengths = new_mask, torch.zeros(num_rows, dtype=torch.int64, device=device)
        else:
            self._mask = torch.cat([self._mask, new_mask], dim=1)
        positions = (self._lengths[:, None] + new_mask.cumsum(dim=1) - 1).clamp(min=0)
        out = self._model(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = out.past_key_values
        self._lengths = self._lengths + new_mask.sum(dim=1)
        return out.logits[:, -1]

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the given rows, in the given order; a row may be named several times."""
        index = torch.as_tensor(rows, device=self._mask.device)
        self._cache.reorder_cache(index)
        self._mask, self._lengths = self._mask[index], self._lengths[index]


def _draw(logits: np.ndarray, number: float, temperature: float) -> tuple[int, float]:
    """Inverse CDF over some logits: the place of the drawn one and its log-prob.

    Args:
        logits: float32 [K] of the K allowed tokens.
        number: Uniform in [0, 1).
        temperature: 0 takes the largest logit, and the log-prob is the one at temperature 1.
    """
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    scaled -= scaled.max()
    running = np.cumsum(np.exp(scaled))
    if temperature == 0:
        at = int(np.argmax(logits))
    else:
        at = min(int(np.searchsorted(running, number * running[-1], side="right")), len(logits) - 1)
    return at, float(scaled[at] - np.log(running[-1]))


def _draw_rows(logits: torch.Tensor, numbers: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """`_draw` for many rows [B, V] over the whole vocabulary, where the logits are."""
    scaled = logits.double() / (temperature or 1.0)
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    running = scaled.exp().cumsum(dim=-1)
    if temperature == 0:
        at = logits.argmax(dim=-1)
    else:
        targets = torch.from_numpy(numbers).to(logits.device)[:, None] * running[:, -1:]
        at = torch.searchsorted(running, targets, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    log_probs = scaled.gather(1, at[:, None])[:, 0] - running[:, -1].log()
    return at.cpu().numpy(), log_probs.cpu().numpy()
