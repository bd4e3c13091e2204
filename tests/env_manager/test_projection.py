"""Replies to actions."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from env_manager.projection import (
    CHINESE_TEXT,
    NO_ACTION_TAG,
    NO_THINK_TAG,
    NOT_ONLY_ACTION,
    PROJECTIONS,
    ParsedReply,
    project_compact,
    project_no_think,
    project_think,
    thought_of,
)


def test_the_published_projection_equals_the_recordings(reference_dir: Path) -> None:
    with gzip.open(reference_dir / "golden" / "projection.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    assert len(records) == 50
    for record in records:
        parsed = project_think(record["text"])
        assert (parsed.action, parsed.format_valid) == (record["action"], bool(record["valid"])), record["text"]


@pytest.mark.parametrize(
    ("reply", "action", "problem"),
    [
        ("<think>so</think><action> Click[Buy Now] </action>", "click[buy now]", None),
        ("<think>write <action> here</think><action>a</action>", "here</think><action>a", None),
        ("<think>so</think><action>search[mug]", "ink><action>search[mug]"[-20:], NO_ACTION_TAG),
        ("<action>search[mug]</action>", "search[mug]", NO_THINK_TAG),
        ("<think>红</think><action>search[mug]</action>", "search[mug]", CHINESE_TEXT),
        ("", "", NO_ACTION_TAG),
    ],
)
def test_thinking_replies(reply: str, action: str, problem: str | None) -> None:
    assert project_think(reply) == ParsedReply(action, problem)


def test_without_thinking_only_the_action_tags_count() -> None:
    assert project_no_think("I buy it. <action>click[buy now]</action>") == ParsedReply("click[buy now]", None)
    assert project_no_think("红 <action>a</action>") == ParsedReply("a", CHINESE_TEXT)
    assert project_no_think("click[buy now]") == ParsedReply("click[buy now]", NO_ACTION_TAG)


@pytest.mark.parametrize(
    ("reply", "action", "problem"),
    [
        ("<action>click[red]</action>", "click[red]", None),
        (" <action>click[red]</action>\n", "click[red]", None),
        ("<ACTION>Click[Red]</ACTION>", "click[red]", None),
        ("well <action>click[red]</action>", "click[red]", NOT_ONLY_ACTION),
        ("<action>a</action><action>b</action>", "a", NOT_ONLY_ACTION),
        ("<action><action>a</action>", "<action>a", NOT_ONLY_ACTION),
        ("click[red]", "click[red]", NO_ACTION_TAG),
    ],
)
def test_compact_replies_are_the_action_alone(reply: str, action: str, problem: str | None) -> None:
    assert project_compact(reply) == ParsedReply(action, problem)


@pytest.mark.parametrize(
    ("case", "reply", "action", "think", "no_think", "compact"),
    [
        # What users meet, and what each template says of it. None: well formed.
        ("no tags", "click[red]", "click[red]", NO_ACTION_TAG, NO_ACTION_TAG, NO_ACTION_TAG),
        (
            "an unclosed action",
            "<think>a</think><action>click[a]",
            "ink><action>click[a]",
            *(NO_ACTION_TAG, NO_ACTION_TAG, NO_ACTION_TAG),
        ),
        ("an unclosed thought", "<think>a<action>click[a]</action>", "click[a]", NO_THINK_TAG, None, NOT_ONLY_ACTION),
        (
            "two actions",
            "<think>a</think><action>click[a]</action><action>click[b]</action>",
            *("click[a]", None, None, NOT_ONLY_ACTION),
        ),
        (
            "nested tags",
            "<think>a</think><action><action>click[a]</action></action>",
            *("<action>click[a]", None, None, NOT_ONLY_ACTION),
        ),
        (
            "tags mentioned inside the thinking",
            "<think>I write <action>it</action></think><action>click[a]</action>",
            *("it", None, None, NOT_ONLY_ACTION),
        ),
        (
            "an action outside the page",
            "<think>a</think><action>click[moon]</action>",
            *("click[moon]", None, None, NOT_ONLY_ACTION),
        ),
        (
            "upper case",
            "<think>A</think><ACTION>CLICK[Buy Now]</ACTION>",
            *("click[buy now]", None, None, NOT_ONLY_ACTION),
        ),
        ("an upper-case thought", "<THINK>a</THINK><action>a</action>", "a", NO_THINK_TAG, None, NOT_ONLY_ACTION),
        (
            "trailing text",
            "<think>a</think><action>click[a]</action> That is it.",
            *("click[a]", None, None, NOT_ONLY_ACTION),
        ),
        (
            "Chinese text",
            "<think>\u7ea2\u8272</think><action>click[a]</action>",
            *("click[a]", CHINESE_TEXT, CHINESE_TEXT, NOT_ONLY_ACTION),
        ),
        ("an empty action", "<think>a</think><action> </action>", "", None, None, NOT_ONLY_ACTION),
        ("an empty reply", "", "", NO_ACTION_TAG, NO_ACTION_TAG, NO_ACTION_TAG),
        (
            "the tags the wrong way round",
            "<think>a</think></action>click[a]<action>",
            *("", None, None, NOT_ONLY_ACTION),
        ),
        ("the action alone", "<action>click[a]</action>", "click[a]", NO_THINK_TAG, None, None),
    ],
)
def test_what_every_template_says_of_a_reply(
    case: str, reply: str, action: str, think: str | None, no_think: str | None, compact: str | None
) -> None:
    assert project_think(reply) == ParsedReply(action, think), case
    assert project_no_think(reply) == ParsedReply(action, no_think), case
    assert project_compact(reply) == ParsedReply(action, compact), case


@pytest.mark.parametrize("name", sorted(PROJECTIONS))
@pytest.mark.parametrize(
    ("piece", "is_valid"),
    [
        ("<action>", False),
        ("</action>", False),
        ("<think><action>", False),
        ("<", False),
        (" ", False),
        ("\u0130", False),
        ("</think></action><think><action>", None),
    ],
)
def test_a_reply_of_a_megabyte_takes_linear_time(name: str, piece: str, is_valid: bool | None) -> None:
    reply = piece * (1_000_000 // len(piece))
    began = time.perf_counter()
    parsed = PROJECTIONS[name](reply)
    # Passing over it a few times takes about 10 ms; anything quadratic would take minutes.
    assert time.perf_counter() - began < 2.0
    assert is_valid is None or parsed.format_valid == is_valid
    whole = f"<think>{'a < b ' * 170_000}</think><action>click[a]</action>"
    assert PROJECTIONS[name](whole).action == "click[a]"


@pytest.mark.parametrize(
    ("reply", "thought"),
    [
        ("<think> red:\n yes </think><action>click[red]</action>", "red: yes"),
        ("well <think>one</think><think>two</think>", "one"),
        ("<think></think><action>click[red]</action>", ""),
        ("<think>unclosed<action>click[red]</action>", ""),
        ("closed</think><action>click[red]</action>", ""),
        ("<action>click[red]</action>", ""),
        ("<think>" * 200_000, ""),
    ],
)
def test_what_a_reply_reasons(reply: str, thought: str) -> None:
    assert thought_of(reply) == thought
