"""The policy without a model."""

from __future__ import annotations

import numpy as np

from rollout.engines.scripted import EOS, ScriptedPolicy
from rollout.types import GenerationRequest, NoiseKey, SamplingParams


def test_prompts_and_replies_pass_as_bytes() -> None:
    policy = ScriptedPolicy(lambda prompt, admissible: f"{prompt} é {admissible}")
    request = GenerationRequest(policy.encode("größe"), NoiseKey(0, 0, 0, 0), ("a",))
    assert len(request.prompt_ids) == policy.count_tokens("größe") == 7
    answer = policy.generate([request], SamplingParams(max_tokens=100))[0]
    assert answer.text == "größe é ('a',)"
    assert answer.reply_ids[-1] == EOS
    assert not answer.is_cut
    assert answer.log_probs.tolist() == [0.0] * len(answer.reply_ids)


def test_long_replies_are_cut_without_an_end() -> None:
    policy = ScriptedPolicy(lambda prompt, admissible: "abcdef")
    request = GenerationRequest(policy.encode("x"), NoiseKey(0, 0, 0, 0))
    assert policy.generate([request], SamplingParams(max_tokens=7))[0].is_cut is False
    answer = policy.generate([request], SamplingParams(max_tokens=4))[0]
    assert (answer.text, answer.is_cut) == ("abcd", True)
    assert answer.reply_ids.dtype == np.int32
