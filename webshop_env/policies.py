"""Policies without a model: an oracle to learn from, rules to beat or to learn from, and chance.

Each has `act(observation, info) -> action`. Oracle, rule and chance remember nothing between steps, so one object can
serve any number of sessions in any order; those that remember play one at a time, and `fresh` gives another one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from thefuzz import fuzz

from webshop_env.actions import BACK, BUY, NEXT, PREV, SEARCH, SEARCH_HINT, SUB_PAGES, match_key
from webshop_env.errors import ShopGymError
from webshop_env.goals import price_text
from webshop_env.pages import SEP, page_book
from webshop_env.reward import same_value
from webshop_env.shop import Shop
from webshop_env.types import Goal, Product

_BUY, _BACK, _PREV, _NEXT = (f"click[{text.lower()}]" for text in (BUY, BACK, PREV, NEXT))
_FEATURES = "click[features]"
_NOT_OF_A_PRODUCT = {f"click[{text.lower()}]" for text in (BUY, BACK, PREV, NEXT, SEARCH, *SUB_PAGES)} | {SEARCH_HINT}

_WORD = re.compile(r"[^\W_]+(?:[-'.&][^\W_]+)*")
_FIRST_OPTION = re.compile(r" with (?:(?! with )[^:,]){1,40}: ")
_OF_KIND = re.compile(r" (?:with|for) ")
_PRICE = re.compile(r",? and price lower than ([0-9.]+) dollars")
# fmt: off
_FILLERS = frozenset((
    "a", "an", "and", "any", "are", "as", "at", "be", "by", "can", "could", "find", "for", "from", "get", "give",
    "hello", "help", "hi", "i", "i'm", "im", "in", "is", "it", "like", "looking", "me", "must", "my", "need", "of",
    "on", "one", "or", "please", "searching", "show", "some", "something", "that", "the", "these", "this", "to",
    "want", "which", "will", "with", "would", "you",
))
# fmt: on
ENOUGH = 2 / 3
"""Share of the phrases of a wish that must stand in title and features of a product that `ReadingPolicy` buys."""
_NOT_FOUND = 10**9
"""Place of a product that a query does not find."""
_NOT_MEANT = -2
"""In place of how much a product offers: less than one that was never opened, which counts as -1."""


class Policy(Protocol):
    """Whatever chooses the next action from what a session shows.

    One that gives reasons has the attribute `thought`: why it chose its last action, "" for no reason worth a word.
    """

    def act(self, observation: str, info: Mapping[str, Any]) -> str: ...


@runtime_checkable
class Remembering(Protocol):
    """A policy that remembers what it saw, so that each session needs its own."""

    def act(self, observation: str, info: Mapping[str, Any]) -> str: ...

    def fresh(self) -> Policy: ...


class RandomPolicy:
    """Chance: any action of the page; searches take up to four words of the instruction.

    Args:
        seed: The same seed gives the same choices in the same order.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        actions = info["available_actions"]
        if not actions:
            return f"search[{self._words(info)}]"  # After the end: does nothing in v1, goes on in v0.
        action = self._rng.choice(actions)
        return f"search[{self._words(info)}]" if action == SEARCH_HINT else action

    def _words(self, info: Mapping[str, Any]) -> str:
        words = _WORD.findall(info["instruction_text"].lower()) or ["gift"]
        return " ".join(self._rng.choices(words, k=self._rng.randint(1, 4)))


class OraclePolicy:
    """The shortest sensible way to the goal's own product with the goal's options: data for imitation.

    It knows the goal, but its queries are words that stand in the instruction, so a model can learn to write them;
    only where those do not find the product does it search for the title. It pages until the product is listed,
    opens it, selects the options in the order of their names, and buys.

    Args:
        shop: The shop that the sessions are in.
    """

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._book = page_book(shop)
        self._queries: dict[int, str] = {}
        self._wanted: dict[int, tuple[tuple[str, str], ...]] = {}

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        goal = self._shop.goal_at(info["goal_index"])
        actions, kind = info["available_actions"], info["page_kind"]
        if kind in ("start", "done"):
            return f"search[{self.query(goal)}]"
        if kind == "results":
            open_product = f"click[{goal.asin.lower()}]"
            if open_product in actions:
                return open_product
            lists_products = any(action not in _NOT_OF_A_PRODUCT for action in actions)
            return _NEXT if _NEXT in actions and lists_products else _BACK
        if kind == "sub_page" or info["asin"] != goal.asin:
            return _PREV
        for name, value in self.wanted_options(goal):
            if info["selected_options"].get(name) != value:
                try:
                    action = self._book.option_action(goal.asin, name, value)
                except ShopGymError:  # v0: a later option of the same name hides it.
                    continue
                if action in actions:
                    return action
        return _BUY

    def query(self, goal: Goal) -> str:
        """What to search for: the first of a few queries that lists the product on page 1, or else anywhere."""
        if goal.goal_index not in self._queries:
            queries = list(dict.fromkeys(self._candidate_queries(goal)))
            ranks = [self._rank(query, goal.asin) for query in queries]
            first_page = [query for query, rank in zip(queries, ranks, strict=True) if rank < self._book.page_size]
            found = [query for query, rank in zip(queries, ranks, strict=True) if rank < _NOT_FOUND]
            self._queries[goal.goal_index] = (first_page or found or queries)[0]
        return self._queries[goal.goal_index]

    def wanted_options(self, goal: Goal) -> tuple[tuple[str, str], ...]:
        """(Name, value) of each option to select, by name; for human goals the values that come nearest."""
        if goal.goal_index not in self._wanted:
            if isinstance(goal.options, dict):
                pairs = tuple(sorted(goal.options.items()))
            else:
                pairs = tuple(sorted(_nearest_options(self._shop.products[goal.asin], goal.options).items()))
            self._wanted[goal.goal_index] = pairs
        return self._wanted[goal.goal_index]

    def _candidate_queries(self, goal: Goal) -> Iterator[str]:
        known = {word for text in (goal.name, goal.query, *goal.attributes) for word in _words(text)}
        instruction = goal.instruction_text.lower().removesuffix(price_text(goal.price_upper))
        wish = _words(_FIRST_OPTION.split(instruction)[0])
        content = [word for word in wish if word in known and word not in _FILLERS]
        yield " ".join(content)
        yield " ".join([word for word in wish if word not in _FILLERS])
        yield " ".join(content + [word for value in _values(goal) for word in _words(value)])
        yield " ".join(goal.name.split()).translate(_NO_BRACKETS)

    def _rank(self, query: str, asin: str) -> int:
        """Place of a product among the hits of a query, from 0; `_NOT_FOUND` when it is none."""
        words = query.lower().split()
        hits = self._shop.search(words) if words else ()
        return hits.index(asin) if asin in hits else _NOT_FOUND


class RulePolicy:
    """A baseline that reads: it sees the instruction and the pages, never the goal.

    It searches for the words of the wish, opens the first product that is listed with a price under the cap, selects
    the options that the instruction names, and buys.

    Args:
        shop: Not looked at; there so that all policies of a shop are made alike.
    """

    def __init__(self, shop: Shop | None = None) -> None:
        del shop

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        actions, kind, instruction = info["available_actions"], info["page_kind"], info["instruction_text"].lower()
        if kind in ("start", "done"):
            return f"search[{self._query(info) or 'gift'}]"
        if kind == "results":
            return self._choose_product(observation, actions, instruction)
        if kind == "sub_page":
            return _PREV
        for label in self._wanted_labels(observation, info, instruction):
            return f"click[{label}]"
        return _BUY

    def _query(self, info: Mapping[str, Any]) -> str:
        return " ".join(_wish_words(info["instruction_text"].lower()))

    def _choose_product(self, observation: str, actions: Sequence[str], instruction: str) -> str:
        ranked = self._ranked(observation, actions, instruction)
        return ranked[0] if ranked else _BACK

    def _ranked(self, observation: str, actions: Sequence[str], instruction: str) -> list[str]:
        """What opens the products of a page of results: those under the cap first, in the order of the page.

        Titles that share more words with the wish are no better a guide: their order alone wins fewer goals.
        """
        cap = _PRICE.search(instruction)
        cap_usd = float(cap[1]) if cap else float("inf")
        segments = observation.split(SEP)
        ranked = []
        for i in range(len(segments) - 2):
            action = f"click[{segments[i].lower()}]"
            if action in actions and action not in _NOT_OF_A_PRODUCT:
                ranked.append((_upper_price(segments[i + 2]) > cap_usd, i, action))
        return [action for *_, action in sorted(ranked)]

    def _wanted_labels(self, observation: str, info: Mapping[str, Any], instruction: str) -> Iterator[str]:
        """What to click for each option group in which nothing is selected yet and the instruction names a value."""
        named = dict(_named_options(instruction))
        chosen = info["selected_options"]
        for name, labels in _option_groups(observation, info["available_actions"]):
            if name in chosen:
                continue
            if name in named:
                keys = {match_key(named[name]), match_key(f"{name}: {named[name]}")}
                yield from [label for label in labels if match_key(label) in keys][:1]
            elif not named:
                mentioned = [label for label in labels if _mentions(instruction, label)]
                yield from [max(mentioned, key=len)] if mentioned else []


class LookingPolicy(RulePolicy):
    """A rule that looks before it buys.

    It opens the products of a page of results one after the other until one offers every option that the instruction
    names, and buys that; where it finds none before its steps run out, the one that offers most.

    It remembers what it has opened since the session began, so it plays one session at a time.

    Args:
        shop: Not looked at.
        max_steps: Of an episode: it turns back in time to buy.
    """

    def __init__(self, shop: Shop | None = None, max_steps: int = 15) -> None:
        super().__init__(shop)
        self._max_steps = max_steps
        self._num_steps = 0
        self._offers: dict[str, int] = {}
        """How much of what is asked for a product shows (of the named options), by the action that opens it."""
        self._has_looked_enough = False
        self.thought = ""
        """Whether the product that was just opened shows what is asked for: "red: yes, 8 ounce: no"."""

    def fresh(self) -> LookingPolicy:
        """Another one, for another session."""
        return LookingPolicy(max_steps=self._max_steps)

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        if info["page_kind"] == "start":
            self._offers, self._has_looked_enough, self._num_steps = {}, False, 0
        num_left, self._num_steps = self._max_steps - self._num_steps, self._num_steps + 1
        opened, self.thought = f"click[{info['asin'].lower()}]", ""
        if info["page_kind"] == "item" and opened not in self._offers:
            named = dict(_named_options(info["instruction_text"].lower()))
            before = max(self._offers.values(), default=-1)
            offered = self._offered(named, observation, info["available_actions"])
            found = self._offers[opened] = sum(offered)
            self.thought = _verdicts(named.values(), offered)
            best = max(before, found)
            # Back, open the next; then choose all options and buy, or back again, open the best and buy that.
            self._has_looked_enough = num_left < 2 + max(len(named) + 1, 2 + best + 1)
            is_here = found == len(named) or (self._has_looked_enough and (found > before or num_left < 2 + before + 1))
            if not is_here and _PREV in info["available_actions"]:
                return _PREV
        return super().act(observation, info)

    def _choose_product(self, observation: str, actions: Sequence[str], instruction: str) -> str:
        ranked = self._ranked(observation, actions, instruction)
        unseen = [action for action in ranked if action not in self._offers]
        if unseen and not self._has_looked_enough:
            return unseen[0]
        return max(ranked, key=lambda action: self._offers.get(action, -1)) if ranked else _BACK

    @staticmethod
    def _offered(named: Mapping[str, str], observation: str, actions: Sequence[str]) -> list[bool]:
        """Of each named option whether an item page has it."""
        groups = {name: set(map(match_key, labels)) for name, labels in _option_groups(observation, actions)}
        return [
            bool({match_key(value), match_key(f"{name}: {value}")} & groups.get(name, set()))
            for name, value in named.items()
        ]


class GuidedPolicy(LookingPolicy):
    """Searches as the oracle does and chooses as one who looks: data for imitation.

    The oracle goes straight to a product that nothing on the page may tell from its neighbours, which a model can only
    learn by heart, and never shows how to turn back. Here only the query is the oracle's.

    Args:
        shop: The shop that the sessions are in.
        oracle: Whose queries are used; None makes one.
        max_steps: Of an episode.
    """

    def __init__(self, shop: Shop, oracle: OraclePolicy | None = None, max_steps: int = 15) -> None:
        super().__init__(max_steps=max_steps)
        self._shop, self._oracle = shop, oracle or OraclePolicy(shop)

    def fresh(self) -> GuidedPolicy:
        return GuidedPolicy(self._shop, self._oracle, max_steps=self._max_steps)

    def _query(self, info: Mapping[str, Any]) -> str:
        return self._oracle.query(self._shop.goal_at(info["goal_index"]))


class ReadingPolicy(LookingPolicy):
    """A rule that also reads what a product is said to be; made for synthetic instructions.

    It searches for the wish and the values of the options. Where the instruction names options it goes on as one who
    looks. Where it names none, it turns back from products that have options, for each of their goals would name one.
    Nothing on an item page tells the others apart: it opens their features, and buys the first whose title and
    features hold most of what is wished for ("soy wax", "easy install"). From the rest it goes back to the search page
    and searches again, which costs no more steps than to go back through the item page, and shows in the actions
    alone what was found. When its steps run out it buys the one that held most. Its `thought` is the verdict on each
    piece of the wish.

    Args:
        shop: Not looked at.
        max_steps: Of an episode: it goes back in time to buy.
    """

    def __init__(self, shop: Shop | None = None, max_steps: int = 15) -> None:
        super().__init__(shop, max_steps)
        self._instruction = ""
        self._last_action = ""
        self._title = ""
        """Of the product that was opened last."""
        self._read: set[str] = set()
        """Actions that open a product whose features it knows; `_offers` has how many phrases of the wish it holds."""

    def fresh(self) -> ReadingPolicy:
        return ReadingPolicy(max_steps=self._max_steps)

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        instruction = info["instruction_text"].lower()
        # Its own way leads over the start page, so that does not tell a new session.
        if instruction != self._instruction or self._last_action == _BUY:
            self._instruction, self._read = instruction, set()
            self._offers, self._has_looked_enough, self._num_steps = {}, False, 0
        if next(_named_options(instruction), None):
            action = super().act(observation, info)
        else:
            action = self._find(observation, info)
        self._last_action = action
        return action

    def _query(self, info: Mapping[str, Any]) -> str:
        instruction = info["instruction_text"].lower()
        values = [word for _, value in _named_options(instruction) for word in _words(value)]
        return " ".join([*_wish_words(instruction), *values])

    def _find(self, observation: str, info: Mapping[str, Any]) -> str:
        """One step where no options are named."""
        num_left, self._num_steps = self._max_steps - self._num_steps, self._num_steps + 1
        kind, action, self.thought = info["page_kind"], None, ""
        if num_left <= 1 and _BUY in info["available_actions"]:
            return _BUY
        if kind == "results":
            self._has_looked_enough |= num_left < 4  # open, read, back to the item, buy
        elif kind == "item" and not self._has_looked_enough:
            action = self._look(observation, info)
        elif kind == "sub_page" and self._last_action == _FEATURES:
            action = self._judge(observation, info, num_left)
        return action or RulePolicy.act(self, observation, info)

    def _look(self, observation: str, info: Mapping[str, Any]) -> str | None:
        """On an item page: opens its features or goes back; None once the product is chosen."""
        opened, phrases = f"click[{info['asin'].lower()}]", _phrases(self._instruction)
        labels = [label for _, labels in _option_groups(observation, info["available_actions"]) for label in labels]
        if labels and not any(_mentions(self._instruction, label) for label in labels):
            self._offers[opened], self.thought = _NOT_MEANT, "options that nobody asked for"
            return _PREV
        self._title = _title(observation)
        held = _held(phrases, self._title)
        self._offers[opened], self.thought = sum(held), _verdicts(map(" ".join, phrases), held)
        is_enough = self._offers[opened] >= ENOUGH * len(phrases)
        self._has_looked_enough = is_enough or bool(labels) or opened in self._read
        return None if self._has_looked_enough else _FEATURES

    def _judge(self, observation: str, info: Mapping[str, Any], num_left: int) -> str | None:
        """On the page of its features: goes back to search; None once the product is chosen."""
        opened, phrases = f"click[{info['asin'].lower()}]", _phrases(self._instruction)
        is_held = _held(phrases, f"{self._title}{SEP}{observation.rpartition(PREV)[2]}")
        held = self._offers[opened] = sum(is_held)
        self.thought = _verdicts(map(" ".join, phrases), is_held)
        self._read.add(opened)
        is_enough, is_best = held >= ENOUGH * len(phrases), held == max(self._offers.values())
        # Back, search, open, read, back to the item, buy; or back, search, open the best, buy.
        self._has_looked_enough = is_enough or num_left < 6
        if is_enough or (self._has_looked_enough and is_best) or num_left < 4:
            return None
        return _BACK


def _wish_words(instruction: str) -> list[str]:
    wish = _FIRST_OPTION.split(_PRICE.split(instruction)[0])[0]
    return [word for word in _words(wish) if word not in _FILLERS]


def _phrases(instruction: str) -> list[tuple[str, ...]]:
    """What is wished for, two words each: of "easy install lenses with tempered glass" all but "lenses" and "with".

    The kind of product ends what stands before " with " and " for ": there two words count if there are more.
    """
    wish = _FIRST_OPTION.split(_PRICE.split(instruction)[0])[0]
    kind, *others = _OF_KIND.split(wish)
    of_kind, others = kind.split(", "), [piece for part in others for piece in part.split(", ")]
    words = [[word for word in _plain_words(piece) if word not in _FILLERS] for piece in (*of_kind, *others)]
    last = len(of_kind) - 1
    return [tuple(piece[:2]) for i, piece in enumerate(words) if len(piece) > 2 or (piece and i != last)]


def _held(phrases: Sequence[tuple[str, ...]], text: str) -> list[bool]:
    """Of each phrase whether it stands in a text, whatever its punctuation."""
    words = f" {' '.join(_plain_words(text))} "
    return [f" {' '.join(phrase)} " in words for phrase in phrases]


def _verdicts(wishes: Iterable[str], are_there: Iterable[bool]) -> str:
    return ", ".join(f"{wish}: {'yes' if is_there else 'no'}" for wish, is_there in zip(wishes, are_there, strict=True))


def _plain_words(text: str) -> list[str]:
    return _words(text.replace("-", " "))


def _title(observation: str) -> str:
    """Of an item page: what stands before the price."""
    segments = observation.split(SEP)
    at_price = next((i for i, segment in enumerate(segments) if segment.startswith("Price: ")), 0)
    return segments[at_price - 1] if at_price else ""


def _named_options(instruction: str) -> Iterator[tuple[str, str]]:
    """(Name, value) pairs of " with color: red, and size: 8"; human instructions have none."""
    options = _PRICE.split(instruction)[0]
    first = _FIRST_OPTION.search(options)
    if first:
        for pair in options[first.start() + len(" with ") :].split(", and "):
            name, _, value = pair.partition(": ")
            yield name, value


def _option_groups(observation: str, actions: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Option groups of an item page: a text that cannot be clicked, then labels that can."""
    groups: list[tuple[str, list[str]]] = []
    for segment in observation.rpartition(f"{PREV}{SEP}")[2].split(SEP):
        label = " ".join(segment.split()).lower()
        if f"click[{label}]" not in actions:
            groups.append((label, []))
        elif groups and f"click[{label}]" not in _NOT_OF_A_PRODUCT:
            groups[-1][1].append(label)
    return groups


def _mentions(instruction: str, label: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(label)}(?!\w)", instruction) is not None


def _upper_price(tag: str) -> float:
    prices = re.findall(r"\d+(?:\.\d+)?", tag.replace(",", ""))
    return float(prices[-1]) if prices else float("inf")


_NO_BRACKETS = str.maketrans("[]", "  ")


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _values(goal: Goal) -> Sequence[str]:
    return tuple(goal.options.values()) if isinstance(goal.options, dict) else goal.options


def _nearest_options(product: Product, wanted: Sequence[str]) -> dict[str, str]:
    """For each wanted value the option value that comes nearest, each group used once."""
    chosen: dict[str, str] = {}
    for wish in wanted:
        pairs = [(n, v) for n, values in product.options.items() if n not in chosen for v in values]
        if pairs:
            name, value = max(pairs, key=lambda pair: _nearness(wish, pair[1]))
            chosen[name] = value
    return chosen


def _nearness(wish: str, value: str) -> tuple[bool, int, int]:
    return same_value(wish, value), fuzz.token_set_ratio(wish, value), fuzz.ratio(wish, value)
