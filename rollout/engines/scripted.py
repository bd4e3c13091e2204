"""A policy without a model: a function writes the replies. For tests, baselines and looking at environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rollout.types import Generation, GenerationRequest, SamplingParams

Script = Callable[[str, tuple[str, ...] | None], str]
"""From a prompt and the page's actions (None when requests are not constrained) to a raw reply."""
EOS = 256


class ScriptedPolicy:
    """Encodes text as UTF-8 bytes (ids 0 to 255, EOS 256) and answers with what a function says."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.weight_version = 0

    def encode(self, prompt: str) -> np.ndarray:
        return np.frombuffer(prompt.encode(), dtype=np.uint8).astype(np.int32)

    def count_tokens(self, prompt: str) -> int:
        return len(prompt.encode())

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """Log-probs are 0: the script is certain. Replies over `max_tokens` are cut, as a model's would be."""
        generations = []
        for request in requests:
            reply = self._script(bytes(request.prompt_ids.astype(np.uint8)).decode(), request.admissible)
            ids = [*reply.encode(), EOS]
            is_cut = len(ids) > params.max_tokens
            ids = ids[: params.max_tokens]
            text = bytes(i for i in ids if i != EOS).decode(errors="replace")
            generations.append(
                Generation(
                    reply_ids=np.asarray(ids, dtype=np.int32),
                    log_probs=np.zeros(len(ids), dtype=np.float32),
                    text=text,
                    is_cut=is_cut,
                    weight_version=self.weight_version,
                )
            )
        return generations
