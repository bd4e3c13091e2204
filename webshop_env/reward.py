"""How well a purchase serves its goal: type factor x (attributes + options + price) / number of wishes.

`score_v0` is the published formula with its surprises, `score_v1` the corrected one. Both are pure; what does not
hang on the selected options is remembered between calls, so that a warm score costs microseconds.

Values where the published formula crashes or divides by nothing: a cap of 0 or less is an unmet price in v0 (in v1
an ordinary cap); without wanted attributes `r_att` is 1.0 with weight 0.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from thefuzz import fuzz

from webshop_env.goals import NO_CAP_USD
from webshop_env.nouns import NameNouns
from webshop_env.types import Goal, Product

# fmt: off
COLOURS = (
    "alabaster", "apricot", "aqua", "ash", "asphalt", "azure", "banana", "beige", "black", "blue", "blush",
    "bordeaux", "bronze", "brown", "burgundy", "camel", "camo", "caramel", "champagne", "charcoal", "cheetah",
    "chestnut", "chocolate", "christmas", "coffee", "cognac", "copper", "coral", "cranberry", "cream", "crystal",
    "dark", "denim", "eggplant", "elephant", "espresso", "fuchsia", "gold", "granite", "grape", "graphite", "grass",
    "gray", "green", "grey", "heather", "indigo", "ivory", "ivy", "khaki", "lavender", "lemon", "leopard", "light",
    "lilac", "lime", "magenta", "maroon", "mauve", "merlot", "midnight", "mint", "mocha", "multicolor", "mushroom",
    "mustard", "natural", "navy", "nude", "olive", "orange", "peach", "pewter", "pink", "plum", "purple", "rainbow",
    "red", "rose", "royal", "rust", "sand", "sapphire", "seashell", "silver", "skull", "slate", "steel", "stone",
    "stonewash", "sunflower", "tan", "taupe", "teal", "tiger", "turquoise", "violet", "walnut", "wheat", "white",
    "wine", "yellow",
)
"""The published colour words, in the published order: the first one found in a text stands for it."""
# fmt: on
MIN_SIMILARITY = 85
"""Two texts are the same wish if thefuzz gives more than this (0 to 100)."""

Breakdown = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TypeMatch:
    """Whether the bought product is the kind of thing that was wanted."""

    factor: float
    query_match: bool
    category_match: bool
    title_score: float


def score_v0(
    product: Product, goal: Goal, options: Mapping[str, str], *, price_usd: float, nouns: NameNouns
) -> tuple[float, Breakdown]:
    """The published score of buying `product` with `options` for `goal`.

    Args:
        product: What is bought.
        goal: What was wanted; its options are pairs (synthetic) or values alone (human).
        options: Selected options, name -> value; names do not count.
        price_usd: The drawn price of `product`.
        nouns: Where the nouns of both names come from.

    Returns:
        Score in [0, 1] and its parts, as the original's verbose mode names them.
    """
    wanted = goal.options.items() if isinstance(goal.options, dict) else goal.options
    num_options = sum(any(_same_option_v0(wish, value) for value in options.values()) for wish in wanted)
    is_price_met = goal.price_upper > 0 and price_usd <= goal.price_upper
    num_attributes = count_attributes(product, goal, "v0")
    return _combine(match_type(product, goal, nouns), goal, num_attributes, num_options, is_price_met)


def score_v1(
    product: Product, goal: Goal, options: Mapping[str, str], *, price_usd: float, nouns: NameNouns
) -> tuple[float, Breakdown]:
    """The corrected score of buying `product` with `options` for `goal`; arguments as for `score_v0`.

    A wanted (name, value) pair is met by a bought pair of the same name and an equal value (`same_value`); a wanted
    value without a name by any bought pair. Attributes match on word boundaries. The goal's own product is of the
    wanted type and has the wanted attributes, so with the goal's options it scores exactly 1.0. `price_usd` may be
    NaN (not known): no cap is met then.
    """
    wanted = goal.options.items() if isinstance(goal.options, dict) else [(None, value) for value in goal.options]
    num_options = sum(_is_option_met(product, options, name, value) for name, value in wanted)
    is_price_met = goal.price_upper == NO_CAP_USD or price_usd <= goal.price_upper
    kind = match_type(product, goal, nouns)
    num_attributes = count_attributes(product, goal, "v1")
    if product.asin == goal.asin:  # a name of one noun, ten times, would make it a stranger to itself
        kind = kind if kind.factor == 1.0 else replace(kind, factor=1.0)
        num_attributes = len(goal.attributes)
    score, breakdown = _combine(kind, goal, num_attributes, num_options, is_price_met)
    return score, {**breakdown, "r_option": breakdown.get("r_option", 1.0), "w_option": breakdown.get("w_option", 0.0)}


def match_type(product: Product, goal: Goal, nouns: NameNouns) -> TypeMatch:
    """Compare search label, categories and the nouns of the names of a bought product and a goal."""
    mine = (product.title, product.query, product.product_category)
    return _match_type(*mine, goal.name, goal.query, goal.product_category, nouns)


def same_value(wanted: str, bought: str) -> bool:
    """Whether two option values mean the same: "X-Large" and "xl", but not "10" and "10.5".

    Numbers, size words and colour words with their modifiers must agree; the other words may differ in order, in
    spelling by little, and in being joined.
    """
    if normalise(wanted) == normalise(bought):
        return True
    first, second = _value_parts(wanted), _value_parts(bought)
    if first.exact != second.exact or bool(first.rest) != bool(second.rest) or not any((*first.exact, first.rest)):
        return False
    return _same_words(first.rest, second.rest)


def _same_words(wanted: str, bought: str) -> bool:
    """Word by word, so that "unlined curtain" is not taken for "lined curtain", however long the rest is."""
    if wanted.replace(" ", "") == bought.replace(" ", ""):
        return True
    first, second = sorted(wanted.split()), sorted(bought.split())
    return len(first) == len(second) and all(map(_same_word, first, second))


def _same_word(wanted: str, bought: str) -> bool:
    if wanted == bought or f"{wanted}es" == bought or wanted == f"{bought}es":
        return True
    return wanted[0] == bought[0] and fuzz.ratio(wanted, bought) > MIN_SIMILARITY


@lru_cache(maxsize=1 << 16)
def normalise(text: str) -> str:
    """Lower case, one blank between words, one spelling of "/" and of letters that Unicode writes in two ways."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"\s*[|/]\s*", "/", " ".join(folded.split()))


def _combine(
    kind: TypeMatch, goal: Goal, num_attributes: int, num_options: int, is_price_met: bool
) -> tuple[float, Breakdown]:
    num_wanted_attributes, num_wanted_options = len(goal.attributes), len(goal.options)
    num_wishes = num_wanted_attributes + num_wanted_options + 1
    score = (num_attributes + num_options + is_price_met) / num_wishes * kind.factor
    breakdown: Breakdown = {
        "r_type": kind.factor,
        "r_att": num_attributes / num_wanted_attributes if num_wanted_attributes else 1.0,
        "w_att": num_wanted_attributes / num_wishes,
        "query_match": kind.query_match,
        "category_match": kind.category_match,
        "title_score": kind.title_score,
    }
    if num_wanted_options:
        breakdown["r_option"] = num_options / num_wanted_options
        breakdown["w_option"] = num_wanted_options / num_wishes
    breakdown["r_price"] = is_price_met
    breakdown["w_price"] = 1 / num_wishes
    return score, breakdown


@lru_cache(maxsize=1 << 17)
def _match_type(
    name: str, query: str, path: str, wanted_name: str, wanted_query: str, wanted_path: str, nouns: NameNouns
) -> TypeMatch:
    wanted_nouns = nouns.of(wanted_name)
    common = set(wanted_nouns) & set(nouns.of(name))
    title_score = len(common) / len(wanted_nouns) if wanted_nouns else 0.2
    query_match = query == wanted_query
    category_match = len(_categories(path) & _categories(wanted_path)) >= 2
    factor = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:
        factor = 0.1
    if title_score == 0.0:
        factor = 0.0
    return TypeMatch(factor, query_match, category_match, title_score)


def count_attributes(product: Product, goal: Goal, version: str) -> int:
    """How many of the wanted attributes a product has: among its attributes, or in one of its texts."""
    texts = (product.title, product.bullet_points, product.description)
    return _count_attributes(goal.attributes, product.attributes, texts, version)


@lru_cache(maxsize=1 << 17)
def _count_attributes(
    wanted: tuple[str, ...], offered: tuple[str, ...], texts: tuple[str, tuple[str, ...], str], version: str
) -> int:
    title, bullet_points, description = texts
    lowered = (title.lower(), " ".join(bullet_points).lower(), description.lower())
    is_same, is_in = (_similar, _is_substring) if version == "v0" else (_same_attribute, _is_phrase)
    return sum(
        any(is_same(attribute, other) for other in offered) or any(is_in(attribute, text) for text in lowered)
        for attribute in wanted
    )


@lru_cache(maxsize=1 << 16)
def _similar(wanted: str, offered: str) -> bool:
    return fuzz.token_set_ratio(offered, wanted) > MIN_SIMILARITY


def _is_substring(attribute: str, text: str) -> bool:
    return attribute in text


_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+")
_NEGATIONS = frozenset({"no", "non", "not", "free", "without", "less", "anti", "un"})


@lru_cache(maxsize=1 << 16)
def _same_attribute(wanted: str, offered: str) -> bool:
    """Equal up to spelling, or the offered one says all the words of the wanted one; numbers and negations agree."""
    first, second = (_WORD.findall(normalise(text)) for text in (wanted, offered))
    if not first or _strict_words(first) != _strict_words(second):
        return False
    return set(first) <= set(second) or fuzz.token_sort_ratio(wanted, offered) > MIN_SIMILARITY


def _strict_words(words: list[str]) -> list[str]:
    return sorted(word for word in words if word in _NEGATIONS or word[0].isdigit())


def _is_phrase(attribute: str, text: str) -> bool:
    """Whether a text holds the attribute as whole words; its last word may be inflected ("wash", "washable")."""
    words = attribute.lower().split()
    # Looking for each word first spares nearly all of the much slower searches.
    return bool(words) and all(word in text for word in words) and _phrase(attribute).search(text) is not None


@lru_cache(maxsize=1 << 14)
def _phrase(attribute: str) -> re.Pattern[str]:
    words = r"[\s-]+".join(map(re.escape, attribute.lower().split()))
    return re.compile(rf"(?<!\w){words}(?:s|es|ed|ing|able)?(?!\w)")


@lru_cache(maxsize=1 << 16)
def _same_option_v0(wish: str | tuple[str, str], bought: str) -> bool:
    """The original compares a pair as its Python text, so there only an equal colour stands for itself."""
    return fuzz.token_set_ratio(_first_colour(bought), _first_colour(wish)) > MIN_SIMILARITY


def _first_colour(wish: str | tuple[str, str]) -> str:
    # `in` means "is part of the text" for a value and "is one of the two" for a pair, as in the original.
    return next((colour for colour in COLOURS if colour in wish), str(wish))


def _is_option_met(product: Product, options: Mapping[str, str], name: str | None, value: str) -> bool:
    if name is not None:
        bought = [name] if name in options else [other for other in options if _same_name(name, other)]
    else:
        bought = list(options)
    return any(_is_value_met(value, options[other], product.options.get(other, ())) for other in bought)


@lru_cache(maxsize=1 << 16)
def _is_value_met(wanted: str, bought: str, offered: tuple[str, ...]) -> bool:
    """Where the wanted value itself is offered, only that one will do; else one that means the same."""
    if any(normalise(value) == normalise(wanted) for value in offered):
        return normalise(bought) == normalise(wanted)
    return same_value(wanted, bought)


@lru_cache(maxsize=1 << 12)
def _same_name(wanted: str, bought: str) -> bool:
    return _plain_name(wanted) == _plain_name(bought)


def _plain_name(name: str) -> str:
    # "Flavour name" and "flavor" are one name.
    return normalise(name).removesuffix(" name").replace("colour", "color").replace("flavour", "flavor")


_COLOUR_WORDS = frozenset(COLOURS) | {
    "bright",
    "pale",
    "deep",
    "soft",
    "hot",
    "neon",
    "pastel",
    "matte",
    "off",
    "jet",
    "sky",
}
_SIZE_SPELLING = {"xs": "xsmall", "s": "small", "m": "medium", "l": "large", "xl": "xlarge"}
_SIZES = re.compile(r"x*(?:small|large)|medium")
_COUNTED_X = re.compile(r"\b(\d)x-?(?=(?:l|large|s|small)\b)")
_REPEATED_X = re.compile(r"\b(x+)-?(l|large|s|small)\b")


@dataclass(frozen=True, slots=True)
class _ValueParts:
    exact: tuple[tuple[float, ...], tuple[str, ...], tuple[str, ...]]
    """Numbers in their order; size words; colour words and modifiers."""
    rest: str


@lru_cache(maxsize=1 << 16)
def _value_parts(value: str) -> _ValueParts:
    text = normalise(value).replace("'s", "")
    text = _COUNTED_X.sub(lambda match: "x" * int(match[1]), text)
    text = _REPEATED_X.sub(lambda match: match[1] + {"l": "large", "s": "small"}.get(match[2], match[2]), text)
    numbers, sizes, colours, rest = [], [], [], []
    for word in _WORD.findall(text):
        word = "gray" if word == "grey" else _SIZE_SPELLING.get(word, word)
        if word[0].isdigit():
            numbers.append(float(word))
        elif _SIZES.fullmatch(word):
            sizes.append(word)
        elif word in _COLOUR_WORDS:
            colours.append(word)
        else:
            rest.append(word)
    return _ValueParts((tuple(numbers), tuple(sorted(sizes)), tuple(sorted(colours))), " ".join(rest))


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}
