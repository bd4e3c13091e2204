"""Episodes that follow a script, while an engine, or no model at all, writes replies of given lengths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from env_manager import EnvManager
from env_manager.webshop import REFUSED
from rollout.constrained import ActionGrammar
from rollout.engines.prompts import PromptEncoder
from rollout.types import Generation, GenerationRequest, NoiseKey, SamplingParams
from webshop_env.policies import OraclePolicy


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the environments are given, whatever the engine wrote, and how long replies are."""

    manager: EnvManager
    oracle: OraclePolicy
    wander: float
    reply_tokens: float
    """Mean of a log-normal distribution, cut at the limit of replies."""

    def length(self, noise: NoiseKey, max_tokens: int) -> int:
        """Tokens that this reply shall have."""
        spread = 0.5
        drawn = self._rng(noise, 0).lognormal(np.log(self.reply_tokens) - spread**2 / 2, spread)
        return int(np.clip(round(drawn), 4, max_tokens))

    def action(self, noise: NoiseKey) -> str:
        """What is done on the page that the request's environment shows."""
        observation, info = self.manager.page(noise.episode % self.manager.num_envs)
        action = self.oracle.act(observation, info)
        left_out = REFUSED | {"click[buy now]"}
        others = [a for a in info["available_actions"] if not a.startswith("search[") and a not in left_out]
        rng = self._rng(noise, 1)
        if others and rng.random() < self.wander:
            return str(rng.choice(others))
        return action

    def text(self, action: str) -> str:
        """A well-formed reply of the template that takes an action."""
        thought = f"<think>{action}</think>" if self.manager.template.thinks else ""
        return f"{thought}<action>{action}</action>"

    @staticmethod
    def _rng(noise: NoiseKey, what: int) -> np.random.Generator:
        return np.random.default_rng((what, noise.seed, noise.update, noise.episode, noise.step))


class ScriptedEngine:
    """An engine whose replies are kept as they were sampled, while the environments get a scripted action."""

    def __init__(self, engine: Any, script: Script) -> None:
        self.engine, self.script = engine, script
        self.script_s = 0.0
        """Seconds spent on the script, which collecting includes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @property
    def weight_version(self) -> int:
        return int(self.engine.weight_version)

    def encode(self, prompt: str) -> np.ndarray:
        return self.engine.encode(prompt)

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """For engines that answer whole lists: as long as the longest is to be, then cut."""
        lengths = [self.script.length(request.noise, params.max_tokens) for request in requests]
        written = self.engine.generate(requests, replace(params, max_tokens=max(lengths)))
        return [
            self._told(request, replace(reply, reply_ids=reply.reply_ids[:length], log_probs=reply.log_probs[:length]))
            for request, reply, length in zip(requests, written, lengths, strict=True)
        ]

    def _told(self, request: GenerationRequest, written: Generation) -> Generation:
        began = time.perf_counter()
        text = self.script.text(self.script.action(request.noise))
        self.script_s += time.perf_counter() - began
        return replace(written, text=text, is_cut=False)


class StreamingScriptedEngine(ScriptedEngine):
    """The same for an engine that takes requests while others are being answered."""

    def __init__(self, engine: Any, script: Script) -> None:
        super().__init__(engine, script)
        self.asked: dict[int, GenerationRequest] = {}

    def submit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[int]:
        numbers = []
        for request in requests:
            length = self.script.length(request.noise, params.max_tokens)
            (number,) = self.engine.submit([request], replace(params, max_tokens=length))
            self.asked[number] = request
            numbers.append(number)
        return numbers

    def poll(self) -> list[tuple[int, Generation]]:
        return [(number, self._told(self.asked.pop(number), written)) for number, written in self.engine.poll()]


class RandomTokens:
    """A policy without a model: replies of random tokens, or of the action's own where a grammar binds them."""

    weight_version = 0

    def __init__(self, encoder: PromptEncoder, vocabulary: int, script: Script, grammar: ActionGrammar | None) -> None:
        self.encode, self.vocabulary, self.script, self.grammar = encoder.encode, vocabulary, script, grammar

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        return [self._reply(request, params) for request in requests]

    def _reply(self, request: GenerationRequest, params: SamplingParams) -> Generation:
        action = self.script.action(request.noise)
        if self.grammar is not None:
            reply = self.grammar.encode_reply(action)
        else:
            length = self.script.length(request.noise, params.max_tokens)
            rng = np.random.default_rng((request.noise.episode, request.noise.step))
            reply = rng.integers(0, self.vocabulary, length).astype(np.int32)
        log_probs = np.full(len(reply), -np.log(self.vocabulary), dtype=np.float32)
        return Generation(reply, log_probs, self.script.text(action), is_cut=False)
