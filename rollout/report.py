"""Episodes as text, for people: what the policy saw, wrote and got.

Dimension: N rows (steps) of a batch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

import numpy as np

from rollout.types import StepBatch

Decode = Callable[[np.ndarray], str]
"""From the token ids of a prompt or reply to text."""
_WIDTH = 118


def episodes_by_success(batch: StepBatch) -> list[int]:
    """Episode numbers, best first: by task score, then return, then the shorter, then the lower number."""
    _, firsts = np.unique(batch.episode_id, return_index=True)
    keys = (
        batch.episode_id[firsts],
        batch.episode_length[firsts],
        -batch.episode_return[firsts],
        -batch.task_score[firsts],
    )
    return [int(batch.episode_id[row]) for row in firsts[np.lexsort(keys)]]


def sample_report(batch: StepBatch, *, num_episodes: int = 4, decode: Decode | None = None) -> str:
    """Tells the best and the worst episode, and others evenly between them; all when there are fewer.

    Args:
        batch: Any rows, whole episodes.
        num_episodes: How many to tell, at least 1 (the best).
        decode: Turns tokens into text, so that the first prompt and the raw replies are shown too.
    """
    ranking = episodes_by_success(batch)
    places = np.unique(np.linspace(0, len(ranking) - 1, min(num_episodes, len(ranking))).round().astype(int))
    parts = [
        f"Place {place + 1} of {len(ranking)}\n{episode_report(batch, ranking[place], decode=decode)}"
        for place in places
    ]
    return f"\n{'=' * _WIDTH}\n".join(parts)


def episode_report(batch: StepBatch, episode_id: int, *, decode: Decode | None = None) -> str:
    """Tells one episode: what became of it, the first prompt, and per step the page, the reply and its effect.

    Raises:
        ValueError: the batch has no such episode.
    """
    rows = np.flatnonzero(batch.episode_id == episode_id)
    if not len(rows):
        raise ValueError(f"there is no episode {episode_id} in this batch")
    rows = rows[np.argsort(batch.step_index[rows])]
    first = rows[0]
    end = "won" if batch.won[first] else "out of steps" if batch.truncated[first] else "lost"
    lines = [
        f"Episode {episode_id}, group {batch.group_id[first]}, goal {batch.goal_index[first]}: {end}, "
        f"score {batch.task_score[first]:.3f}, return {batch.episode_return[first]:g}, {len(rows)} steps",
    ]
    if decode is not None:
        lines += ["First prompt:", *_wrapped(decode(batch.prompt_ids[first]), "    | ")]
    for row in rows:
        lines += _step_lines(batch, int(row), decode)
    return "\n".join(lines) + "\n"


def _step_lines(batch: StepBatch, row: int, decode: Decode | None) -> list[str]:
    action = batch.action[row] if batch.action is not None else "(not recorded)"
    notes = [f"reward {batch.reward[row]:g}"]
    if batch.advantage is not None:
        notes.append(f"advantage {batch.advantage[row]:+.3f}")
    if batch.problem is not None and batch.problem[row] is not None:
        notes.append(f"malformed: {batch.problem[row]}")
    if not batch.action_possible[row]:
        reason = batch.reason[row] if batch.reason is not None else ""
        notes.append(f"not taken: {reason or 'the page does not offer it'}")
    if batch.prompt_is_cut is not None and batch.prompt_is_cut[row]:
        notes.append("prompt cut to fit")
    if batch.reply_is_cut is not None and batch.reply_is_cut[row]:
        notes.append("reply cut at the limit")
    lines = [f"Step {batch.step_index[row] + 1}"]
    lines += _wrapped(batch.anchor_texts[batch.anchor_id[row]], "    ")
    if decode is not None:
        lines += _wrapped(decode(batch.reply_ids[row]), "    reply: ")
    return [*lines, *_wrapped(action, "    -> "), *_wrapped(f"({'; '.join(notes)})", " " * 7)]


def _wrapped(text: str, lead: str) -> Sequence[str]:
    """Lines of at most `_WIDTH` characters that begin with `lead`, or with blanks where it is a word."""
    rest = lead if lead.endswith("| ") else " " * len(lead)
    lines: list[str] = []
    for line in text.splitlines() or [""]:
        start = rest if lines else lead
        lines += textwrap.wrap(line, _WIDTH, initial_indent=start, subsequent_indent=rest) or [start.rstrip()]
    return lines
