"""The language of large made-up catalogues: how often each word comes, which words go together, how they are spelt.

Frequencies follow WebShop's 1,000 products: `CURVE` says in which share of the products the words of a rank occur.
Beyond its last rank the shares fall by a power law, so the vocabulary grows with the catalogue, as in real shops.
"""

from __future__ import annotations

import json
from functools import cached_property

import numpy as np

from data.vocabulary import WORDS_DIR

# Dimensions: V words, K kinds of products.

CURVE = {1: 0.39, 6: 0.31, 11: 0.23, 21: 0.178, 51: 0.13, 101: 0.082, 201: 0.057, 501: 0.028, 1001: 0.014, 2001: 0.006}
"""Rank -> share of products that hold the word of that rank, measured without the words of options."""
TAIL_EXPONENT = 1.8
"""How fast shares fall beyond the last rank; the words of WebShop's products from rank 2,001 on add up as with this."""
NUM_WORDS = 1 << 21
"""V; most of them are so rare that even a million products hold only a part of them."""

TOPIC_RANKS = (100, 100 + (1 << 15))
"""Words of these ranks belong to topics; more common ones are everybody's, rarer ones nobody's."""
TOPIC_SIZE = 64
"""So many words of neighbouring ranks, of about equal frequency; each kind of product prefers a few of them."""

OPTION_WORDS = {"color", "size", "style", "black", "white", "blue", "red", "small", "large", "medium"}
"""Words that options bring in so often that texts need not."""

_ONSETS = ("b", "br", "c", "ch", "d", "f", "g", "gr", *"hjklmn", "p", "pr", "r", "s", "st", *"tvz")
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("n", "r", "l", "m", "t", "k", "p", "d", "g", "x", "sh", "nd")
_LETTERS = "abcdefghjkmnpqrtuvwxz"


class Language:
    """Word frequencies for products whose texts have given lengths.

    Args:
        lengths: int [any], numbers of words of a sample of products.
    """

    def __init__(self, lengths: np.ndarray) -> None:
        ranks = np.arange(1, NUM_WORDS + 1, dtype=np.float64)
        last, share = list(CURVE.items())[-1]
        curve = np.exp(np.interp(np.log(ranks), np.log(list(CURVE)), np.log(list(CURVE.values()))))
        shares = np.where(ranks > last, share * (ranks / last) ** -TAIL_EXPONENT, curve)  # [V]
        self.fresh_frac, frequencies = _frequencies(shares, lengths)
        """Share of a product's words that are drawn; the others repeat one of these."""
        self._cumulative = np.cumsum(frequencies)
        self._cumulative /= self._cumulative[-1]
        self._spelt: dict[int, str] = {}

    def draw(self, uniforms: np.ndarray, preferred: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """Draw words.

        Args:
            uniforms: float64 [any], in [0, 1): choose the rank.
            preferred: float64 [any], in [0, 1): choose within a topic.
            kinds: int64 [any], kind of the product that each word is for.

        Returns:
            int64 [any], words as ranks from 0.
        """
        words = np.searchsorted(self._cumulative, uniforms, side="right")
        is_topical = (words >= TOPIC_RANKS[0]) & (words < TOPIC_RANKS[1])
        topics = (words[is_topical] - TOPIC_RANKS[0]) // TOPIC_SIZE
        # The kind's first choice takes 3 in 10 of the topic's places, its second 3 in 10 of what is left, and so on.
        choices = np.minimum(np.log(1 - preferred[is_topical]) / np.log(0.7), TOPIC_SIZE - 1).astype(np.int64)
        words[is_topical] = topic_words(kinds[is_topical], topics, choices)
        return words

    def spell(self, word: int) -> str:
        """The letters of a word; equal words are equal objects, different ones differ."""
        text = self._spelt.get(word)
        if text is None:
            text = self._spelt[word] = self._common[word] if word < len(self._common) else _invent(word)
        return text

    @cached_property
    def _common(self) -> list[str]:
        """The commonest words are those of the hand-written lists, with small numbers between them."""
        words: dict[str, None] = {}
        for number, word in enumerate(_written_words()):
            if number % 8 == 0 and number < 480:
                words[str(number // 8 + 1)] = None
            if word not in OPTION_WORDS:
                words[word] = None
        return list(words)


def topic_words(kinds: np.ndarray, topics: np.ndarray, choices: np.ndarray) -> np.ndarray:
    """Words by topic and by how much a kind of product prefers them: choice 0 is its own word for that topic."""
    mixed = (kinds * 2654435761 + topics * 40503 + 12345) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    first = (mixed >> 13) % TOPIC_SIZE
    return TOPIC_RANKS[0] + topics * TOPIC_SIZE + (first + choices) % TOPIC_SIZE


def _frequencies(shares: np.ndarray, lengths: np.ndarray) -> tuple[float, np.ndarray]:
    """Turn shares of products into frequencies of draws.

    A word of frequency f is in a product of n draws with probability 1 - exp(-f n); n varies. The number of draws is
    chosen so that the frequencies add up to one.
    """
    sample = np.quantile(lengths, (np.arange(256) + 0.5) / 256)
    grid = np.geomspace(1e-12, 1.0, 400)
    lowest, highest = 0.05, 1.0
    for _ in range(40):
        fresh_frac = (lowest + highest) / 2
        expected = -np.expm1(-grid[:, None] * (fresh_frac * sample)[None, :]).mean(axis=1)  # share for each frequency
        frequencies = np.exp(np.interp(np.log(shares), np.log(expected), np.log(grid)))
        if frequencies.sum() > 1:  # too few draws for so many words
            lowest = fresh_frac
        else:
            highest = fresh_frac
    return fresh_frac, frequencies


def _written_words() -> list[str]:
    """Single lower-case words of `data/words`, commonest first."""
    counts: dict[str, int] = {}
    for path in sorted(WORDS_DIR.glob("*.json")):
        for text in _texts(json.loads(path.read_text(encoding="utf-8"))):
            for word in text.lower().split():
                if word.isascii() and word.isalpha() and len(word) > 2:
                    counts[word] = counts.get(word, 0) + 1
    return sorted(counts, key=lambda word: (-counts[word], word))


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for part in parts for text in _texts(part)]


def _invent(word: int) -> str:
    """A word of two or more syllables, or a model code such as "kx4071"; no two numbers share one."""
    if word % 3 == 0 and word > 3000:
        number, second = divmod(word // 3, len(_LETTERS))
        number, first = divmod(number, len(_LETTERS))
        return f"{_LETTERS[first]}{_LETTERS[second]}{number * 7 + 10}"
    num_open, text = len(_ONSETS) * len(_VOWELS), ""
    number, coda = divmod(word * 1_103_515_245 % NUM_WORDS, len(_CODAS))  # neighbours look different
    while number or len(text) < 3:
        number, syllable = divmod(number, num_open)
        text += _ONSETS[syllable % len(_ONSETS)] + _VOWELS[syllable // len(_ONSETS)]
    return text + _CODAS[coda]
