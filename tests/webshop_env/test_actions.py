"""What counts as an action, in both versions."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webshop_env.actions import MAX_ACTION_CHARS, ParsedAction, match_key, parse_v0, parse_v1


@pytest.mark.parametrize(
    ("text", "kind", "argument"),
    [
        ("search[Red Mug]", "search", "red mug"),
        ("search[ ]", "search", " "),
        ("search[lamp] and more", "search", "lamp"),
        ("search[a]b]", "search", "a]b"),
        ("search[][]", "search", "]["),
        ("click[< Prev]", "click", "< prev"),
        ("search[a]\nclick[b]", "search", "a"),
        ("search[[a]]", None, ""),
        ("search[[]]", None, ""),
        ("search[]", None, ""),
        (" search[lamp]", None, ""),
        ("Search[lamp]", None, ""),
        ("search[la\nmp]", None, ""),
        ("", None, ""),
        ("]a[", None, ""),
    ],
)
def test_v0_reads_actions_as_published(text, kind, argument):
    parsed = parse_v0(text)
    assert (parsed.kind, parsed.argument) == (kind, argument)
    assert bool(parsed.problem) == (kind is None)


@given(st.text(alphabet="ab[]\n searchclik", max_size=40))
def test_v0_agrees_with_the_published_pattern(text):
    match = re.match(r"(.+)\[(.+)\]", text)
    name, argument = match.groups() if match else (text, "")
    expected = (name, argument.lower()) if match and name in ("search", "click") else (None, "")
    parsed = parse_v0(text)
    assert (parsed.kind, parsed.argument) == expected


@pytest.mark.parametrize("parse", [parse_v0, parse_v1])
def test_a_megabyte_of_brackets_takes_no_time(parse):
    start = time.perf_counter()
    for text in ("[" * 1_000_000, "a[" * 500_000 + "]", "search[" + "]" * 1_000_000):
        parse(text)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("click[Buy Now]", ParsedAction("click", "buy now")),
        ("  CLICK[ buy   now ]\n", ParsedAction("click", "buy now")),
        ("click[size [us]]", ParsedAction("click", "size [us]")),
        ("Search [Red  Mug]", ParsedAction("search", "red  mug")),
        ("search[ ]", ParsedAction("search", " ")),
    ],
)
def test_v1_takes_any_case_and_surrounding_blanks(text, expected):
    assert parse_v1(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("search[]", "nothing between the brackets"),
        ("click[red", "the closing ] is missing"),
        ("click red", "not of the form"),
        ("buy[red]", "not of the form"),
        ("search[a] click[b]", "more than one action"),
        ("click[red] now", "the closing ] is missing"),
        ("search[" + "a" * MAX_ACTION_CHARS + "]", "characters, at most"),
    ],
)
def test_v1_says_what_is_wrong(text, problem):
    parsed = parse_v1(text)
    assert parsed.kind is None and problem in parsed.problem and len(parsed.problem) < 200


def test_case_and_runs_of_blanks_do_not_tell_two_clicks_apart():
    assert match_key("  Dark\u00a0 Blue ") == match_key("dark blue") != match_key("darkblue")
