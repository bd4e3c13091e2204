"""Whole prompts, and what happens to those that are too long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from env_manager import EnvConfig, EnvManager
from env_manager.memory import MemoryEntry
from env_manager.prompts import MARK, build_prompt, load_template, parse_template, shorten
from env_manager.types import PageView
from webshop_env.errors import ShopGymError

VIEW = PageView(
    task="Find me a Red Mug",
    anchor="'Page 1' [SEP] 'A' [SEP] 'Selected: color: red' [SEP] 'B' [SEP] 'C' [SEP] 'D' [SEP] 'Buy Now'",
    pieces=("'Page 1'", "'A'", "'Selected: color: red'", "'B'", "'C'", "'D'", "'Buy Now'"),
    joiner=" [SEP] ",
    protected=frozenset({2}),
    admissible=("click[a]", "click[buy now]"),
)
HISTORY = [MemoryEntry(3, "'Search'", "search[mug]"), MemoryEntry(4, "'Page 1'", "click[a]")]


HEAD = "projection: think\nthinks: no\npage: full\nhistory: x\naction: x\n"


def count_words(text: str) -> int:
    return len(text.split())


FIRST_THINK_PROMPT = """\
You are a skilled assistant that works its way through an interactive environment, one action at a time.
Your assignment: Find me a Red Mug
You now see: 'Page 1' [SEP] 'A' [SEP] 'Selected: color: red' [SEP] 'B' [SEP] 'C' [SEP] 'D' [SEP] 'Buy Now'
From here you can do one of the following:
[
'click[a]',
'click[buy now]',
]

It is your turn to pick exactly one action.
First reason about the situation, step by step, inside <think> </think>. Then write the action you settle on, taken \
from the list above, inside <action> </action>."""

LATER_NO_THINK_PROMPT = """\
You work your way through an interactive environment, one action at a time.
Your assignment: Find me a Red Mug
Steps taken so far: 4. The latest 2 of them, what you saw and what you did:
[Observation 3: ''Search'', Action 3: 'search[mug]']
[Observation 4: ''Page 1'', Action 4: 'click[a]']
This is step 5. You now see: 'Page 1' [SEP] 'A' [SEP] 'Selected: color: red' [SEP] 'B' [SEP] 'C' [SEP] 'D' [SEP] \
'Buy Now'
From here you can do one of the following:
[
'click[a]',
'click[buy now]',
]

Answer with exactly one action from the list, inside <action> </action>, and nothing else."""

LATER_COMPACT_PROMPT = """\
task: find me a red mug
did: search[mug] > click[a]
page: 'page 1' [sep] 'a' [sep] 'selected: color: red' [sep] 'b' [sep] 'c' [sep] 'd' [sep] 'buy now'"""


def test_whole_prompts() -> None:
    assert build_prompt(load_template("think"), VIEW, [], step_number=1).text == FIRST_THINK_PROMPT
    assert build_prompt(load_template("no_think"), VIEW, HISTORY, step_number=5).text == LATER_NO_THINK_PROMPT
    assert build_prompt(load_template("compact"), VIEW, HISTORY, step_number=5).text == LATER_COMPACT_PROMPT


def compact(max_tokens: int | None) -> tuple[str, bool]:
    prompt = build_prompt(
        load_template("compact"), VIEW, HISTORY, step_number=5, count_tokens=count_words, max_tokens=max_tokens
    )
    return prompt.text, prompt.is_cut


def test_history_goes_first_and_oldest_first() -> None:
    # 6 words of task, 4 of history (two actions, the arrow, the heading), 18 of page.
    assert count_words(LATER_COMPACT_PROMPT) == 28
    assert compact(28) == (LATER_COMPACT_PROMPT, False)
    assert compact(27) == compact(26) == (LATER_COMPACT_PROMPT.replace("search[mug] > ", ""), True)
    without_history = LATER_COMPACT_PROMPT.replace("did: search[mug] > click[a]\n", "")
    assert compact(25) == compact(24) == (without_history, True)


def test_of_a_long_history_the_fewest_steps_go() -> None:
    history = [MemoryEntry(n, "page", f"click[{n}]") for n in range(1, 41)]
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return count_words(text)

    def shown(max_tokens: int) -> str:
        return build_prompt(
            load_template("compact"), VIEW, history, step_number=41, count_tokens=count, max_tokens=max_tokens
        ).text

    # 6 words of task, 18 of page, 1 of heading, and n actions with n - 1 arrows between them.
    for kept in (40, 39, 20, 1):
        expected = " > ".join(f"click[{n}]" for n in range(41 - kept, 41))
        assert f"did: {expected}\n" in shown(24 + 2 * kept)
    assert "did:" not in shown(25)
    counted.clear()
    shown(30)
    assert len(counted) < 10, "a history is not written out once for every step of it"


def test_then_the_page_loses_its_middle_but_never_the_selections() -> None:
    text, is_cut = compact(23)
    assert is_cut
    page = "page: 'page 1' [sep] 'a' [sep] 'selected: color: red' [sep] … [sep] 'd' [sep] 'buy now'"
    assert text == f"task: find me a red mug\n{page}"
    for budget in range(24):
        text, _ = compact(budget)
        assert text.startswith("task: find me a red mug\npage: ")
        assert "'selected: color: red'" in text
    assert compact(0)[0] == f"task: find me a red mug\npage: {MARK} [sep] 'selected: color: red' [sep] {MARK}"


def test_a_page_of_one_long_text_is_shortened_by_words() -> None:
    words = " ".join(str(n) for n in range(100))
    view = PageView("t", words, ("back", words, "buy"), " | ", frozenset(), ())
    prompt = build_prompt(load_template("compact"), view, [], step_number=1, count_tokens=count_words, max_tokens=12)
    # 3 words for the task and the heading, 9 for the page.
    assert prompt.text == "task: t\npage: back | 0 1 … 98 99 | buy"
    assert prompt.is_cut


def test_the_compact_prompt_with_a_list_is_the_compact_one_and_the_actions() -> None:
    for history in ([], HISTORY):
        plain, listed = (
            build_prompt(load_template(name), VIEW, history, step_number=len(history) + 1).text
            for name in ("compact", "compact_listed")
        )
        actions = "\n".join(VIEW.admissible).lower()
        assert VIEW.admissible and listed == f"{plain}\nactions:\n{actions}"


def test_a_template_says_how_much_of_a_text_compact_pages_show() -> None:
    words = " ".join(f"w{n}" for n in range(60))
    for name, num_words in (("compact", 24), ("compact_reading", 48)):
        manager = EnvManager("WebShop-v0", 1, EnvConfig(prompt=name))
        observation = " [SEP] ".join(("Instruction:", "a red mug", "Back to Search", "< Prev", words))
        info = {
            "instruction_text": "a red mug",
            "page_kind": "sub_page",
            "available_actions": ("click[back to search]", "click[< prev]"),
        }
        assert manager._view(observation, info).pieces[1].split() == words.split()[:num_words]
    plain, reading = load_template("compact"), load_template("compact_reading")
    assert replace(reading, name="compact", text_words=None, digest=plain.digest) == plain


def test_text_words_where_there_are_no_texts_to_shorten_is_a_mistake() -> None:
    for env in ("FrozenLake-v1", "TextWorld-v0"):
        with pytest.raises(ShopGymError, match="template compact_reading: text_words"):
            EnvManager(env, 1, EnvConfig(prompt="compact_reading"))
    end = "--- first\nx\n--- later\nx\n"
    for wrong in ("0", "-3", "many", ""):
        with pytest.raises(ShopGymError, match="text_words must be a number of words, at least 1"):
            parse_template(f"{HEAD.replace('full', 'compact')}text_words: {wrong}\n{end}", "t")
    with pytest.raises(ShopGymError, match="text_words goes with page: compact"):
        parse_template(f"{HEAD}text_words: 9\n{end}", "t")
    with pytest.raises(ShopGymError, match="'text_words:48' of the head is not 'key: value'"):
        parse_template(f"{HEAD}text_words:48\n{end}", "t")


def test_the_actions_are_shortened_last() -> None:
    template = load_template("no_think")
    view = PageView("the task", "page", ("page",), " ", frozenset(), tuple(f"click[{n}]" for n in range(50)))
    full = build_prompt(template, view, [], step_number=1)
    cut = build_prompt(
        template, view, [], step_number=1, count_tokens=count_words, max_tokens=count_words(full.text) - 10
    )
    assert cut.is_cut
    assert count_words(cut.text) <= count_words(full.text) - 10
    assert "'click[0]'," in cut.text and "'click[49]'," in cut.text
    assert cut.text.count(MARK) == 2, "one mark for the page, one for the actions"
    assert cut.text.endswith(full.text[-60:]), "the format stays"


def test_all_history_goes_past_13000_characters_as_published() -> None:
    template = load_template("think")
    overhead = len(build_prompt(template, VIEW, [MemoryEntry(1, "", "a")], step_number=2).text)
    for length, keeps in ((13_000, True), (13_001, False)):
        history = [MemoryEntry(1, "x" * (length - overhead), "a")]
        prompt = build_prompt(template, VIEW, history, step_number=2, history_overflow="all")
        assert ("Steps taken so far" in prompt.text) == keeps
        assert prompt.is_cut != keeps
        assert "Steps taken so far" in build_prompt(template, VIEW, history, step_number=2).text


def test_as_little_as_possible_is_left_out() -> None:
    pieces = list("abcdefg")
    assert shorten(pieces, lambda kept: len(kept) <= 7) == tuple("abcdefg")
    assert shorten(pieces, lambda kept: len(kept) <= 6) == ("a", "b", MARK, "e", "f", "g")
    assert shorten(pieces, lambda kept: len(kept) <= 3, protected=frozenset({3})) == (MARK, "d", MARK)
    assert shorten([], lambda kept: False) == ()


def test_braces_in_pages_and_tasks_are_plain_text() -> None:
    view = PageView("a {task}", "{0}", ("{page}",), " ", frozenset(), ("click[{x}]",))
    text = build_prompt(load_template("think"), view, [MemoryEntry(1, "{a}", "{b}")], step_number=2).text
    for part in ("a {task}", "{page}", "click[{x}]", "{a}", "{b}"):
        assert part in text


def test_a_template_can_be_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(
        "projection: no_think\nthinks: no\npage: full\nhistory: {action}\naction: {action}\n"
        "--- first\nDo: {task}\n--- later\nDo: {task} after {history}\n"
    )
    template = load_template(str(path))
    assert (
        build_prompt(template, VIEW, HISTORY, step_number=5).text == "Do: Find me a Red Mug after search[mug]\nclick[a]"
    )
    assert template.digest != load_template("no_think").digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("projection: think\n--- first\nx\n", "--- later"),
        ("projection think\n--- first\nx\n--- later\ny\n", "not 'key: value'"),
        ("colour: red\n--- first\nx\n--- later\ny\n", "unknown key 'colour'"),
        ("projection: think\n--- first\nx\n--- later\ny\n", "lacks 'action'"),
        (HEAD + "--- first\n{goal}\n--- later\ny\n", "--- first may hold {task}, {page}"),
        (HEAD + "--- first\nx\n--- later\na { b\n", "--- later may hold.*written twice"),
        (HEAD.replace("history: x", "history: {page}") + "--- first\nx\n--- later\ny\n", "history may hold {step}"),
        ("projection: x\nthinks: no\npage: full\nhistory: x\naction: x\n--- first\nx\n--- later\ny\n", "no projection"),
        (HEAD.replace("thinks: no", "thinks: true") + "--- first\nx\n--- later\ny\n", "yes or no, got 'true'"),
        (HEAD.replace("page: full", "page: short") + "--- first\nx\n--- later\ny\n", "full or compact, got 'short'"),
        (HEAD + "lower_case: 1\n--- first\nx\n--- later\ny\n", "lower_case is yes or no, got '1'"),
        (HEAD + "--- first\nx\n--- later\n{step:s}\n", "--- later may hold"),
        (HEAD + "--- first\nx\n--- later\n{num_taken:.2}\n", "--- later may hold"),
        (HEAD.replace("history: x", "history: {step[0]}") + "--- first\nx\n--- later\ny\n", "history may hold {step}"),
        (HEAD + "--- first\n{page[0]}\n--- later\ny\n", "--- first may hold"),
    ],
)
def test_a_broken_template_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ShopGymError, match=message):
        parse_template(text, name="broken")


def test_an_unknown_template_is_named() -> None:
    with pytest.raises(ShopGymError, match=r"env\.prompt.*'missing'"):
        load_template("missing")
    with pytest.raises(ShopGymError, match=r"env\.prompt"):
        load_template("x" * 300)  # too long for a file's name


def test_a_file_that_is_no_text_is_no_template(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(b"projection: \xff")
    with pytest.raises(ShopGymError, match=r"mine\.txt cannot be read"):
        load_template(str(tmp_path / "mine.txt"))


def test_a_template_file_in_the_home_directory_may_be_written_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_text(f"{HEAD}--- first\nmine\n--- later\nmine\n")
    assert load_template("~/mine.txt").first == "mine"
