"""The policy that learns, and the frozen one that it is held to, sharded over the ranks with FSDP2.

All ranks hold the same rows in the same order. A mini-batch counts rows over all ranks and is one optimizer step;
each rank computes its share of it in micro-batches. Neither the number of ranks nor the size of a micro-batch
changes a gradient, because the coefficient of each token is fixed by the whole mini-batch (`losses.row_coefficients`).

Dimensions: N rows, T reply tokens of a micro-batch's distinct pairs, K reply tokens of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from rollout.types import StepBatch, ragged
from trainers.losses import LossConfig, TokenLosses, row_coefficients, token_losses
from trainers.mismatch import MismatchTotals
from trainers.ranks import Ranks
from trainers.scoring import Collator, Grammar, Pairs, TokenScorer, distinct_pairs, least_fill, micro_batches
from trainers.settings import ActorSettings, OptimSettings, RolloutSettings, Settings
from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


_ROW_ORDER = 2
"""Keeps the seeds of the row order apart from those of the goal order, which begin with the seed alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig:
    """How the actor learns; the defaults are those of the settings."""

    lr: float = OptimSettings.lr
    """Learning rate of AdamW."""
    weight_decay: float = OptimSettings.weight_decay
    """Decoupled weight decay."""
    grad_clip: float = ActorSettings.grad_clip
    """Largest gradient norm."""
    mini_batch_size: int = ActorSettings.ppo_mini_batch_size
    """Rows over all ranks of one optimizer step; a last smaller one is one step too."""
    micro_batch_size: int = ActorSettings.ppo_micro_batch_size_per_gpu
    """Sequences of one pass with gradients, at most."""
    log_prob_micro_batch_size: int = RolloutSettings.log_prob_micro_batch_size_per_gpu
    """Sequences of one pass without gradients, at most."""
    max_tokens: int = ActorSettings.ppo_max_token_len_per_gpu
    """Tokens of one pass, at most."""
    epochs: int = ActorSettings.ppo_epochs
    """Passes over the rows of an update."""
    loss: LossConfig = field(default_factory=LossConfig)
    """What is minimised."""

    @classmethod
    def of(cls, settings: Settings) -> ActorConfig:
        """What the settings of a run say."""
        actor = settings.actor_rollout_ref.actor
        return cls(
            lr=actor.optim.lr,
            weight_decay=actor.optim.weight_decay,
            grad_clip=actor.grad_clip,
            mini_batch_size=actor.ppo_mini_batch_size,
            micro_batch_size=actor.ppo_micro_batch_size_per_gpu,
            log_prob_micro_batch_size=settings.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,
            max_tokens=actor.ppo_max_token_len_per_gpu,
            epochs=actor.ppo_epochs,
            loss=LossConfig.of(actor),
        )


class ShardedPolicy:
    """A causal language model, sharded, that scores replies."""

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        *,
        pad_id: int,
        temperature: float,
        grammar: Grammar | None,
        max_rows: int,
        max_tokens: int,
    ) -> None:
        """Takes the model over: its weights are sharded in place.

        Args:
            model: Full weights, the same on every rank.
            ranks: The processes that share it.
            pad_id: Token that fills up rows; any will do.
            temperature: Of the rollouts; logits are divided by it.
            grammar: Rebuilds the masks of constrained decoding; None for free decoding.
            max_rows: Sequences of one pass without gradients, at most.
            max_tokens: Tokens of one pass, at most.
        """
        self.ranks, self.max_rows, self.max_tokens = ranks, max_rows, max_tokens
        self.collate = Collator(pad_id, ranks.device, grammar)
        model.to(ranks.device)  # type: ignore[arg-type]  # transformers' wrapper of Module.to lost its signature
        self.scorer = shard(TokenScorer(model, temperature=temperature), ranks)
        self.scorer.eval()

    @torch.no_grad()
    def log_probs(self, batch: StepBatch) -> np.ndarray:
        """Log-probability of every reply token, object [N] of float32 [R_i], the same on every rank."""
        pairs = distinct_pairs(batch)
        found: dict[int, np.ndarray] = {}
        for chosen, is_real in self._passes(pairs, np.arange(len(pairs)), max_rows=self.max_rows):
            log_probs, _ = self.scorer(self.collate(pairs, chosen), with_entropy=False)
            if is_real:
                cuts = np.cumsum([len(pairs.replies[u]) for u in chosen])[:-1]
                found.update(zip(chosen.tolist(), np.split(log_probs.cpu().numpy(), cuts), strict=True))
        everywhere = {u: row for share in self.ranks.gather(found) for u, row in share.items()}
        return ragged([everywhere[u] for u in pairs.of_row.tolist()])

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """All weights, unsharded, under the model's own names; every rank must call it and gets them."""
        return {model_name(name): _full(tensor.detach()) for name, tensor in self.scorer.state_dict().items()}

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names, tied copies left out."""
        return ((model_name(name), parameter) for name, parameter in self.scorer.named_parameters())

    def load_full_state_dict(self, weights: dict[str, torch.Tensor]) -> None:
        """Takes over full weights; names that are tied copies may be missing."""
        with torch.no_grad():
            for name, parameter in self.named_weights():
                assign(parameter, weights[name])

    def _passes(self, pairs: Pairs, chosen: np.ndarray, *, max_rows: int) -> Iterator[tuple[np.ndarray, bool]]:
        """This rank's micro-batches of the chosen pairs, as many as on every other rank.

        Pairs are dealt by length, longest first. A rank that has fewer micro-batches repeats a short one at the
        end, marked False: sharded layers need all ranks to pass through them together.
        """
        lengths = pairs.lengths[chosen]
        by_length = chosen[np.argsort(-lengths, kind="stable")]
        plans = []
        for rank in range(self.ranks.world):
            mine = by_length[rank :: self.ranks.world]
            packed = micro_batches(
                pairs.lengths[mine],
                max_rows=max_rows,
                max_tokens=self.max_tokens,
                least_fill=least_fill(self.ranks.device),
            )
            plans.append([mine[positions] for positions in packed])
        own = plans[self.ranks.rank]
        for number in range(max(len(plan) for plan in plans)):
            yield (own[number], True) if number < len(own) else (by_length[-1:], False)


class Reference(ShardedPolicy):
    """The frozen policy at the start of the run."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks, **kwargs: Any) -> None:
        super().__init__(model.requires_grad_(False), ranks, **kwargs)

    def with_log_probs(self, batch: StepBatch) -> StepBatch:
        """The batch with `ref_log_probs` filled in."""
        self.collate.forget()
        return replace(batch, ref_log_probs=self.log_probs(batch))


class Actor(ShardedPolicy):
    """The policy that learns."""

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        config: ActorConfig,
        *,
        pad_id: int,
        temperature: float = 1.0,
        grammar: Grammar | None = None,
    ) -> None:
        super().__init__(
            model,
            ranks,
            pad_id=pad_id,
            temperature=temperature,
            grammar=grammar,
            max_rows=config.log_prob_micro_batch_size,
            max_tokens=config.max_tokens,
        )
        self.config = config
        self.optimizer = torch.optim.AdamW(self.scorer.parameters(), lr=config.lr, weight_decay=config.weight_decay)

    def with_old_log_probs(self, batch: StepBatch) -> StepBatch:
        """The batch with `old_log_probs`, where the update needs a pass for them.

        With one epoch of one mini-batch nothing has been learnt yet when the loss is taken: the old log-probs are
        the current ones, and `update` uses those.
        """
        self.collate.forget()
        return batch if self._is_one_step(batch) else replace(batch, old_log_probs=self.log_probs(batch))

    def update(self, batch: StepBatch, *, seed: int = 0, update: int = 0) -> dict[str, float]:
        """Learns from the rows: one optimizer step per mini-batch.

        Args:
            batch: With `advantage`, with `ref_log_probs` if the loss has a KL term, and with `old_log_probs` unless
                there is a single step.
            seed: With `update`, names the order of the rows when there are several mini-batches.
            update: Number of the update.

        Returns:
            Metrics over all ranks and mini-batches.
        """
        real = np.flatnonzero(batch.row_weight > 0)
        if len(real) == 0:
            raise ValueError("an update needs at least one row with a weight above 0")
        if batch.old_log_probs is None and not self._is_one_step(batch):
            raise ValueError("more than one optimizer step follows: fill old_log_probs with with_old_log_probs(batch)")
        totals = UpdateTotals(tis_imp_ratio_cap=self.config.loss.tis_imp_ratio_cap)
        for epoch in range(self.config.epochs):
            order = real
            if len(real) > self.config.mini_batch_size:
                order = np.random.default_rng((_ROW_ORDER, seed, update, epoch)).permutation(real)
            for start in range(0, len(order), self.config.mini_batch_size):
                self._optimizer_step(batch.select(order[start : start + self.config.mini_batch_size]), totals)
        return totals.metrics(self.ranks)

    def _is_one_step(self, batch: StepBatch) -> bool:
        return self.config.epochs == 1 and int(np.count_nonzero(batch.row_weight)) <= self.config.mini_batch_size

    def _optimizer_step(self, rows: StepBatch, totals: UpdateTotals) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulate_gradients(rows, totals)
        norm = float(_full(torch.nn.utils.clip_grad_norm_(self.scorer.parameters(), self.config.grad_clip)))
        if math.isfinite(norm):
            self.optimizer.step()
            totals.grad_norms.append(norm)
        else:
            totals.num_skipped_steps += 1
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate_gradients(self, rows: StepBatch, totals: UpdateTotals) -> None:
        """Adds the gradient of one mini-batch, in micro-batches over all ranks."""
        lengths = np.asarray([len(reply) for reply in rows.reply_ids])
        totals.num_mini_batches += 1
        coefficients = row_coefficients(lengths, rows.row_weight, loss_agg_mode=self.config.loss.loss_agg_mode)
        pairs = distinct_pairs(rows)
        rows_of_pair: list[list[int]] = [[] for _ in range(len(pairs))]
        for row, pair in enumerate(pairs.of_row.tolist()):
            rows_of_pair[pair].append(row)
        for chosen, is_real in self._passes(pairs, np.arange(len(pairs)), max_rows=self.config.micro_batch_size):
            log_probs, entropy = self.scorer(self.collate(pairs, chosen))
            members = [rows_of_pair[u] for u in chosen]
            index = torch.from_numpy(_tokens_of_rows([len(pairs.replies[u]) for u in chosen], members))
            index = index.to(log_probs.device)
            loss = self._loss(
                rows,
                np.asarray([row for group in members for row in group]),
                log_probs[index],
                entropy[index],
                coefficients if is_real else np.zeros_like(coefficients),
                totals,
            )
            # FSDP averages gradients over the ranks; each rank holds its share of one sum.
            (loss * self.ranks.world).backward()

    def _loss(
        self,
        rows: StepBatch,
        chosen: np.ndarray,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        coefficients: np.ndarray,
        totals: UpdateTotals,
    ) -> torch.Tensor:
        if rows.advantage is None:
            raise ValueError("the loss needs advantage: fill it with with_advantages(batch, config)")

        def per_token(values: np.ndarray) -> torch.Tensor:
            repeated = np.repeat(values[chosen], [len(rows.reply_ids[row]) for row in chosen])
            return torch.from_numpy(repeated.astype(np.float32)).to(log_probs.device)

        def column(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([values[row] for row in chosen])).to(log_probs.device)

        old = log_probs.detach() if rows.old_log_probs is None else column(rows.old_log_probs)
        reference = None if rows.ref_log_probs is None else column(rows.ref_log_probs)
        engine = column(rows.rollout_log_probs)
        losses = token_losses(
            *(log_probs, entropy, old, reference, per_token(rows.advantage), self.config.loss), rollout_log_probs=engine
        )
        weights = per_token(coefficients)
        with torch.no_grad():
            totals.add(losses, entropy, weights, old - log_probs, old - engine)
        return (losses.total * weights).sum()


class UpdateTotals:
    """Sums of an update's figures, weighted as the loss weights its tokens.

    Losses are means over the mini-batches, as they were minimised; the others are means over tokens.
    """

    NAMES = (
        "actor/loss",
        "actor/policy_loss",
        "actor/kl_to_reference_nats",
        "actor/entropy_nats",
        "actor/ratio_clipped_frac",
        "actor/ratio_dual_clipped_frac",
        "actor/kl_to_old_nats",
    )
    LOSSES = ("actor/loss", "actor/policy_loss")

    def __init__(self, *, tis_imp_ratio_cap: float | None = None) -> None:
        self.mismatch = MismatchTotals(cap=tis_imp_ratio_cap)
        self.sums = np.zeros(len(self.NAMES))
        self.weight = 0.0
        self.num_mini_batches = 0
        self.largest_ratio = 0.0
        self.grad_norms: list[float] = []
        self.num_skipped_steps = 0

    def add(
        self, losses: TokenLosses, entropy: torch.Tensor, weights: torch.Tensor, to_old: torch.Tensor, gap: torch.Tensor
    ) -> None:
        kl = torch.zeros_like(weights) if losses.kl is None else losses.kl
        columns = (
            losses.total,
            losses.policy,
            kl,
            entropy,
            losses.is_clipped.float(),
            losses.is_dual_clipped.float(),
            to_old,
        )
        self.sums += (torch.stack(columns) * weights).sum(dim=1).double().cpu().numpy()
        self.weight += float(weights.sum())
        counted = weights > 0
        if bool(counted.any()):
            self.largest_ratio = max(self.largest_ratio, float(losses.ratio[counted].max()))
        self.mismatch.add(gap, weights)

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        *sums, weight = ranks.sum([*self.sums, self.weight])
        (ratio,) = ranks.max([self.largest_ratio])
        metrics = {
            name: float(total / (self.num_mini_batches if name in self.LOSSES else weight))
            for name, total in zip(self.NAMES, sums, strict=True)
        }
        metrics["actor/ratio_max"] = float(ratio)
        metrics["actor/grad_norm"] = float(np.mean(self.grad_norms)) if self.grad_norms else float("nan")
        metrics["actor/optimizer_steps"] = float(len(self.grad_norms))
        metrics["actor/skipped_steps"] = float(self.num_skipped_steps)
        return metrics | self.mismatch.metrics(ranks)


def shard(scorer: TokenScorer, ranks: Ranks) -> TokenScorer:
    """Applies FSDP2: each transformer layer is a unit, the rest (embeddings, norm, output) is the root's.

    On a GPU the layers compute in bfloat16 from float32 weights, and gradients are reduced in float32.
    """
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    precision = mixed if ranks.device.type == "cuda" else MixedPrecisionPolicy()
    for layer in layers(scorer.policy):
        fully_shard(layer, mesh=ranks.mesh, mp_policy=precision)
    fully_shard(scorer, mesh=ranks.mesh, mp_policy=precision)
    return scorer


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer layers of a model, as transformers names their classes; empty where it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Makes each layer keep its input alone and compute the rest again in the backward pass.

    transformers does that in training mode only, which would also turn dropout on: log-probs must not be noisy.

    Raises:
        ShopGymError: The model does not say which of its modules are layers.
    """
    found = layers(model)
    if not found:
        raise ShopGymError(
            f"actor_rollout_ref.model.enable_gradient_checkpointing: {type(model).__name__} names no layers to "
            "compute again; leave it out"
        )
    for layer in found:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def model_name(name: str) -> str:
    """Name of a weight in the model, from its name in the scorer."""
    return name.removeprefix("policy.")


def assign(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Writes a full tensor into a sharded one."""
    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _tokens_of_rows(reply_lengths: list[int], members: list[list[int]]) -> np.ndarray:
    """int64 [K]: for the tokens of each row, pair by pair, their places among the tokens of the distinct pairs."""
    starts = np.cumsum([0, *reply_lengths[:-1]])
    pieces = [
        np.arange(start, start + length)
        for start, length, group in zip(starts, reply_lengths, members, strict=True)
        for _ in group
    ]
    return np.concatenate(pieces)
