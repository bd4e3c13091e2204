"""What one page looks like to the manager, whatever environment it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from webshop_env.errors import ShopGymError

TokenCounter = Callable[[str], int]
"""Tokens of a whole prompt as the policy will see it, chat template included."""


@dataclass(frozen=True, slots=True)
class PageView:
    """One observation, taken apart: what to do, where the agent is, what it may do."""

    task: str
    """What the episode is about; the same on every page of it."""
    anchor: str
    """The page without task, history or hints: rows with equal anchors are compared by the step advantage."""
    pieces: tuple[str, ...]
    """The page as the prompt shows it, in pieces that can be left out one by one when it has to be shortened."""
    joiner: str = "\n"
    """What stands between two pieces."""
    protected: frozenset[int] = frozenset()
    """Positions in `pieces` that are never left out, such as the current selections."""
    admissible: tuple[str, ...] = ()
    """The actions that the page offers, as the policy has to write them."""
    refused: frozenset[str] = frozenset()
    """Those of them that the environment never takes, though it lists them."""

    @property
    def taken(self) -> tuple[str, ...]:
        """`admissible` without what is `refused`."""
        return tuple(action for action in self.admissible if action not in self.refused)


def one_line(value: object) -> str:
    """A value that somebody's code gave, as much of it as an error message has room for."""
    return " ".join(repr(value).split())[:80]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(text, str) for text in value)


def _is_set(value: object) -> bool:
    return isinstance(value, frozenset | set)


_FIELD_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("task", "anchor", "joiner"), (_is_text, "a text")),
    **dict.fromkeys(("pieces", "admissible"), (_are_texts, "a tuple of texts")),
    **dict.fromkeys(("protected", "refused"), (_is_set, "a frozenset")),
}


def require_page_view(view: object, env_id: str) -> None:
    """Refuses what a view of somebody's environment made wrong before it shows as odd prompts and actions.

    Raises:
        ShopGymError: It is no `PageView`, or a field has not its type.
    """
    if not isinstance(view, PageView):
        raise ShopGymError(f"{env_id}: its view must return a PageView, got {one_line(view)}")
    for name, (is_right, type_name) in _FIELD_TYPES.items():
        if not is_right(value := getattr(view, name)):
            raise ShopGymError(f"{env_id}: its view must give PageView.{name} as {type_name}, got {one_line(value)}")
