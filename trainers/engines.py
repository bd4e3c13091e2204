"""The engine that writes the replies of a run or an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.engines.hf import HFEngine
from rollout.engines.led import LedEngine, RankGroups
from rollout.engines.prompts import eos_ids
from rollout.engines.vllm import VLLMConfig, VLLMEngine
from trainers.models import compute_dtype, load_model, locate
from trainers.ranks import Ranks
from trainers.settings import Settings, SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rollout.constrained import ActionGrammar
    from rollout.types import Engine


def open_engine(
    settings: Settings,
    ranks: Ranks,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    grammar: ActionGrammar | None,
) -> Engine:
    """An engine for this rank, without weights of its own worth a reply: `load_weights` comes before the first one.

    Args:
        settings: Which engine, and how much it takes.
        ranks: Each has an engine, or its part of one, on its device.
        policy: The model that will learn, still whole: says which weights there are and what ends a reply.
        tokenizer: The policy's.
        grammar: Of constrained decoding, where the settings ask for it.
    """
    rollout, model_path = settings.actor_rollout_ref.rollout, settings.actor_rollout_ref.model.path
    if rollout.name == "vllm":
        num_parts = ranks_per_engine(settings)
        config = VLLMConfig(
            max_model_len=settings.data.max_prompt_length + settings.data.max_response_length,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            kv_cache_memory_bytes=rollout.kv_cache_memory_bytes,
            enforce_eager=rollout.enforce_eager,
            enable_chunked_prefill=rollout.enable_chunked_prefill,
            free_cache_engine=rollout.free_cache_engine,
            seeded_replies=rollout.seeded_replies,
            under_launcher=ranks.world > 1,
            tensor_parallel_size=num_parts,
        )
        return _vllm_engine(config, model_path, policy, tokenizer, grammar, ranks)
    return HFEngine(
        load_model(model_path, dtype=compute_dtype(ranks.device)),
        tokenizer,
        grammar=grammar,
        copy_model=False,
        device=ranks.device,
    )


def open_fixed_engine(
    config: VLLMConfig | None,
    ranks: Ranks,
    model_path: str,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    grammar: ActionGrammar | None,
) -> Engine:
    """An engine for this rank that writes with a saved policy's own weights.

    Args:
        config: Of vLLM; None takes the transformers engine.
        ranks: As in `open_engine`.
        model_path: Where the policy is.
        policy: The policy; the transformers engine keeps it.
        tokenizer: The policy's.
        grammar: Of constrained decoding.
    """
    if config is None:
        return HFEngine(policy, tokenizer, grammar=grammar, copy_model=False, device=ranks.device)
    engine = _vllm_engine(config, model_path, policy, tokenizer, grammar, ranks)
    engine.load_weights(policy.state_dict(), 0)
    return engine


def ranks_per_engine(settings: Settings) -> int:
    """How many neighbouring ranks share an engine."""
    rollout = settings.actor_rollout_ref.rollout
    return rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1


def require_equal_parts(policy: PreTrainedModel, num_parts: int) -> None:
    """Refuses a model whose attention heads cannot be shared out.

    Raises:
        SettingsError: Their number is not divided by that of the parts, or neither of the two numbers of keys and parts
            divides the other.
    """
    heads = int(getattr(policy.config, "num_attention_heads", num_parts))
    keys = int(getattr(policy.config, "num_key_value_heads", None) or heads)
    if heads % num_parts or (keys % num_parts and num_parts % keys):
        raise SettingsError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={num_parts} cannot share out the model's {heads} "
            f"attention heads and {keys} heads of keys: take another number, or 1"
        )


def _vllm_engine(
    config: VLLMConfig,
    model_path: str,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    grammar: ActionGrammar | None,
    ranks: Ranks,
) -> VLLMEngine | LedEngine:
    require_equal_parts(policy, config.tensor_parallel_size)
    part = VLLMEngine(
        locate(model_path),
        tokenizer,
        config,
        weight_shapes={name: tensor.shape for name, tensor in policy.state_dict().items()},
        eos_ids=eos_ids(policy, tokenizer),
        device=ranks.device,
        grammar=grammar,
    )
    return part if config.tensor_parallel_size == 1 else LedEngine(part, RankGroups(config.tensor_parallel_size))
