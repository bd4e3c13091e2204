"""From prompts to token ids, once each: the same prompt is counted, then sent, and siblings share their first one.

Also says which ids end a reply.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
        # The tokenizers package's own call makes ids only, without offsets and masks, and those of several prompts on
        # several cores.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None and self._ids_fast([_PROBE, ""]) != self._ids([_PROBE, ""]):
            self._backend = None

    def encode(self, prompt: str) -> np.ndarray:
        """One user message -> int32 [P] through the chat template, or the plain text where there is none."""
        return self.encode_all([prompt])[0]

    def encode_all(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Several prompts, each as `encode` does it; those that are new are tokenised together."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._encoded]
        for prompt, ids in zip(new, self._ids_fast([writable(prompt) for prompt in new]), strict=True):
            self._encoded[prompt] = np.asarray(ids, dtype=np.int32)
        found = []
        for prompt in prompts:
            self._encoded.move_to_end(prompt)
            found.append(self._encoded[prompt])
        while len(self._encoded) > _KEPT:
            self._encoded.popitem(last=False)
        return found

    def _ids(self, prompts: Sequence[str]) -> list[list[int]]:
        if not self._tokenizer.chat_template:
            return [list(self._tokenizer(prompt)["input_ids"]) for prompt in prompts]
        template: Any = self._tokenizer.apply_chat_template  # annotated with all that it can return
        return [
            list(template(messages, add_generation_prompt=True, return_dict=False))
            for messages in _conversations(prompts)
        ]

    def _ids_fast(self, prompts: Sequence[str]) -> list[list[int]]:
        backend = self._backend
        if not prompts or backend is None or backend.truncation is not None or backend.padding is not None:
            return self._ids(prompts)
        if not self._tokenizer.chat_template:
            return [encoded.ids for encoded in backend.encode_batch_fast(list(prompts))]
        texts = self._tokenizer.apply_chat_template(_conversations(prompts), add_generation_prompt=True, tokenize=False)
        return [encoded.ids for encoded in backend.encode_batch_fast(texts, add_special_tokens=False)]


def writable(text: str) -> str:
    """The text with "?" for each half of a surrogate pair, which odd catalogues hold and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def _conversations(prompts: Sequence[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": prompt}] for prompt in prompts]
