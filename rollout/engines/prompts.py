"""From prompts to token ids, once each: the same prompt is counted, then sent, and siblings share their first one.

Also says which ids end a reply.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_KEPT = 4096
_PROBE = "A prompt,\nwith 'words', 12.50 and — é ☕ <action> in it."


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a reply: the tokenizer's and those that the model's generation settings name."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [named] if isinstance(named, int) else list(named or [])
    return frozenset([*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])])


class PromptEncoder:
    """A tokenizer that remembers the latest prompts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Takes the tokenizer's chat template where it has one."""
        self._tokenizer = tokenizer
        self._encoded: OrderedDict[str, np.ndarray] = OrderedDict()
        # The tokenizers package's own call makes ids only, without offsets and masks: a third faster.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None and self._ids_fast(_PROBE) != self._ids(_PROBE):
            self._backend = None

    def encode(self, prompt: str) -> np.ndarray:
        """One user message -> int32 [P] through the chat template, or the plain text where there is none."""
        if prompt in self._encoded:
            self._encoded.move_to_end(prompt)
            return self._encoded[prompt]
        encoded = np.asarray(self._ids_fast(prompt), dtype=np.int32)
        self._encoded[prompt] = encoded
        if len(self._encoded) > _KEPT:
            self._encoded.popitem(last=False)
        return encoded

    def _ids(self, prompt: str) -> list[int]:
        if self._tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        return list(self._tokenizer(prompt)["input_ids"])

    def _ids_fast(self, prompt: str) -> list[int]:
        backend = self._backend
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return self._ids(prompt)
        if not self._tokenizer.chat_template:
            return backend.encode_batch_fast([prompt])[0].ids
        messages = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
