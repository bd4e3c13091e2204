"""The policy that learns, and the frozen one that it is held to, sharded over the ranks with FSDP2.

All ranks hold the same rows in the same order. A mini-batch counts rows over all ranks and is one optimizer step;
each rank computes its share of it in micro-batches. Neither the number of ranks nor the size of a micro-batch
changes a gradient, because the coefficient of each token is fixed by the whole mini-batch (`losses.row_coefficients`).

Dimensions: N rows, T reply tokens of a micro-batch's distinct pairs, K reply tokens of its rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from rollout.types import StepBatch, ragged
from trainers import lora
from trainers.learning_rate import RateSchedule
from trainers.losses import LossConfig, TokenLosses, kl_estimate, row_coefficients, token_losses
from trainers.mismatch import MismatchTotals
from trainers.offload import state_on
from trainers.packing import is_packed
from trainers.ranks import Ranks
from trainers.scoring import (
    Collator,
    Grammar,
    Pairs,
    TokenScorer,
    distinct_pairs,
    micro_batches_for,
    on_device,
)
from trainers.settings import (
    ActorFsdpSettings,
    ActorSettings,
    OptimSettings,
    RolloutSettings,
    Settings,
    TrainerSettings,
)
from trainers.sharding import ShardingConfig, full, gathered_once, like, reduced_at_the_end, reshard, shard

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


_ROW_ORDER = 2
"""Keeps the seeds of the row order apart from those of the goal order, which begin with the seed alone."""


class NotFinite(Exception):
    """Loss or gradient were NaN or infinite, again and again."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(f"{num_steps} optimizer steps in a row had a loss or a gradient that is not finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig:
    """How the actor learns; the defaults are those of the settings."""

    lr: float = OptimSettings.lr
    """Learning rate of AdamW, at its highest."""
    rate: RateSchedule = field(default_factory=RateSchedule)
    """Share of it that each update has."""
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
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    """How the weights are kept."""
    optimizer_offload: bool = ActorFsdpSettings.optimizer_offload
    """Keep the optimizer's state on the CPU between steps; it is there anyway where the weights are."""
    max_nan_steps: int = TrainerSettings.max_nan_steps
    """Optimizer steps in a row that may be skipped, because loss or gradient is not finite, before the run stops."""
    loss: LossConfig = field(default_factory=LossConfig)
    """What is minimised."""

    @classmethod
    def of(cls, settings: Settings) -> ActorConfig:
        """What the settings of a run say."""
        actor = settings.actor_rollout_ref.actor
        return cls(
            lr=actor.optim.lr,
            rate=RateSchedule(
                shape=actor.optim.lr_scheduler_type,
                num_steps=settings.trainer.total_updates,
                num_rising=actor.optim.lr_warmup_steps,
                lowest=actor.optim.min_lr_ratio,
            ),
            weight_decay=actor.optim.weight_decay,
            grad_clip=actor.grad_clip,
            mini_batch_size=actor.ppo_mini_batch_size,
            micro_batch_size=actor.ppo_micro_batch_size_per_gpu,
            log_prob_micro_batch_size=settings.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu,
            max_tokens=actor.ppo_max_token_len_per_gpu,
            epochs=actor.ppo_epochs,
            sharding=ShardingConfig(dtype=actor.fsdp_config.dtype, param_offload=actor.fsdp_config.param_offload),
            optimizer_offload=actor.fsdp_config.optimizer_offload,
            max_nan_steps=settings.trainer.max_nan_steps,
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
        sharding: ShardingConfig | None = None,
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
            sharding: How weights are kept; None takes the defaults.
        """
        self.ranks, self.max_rows, self.max_tokens = ranks, max_rows, max_tokens
        self.is_packed = is_packed(model)
        self.width = int(model.config.get_text_config().hidden_size)
        self.collate = Collator(pad_id, ranks.device, grammar, is_packed=self.is_packed)
        self.scorer = shard(TokenScorer(model, temperature=temperature), ranks, sharding or ShardingConfig())
        self.scorer.eval()

    @torch.no_grad()
    def log_probs(self, batch: StepBatch, *, max_rows: int | None = None) -> np.ndarray:
        """Log-probability of every reply token, object [N] of float32 [R_i], the same on every rank.

        `max_rows` is for this time in the place of the policy's own.
        """
        pairs = distinct_pairs(batch)
        scored: list[tuple[np.ndarray, torch.Tensor]] = []
        passes = self._passes(pairs, np.arange(len(pairs)), max_rows=max_rows or self.max_rows)
        with gathered_once(self.scorer, self.ranks):
            for chosen, is_real in passes:
                log_probs, _ = self.scorer(self.collate(pairs, chosen), with_entropy=False)
                if is_real:
                    scored.append((chosen, log_probs))
        found: dict[int, np.ndarray] = {}
        for chosen, log_probs in scored:  # at the end: a GPU need not be waited for between two passes
            cuts = np.cumsum([len(pairs.replies[u]) for u in chosen])[:-1]
            found.update(zip(chosen.tolist(), np.split(log_probs.cpu().numpy(), cuts), strict=True))
        everywhere = {u: row for share in self.ranks.gather(found) for u, row in share.items()}
        return ragged([everywhere[u] for u in pairs.of_row.tolist()])

    def is_finite(self) -> bool:
        """Whether this rank's part of the weights holds numbers alone."""
        parts = (p.detach() for p in self.scorer.parameters())
        return all(bool(torch.isfinite(p.to_local() if isinstance(p, DTensor) else p).all()) for p in parts)

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights one after the other, unsharded, adapters merged, under the model's own names, tied copies too.

        Every rank must go through all of them. A tensor is gathered when it is asked for, so that whoever drops it
        before the next never holds a second model.

        Args:
            dtype: Converts each rank's part before it is sent; None keeps it.
        """
        weights = {model_name(name): tensor.detach() for name, tensor in self.scorer.state_dict().items()}
        adapter = lora.adapter_config(self.scorer.policy)
        for name, tensor in weights.items():
            if adapter is None:
                yield name, full(tensor if dtype is None else tensor.to(dtype))
            elif not lora.is_adapter_weight(name):
                whole = lora.merged(name, weights, scale=adapter.lora_alpha / adapter.r)
                yield lora.plain_name(name), whole if dtype is None else whole.to(dtype)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """All weights at once; every rank must call it and gets them."""
        return dict(self.full_weights())

    def trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters that are trained, under the model's own names, tied copies left out."""
        reshard(self.scorer)
        named = self.scorer.named_parameters()
        return ((model_name(name), parameter) for name, parameter in named if parameter.requires_grad)

    def load_trained_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Takes over full tensors of all that is trained; names that are tied copies may be missing."""
        with torch.no_grad():
            for name, parameter in self.trained_weights():
                parameter.copy_(like(parameter, weights[name]))

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
            shares = micro_batches_for(
                self.ranks.device,
                pairs.lengths[mine],
                max_rows=max_rows,
                max_tokens=self.max_tokens,
                width=self.width,
                is_packed=self.is_packed,
            )
            plans.append([mine[positions] for positions in shares])
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


class WithoutAdapter:
    """The frozen policy of a run that trains an adapter: the actor's own weights without it."""

    def __init__(self, actor: Actor, *, max_rows: int) -> None:
        """`max_rows` as in `ShardedPolicy`."""
        self.actor, self.max_rows = actor, max_rows

    def with_log_probs(self, batch: StepBatch) -> StepBatch:
        """The batch with `ref_log_probs` filled in."""
        with lora.without_adapter(self.actor.scorer.policy):
            return replace(batch, ref_log_probs=self.actor.log_probs(batch, max_rows=self.max_rows))


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
            sharding=config.sharding,
        )
        self.config = config
        self.trained = [parameter for _, parameter in self.trained_weights()]
        is_fused = self.trained[0].device.type == "cuda" and not config.optimizer_offload
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=config.lr, weight_decay=config.weight_decay, fused=is_fused or None
        )
        self.counts_on = self.trained[0].device if is_fused else torch.device("cpu")
        """Where the optimizer counts the steps of each parameter."""
        self.num_nan_steps = 0
        """Optimizer steps skipped since the last one that was taken."""

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """This rank's state of the optimizer by the names of its parameters; those without a gradient so far have none.

        Raises:
            RuntimeError: It holds state of something that is not trained, which would be lost with a checkpoint.
        """
        state = self.optimizer.state
        found = {name: state[parameter] for name, parameter in self.trained_weights() if state.get(parameter)}
        if len(found) != len(state):
            raise RuntimeError(
                f"the optimizer has state of {len(state)} tensors, only {len(found)} of them are trained"
            )
        return found

    def with_old_log_probs(self, batch: StepBatch, *, always: bool = False) -> StepBatch:
        """The batch with `old_log_probs`, where the update needs a pass for them.

        With one epoch of one mini-batch nothing has been learnt yet when the loss is taken: the old log-probs are
        the current ones, and `update` uses those.

        Args:
            batch: Rows to learn from.
            always: Make the pass in that case too: something else needs them before the loss (KL in the reward).
        """
        self.collate.forget()
        return batch if self._is_one_step(batch) and not always else replace(batch, old_log_probs=self.log_probs(batch))

    def update(self, batch: StepBatch, *, seed: int = 0, update: int = 0) -> dict[str, float]:
        """Learns from the rows: one optimizer step per mini-batch.

        Args:
            batch: With `advantage`, with `ref_log_probs` if the loss has a KL term, and with `old_log_probs` unless
                there is a single step.
            seed: With `update`, names the order of the rows when there are several mini-batches.
            update: Number of the update, which the learning rate hangs on too.

        Returns:
            Metrics over all ranks and mini-batches that were learnt from; NaN where there are none.

        Raises:
            NotFinite: Too many steps in a row had to be skipped, those of earlier updates included.
        """
        real = np.flatnonzero(batch.row_weight > 0)
        if len(real) == 0:
            raise ValueError("an update needs at least one row with a weight above 0")
        if batch.old_log_probs is None and not self._is_one_step(batch):
            raise ValueError("more than one optimizer step follows: fill old_log_probs with with_old_log_probs(batch)")
        rate = self.config.lr * self.config.rate.share(update)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        totals = UpdateTotals(
            tis_imp_ratio_cap=self.config.loss.tis_imp_ratio_cap, has_reference=batch.ref_log_probs is not None
        )
        for epoch in range(self.config.epochs):
            order = real
            if len(real) > self.config.mini_batch_size:
                order = np.random.default_rng((_ROW_ORDER, seed, update, epoch)).permutation(real)
            for start in range(0, len(order), self.config.mini_batch_size):
                rows = batch.select(order[start : start + self.config.mini_batch_size])
                totals = self._optimizer_step(rows, totals)
        return totals.metrics(self.ranks) | {"actor/lr": rate}

    def _is_one_step(self, batch: StepBatch) -> bool:
        return self.config.epochs == 1 and int(np.count_nonzero(batch.row_weight)) <= self.config.mini_batch_size

    def _optimizer_step(self, rows: StepBatch, totals: UpdateTotals) -> UpdateTotals:
        """One step, or none on any rank where the loss of one, or the gradient, is not finite."""
        self.optimizer.zero_grad(set_to_none=True)
        counted = copy.deepcopy(totals)
        loss = self.accumulate_gradients(rows, counted)
        norm = float(full(torch.nn.utils.clip_grad_norm_(self.trained, self.config.grad_clip)))
        if self.ranks.all_of(math.isfinite(loss) and math.isfinite(norm)):
            with state_on(self.optimizer, self.ranks.device) if self._moves_state else nullcontext():
                self.optimizer.step()
            counted.grad_norms.append(norm)
            self.num_nan_steps = 0
        else:
            counted = totals
            counted.num_skipped_steps += 1
            self.num_nan_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.num_nan_steps >= self.config.max_nan_steps:
            raise NotFinite(self.num_nan_steps)
        return counted

    @property
    def _moves_state(self) -> bool:
        return self.config.optimizer_offload and not self.config.sharding.param_offload

    def accumulate_gradients(self, rows: StepBatch, totals: UpdateTotals) -> float:
        """Adds the gradient of one mini-batch, in micro-batches; returns this rank's part of its loss."""
        lengths = np.asarray([len(reply) for reply in rows.reply_ids])
        totals.num_mini_batches += 1
        sum_of_losses = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        coefficients = row_coefficients(lengths, rows.row_weight, loss_agg_mode=self.config.loss.loss_agg_mode)
        pairs = distinct_pairs(rows)
        rows_of_pair: list[list[int]] = [[] for _ in range(len(pairs))]
        for row, pair in enumerate(pairs.of_row.tolist()):
            rows_of_pair[pair].append(row)
        passes = list(self._passes(pairs, np.arange(len(pairs)), max_rows=self.config.micro_batch_size))
        with gathered_once(self.scorer, self.ranks):
            for chosen, is_real in reduced_at_the_end(self.scorer, self.ranks, passes):
                log_probs, entropy = self.scorer(self.collate(pairs, chosen))
                members = [rows_of_pair[u] for u in chosen]
                index = on_device(_tokens_of_rows([len(pairs.replies[u]) for u in chosen], members), log_probs.device)
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
                sum_of_losses += loss.detach()
        return float(sum_of_losses)

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
            return on_device(repeated.astype(np.float32), log_probs.device)

        def column(values: np.ndarray) -> torch.Tensor:
            return on_device(np.concatenate([values[row] for row in chosen]), log_probs.device)

        old = log_probs.detach() if rows.old_log_probs is None else column(rows.old_log_probs)
        reference = None if rows.ref_log_probs is None else column(rows.ref_log_probs)
        engine = column(rows.rollout_log_probs)
        losses = token_losses(
            *(log_probs, entropy, old, reference, per_token(rows.advantage), self.config.loss), rollout_log_probs=engine
        )
        weights = per_token(coefficients)
        with torch.no_grad():
            if losses.kl is None and reference is not None:  # no part of the loss, but worth knowing
                kl = kl_estimate(log_probs, reference, kind=self.config.loss.kl_loss_type)
                losses = replace(losses, kl=kl)
            totals.add(losses, entropy, weights, old - log_probs, old - engine)
        return (losses.total * weights).sum()


class UpdateTotals:
    """Sums of an update's figures, weighted as the loss weights its tokens.

    So with token-mean each is the mean over the mini-batches of its mean over tokens, as the losses were minimised (a
    last, smaller mini-batch counts as much as the others), and with seq-mean-token-mean of rows' means. The KL to the
    reference is known wherever there is a reference, whether the loss has it or not, and left out elsewhere.

    Sums stay where the tokens are until `metrics`: a GPU need not be waited for.
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

    def __init__(self, *, tis_imp_ratio_cap: float | None = None, has_reference: bool = False) -> None:
        self.has_reference = has_reference
        self.mismatch = MismatchTotals(cap=tis_imp_ratio_cap)
        self.sums = torch.zeros(len(self.NAMES) + 1, dtype=torch.float64)
        """In the order of the names, and of the weights at the end."""
        self.num_mini_batches = 0
        self.largest_ratio = torch.zeros(())
        self.first_mini_batch = torch.zeros(2, dtype=torch.float64)
        """Weighted distance of its ratios from 1, and weight: no optimizer step lies between old and new."""
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
            torch.ones_like(weights),
        )
        device = weights.device
        self.sums = self.sums.to(device) + (torch.stack(columns) * weights).sum(dim=1).double()
        ratios = torch.where(weights > 0, losses.ratio, 0.0)
        self.largest_ratio = torch.cat([self.largest_ratio.to(device)[None], ratios]).amax()
        if self.num_mini_batches == 1:
            distances = torch.stack([(losses.ratio - 1).abs() * weights, weights])
            self.first_mini_batch = self.first_mini_batch.to(device) + distances.sum(dim=1).double()
        self.mismatch.add(gap, weights)

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        *sums, weight, first_gap, first_weight = ranks.sum([*self.sums.tolist(), *self.first_mini_batch.tolist()])
        (ratio,) = ranks.max([float(self.largest_ratio)])
        metrics = {
            name: _ratio(total, self.num_mini_batches if name in self.LOSSES else weight)
            for name, total in zip(self.NAMES, sums, strict=True)
        }
        if not self.has_reference:
            del metrics["actor/kl_to_reference_nats"]
        metrics["actor/ratio_max"] = float(ratio)
        metrics["actor/first_ratio_distance"] = float(first_gap / first_weight) if first_weight else 0.0
        metrics["actor/grad_norm"] = float(np.mean(self.grad_norms)) if self.grad_norms else float("nan")
        metrics["actor/optimizer_steps"] = float(len(self.grad_norms))
        metrics["actor/skipped_steps"] = float(self.num_skipped_steps)
        return metrics | self.mismatch.metrics(ranks)


def _ratio(total: float, count: float) -> float:
    return float(total / count) if count else float("nan")


def model_name(name: str) -> str:
    """Name of a weight in the model, from its name in the scorer."""
    return name.removeprefix("policy.")


def _tokens_of_rows(reply_lengths: list[int], members: list[list[int]]) -> np.ndarray:
    """int64 [K]: for the tokens of each row, pair by pair, their places among the tokens of the distinct pairs."""
    starts = np.cumsum([0, *reply_lengths[:-1]])
    pieces = [
        np.arange(start, start + length)
        for start, length, group in zip(starts, reply_lengths, members, strict=True)
        for _ in group
    ]
    return np.concatenate(pieces)
