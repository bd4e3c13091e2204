"""The Gymnasium space of texts: observations and actions."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Space
from gymnasium.wrappers.utils import create_zero_array

MAX_CHARS = 10_000_000
"""Default length: no page and no reply of a model comes near it."""
_WORDS = ("lamp", "table", "shirt", "shoes", "red", "blue", "black", "large", "small", "cotton", "wood", "vegan")
_CLICKS = ("Buy Now", "Back to Search", "< Prev", "Next >", "Description", "Features", "Reviews")


class TextSpace(Space[str]):
    """Any text up to a length, in any alphabet.

    `gymnasium.spaces.Text` needs a finite alphabet, which no catalogue of the world keeps to. `sample` gives what a
    policy might plausibly write, a search or a click, so that a random walk through `action_space.sample()` moves.
    As a text has no fixed size, `AsyncVectorEnv` needs `shared_memory=False`.

    Args:
        max_chars: Longest text, in characters.
        seed: Of `sample`.
    """

    def __init__(self, max_chars: int = MAX_CHARS, seed: int | np.random.Generator | None = None) -> None:
        if max_chars < 1:
            raise ValueError(f"max_chars must be at least 1, got {max_chars}")
        self.max_chars = max_chars
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Draw a search of one to three words or the click of a common button."""
        rng = self.np_random
        if rng.random() < 0.5:
            words = rng.choice(_WORDS, size=int(rng.integers(1, 4)))
            return f"search[{' '.join(words)}]"[: self.max_chars]
        return f"click[{rng.choice(_CLICKS)}]"[: self.max_chars]

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_chars

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace) and self.max_chars == other.max_chars

    def __repr__(self) -> str:
        return f"TextSpace({self.max_chars})"


@create_zero_array.register(TextSpace)
def _no_text(space: TextSpace) -> str:  # type: ignore[misc]  # the registry is typed for all spaces at once
    """What Gymnasium's wrappers take for an observation where there is none yet."""
    return ""
