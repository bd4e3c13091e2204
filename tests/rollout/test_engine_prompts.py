"""Prompts to token ids: as the tokenizer itself does it, and once."""

from __future__ import annotations

import pytest
from small_lm import small_tokenizer
from tokenizers import processors

from rollout.engines.prompts import PromptEncoder

PROMPT = "task: red mug\npage: b012345678 | $12.0 — é ☕ <action>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>>{% endif %}"
)


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("adds_tokens", [False, True])
def test_ids_are_those_of_the_tokenizer(template, adds_tokens) -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = template
    if adds_tokens:
        end = ("<|end|>", tokenizer.eos_token_id)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<|end|> $A", None, [end])
    encoded = PromptEncoder(tokenizer).encode(PROMPT)
    if template is None:
        assert encoded.tolist() == tokenizer(PROMPT)["input_ids"]
        assert (encoded[0] == tokenizer.eos_token_id) == adds_tokens
    else:
        assert tokenizer.decode(encoded) == f"<|user|>{PROMPT}>>"
        messages = [{"role": "user", "content": PROMPT}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert encoded.tolist() == ids


def test_nothing_is_cut_when_another_user_of_the_tokenizer_cuts() -> None:
    tokenizer = small_tokenizer()
    encoder = PromptEncoder(tokenizer)
    whole = tokenizer(PROMPT)["input_ids"]
    tokenizer(PROMPT, truncation=True, max_length=4, padding="max_length")
    assert encoder.encode(PROMPT).tolist() == whole


def test_a_prompt_is_encoded_once() -> None:
    encoder = PromptEncoder(small_tokenizer())
    assert encoder.encode(PROMPT) is encoder.encode(PROMPT)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_several_prompts_are_encoded_like_each_alone(template) -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = template
    prompts = [PROMPT, "", f"{PROMPT} again", PROMPT]
    encoder = PromptEncoder(tokenizer)
    together = encoder.encode_all(prompts)
    assert [ids.tolist() for ids in together] == [PromptEncoder(tokenizer).encode(p).tolist() for p in prompts]
    assert together[0] is together[3] is encoder.encode(PROMPT)
    assert encoder.encode_all([]) == []


def test_half_a_surrogate_pair_of_an_odd_catalogue_is_a_question_mark() -> None:
    encoder = PromptEncoder(small_tokenizer())
    assert encoder.encode("lovely mug \ud83d!").tolist() == encoder.encode("lovely mug ?!").tolist()
    assert encoder.encode("mug \U0001f600").tolist() != encoder.encode("mug ?").tolist(), "a whole pair is a character"
