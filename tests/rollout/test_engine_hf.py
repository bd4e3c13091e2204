"""The transformers engine against a plain forward of the same model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_lm import small_model, small_tokenizer

from rollout.constrained import SEARCH, ActionGrammar
from rollout.engines.hf import HFEngine, _draw, _draw_rows
from rollout.types import Generation, GenerationRequest, NoiseKey, SamplingParams
from webshop_env.errors import ShopGymError

PAGES = (
    (SEARCH,),
    ("click[buy now]", "click[size: x-large]", "click[b012345678]", "click[b012345679]", "click[back to search]"),
)
PARAMS = SamplingParams(temperature=0.7, max_tokens=24)


def engine(*, with_tags: bool = True, **settings: object) -> HFEngine:
    tokenizer = small_tokenizer(with_tags=with_tags)
    grammar = ActionGrammar(tokenizer, max_tokens=24)
    return HFEngine(small_model(tokenizer), tokenizer, grammar=grammar, **settings)


def requests(engine: HFEngine, num: int = 14) -> list[GenerationRequest]:
    """Prompts of many lengths, some equal, two thirds of them constrained."""
    made = []
    for i in range(num):
        prompt = "task: find me red shoes\npage: " + "results | red mug " * (i // 2)
        admissible = (*PAGES, None)[i % 3]
        made.append(GenerationRequest(engine.encode(prompt), NoiseKey(5, 1, i, i % 4), admissible))
    return made


def plain_log_probs(engine: HFEngine, request: GenerationRequest, reply: np.ndarray, temperature: float) -> np.ndarray:
    """Teacher forcing of one row without cache, padding or batch."""
    ids = torch.tensor(np.concatenate([request.prompt_ids, reply])[None].astype(np.int64))
    with torch.inference_mode():
        logits = engine.model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].double() / temperature
    if request.admissible is not None:
        mask = engine.grammar.allowed_mask(request.admissible, reply, logits.shape[-1])
        logits = logits.masked_fill(~torch.from_numpy(mask), -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.from_numpy(reply.astype(np.int64))[:, None])[:, 0].numpy()


@pytest.mark.parametrize("with_tags", [True, False])
def test_log_probs_are_those_of_a_plain_forward_under_the_same_masks(with_tags: bool) -> None:
    hf = engine(with_tags=with_tags, max_batch_tokens=400)
    asked = requests(hf)
    for request, answer in zip(asked, hf.generate(asked, PARAMS), strict=True):
        expected = plain_log_probs(hf, request, answer.reply_ids, PARAMS.temperature)
        assert answer.log_probs.dtype == np.float32
        np.testing.assert_allclose(answer.log_probs, expected, atol=1e-5)


def test_answers_do_not_depend_on_batches_or_order() -> None:
    asked = requests(engine())
    alone = [engine().generate([request], PARAMS)[0] for request in asked]
    for budget in (60, 500, 100_000):
        together = engine(max_batch_tokens=budget).generate(asked, PARAMS)
        backwards = engine(max_batch_tokens=budget).generate(asked[::-1], PARAMS)[::-1]
        for one, two, three in zip(alone, together, backwards, strict=True):
            assert one.reply_ids.tolist() == two.reply_ids.tolist() == three.reply_ids.tolist()
            np.testing.assert_allclose(one.log_probs, two.log_probs, atol=1e-5)
    assert len({answer.reply_ids.tobytes() for answer in alone}) > len(alone) // 2, "replies differ from each other"


def test_equal_prompts_are_run_once_and_answered_apart() -> None:
    hf = engine()
    prompt = hf.encode("task: red shoes")
    asked = [GenerationRequest(prompt, NoiseKey(0, 0, episode, 0), PAGES[1]) for episode in range(20)]
    sizes = []
    hook = hf.model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[0]))
    answers = hf.generate(asked, PARAMS)
    hook.remove()
    assert sizes[0] == 1
    assert len({answer.text for answer in answers}) > 1


def test_forced_tokens_cost_no_forward_pass() -> None:
    hf = engine()
    calls = []
    hook = hf.model.register_forward_pre_hook(lambda *_: calls.append(1))
    answer = hf.generate([GenerationRequest(hf.encode("task"), NoiseKey(0, 0, 0, 0), ("click[buy now]",))], PARAMS)[0]
    hook.remove()
    assert answer.text == "<action>click[buy now]</action>"
    assert answer.log_probs.tolist() == [0.0] * len(answer.reply_ids)
    assert not calls


def test_tokens_are_drawn_by_inverse_cdf() -> None:
    logits = np.log(np.float32([0.2, 0.5, 0.3]))
    assert [_draw(logits, u, 1.0)[0] for u in (0.0, 0.19, 0.21, 0.69, 0.71, 0.999)] == [0, 0, 1, 1, 2, 2]
    assert _draw(logits, 0.5, 1.0)[1] == pytest.approx(np.log(0.5), abs=1e-6)
    # At temperature 0.5 the weights are the squares 0.04, 0.25, 0.09 of 0.38.
    assert _draw(logits, 0.2, 0.5) == (1, pytest.approx(np.log(0.25 / 0.38), abs=1e-6))
    assert _draw(logits, 0.99, 0.0) == (1, pytest.approx(np.log(0.5), abs=1e-6))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_the_batched_draw_is_the_single_one(temperature: float) -> None:
    rng = np.random.default_rng(0)
    logits, numbers = rng.normal(size=(40, 300)).astype(np.float32) * 3, rng.random(40)
    tokens, log_probs = _draw_rows(torch.from_numpy(logits), numbers, temperature)
    for i in range(40):
        at, log_prob = _draw(logits[i], numbers[i], temperature)
        assert tokens[i] == at
        assert log_probs[i] == pytest.approx(log_prob, abs=1e-9)


def test_eos_ends_a_reply_and_stays_in_it() -> None:
    hf = engine()
    free = [r for r in requests(hf, 60) if r.admissible is None]
    answers = hf.generate(free, SamplingParams(max_tokens=200))
    ended = [a for a in answers if not a.is_cut]
    assert ended, "some reply ends by itself"
    for answer in ended:
        assert answer.reply_ids[-1] == hf.tokenizer.eos_token_id
        assert hf.tokenizer.eos_token_id not in answer.reply_ids[:-1]
        assert "<|end|>" not in answer.text
    for answer in hf.generate(free, SamplingParams(max_tokens=3)):
        assert len(answer.reply_ids) <= 3
        assert answer.is_cut == (answer.reply_ids[-1] != hf.tokenizer.eos_token_id)


def test_tags_survive_decoding() -> None:
    hf = engine()
    answers = hf.generate([r for r in requests(hf) if r.admissible is not None], PARAMS)
    assert all(a.text.startswith("<action>") and a.text.endswith("</action>") for a in answers)


def test_new_weights_change_the_answers_and_the_stamp() -> None:
    hf = engine()
    asked = requests(hf)
    before = hf.generate(asked, PARAMS)
    other = small_model(hf.tokenizer, seed=1)
    weights = {name: value for name, value in other.state_dict().items() if name != "lm_head.weight"}
    hf.load_weights(weights, version=3)
    after = hf.generate(asked, PARAMS)
    assert [a.weight_version for a in before] == [0] * len(asked)
    assert [a.weight_version for a in after] == [3] * len(asked)
    expected = HFEngine(other, hf.tokenizer, grammar=hf.grammar).generate(asked, PARAMS)
    assert [a.reply_ids.tolist() for a in after] == [a.reply_ids.tolist() for a in expected]
    assert [a.reply_ids.tolist() for a in after] != [a.reply_ids.tolist() for a in before]


def test_weights_that_do_not_fit_are_refused() -> None:
    hf = engine()
    weights = dict(hf.model.state_dict())
    weights["model.extra"] = torch.zeros(1)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*model\.extra"):
        hf.load_weights(weights, version=1)


def test_the_engine_keeps_its_own_copy() -> None:
    tokenizer = small_tokenizer()
    model = small_model(tokenizer)
    hf = HFEngine(model, tokenizer)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert hf.model.model.norm.weight.abs().sum() > 0
    assert model.model.norm.weight.requires_grad


def test_the_chat_template_is_used_where_there_is_one() -> None:
    hf = engine()
    assert hf.tokenizer.decode(hf.encode("red mug")) == "red mug"
    hf.tokenizer.chat_template = (
        "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}{% if add_generation_prompt %}(me){% endif %}"
    )
    assert hf.tokenizer.decode(hf.encode("blue mug")) == "(user)blue mug(me)"
    assert hf.count_tokens("blue mug") == len(hf.encode("blue mug"))


def test_what_the_engine_cannot_do_is_said() -> None:
    hf = engine()
    asked = requests(hf)
    with pytest.raises(ShopGymError, match="top_p"):
        hf.generate(asked, SamplingParams(top_p=0.9))
    with pytest.raises(ShopGymError, match="24 tokens"):
        hf.generate(asked, SamplingParams(max_tokens=10))
    with pytest.raises(ShopGymError, match="grammar"):
        HFEngine(hf.model, hf.tokenizer).generate(asked, PARAMS)


def test_no_requests_no_answers() -> None:
    answers: list[Generation] = engine().generate([], PARAMS)
    assert answers == []
