"""The records that travel between collector, engine and trainer.

A rollout in one paragraph: the collector turns each live environment's prompt into a `GenerationRequest`; a `Policy`
answers with `Generation`s; every (request, generation, reward) becomes one row of a `StepBatch`, the only thing
that the trainer sees.

Dimensions: N rows (one per real environment step), P_i prompt tokens and R_i reply tokens of row i.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Names the random numbers of one reply, so that they do not depend on batching, ranks or restarts.

    Token t of the reply is drawn with the t-th uniform number of the stream that these four integers name.
    """

    seed: int
    update: int
    """Pass of the main loop; validations use negative numbers so that they never share noise with training."""
    episode: int
    """Number of the episode within the whole update, over all ranks."""
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 takes the most probable token; log-probs are those of the logits divided by the temperature."""
    max_tokens: int = 64
    """Most tokens of a reply, EOS included."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt that waits for a reply."""

    prompt_ids: np.ndarray
    """int32 [P]."""
    noise: NoiseKey
    admissible: tuple[str, ...] | None = None
    """The page's actions when decoding is constrained to them ("search[<your query>]" stands for any query)."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled reply, as the engine sampled it (never decoded and encoded again)."""

    reply_ids: np.ndarray
    """int32 [R], with the EOS token if it was sampled."""
    log_probs: np.ndarray
    """float32 [R], of the distribution that was sampled (temperature, and mask when constrained); NaN where the engine
    gives none, which training then does without."""
    text: str
    """The reply without special tokens: what the environment sees."""
    is_cut: bool
    """True when `max_tokens` ended it."""
    weight_version: int = 0
    """Version stamp of the weights that wrote it; the collector refuses stale ones."""


class Policy(Protocol):
    """Anything that can answer prompts: a transformers model, vLLM, a script."""

    weight_version: int

    def encode(self, prompt: str) -> np.ndarray:
        """One user message -> int32 [P] through the chat template, or the plain text where there is none."""
        ...

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """Answers in the order of the requests."""
        ...


@runtime_checkable
class StreamingPolicy(Protocol):
    """A policy that also takes requests while others are being answered, so that no episode waits for another.

    The collector uses these two methods where a policy has them, and `generate` where it has not.
    """

    weight_version: int

    def encode(self, prompt: str) -> np.ndarray:
        """As `Policy.encode`."""
        ...

    def submit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[int]:
        """Takes requests without waiting for replies.

        Returns:
            A number for each, in order, that no other request of this policy has or had.
        """
        ...

    def poll(self) -> list[tuple[int, Generation]]:
        """Works or waits for a while and hands over what is finished, each once, in any order; perhaps nothing.

        Raises:
            Exception: A request failed for good. A policy must not stay silent about one: its episode waits for it.
        """
        ...


class Engine(Policy, Protocol):
    """A policy that a trainer keeps beside the actor and gives new weights after each update."""

    notes: list[str]
    """What to tell the user before a long run."""
    dtype: torch.dtype
    """What weights are kept in: whoever gathers them can convert them before."""

    def encode_all(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Several prompts, each as `encode` does it, which then finds them done."""
        ...

    def count_tokens(self, prompt: str) -> int:
        """Length of `encode(prompt)`."""
        ...

    def load_weights(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """Takes full tensors over, in place and one after the other, and wakes up.

        Raises:
            ValueError: They do not fit the model.
        """
        ...

    def sleep(self) -> None:
        """Gives memory back until the next `load_weights`, where the engine can."""
        ...

    def pop_seconds(self) -> dict[str, float]:
        """Seconds spent on sleeping, waking and weights (`time/engine_<stage>_s`) since this was last asked."""
        ...

    def close(self) -> None:
        """Ends what the engine started."""
        ...


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """One row per real environment step. See the table of section 6 of the design for verl-agent's names."""

    # Ragged: object arrays [N] of arrays, so that rows can be selected like any other column.
    prompt_ids: np.ndarray
    """object [N] of int32 [P_i]."""
    reply_ids: np.ndarray
    """object [N] of int32 [R_i]."""
    rollout_log_probs: np.ndarray
    """object [N] of float32 [R_i]."""
    admissible: np.ndarray
    """object [N] of tuple[str, ...] | None: what constrained decoding allowed; masks are rebuilt from it."""
    group_id: np.ndarray
    """int64 [N]: episodes of one goal."""
    episode_id: np.ndarray
    """int64 [N]."""
    anchor_id: np.ndarray
    """int64 [N]: index into `anchor_texts`."""
    step_index: np.ndarray
    """int32 [N], from 0."""
    goal_index: np.ndarray
    """int32 [N]."""
    reward: np.ndarray
    """float32 [N], from the environment, before any penalty."""
    episode_return: np.ndarray
    """float32 [N]: sum of the episode's rewards, the same on each of its rows."""
    episode_length: np.ndarray
    """int32 [N]: steps of the episode."""
    format_valid: np.ndarray
    """bool [N]: the reply was well formed."""
    action_possible: np.ndarray
    """bool [N]: the page offered the action."""
    won: np.ndarray
    """bool [N], of the episode."""
    truncated: np.ndarray
    """bool [N], of the episode: it ran out of steps."""
    task_score: np.ndarray
    """float32 [N] in [0, 1], of the episode."""
    row_weight: np.ndarray
    """float32 [N]: 1, or 0 for padding rows."""
    anchor_texts: tuple[str, ...] = ()
    """Page text of each anchor_id."""

    # For reading and statistics; the trainer does not need them, so batches made by hand may leave them out.
    action: np.ndarray | None = None
    """object [N] of str: what the environment was given."""
    problem: np.ndarray | None = None
    """object [N] of str | None: what was wrong with the reply's form."""
    reason: np.ndarray | None = None
    """object [N] of str: why the page did not take the action; "" when it did."""
    terminated: np.ndarray | None = None
    """bool [N], of the episode: it ended by itself (a purchase)."""
    prompt_is_cut: np.ndarray | None = None
    """bool [N]: something was left out to make the prompt fit."""
    reply_is_cut: np.ndarray | None = None
    """bool [N]: `max_tokens` ended the reply."""

    # Filled by the trainer.
    discounted_return: np.ndarray | None = None
    """float32 [N]: discounted return before any penalty, where rows were repeated or removed since."""
    step_return: np.ndarray | None = None
    """float32 [N]: discounted return from this step on."""
    advantage: np.ndarray | None = None
    """float32 [N], the same on every reply token of the row."""
    old_log_probs: np.ndarray | None = None
    """object [N] of float32 [R_i]: the actor's, before any optimizer step."""
    ref_log_probs: np.ndarray | None = None
    """object [N] of float32 [R_i]: the frozen reference's."""
    row_kl: np.ndarray | None = None
    """float32 [N]: KL of the old policy to the reference over the row's reply, nats; only where rewards include it."""

    def __len__(self) -> int:
        return len(self.group_id)

    def select(self, rows: np.ndarray) -> StepBatch:
        """The given rows, in the given order (indices or a bool mask)."""
        columns = {
            f.name: getattr(self, f.name)[rows]
            for f in fields(self)
            if f.name != "anchor_texts" and getattr(self, f.name) is not None
        }
        return replace(self, **columns)


def ragged(rows: Sequence[object]) -> np.ndarray:
    """object [N] that holds the rows as they are (numpy would stack rows of equal length into a matrix)."""
    column = np.empty(len(rows), dtype=object)
    for i, row in enumerate(rows):
        column[i] = row
    return column
