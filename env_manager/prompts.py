"""Prompts: templates as data, and the rule that makes a prompt fit.

A template is one text file: a head of `key: value` lines, then the text of the first step (also used when there is
no history) and the text of later steps. Over the token budget history goes first, oldest first; then the page and
last the list of actions lose pieces from their middle, with a mark. The task, the current selections and the output
format are never cut, and nothing here raises in the middle of a run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from env_manager.memory import MemoryEntry
from env_manager.projection import PROJECTIONS
from env_manager.types import PageView, TokenCounter
from webshop_env.errors import ShopGymError

MARK = "…"
"""Stands where something was left out."""
PUBLISHED_MAX_CHARS = 13_000
"""Prompts with history longer than this drop all of it when `history_overflow` is "all"."""
_MIN_PIECES = 6
"""A page of fewer pieces (one long description, say) is shortened word by word."""
_PLACES_IN_HISTORY = ("step", "anchor", "action", "thought")
_PLACES_IN_ACTION = ("action",)
_PLACES_IN_PROMPT = ("task", "page", "actions", "history", "num_taken", "num_shown", "step")
_NUMBERS = ("num_taken", "num_shown", "step")
"""Places that hold a number; the others hold a text, which may be empty."""
_CHOICES = {"thinks": ("yes", "no"), "page": ("full", "compact"), "lower_case": ("yes", "no")}
"""Keys of the head that take one of two words."""
_SECTION = re.compile(r"^--- (first|later)\n", flags=re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """How prompts are worded, and what replies to them look like."""

    name: str
    projection: str
    """Which projection reads the replies (a key of `projection.PROJECTIONS`)."""
    thinks: bool
    """True when replies reason inside <think> first; False when they start directly with <action>."""
    is_compact: bool
    """The page is shown in the environment's short form instead of the full text."""
    text_words: int | None
    """How many words the short form leaves of a description or a feature; None is the environment's choice."""
    lower_case: bool
    history: str
    """One past step, with {step}, {anchor}, {action} and {thought}."""
    history_joiner: str
    action: str
    """One admissible action, with {action}."""
    first: str
    """The prompt without history, with {task}, {page}, {actions}, {step}."""
    later: str
    """The prompt with history: {history}, {num_taken} and {num_shown} on top."""
    digest: str
    """SHA-256 of the file's text: a policy that was trained on one wording knows its prompts by it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A finished prompt."""

    text: str
    is_cut: bool
    """True when anything was left out to make it fit."""


@lru_cache(maxsize=32)
def load_template(name: str) -> Template:
    """A packaged template by name ("think", "no_think", "compact", "compact_listed", "compact_reading",
    "compact_thinking"), or any file by its path.

    Raises:
        ShopGymError: there is no such template, or the file is not one.
    """
    packaged = files("env_manager") / "templates" / f"{name}.txt"
    if re.fullmatch(r"\w{1,100}", name) and packaged.is_file():
        text = packaged.read_text(encoding="utf-8")
    elif os.path.isfile(path := os.path.expanduser(name)):
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ShopGymError(f"env.prompt: the template file {name} cannot be read: {error}") from None
    else:
        raise ShopGymError(
            f"env.prompt: no template is called {name!r}; give think, no_think, compact, compact_listed, "
            "compact_reading, compact_thinking or the path of a template file"
        )
    return parse_template(text, name=name)


def parse_template(text: str, name: str) -> Template:
    """Reads the text of a template file.

    Raises:
        ShopGymError: a part is missing, or a key or projection is unknown.
    """
    parts = _SECTION.split(text)
    if len(parts) != 5 or (parts[1], parts[3]) != ("first", "later"):
        raise ShopGymError(f"template {name}: expected a head, then '--- first' and '--- later', each on its own line")
    head: dict[str, str] = {}
    for line in parts[0].splitlines():
        key, colon, value = line.partition(":")
        if not colon or value[:1].strip():
            raise ShopGymError(f"template {name}: the line {line!r} of the head is not 'key: value'")
        head[key] = value[1:]
    known = {"projection", "thinks", "page", "text_words", "lower_case", "history", "history_joiner", "action"}
    if unknown := sorted(head.keys() - known):
        raise ShopGymError(f"template {name}: unknown key {unknown[0]!r}; there are {', '.join(sorted(known))}")
    if missing := sorted({"projection", "thinks", "page", "history", "action"} - head.keys()):
        raise ShopGymError(f"template {name}: the head lacks {missing[0]!r}")
    if head["projection"] not in PROJECTIONS:
        raise ShopGymError(f"template {name}: no projection is called {head['projection']!r}")
    for key, words in _CHOICES.items():
        if head.get(key, words[1]) not in words:
            raise ShopGymError(f"template {name}: {key} is {words[0]} or {words[1]}, got {head[key]!r}")
    text_words = head.get("text_words")
    if text_words is not None and not (text_words.isdecimal() and int(text_words) > 0):
        raise ShopGymError(f"template {name}: text_words must be a number of words, at least 1, got {text_words!r}")
    if text_words is not None and head["page"] != "compact":
        raise ShopGymError(f"template {name}: text_words goes with page: compact; full pages are not shortened")
    for where, wording, places in (
        ("history", head["history"], _PLACES_IN_HISTORY),
        ("action", head["action"], _PLACES_IN_ACTION),
        ("--- first", parts[2], _PLACES_IN_PROMPT),
        ("--- later", parts[4], _PLACES_IN_PROMPT),
    ):
        try:
            for filling in ("", "text"):
                wording.format(**{place: 1 if place in _NUMBERS else filling for place in places})
        except (KeyError, IndexError, ValueError, AttributeError, TypeError):
            raise ShopGymError(
                f"template {name}: {where} may hold {', '.join('{' + place + '}' for place in places)}; "
                "braces of its own are written twice"
            ) from None
    return Template(
        name=name,
        projection=head["projection"],
        thinks=head["thinks"] == "yes",
        is_compact=head["page"] == "compact",
        text_words=None if text_words is None else int(text_words),
        lower_case=head.get("lower_case") == "yes",
        history=head["history"],
        history_joiner=head.get("history_joiner", "\n"),
        action=head["action"],
        first=parts[2].removesuffix("\n"),
        later=parts[4].removesuffix("\n"),
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def whole_prompt(template: Template, view: PageView, history: Sequence[MemoryEntry], *, step_number: int) -> str:
    """The prompt that `build_prompt` begins with, and returns when it fits."""
    return _render(template, view, history, view.pieces, view.admissible, step_number)


def build_prompt(
    template: Template,
    view: PageView,
    history: Sequence[MemoryEntry],
    *,
    step_number: int,
    count_tokens: TokenCounter | None = None,
    max_tokens: int | None = None,
    history_overflow: str = "oldest",
) -> Prompt:
    """One prompt that fits.

    Args:
        template: The wording.
        view: The current page.
        history: Past steps, oldest first; empty uses the template without history.
        step_number: The coming step, from 1.
        count_tokens: Tokens of a whole prompt, chat template included; None: prompts are never cut by tokens.
        max_tokens: The budget; None: no budget.
        history_overflow: "oldest", or "all": drop all history of a prompt of more than 13,000 characters.
    """

    def render(shown: Sequence[MemoryEntry], pieces: Sequence[str], actions: Sequence[str]) -> str:
        return _render(template, view, shown, pieces, actions, step_number)

    def fits(text: str) -> bool:
        if count_tokens is None or max_tokens is None:
            return True
        return count_tokens(text) <= max_tokens

    text = whole_prompt(template, view, history, step_number=step_number)
    is_cut = False
    if history and history_overflow == "all" and len(text) > PUBLISHED_MAX_CHARS:
        history, is_cut = (), True
        text = render(history, view.pieces, view.admissible)
    if fits(text):
        return Prompt(text, is_cut)
    # The fewest of the oldest steps whose loss is enough: a long history is not written out once per step of it.
    low, high = 1, len(history) + 1
    while low < high:
        first_shown = (low + high) // 2
        if fits(render(history[first_shown:], view.pieces, view.admissible)):
            high = first_shown
        else:
            low = first_shown + 1
    if low <= len(history):
        return Prompt(render(history[low:], view.pieces, view.admissible), is_cut=True)
    if len(view.pieces) < _MIN_PIECES:
        view, mark = _in_words(view), f"{MARK} "
    else:
        mark = MARK
    pieces = shorten(
        view.pieces, lambda kept: fits(render((), kept, view.admissible)), protected=view.protected, mark=mark
    )
    actions = shorten(view.admissible, lambda kept: fits(render((), pieces, kept)))
    return Prompt(render((), pieces, actions), is_cut=True)


def _render(
    template: Template,
    view: PageView,
    shown: Sequence[MemoryEntry],
    pieces: Sequence[str],
    actions: Sequence[str],
    step_number: int,
) -> str:
    wording = template.later if shown else template.first
    text = wording.format(
        task=view.task,
        page=view.joiner.join(pieces),
        actions="\n".join(a if a == MARK else template.action.format(action=a) for a in actions),
        history=template.history_joiner.join(
            template.history.format(step=e.step_number, anchor=e.anchor, action=e.action, thought=e.thought)
            for e in shown
        ),
        num_taken=step_number - 1,
        num_shown=len(shown),
        step=step_number,
    )
    return text.lower() if template.lower_case else text


def shorten(
    pieces: Sequence[str],
    fits: Callable[[Sequence[str]], bool],
    *,
    protected: frozenset[int] = frozenset(),
    mark: str = MARK,
) -> tuple[str, ...]:
    """Leaves out as few pieces as needed, those nearest the middle first.

    Args:
        pieces: What there is; returned as it is when it fits.
        fits: Judges a shortened list. More left out is taken to fit no worse.
        protected: Positions that stay whatever happens.
        mark: Stands for a run that was left out.

    Returns:
        The kept pieces with one mark for every run that was left out; all but the protected ones are left out when
        even that does not fit.
    """
    if fits(pieces):
        return tuple(pieces)
    middle = (len(pieces) - 1) / 2
    removable = sorted((i for i in range(len(pieces)) if i not in protected), key=lambda i: (abs(i - middle), i))
    low, high = 1, len(removable)
    while low < high:
        num_out = (low + high) // 2
        if fits(_leave_out(pieces, set(removable[:num_out]), mark)):
            high = num_out
        else:
            low = num_out + 1
    return _leave_out(pieces, set(removable[:low]), mark)


def _leave_out(pieces: Sequence[str], out: set[int], mark: str) -> tuple[str, ...]:
    kept: list[str] = []
    for i, piece in enumerate(pieces):
        if i not in out:
            kept.append(piece)
        elif i - 1 not in out:
            kept.append(mark)
    return tuple(kept)


def _in_words(view: PageView) -> PageView:
    """The same page with words as pieces; they carry their own blanks and joiners."""
    words: list[str] = []
    protected: set[int] = set()
    for i, piece in enumerate(view.pieces):
        end = view.joiner if i + 1 < len(view.pieces) else ""
        if i in view.protected:
            protected.add(len(words))
            words.append(piece + end)
        else:
            parts = re.findall(r"\S+\s*", piece) or [piece]
            words += [*parts[:-1], parts[-1] + end]
    return PageView(view.task, view.anchor, tuple(words), "", frozenset(protected), view.admissible, view.refused)
