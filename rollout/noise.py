"""Random numbers that belong to a reply, not to a generator that everything shares."""

from __future__ import annotations

import numpy as np

from rollout.types import NoiseKey

_WORD = 2**64


def uniforms(key: NoiseKey, num_tokens: int) -> np.ndarray:
    """The uniform numbers that draw the tokens of one reply.

    They depend on the key alone: batches, ranks, restarts and the length limit change nothing. Negative parts of
    the key are taken modulo 2^64.

    Returns:
        float64 [num_tokens] in [0, 1); number t draws token t.
    """
    return np.random.Generator(_stream(key)).random(num_tokens)


def seed_of(key: NoiseKey) -> int:
    """A seed in [0, 2^63) for an engine that draws with generators of its own; it depends on the key alone."""
    return int(_stream(key).random_raw()) >> 1


def _stream(key: NoiseKey) -> np.random.Philox:
    # Philox counts up in its lowest word; the names of the reply go into the words above it.
    return np.random.Philox(
        key=np.array([key.seed % _WORD, key.update % _WORD], dtype=np.uint64),
        counter=np.array([0, 0, key.step % _WORD, key.episode % _WORD], dtype=np.uint64),
    )
