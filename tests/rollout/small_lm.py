"""A tokenizer and a random model that are made in a moment, for the tests of this folder."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEXTS = [
    "task: find me red shoes, and price lower than 40.00 dollars",
    "page: results 1 | b012345678 red mug with a handle $12.0 | next > | back to search",
    "did: search[red mug] > click[b012345678] > click[buy now]",
    "<think>the mug is red</think><action>click[buy now]</action>",
    "<action>search[red mug]</action>",
    "<action>click[b012345678]</action>",
    "<action>click[size: x-large]</action>",
] * 4


def small_tokenizer(*, with_tags: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE. With tags, `<action>` and `</action>` are tokens of their own; without, they fall apart and
    neighbouring punctuation such as "]</" may merge into one token, as in most published tokenizers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    if with_tags:
        fast.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<action>", "</action>")])
    return fast


def small_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen2ForCausalLM:
    """A random Qwen2 with grouped heads and tied embeddings, sharp enough that wrong masks would show."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.15,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()
