"""A small policy that wins some episodes and loses others, made in seconds: there is something to learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from env_manager import EnvConfig, EnvManager
from rollout.constrained import ActionGrammar
from rollout.engines.hf import HFEngine
from trainers.models import make_small_policy, save_policy, train_tokenizer

MAX_PASSES = 300


def make_taught_policy(directory: Path, env_name: str, ways: Mapping[int, Sequence[str]], *, until: float) -> Path:
    """Imitates ways to win until they are likely enough, and saves the policy.

    Args:
        directory: Where to.
        env_name: Registered name; the template is no_think.
        ways: Actions that win, by goal.
        until: Probability of a way without a wrong step at which teaching ends.
    """
    manager = EnvManager(env_name, 1, EnvConfig(prompt="no_think"))
    shown: list[tuple[str, str]] = []
    texts: list[str] = []
    for goal, actions in ways.items():
        observations = manager.reset([goal])
        for action in actions:
            shown.append((observations.prompts[0], action))
            texts += [observations.prompts[0], *(f"<action>{each}</action>" for each in observations.admissible[0])]
            result = manager.step([f"<action>{action}</action>"])
            observations = result.observations
        assert result.won[0], f"{actions} does not win goal {goal}"
    manager.close()

    tokenizer = train_tokenizer(texts, 600)
    model = make_small_policy(tokenizer, hidden=64, layers=2, heads=2, max_positions=2048)
    engine, grammar = HFEngine(model, tokenizer, copy_model=False), ActionGrammar(tokenizer, max_tokens=64)
    rows = [(engine.encode(prompt), grammar.encode_reply(action)) for prompt, action in shown]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.requires_grad_(True)  # the engine froze it
    for _ in range(MAX_PASSES):
        nats = 0.0
        optimizer.zero_grad()
        for prompt_ids, reply_ids in rows:
            ids = torch.as_tensor(np.concatenate([prompt_ids, reply_ids]))[None].long()
            labels = ids.clone()
            labels[:, : len(prompt_ids)] = -100
            loss = model(input_ids=ids, labels=labels).loss
            (loss / len(rows)).backward()
            nats += loss.item() * len(reply_ids)
        if math.exp(-nats / len(ways)) >= until:
            break
        optimizer.step()
    made = {"environment": env_name, "prompt_template_hash": manager.prompt_hash}
    save_policy(directory, config=model.config, state_dict=model.state_dict(), tokenizer=tokenizer, made=made)
    return directory
