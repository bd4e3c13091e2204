"""Constrained decoding inside vLLM: the same sets of token ids as in the transformers engine and in the trainer.

The engine writes what is forced itself: the forced head of a reply stands in the prompt, and once nothing is left to
choose the only token allowed is EOS, in place of the forced rest.

Import it after vLLM was prepared (`vllm_install.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

if TYPE_CHECKING:
    from rollout.constrained import ActionGrammar, Cursor

ADMISSIBLE = "shopgym_admissible"
"""Key of `SamplingParams.extra_args` under which a request brings the actions of its page."""
_LARGE = 1024
"""Sets with more ids (free text) are few and used again and again: their masks are kept on the device."""


def mask_class(grammar: ActionGrammar) -> type[LogitsProcessor]:
    """The logits processor of one grammar: vLLM takes classes, and makes the instance itself."""
    return type("GrammarMask", (_GrammarMask,), {"grammar": grammar})


class _Walk:
    """A reply in progress: vLLM adds to `reply` what it samples, `cursor` follows."""

    __slots__ = ("cursor", "end", "num_seen", "reply")

    def __init__(self, cursor: Cursor, reply: list[int], end: np.ndarray) -> None:
        self.cursor, self.reply, self.num_seen, self.end = cursor, reply, 0, end
        cursor.take_forced()

    def allowed(self) -> np.ndarray:
        for token in self.reply[self.num_seen :]:
            if not self.cursor.is_forced:
                self.cursor.advance(token)
        self.num_seen = len(self.reply)
        return self.end if self.cursor.is_forced else self.cursor.allowed()


class _GrammarMask(LogitsProcessor):
    """Leaves each constrained request of a batch only what its page allows next."""

    grammar: ActionGrammar

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._walks: dict[int, _Walk] = {}
        """By place in the batch."""
        self._end = np.asarray([self.grammar.eos], dtype=np.int32)
        self._large: dict[int, tuple[np.ndarray, torch.Tensor]] = {}
        """By identity of the set, which is kept so that the identity stays its own: what it forbids, bool [V]."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._walks.pop(place, None)
        for place, params, _, reply in batch_update.added:
            self._walks.pop(place, None)
            admissible = (params.extra_args or {}).get(ADMISSIBLE)
            if admissible is not None:
                self._walks[place] = _Walk(self.grammar.start(admissible), reply, self._end)
        for one, other, direction in batch_update.moved:
            moved, replaced = self._walks.pop(one, None), self._walks.pop(other, None)
            if moved is not None:
                self._walks[other] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._walks[one] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Sets the logits [B, V] of forbidden tokens to minus infinity, in place."""
        places, columns = [], []
        sharing: dict[int, tuple[np.ndarray, list[int]]] = {}
        for place, walk in self._walks.items():
            allowed = walk.allowed()
            if len(allowed) > _LARGE:
                sharing.setdefault(id(allowed), (allowed, []))[1].append(place)
            else:
                places.append(place)
                columns.append(allowed)
        for allowed, alike in sharing.values():
            (rows,) = _on_device([np.asarray(alike)], logits.device)
            logits[rows] = logits[rows].masked_fill(self._forbidden(allowed, logits), float("-inf"))
        if places:
            repeated = np.repeat(places, [len(ids) for ids in columns])
            masked, rows, ids = _on_device([np.asarray(places), repeated, np.concatenate(columns)], logits.device)
            kept = logits[rows, ids]
            logits[masked] = float("-inf")
            logits[rows, ids] = kept
        return logits

    def _forbidden(self, allowed: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        if id(allowed) not in self._large:
            mask = torch.ones(logits.shape[-1], dtype=torch.bool)
            mask[torch.from_numpy(allowed.astype(np.int64))] = False
            self._large[id(allowed)] = allowed, mask.to(logits.device)
        return self._large[id(allowed)][1]


def _on_device(parts: list[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Lists of ints as int64 tensors, in one copy that waits for nothing the device still has to do."""
    host = torch.from_numpy(np.concatenate(parts, dtype=np.int64))
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True).split([len(part) for part in parts])
