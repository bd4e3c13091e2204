"""Replies to actions."""

from __future__ import annotations

import gzip
import json
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


@pytest.mark.parametrize("name", sorted(PROJECTIONS))
def test_a_reply_of_a_megabyte_is_no_trouble(name: str) -> None:
    assert not PROJECTIONS[name]("<action>" * 130_000).format_valid
