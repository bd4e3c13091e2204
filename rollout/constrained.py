"""Decoding that can only write what the page offers.

A reply is `<action>…</action>` and EOS (with thinking: `<think>…</think>` before it). For the actions of a page the
grammar names, token by token, the ids that may come next. Fixed actions are a trie over their tokenised replies; a
search is its fixed head, free text, its fixed tail. The engine samples from the model's distribution restricted to
these ids, and the trainer rebuilds the same sets from the page's actions and the reply, so that both speak of one
distribution. Sets depend on nothing else: not on the batch, not on the sampled noise.

Dimensions: R tokens of a reply, V size of the vocabulary.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rollout.engines.prompts import writable
from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEARCH = "search[<your query>]"
"""Stands for a search with any words."""
_SEARCH_HEAD, _SEARCH_TAIL = "search[", "]"
_THINK_HEAD, _THINK_TAIL = "<think>", "</think>"
# U+FFFD is how a token that ends inside a character reads: left out, so that every reply is whole text.
_NOT_IN_QUERY = re.compile("[\\[\\]<>\x00-\x1f\x7f\x85\u2028\u2029\ufffd\u4e00-\u9fff]")
_NOT_IN_THOUGHT = re.compile("[<>\x00-\x09\x0b-\x1f\x7f\ufffd\u4e00-\u9fff]")
_TRIES_KEPT = 512


@dataclass(slots=True)
class _Node:
    """A place in the trie of fixed token sequences."""

    children: dict[int, _Node] = field(default_factory=dict)
    opens_query: bool = False
    """The head of a search ends here: free text may follow."""
    _allowed: np.ndarray | None = None
    _is_forced: bool | None = None

    @property
    def allowed(self) -> np.ndarray:
        if self._allowed is None:
            self._allowed = np.asarray(sorted(self.children), dtype=np.int32)
        return self._allowed

    @property
    def is_end(self) -> bool:
        return not self.children and not self.opens_query

    @property
    def is_forced(self) -> bool:
        """One way leads from here to the end of the reply."""
        if self._is_forced is None:
            node = self
            while len(node.children) == 1 and not node.opens_query:
                (node,) = node.children.values()
            self._is_forced = node.is_end
        return self._is_forced


@dataclass(slots=True)
class _Trie:
    """The replies to a page."""

    root: _Node
    rest: int
    """Tokens of the longest one."""
    deciding: tuple[int, ...] | None = None
    """See `ActionGrammar.deciding_tokens`, found when it is first asked for."""


class Cursor:
    """Walks one reply, token by token."""

    __slots__ = ("_grammar", "_has_word", "_length", "_node", "_phase", "_rest")

    def __init__(self, grammar: ActionGrammar, root: _Node, rest: int) -> None:
        self._grammar = grammar
        self._node = root
        self._rest = rest
        """Tokens that must still fit after a thought."""
        self._length = 0
        self._has_word = False
        self._phase = "think" if grammar.free_prefix else "fixed"

    @property
    def is_done(self) -> bool:
        """EOS has been taken."""
        return self._phase == "done"

    def allowed(self) -> np.ndarray:
        """int32, ascending: the ids that may come next; never empty before the end, empty after it."""
        grammar = self._grammar
        if self._phase == "fixed":
            if self._node.opens_query:
                return grammar.query_free.ids
            return self._node.allowed
        if self._phase == "query":
            fits_one_more = self._length + 1 + len(grammar.search_tail) <= grammar.max_tokens
            return grammar.query_free.choose(grammar.search_tail[0], may_go_on=fits_one_more, may_close=self._has_word)
        if self._phase == "close":
            return self._node.allowed
        if self._phase == "think":
            if self._length < len(grammar.think_head):
                return grammar.think_head_ids[self._length]
            fits_one_more = self._length + 1 + self._rest <= grammar.max_tokens
            return grammar.thought_free.choose(self._node.allowed[0], may_go_on=fits_one_more, may_close=True)
        return np.empty(0, dtype=np.int32)

    @property
    def is_forced(self) -> bool:
        """Nothing is left to choose, and `take_forced` ends the reply; never said during a thought."""
        if self._phase == "query":
            return len(self.allowed()) == 1  # it has to be closed
        return self._phase != "think" and self._node.is_forced

    def take_forced(self) -> list[int]:
        """Takes tokens as long as there is no choice, and returns them."""
        taken: list[int] = []
        while len(allowed := self.allowed()) == 1:
            token = int(allowed[0])
            self._move(token)
            taken.append(token)
        return taken

    def advance(self, token: int) -> None:
        """Takes the next token.

        Raises:
            ValueError: the token is not among the allowed ones.
        """
        if self._phase in ("fixed", "close") and not self._node.opens_query:
            is_allowed = token in self._node.children
        else:
            allowed = self.allowed()
            at = int(allowed.searchsorted(np.int32(token)))  # of another type all ids would be converted first
            is_allowed = at < len(allowed) and allowed[at] == token
        if not is_allowed:
            raise ValueError(f"token {token} at place {self._length} of the reply is not allowed by the page's actions")
        self._move(token)

    def _move(self, token: int) -> None:
        grammar = self._grammar
        if self._phase == "fixed" and self._node.opens_query:
            self._phase = "query"
            self._has_word = bool(grammar.query_free.is_word[token])
        elif self._phase == "query" and token != grammar.search_tail[0]:
            self._has_word |= bool(grammar.query_free.is_word[token])
        elif self._phase == "query":
            self._phase, self._node = "close", grammar.search_tail_node.children[token]
        elif self._phase == "think":
            if self._length >= len(grammar.think_head) and token in self._node.children:
                self._phase, self._node = "fixed", self._node.children[token]
        else:
            self._node = self._node.children[token]
        self._length += 1
        if self._phase in ("fixed", "close") and self._node.is_end:
            self._phase = "done"


class _FreeText:
    """The ids that free text may use, and the same with the id that closes it."""

    def __init__(self, ids: np.ndarray, is_word: np.ndarray, closing: Sequence[int]) -> None:
        closing_ids = np.asarray(sorted(set(closing)), dtype=np.int32)
        self.ids = np.setdiff1d(ids, closing_ids).astype(np.int32)
        self.is_free = np.zeros(len(is_word), dtype=bool)
        """bool [V]: the token is one of `ids`."""
        self.is_free[self.ids] = True
        self.is_word = is_word
        """bool [V]: the token holds more than blanks."""
        self._with_closing: dict[int, np.ndarray] = {}
        self._only_closing: dict[int, np.ndarray] = {}

    def choose(self, closing: int, *, may_go_on: bool, may_close: bool) -> np.ndarray:
        closing = int(closing)
        if closing not in self._with_closing:
            self._with_closing[closing] = np.union1d(self.ids, [closing]).astype(np.int32)
            self._only_closing[closing] = np.asarray([closing], dtype=np.int32)
        if may_go_on:
            return self._with_closing[closing] if may_close else self.ids
        return self._only_closing[closing]


class NotLosslessError(ShopGymError):
    """The tokenizer does not give a text back after encoding."""


class ActionGrammar:
    """Which tokens may come next, for one tokenizer.

    Attributes:
        left_out: Actions of pages so far that the tokenizer does not give back (text that it normalises): no reply
            could take them, so they are not offered.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prefix: str = "<action>",
        suffix: str = "</action>",
        *,
        free_prefix: bool = False,
        max_tokens: int = 64,
    ) -> None:
        """Prepares the vocabulary.

        Args:
            tokenizer: Its EOS ends every reply.
            prefix: Stands before an action.
            suffix: Stands after it.
            free_prefix: Replies begin with a thought, `<think>` free text `</think>`.
            max_tokens: Most tokens of a reply, EOS included: free text is closed in time, and actions that are longer
                than this are not offered.

        Raises:
            ShopGymError: the tokenizer has no EOS, or `max_tokens` is too small for any reply.
        """
        if tokenizer.eos_token_id is None:
            raise ShopGymError("constrained decoding needs a tokenizer with an EOS token; this one has none")
        self.tokenizer = tokenizer
        self.prefix, self.suffix = prefix, suffix
        self.free_prefix = free_prefix
        self.max_tokens = max_tokens
        self.eos = int(tokenizer.eos_token_id)
        self.left_out: set[str] = set()
        self._token_cache: dict[str, tuple[int, ...] | None] = {}
        self._trie_cache: OrderedDict[tuple[str, ...], _Trie] = OrderedDict()

        self.think_head = self._tokens(_THINK_HEAD) if free_prefix else ()
        self.think_head_ids = [np.asarray([token], dtype=np.int32) for token in self.think_head]
        self._lead = _THINK_TAIL + prefix if free_prefix else prefix
        self.search_head = self._tokens(self._lead + _SEARCH_HEAD)
        self.search_tail = (*self._tokens(_SEARCH_TAIL + suffix), self.eos)
        self.search_tail_node = _Node()
        _insert(self.search_tail_node, self.search_tail)

        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], clean_up_tokenization_spaces=False)
        special = set(tokenizer.all_special_ids)
        usable = [i for i, text in enumerate(texts) if text and i not in special]
        is_word = np.asarray([bool(text.strip()) for text in texts], dtype=bool)
        query_ids = np.asarray([i for i in usable if not _NOT_IN_QUERY.search(texts[i])], dtype=np.int32)
        thought_ids = np.asarray([i for i in usable if not _NOT_IN_THOUGHT.search(texts[i])], dtype=np.int32)
        self.query_free = _FreeText(query_ids, is_word, self.search_tail[:1])
        self.thought_free = _FreeText(thought_ids, is_word, self.search_head[:1])

    def require_room(self, max_tokens: int) -> None:
        """Refuses a limit of replies that would cut some before the grammar closes them.

        Raises:
            ShopGymError: fewer tokens may be sampled than the grammar counts on.
        """
        if self.max_tokens > max_tokens:
            raise ShopGymError(
                f"the grammar closes replies within {self.max_tokens} tokens, but only {max_tokens} may be sampled; "
                "make both the same"
            )

    def start(self, admissible: Sequence[str]) -> Cursor:
        """A cursor before the first token of a reply to a page with these actions.

        Raises:
            ShopGymError: the page offers nothing, or nothing that fits into `max_tokens`.
        """
        trie = self._trie(tuple(admissible))
        return Cursor(self, trie.root, trie.rest)

    def deciding_tokens(self, admissible: Sequence[str]) -> tuple[int, ...]:
        """Tokens after which nothing is left to choose, wherever in a reply to the page they are taken.

        An engine may stop there: `Cursor.take_forced` knows the rest. Other tokens may decide at some places only.
        """
        trie = self._trie(tuple(admissible))
        if trie.deciding is None:
            trie.deciding = self._deciding(trie.root)
        return trie.deciding

    def allowed_ids(self, admissible: Sequence[str], reply_ids: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Rebuilds what was allowed at every token of a reply.

        Args:
            admissible: The page's actions, as they were when the reply was sampled.
            reply_ids: int [R].

        Returns:
            R int32 arrays, ascending, each with the reply's token in it. Arrays are shared: do not change them.

        Raises:
            ValueError: the reply could not have been sampled on this page.
        """
        cursor = self.start(admissible)
        allowed: list[np.ndarray] = []
        for token in reply_ids:
            allowed.append(cursor.allowed())
            cursor.advance(int(token))
        return allowed

    def allowed_mask(
        self, admissible: Sequence[str], reply_ids: Sequence[int] | np.ndarray, num_logits: int
    ) -> np.ndarray:
        """`allowed_ids` as bool [R, num_logits], True where a token was allowed."""
        allowed = self.allowed_ids(admissible, reply_ids)
        mask = np.zeros((len(allowed), num_logits), dtype=bool)
        for row, ids in zip(mask, allowed, strict=True):
            row[ids] = True
        return mask

    def encode_reply(self, action: str, thought: str = "") -> np.ndarray:
        """The reply that takes an action, tokenised as this grammar samples it, EOS included.

        For imitation: queries lose what free text may not hold. `thought` is used with `free_prefix` alone.

        Returns:
            int32 [R]; it may be longer than `max_tokens`, which `allowed_ids` then refuses.

        Raises:
            NotLosslessError: the tokenizer does not give the action back.
        """
        head = (*self.think_head, *self._free_tokens(thought, self.thought_free)) if self.free_prefix else ()
        if action.startswith(_SEARCH_HEAD) and action.endswith(_SEARCH_TAIL) and action != SEARCH:
            query = action[len(_SEARCH_HEAD) : -len(_SEARCH_TAIL)]
            body = (*self.search_head, *self._free_tokens(query, self.query_free), *self.search_tail)
        else:
            body = (*self._tokens(self._lead + action + self.suffix), self.eos)
        return np.asarray([*head, *body], dtype=np.int32)

    def _free_tokens(self, text: str, free: _FreeText) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [i for i in ids if free.is_free[i]]

    def _tokens(self, text: str) -> tuple[int, ...]:
        self._tokenise([text])
        tokens = self._token_cache[text]
        if tokens is None:
            raise NotLosslessError(
                f"constrained decoding: the tokenizer does not give {text!r} back after encoding; "
                "use one that is lossless, or set actor_rollout_ref.rollout.constrained=false"
            )
        return tokens

    def _tokenise(self, texts: Iterable[str]) -> None:
        """Remembers the tokens of texts, all at once; None for a text that does not come back."""
        new = [text for text in texts if text not in self._token_cache]
        if new:
            rows = self.tokenizer([writable(text) for text in new], add_special_tokens=False)["input_ids"]
            decoded = self.tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)
            for text, ids, back in zip(new, rows, decoded, strict=True):
                self._token_cache[text] = tuple(int(i) for i in ids) if back == text else None

    def _deciding(self, root: _Node) -> tuple[int, ...]:
        deciding: set[int] = set()
        leaving_open: set[int] = set()
        free = [self.thought_free] if self.free_prefix else []
        nodes = [] if root.is_forced else [root]
        while nodes:
            node = nodes.pop()
            if node.opens_query:
                free.append(self.query_free)
                deciding.add(self.search_tail[0])
                continue
            for token, child in node.children.items():
                if child.is_forced:
                    deciding.add(token)
                else:
                    leaving_open.add(token)
                    nodes.append(child)
        return tuple(sorted(t for t in deciding - leaving_open if not any(text.is_free[t] for text in free)))

    def _trie(self, admissible: tuple[str, ...]) -> _Trie:
        if admissible in self._trie_cache:
            self._trie_cache.move_to_end(admissible)
            return self._trie_cache[admissible]
        root, rest = _Node(), 0
        room = self.max_tokens - len(self.think_head)
        self._tokenise(self._lead + action + self.suffix for action in admissible if action != SEARCH)
        for action in admissible:
            if action == SEARCH:
                length = len(self.search_head) + 1 + len(self.search_tail)
                if length <= room:
                    _insert(root, self.search_head).opens_query = True
            else:
                try:
                    tokens = (*self._tokens(self._lead + action + self.suffix), self.eos)
                except NotLosslessError:
                    self.left_out.add(action)
                    continue
                length = len(tokens)
                if length <= room:
                    _insert(root, tokens)
            if length <= room:
                rest = max(rest, length)
        if rest == 0:
            raise ShopGymError(
                f"constrained decoding: none of the page's {len(admissible)} actions fits into {self.max_tokens} "
                "tokens and comes back from the tokenizer whole; raise data.max_response_length"
            )
        self._trie_cache[admissible] = trie = _Trie(root, rest)
        if len(self._trie_cache) > _TRIES_KEPT:
            self._trie_cache.popitem(last=False)
        return trie


def _insert(root: _Node, tokens: Sequence[int]) -> _Node:
    node = root
    for token in tokens:
        node = node.children.setdefault(token, _Node())
    return node
