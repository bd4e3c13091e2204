"""The grammar of admissible actions."""

from __future__ import annotations

import numpy as np
import pytest
from small_lm import small_tokenizer

from env_manager.projection import project_compact, project_think
from rollout.constrained import SEARCH, ActionGrammar
from webshop_env.errors import ShopGymError

PAGE = (SEARCH, "click[buy now]", "click[b012345678]", "click[b012345679]", "click[size: x-large]")


def sample(grammar: ActionGrammar, admissible: tuple[str, ...], rng: np.random.Generator) -> list[int]:
    cursor, reply = grammar.start(admissible), []
    while not cursor.is_done:
        token = int(rng.choice(cursor.allowed()))
        cursor.advance(token)
        reply.append(token)
    assert len(cursor.allowed()) == 0
    return reply


@pytest.mark.parametrize("with_tags", [True, False])
def test_every_sampled_reply_is_well_formed_offered_and_in_time(with_tags: bool) -> None:
    tokenizer = small_tokenizer(with_tags=with_tags)
    grammar = ActionGrammar(tokenizer, max_tokens=40)
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        reply = sample(grammar, PAGE, rng)
        assert len(reply) <= 40
        assert reply[-1] == tokenizer.eos_token_id
        parsed = project_compact(tokenizer.decode(reply, skip_special_tokens=True))
        assert parsed.format_valid
        if parsed.action.startswith("search["):
            assert parsed.action.endswith("]")
            assert not set("[]<>\n") & set(parsed.action[len("search[") : -1])
        else:
            assert parsed.action in PAGE
        seen.add(parsed.action.split("[")[0] if parsed.action.startswith("search") else parsed.action)
    assert seen == {"search", *PAGE[1:]}, "every action of the page can be reached"


@pytest.mark.parametrize("with_tags", [True, False])
@pytest.mark.parametrize("free_prefix", [True, False])
def test_the_masks_of_a_reply_contain_its_tokens(with_tags: bool, free_prefix: bool) -> None:
    grammar = ActionGrammar(small_tokenizer(with_tags=with_tags), max_tokens=60, free_prefix=free_prefix)
    rng = np.random.default_rng(1)
    for _ in range(50):
        reply = sample(grammar, PAGE, rng)
        allowed = grammar.allowed_ids(PAGE, np.asarray(reply, dtype=np.int32))
        assert len(allowed) == len(reply)
        mask = grammar.allowed_mask(PAGE, reply, num_logits=500)
        for t, token in enumerate(reply):
            assert token in allowed[t]
            assert np.flatnonzero(mask[t]).tolist() == allowed[t].tolist()


@pytest.mark.parametrize("with_tags", [True, False])
@pytest.mark.parametrize("free_prefix", [True, False])
def test_what_is_forced_can_be_taken_at_once_and_is_known_from_the_last_choice_on(with_tags, free_prefix) -> None:
    grammar = ActionGrammar(small_tokenizer(with_tags=with_tags), max_tokens=60, free_prefix=free_prefix)
    rng = np.random.default_rng(2)
    num_decided = 0
    for _ in range(60):
        reply = sample(grammar, PAGE, rng)
        has_choice = [len(ids) > 1 for ids in grammar.allowed_ids(PAGE, reply)]
        decided = len(reply) - has_choice[::-1].index(True)
        cursor = grammar.start(PAGE)
        at = len(cursor.take_forced())
        assert at == has_choice.index(True) and not cursor.is_done
        while not cursor.is_forced:
            token = reply[at]
            cursor.advance(token)
            at += 1
            is_deciding = token in grammar.deciding_tokens(PAGE)
            assert not is_deciding or cursor.is_forced
            num_decided += is_deciding
        assert at == decided
        assert [*reply[:at], *cursor.take_forced()] == reply and cursor.is_done and cursor.take_forced() == []
    assert free_prefix or num_decided > 0, "in a thought any token may stand"


def test_a_token_decides_only_if_it_does_wherever_it_stands() -> None:
    grammar = ActionGrammar(small_tokenizer(with_tags=True), max_tokens=60)
    *_, one, _, closing, _, _ = grammar.encode_reply("click[z1z]").tolist()
    *_, two, x, _, _, _ = grammar.encode_reply("click[z2x]").tolist()
    assert len({one, two, x, closing}) == 4
    assert grammar.deciding_tokens(("click[z1z]", "click[z2x]")) == tuple(sorted({one, two}))
    assert set(grammar.deciding_tokens(("click[z1]", "click[z1x]", "click[z2x]"))) == {closing, two, x}
    assert x not in grammar.deciding_tokens(("click[z1]", "click[z1x]", "click[x1]", "click[x2]"))
    assert grammar.deciding_tokens((SEARCH,)) == (closing,)
    assert closing in grammar.deciding_tokens((SEARCH, "click[z1]", "click[z2]"))
    assert two not in grammar.deciding_tokens((SEARCH, "click[z1]", "click[z2]")), "it may be part of a query"
    assert grammar.deciding_tokens(("click[z1z]",)) == (), "there is nothing to decide"


def test_thoughts_come_first_and_leave_room_for_the_action() -> None:
    tokenizer = small_tokenizer()
    grammar = ActionGrammar(tokenizer, max_tokens=60, free_prefix=True)
    rng = np.random.default_rng(2)
    for _ in range(100):
        reply = sample(grammar, PAGE, rng)
        assert len(reply) <= 60
        text = tokenizer.decode(reply, skip_special_tokens=True)
        assert text.startswith("<think>")
        assert project_think(text).format_valid, text


def test_a_search_is_closed_before_the_limit() -> None:
    tokenizer = small_tokenizer()
    grammar = ActionGrammar(tokenizer, max_tokens=12)
    head, tail = len(grammar.search_head), len(grammar.search_tail)
    word = int(tokenizer("red")["input_ids"][0])
    cursor = grammar.start((SEARCH,))
    for token in grammar.search_head:
        cursor.advance(token)
    for taken in range(1, 12 - head - tail + 1):
        cursor.advance(word)
        may_go_on = taken < 12 - head - tail
        assert (word in cursor.allowed()) == may_go_on
        assert grammar.search_tail[0] in cursor.allowed()
    assert cursor.allowed().tolist() == [grammar.search_tail[0]]


def test_blanks_alone_are_no_query() -> None:
    tokenizer = small_tokenizer()
    grammar = ActionGrammar(tokenizer, max_tokens=40)
    cursor = grammar.start((SEARCH,))
    for token in grammar.search_head:
        cursor.advance(token)
    cursor.advance(int(tokenizer(" ")["input_ids"][0]))
    assert grammar.search_tail[0] not in cursor.allowed()


def test_actions_that_do_not_fit_are_not_offered() -> None:
    tokenizer = small_tokenizer()
    long = "click[" + "zq" * 30 + "]"
    grammar = ActionGrammar(tokenizer, max_tokens=20)
    short = grammar.encode_reply("click[buy now]")
    for allowed in grammar.allowed_ids((long, "click[buy now]"), short):
        assert len(allowed) == 1
    with pytest.raises(ShopGymError, match="max_response_length"):
        grammar.start((long,))


def test_imitated_replies_are_in_the_grammar() -> None:
    tokenizer = small_tokenizer(with_tags=False)
    grammar = ActionGrammar(tokenizer, max_tokens=80)
    for action in ("click[buy now]", "search[red mug!]", "search[a [nice] mug]"):
        reply = grammar.encode_reply(action)
        grammar.allowed_ids(PAGE, reply)
        text = tokenizer.decode(reply, skip_special_tokens=True)
        expected = action if action != "search[a [nice] mug]" else "search[a nice mug]"
        assert project_compact(text).action.replace("  ", " ") == expected


def test_a_reply_of_another_page_is_refused() -> None:
    grammar = ActionGrammar(small_tokenizer(), max_tokens=40)
    with pytest.raises(ValueError, match="not allowed"):
        grammar.allowed_ids(("click[buy now]",), grammar.encode_reply("click[b012345678]"))


def test_a_tokenizer_without_eos_is_refused() -> None:
    tokenizer = small_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ShopGymError, match="EOS"):
        ActionGrammar(tokenizer)


def test_an_action_with_half_a_surrogate_pair_is_left_out_as_no_tokenizer_gives_it_back() -> None:
    grammar = ActionGrammar(small_tokenizer(), max_tokens=60)
    odd = "click[red \ud83d]"
    assert grammar.start((*PAGE, odd)).allowed().tolist() == grammar.start(PAGE).allowed().tolist()
    assert grammar.left_out == {odd}
