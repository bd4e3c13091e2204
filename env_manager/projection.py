"""From the policy's raw reply to the action that the environment gets.

What a policy writes is data: a projection never raises, it says what was wrong. Whether the page offers the action
is another question, which the environment answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

NO_ACTION_TAG = "no <action>…</action>"
NO_THINK_TAG = "no <think>…</think>"
CHINESE_TEXT = "Chinese characters"
NOT_ONLY_ACTION = "text around <action>…</action>"
REPLY_CUT = "cut at the length limit"

_CHINESE = re.compile("[\u4e00-\u9fff]")
_FALLBACK_CHARS = 20


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """What a reply asks for, and what is wrong with its form."""

    action: str | None
    """"search[red mug]", lower case; for a reply without tags whatever the rule takes instead; None for nothing."""
    problem: str | None
    """One of the texts above; None when well formed."""

    @property
    def format_valid(self) -> bool:
        """True when the reply follows the format (and so escapes the invalid-action penalty)."""
        return self.problem is None


Projection = Callable[[str], ParsedReply]


def project_think(reply: str) -> ParsedReply:
    """The published projection: `<think>…</think><action>…</action>`, and no Chinese characters.

    The action is the lower-cased text between the first `<action>` and the first `</action>`, wherever they stand;
    without both tags it is the last 20 characters of the lower-cased reply. The think tags are looked for in the
    reply as it is, upper case does not count.
    """
    action, problem = _action_between_tags(reply)
    if problem is None and ("<think>" not in reply or "</think>" not in reply):
        problem = NO_THINK_TAG
    if problem is None and _CHINESE.search(reply):
        problem = CHINESE_TEXT
    return ParsedReply(action, problem)


def project_no_think(reply: str) -> ParsedReply:
    """As `project_think`, for prompts that do not ask for thinking: only the action tags are demanded."""
    action, problem = _action_between_tags(reply)
    if problem is None and _CHINESE.search(reply):
        problem = CHINESE_TEXT
    return ParsedReply(action, problem)


def project_compact(reply: str) -> ParsedReply:
    """For replies that are the action and nothing else: `<action>…</action>`, blanks around it aside."""
    action, problem = _action_between_tags(reply)
    if problem is None:
        bare = reply.strip().lower()
        inside = bare[len("<action>") : -len("</action>")]
        is_whole = bare.startswith("<action>") and bare.endswith("</action>")
        if not is_whole or "<action>" in inside or "</action>" in inside:
            problem = NOT_ONLY_ACTION
    return ParsedReply(action, problem)


def thought_of(reply: str) -> str:
    """What a reply reasons, for memories that keep it: the text inside its first think tags, on one line."""
    _, is_begun, rest = reply.partition("<think>")
    thought, is_ended, _ = rest.partition("</think>")
    return " ".join(thought.split()) if is_begun and is_ended else ""


def _action_between_tags(reply: str) -> tuple[str, str | None]:
    lowered = reply.lower()
    start = lowered.find("<action>")
    end = lowered.find("</action>")
    if start == -1 or end == -1:
        return lowered[-_FALLBACK_CHARS:], NO_ACTION_TAG
    # An end before the start gives the empty text, as published; such a reply is still well formed.
    return lowered[start + len("<action>") : end].strip(), None


PROJECTIONS: dict[str, Projection] = {
    "think": project_think,
    "no_think": project_no_think,
    "compact": project_compact,
}
"""Projection by the name that templates use."""
