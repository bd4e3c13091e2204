"""Policies: made, saved, found, refused."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from rollout.constrained import ActionGrammar, NotLosslessError
from trainers.files import atomic_directory, write_atomically
from trainers.models import (
    ModelError,
    load_model,
    load_tokenizer,
    make_small_policy,
    refuse_other_prompts,
    save_policy,
    train_tokenizer,
)
from trainers.ranks import start_ranks
from trainers.rollouts import unwritable_actions

TEXTS = ["task: find a red mug 128 oz\npage: start", "click[buy now] click[< prev] search[red mug]"] * 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 400)


def test_action_tags_are_one_token_each_and_stay_in_decoded_text(tokenizer):
    ids = tokenizer("<action>click[buy now]</action>")["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert (tokens[0], tokens[-1]) == ("<action>", "</action>")
    text = tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True)
    assert text == "<action>click[buy now]</action>"


def test_any_text_comes_back_whole(tokenizer):
    text = "Search[Café  crème, 128GB]\n\n ünïcode \U0001f600"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_frequent_words_are_whole_and_numbers_fall_into_digits(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(" mug 128")["input_ids"])
    assert tokens == ["Ġmug", "Ġ", "1", "2", "8"]


def test_a_saved_policy_loads_with_equal_weights_in_half_the_bytes(tokenizer, tmp_path):
    model = make_small_policy(tokenizer, hidden=32, layers=2, heads=2)
    save_policy(
        tmp_path / "p",
        config=model.config,
        state_dict=model.state_dict(),
        tokenizer=tokenizer,
        made={"a": 1},
        dtype=torch.bfloat16,
    )
    loaded = load_model(str(tmp_path / "p"))
    assert loaded.dtype == torch.float32
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float()), name
    again = load_tokenizer(str(tmp_path / "p"))
    assert (len(again), again.eos_token, again.pad_token) == (len(tokenizer), "<eos>", "<pad>")
    for text in (*TEXTS[:2], "<action>click[B07X 12.50]</action>", "It's 3 mugs"):
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert again.decode(again(text)["input_ids"]) == text
    assert json.loads((tmp_path / "p" / "provenance.json").read_text()) == {"a": 1}


def test_the_seed_names_the_weights_and_leaves_global_random_state_alone(tokenizer):
    state = torch.random.get_rng_state()
    one, two, other = (make_small_policy(tokenizer, hidden=32, layers=1, heads=2, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one.state_dict()[name], two.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])


@pytest.mark.parametrize("path", ["/no/such/policy", "./missing", "a/b/c"])
def test_a_path_that_does_not_exist_is_one_clear_line(path):
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert path in str(caught.value)
    assert "does not exist" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_model_says_so_and_a_checkpoint_points_inside(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"did you mean .*policy"):
        load_tokenizer(str(tmp_path))


def test_a_policy_made_for_other_prompts_is_refused(tokenizer, tmp_path):
    model = make_small_policy(tokenizer, hidden=32, layers=1, heads=2)
    made = {"environment": "WebShop-v1", "prompt_template_hash": "aa"}
    save_policy(tmp_path, config=model.config, state_dict=model.state_dict(), tokenizer=tokenizer, made=made)
    refuse_other_prompts(str(tmp_path), prompt_template_hash="aa", environment="WebShop-v1")
    with pytest.raises(ModelError, match="prompt template hash aa, this run has bb"):
        refuse_other_prompts(str(tmp_path), prompt_template_hash="bb", environment="WebShop-v1")
    with pytest.raises(ModelError, match="environment WebShop-v1, this run has WebShop-v0"):
        refuse_other_prompts(str(tmp_path), prompt_template_hash="aa", environment="WebShop-v0")


def test_a_directory_is_complete_or_not_there(tmp_path):
    with pytest.raises(RuntimeError), atomic_directory(tmp_path / "a") as scratch:
        (scratch / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_directory(tmp_path / "a") as scratch:
        (scratch / "whole").write_text("x")
    with atomic_directory(tmp_path / "a") as scratch:
        (scratch / "later").write_text("x")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["whole"]
    write_atomically(tmp_path / "f", "1")
    write_atomically(tmp_path / "f", "2")
    assert (tmp_path / "f").read_text() == "2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "f"]


def test_an_action_that_the_tokenizer_normalises_is_left_out_of_its_page(tokenizer):
    """Qwen2's rules compose accents: `e` and a combining acute come back as one character."""
    grammar = ActionGrammar(tokenizer)
    composed, decomposed = "click[caf\u00e9]", "click[cafe\u0301]"
    page = ("click[buy now]", composed, decomposed)
    assert grammar.left_out == set()
    assert unwritable_actions(grammar, start_ranks()) == {}
    allowed = grammar.allowed_ids(page, grammar.encode_reply(composed))
    assert grammar.left_out == {decomposed}
    assert unwritable_actions(grammar, start_ranks()) == {"rollout/unwritable_actions": 1.0}
    without = grammar.allowed_ids(page[:2], grammar.encode_reply(composed))
    assert [ids.tolist() for ids in allowed] == [ids.tolist() for ids in without]
    with pytest.raises(NotLosslessError, match="does not give"):
        grammar.encode_reply(decomposed)
    with pytest.raises(NotLosslessError, match="does not give"):
        ActionGrammar(tokenizer, prefix="<cafe\u0301>")


def test_every_file_and_folder_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def recording(handle: int) -> None:
        fsync(handle)
        synced.append(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", recording)
    target = tmp_path / "run" / "checkpoints" / "update_000001"
    with atomic_directory(target) as scratch:
        (scratch / "policy").mkdir()
        (scratch / "policy" / "weights").write_text("x")
    inside = [target, target / "policy", target / "policy" / "weights"]
    above = [tmp_path, tmp_path / "run", tmp_path / "run" / "checkpoints"]
    assert {path.stat().st_ino for path in [*inside, *above]} <= set(synced)
    assert synced[-1] == target.parent.stat().st_ino


def test_a_small_policy_reads_padding_on_the_right_as_nothing(tokenizer):
    model = make_small_policy(tokenizer, hidden=32, layers=2, heads=2)
    ids = torch.from_numpy(np.arange(12).reshape(1, 12) + 20)
    short, padded = model(ids[:, :8]).logits, model(ids).logits[:, :8]
    assert torch.allclose(short, padded, atol=1e-5)
