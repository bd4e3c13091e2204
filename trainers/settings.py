"""All settings of a training run: built-in defaults <- a recipe file <- `key=value` on the command line.

The tree below is the list of keys (`--explain` prints the meaning of each); `published.py` takes the keys of the
published scripts. An unknown key is an error that names the nearest one. All mistakes of a command line are told at
once, a line for each.
"""

# ruff: noqa: RUF009  setting() and group() make dataclass fields

from __future__ import annotations

import dataclasses
import datetime
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from env_manager import EnvConfig
from rollout.filters import FilterConfig, Outcome
from trainers.published import ALIASES, NOT_NEEDED, TRUNCATION, TRUNCATION_MEANING, translate
from webshop_env.errors import ShopGymError
from webshop_env.goals import GoalKind, Variant

RECIPES = Path(__file__).parent / "recipes"

AdvantageMode = Literal["mean_norm", "mean_std_norm"]
Baseline = Literal["episode", "step"]
RowMode = Literal["pad", "copy", "delete"]
SampleBy = Literal["goal", "product"]
KlKind = Literal["low_var_kl", "kl", "abs", "mse"]
CheckpointFormat = Literal["full", "sharded"]
RateShape = Literal["constant", "cosine"]
ComputeType = Literal["auto", "bfloat16", "float32"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


class SettingsError(ShopGymError):
    """A setting that does not exist, has the wrong type, or is out of range."""


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"[{','.join(value)}]" if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Need:
    """What must hold of other settings for one to count."""

    words: str
    """Settings with which it counts."""
    holds: Callable[[Mapping[str, Any]], bool]
    """Whether it does, of dotted key -> value."""


def equal(key: str, *values: Any) -> Need:
    """The need for a setting to have one of some values."""
    words = " or ".join([f"{key}={_text(values[0])}", *map(_text, values[1:])])
    return Need(words, lambda settings: settings.get(key) in values)


def setting(
    default: Any,
    meaning: str,
    *,
    only: Sequence[Any] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    why_only: str = "",
    needs: Sequence[Need] = (),
) -> Any:
    """A dataclass field that carries its meaning and its range.

    Args:
        default: Value when neither the recipe nor the command line names it.
        meaning: What it is, with its unit.
        only: The values that are taken; empty takes any of the right type.
        at_least: Smallest value.
        at_most: Largest value.
        above: Value that it must exceed.
        why_only: Why values outside `only` are refused.
        needs: What must hold of other settings, all of it, or it does nothing; the user is told so.
    """
    limits = {"only": tuple(only), "at_least": at_least, "at_most": at_most, "above": above}
    words = {"meaning": meaning, "why_only": why_only, "needs": tuple(needs)}
    if dataclasses.is_dataclass(default):
        raise TypeError("groups are declared with group()")
    return field(default=default, metadata={**words, **limits})


def group(kind: type) -> Any:
    """A dataclass field that holds a group of settings."""
    return field(default_factory=kind)


_ACTOR = "actor_rollout_ref.actor"
VLLM = equal("actor_rollout_ref.rollout.name", "vllm")
SHOP = Need("a shop (env.env_name=WebShop-v1, say)", lambda values: values["env.env_name"].startswith("WebShop-"))
MEMORY_WITH_TOKENS = Need("env.memory=full, or a memory of your own", lambda values: values["env.memory"] != "history")
LORA = Need("actor_rollout_ref.model.lora_rank above 0", lambda values: values["actor_rollout_ref.model.lora_rank"] > 0)
NO_LORA = equal("actor_rollout_ref.model.lora_rank", 0)
WANDB = Need("trainer.logger=[console,wandb]", lambda values: "wandb" in values["trainer.logger"])
KL_IN_REWARD = equal("algorithm.use_kl_in_reward", True)
REFERENCE = Need(
    f"a reference ({_ACTOR}.use_kl_loss=true or algorithm.use_kl_in_reward=true)",
    lambda values: values[f"{_ACTOR}.use_kl_loss"] or values["algorithm.use_kl_in_reward"],
)
PENALTY = equal(f"{_ACTOR}.use_invalid_action_penalty", True)
FILTER = equal("algorithm.filter_groups.enable", True)
WORKERS = equal("env.backend", "ray")


@dataclass(frozen=True, kw_only=True)
class WebshopSettings:
    data_dir: str | None = setting(
        None, "directory of a catalogue in WebShop's format; null is the embedded one", needs=[SHOP]
    )
    goals: GoalKind = setting("synthetic", "which instructions are goals", only=get_args(GoalKind), needs=[SHOP])
    split_by: str = setting(
        "goal",
        "whether goals or products are kept apart by the splits: goal, product, or product:NUMBER for another such cut",
        needs=[SHOP],
    )
    search: str = setting(
        "bm25", "search engine: embedded, or Lucene (an extra)", only=("bm25", "pyserini"), needs=[SHOP]
    )
    num_products: int | None = setting(
        None, "load only the first so many products; null loads all", at_least=1, needs=[SHOP]
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"goal|product(:\d+)?", self.split_by):
            raise SettingsError(
                f"env.webshop.split_by must be goal, product, or product:NUMBER such as product:3, got {self.split_by}"
            )


@dataclass(frozen=True, kw_only=True)
class EnvRolloutSettings:
    n: int = setting(8, "episodes of one goal that are compared with each other (the group size)", at_least=1)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    num_cpus: float = setting(0.1, "CPU share of an environment worker", above=0, needs=[WORKERS])
    timeout_s: float = setting(
        60.0, "seconds that a step of such a worker may take before it is restarted", above=0, needs=[WORKERS]
    )


@dataclass(frozen=True, kw_only=True)
class ProjectionSettings:
    reject_chinese: bool = setting(
        EnvConfig.reject_chinese, "replies with Chinese characters are malformed (not with env.prompt=compact)"
    )
    penalise_cut: bool = setting(
        True, "malformed replies that the length limit ended cost the penalty too", needs=[PENALTY]
    )
    strict: bool = setting(False, "actions that the page does not offer cost the penalty too", needs=[PENALTY])


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    env_name: str = setting(
        "WebShop-v1",
        "registered name, or module:name to import the module that registers it; `Webshop` is WebShop-v0, variant verl",
    )
    variant: Variant = setting(None, "variant of the environment", only=(None, "verl"), needs=[SHOP])
    webshop: WebshopSettings = group(WebshopSettings)
    seed: int = setting(
        0,
        "seed of the environments (v0: of the prices and caps drawn)",
        at_least=0,
        needs=[equal("env.env_name", "WebShop-v0")],
    )
    max_steps: int = setting(EnvConfig.max_steps, "steps after which an episode is truncated", at_least=1)
    history_length: int = setting(EnvConfig.history_length, "last steps that a prompt shows", at_least=0)
    prompt: str = setting(
        "think",
        "prompt template: think, no_think, compact, compact_listed, compact_reading, compact_thinking, or a file",
    )
    history_overflow: str = setting(
        EnvConfig.history_overflow, "what a prompt over its limit loses first", only=("oldest", "all")
    )
    memory: str = setting(EnvConfig.memory, "kind of memory: history, full, or module:name for one of your own")
    memory_tokens: int | None = setting(
        None,
        "tokens that the memory `full` keeps; null is what the prompt has room for",
        at_least=0,
        needs=[MEMORY_WITH_TOKENS],
    )
    projection: ProjectionSettings = group(ProjectionSettings)
    reward: str = setting("sparse", "training reward: success_reward or 0, or the task score", only=("sparse", "score"))
    success_reward: float = setting(
        10.0, "sparse reward of a won episode", above=0, needs=[equal("env.reward", "sparse")]
    )
    rollout: EnvRolloutSettings = group(EnvRolloutSettings)
    backend: str = setting("local", "where environments run: in this process, or in actors", only=("local", "ray"))
    resources_per_worker: WorkerSettings = group(WorkerSettings)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    train_batch_size: int = setting(16, "goals of one update", at_least=1)
    gen_batch_size: int | None = setting(
        None,
        "goals that are played at once, more than are learnt from, so that enough groups differ; null is as many",
        at_least=1,
        needs=[FILTER],
    )
    val_batch_size: int = setting(128, "goals of one validation, a fixed list, where val_files names none", at_least=1)
    train_files: str | None = setting(
        None, "goal list for training (python -m data.prepare makes one); null uses the whole train split"
    )
    val_files: str | None = setting(
        None, "goal list for validation, played whole; null plays val_batch_size goals of the eval split"
    )
    sample_by: SampleBy = setting(
        "goal",
        "what is played once in training before any comes again: each goal, or each product with one of its goals",
        only=get_args(SampleBy),
        needs=[SHOP],
    )
    row_mode: RowMode = setting(
        "pad",
        "repeat or remove random rows until micro-batches and ranks divide them, as published; pad leaves the rows be",
        only=get_args(RowMode),
    )
    max_prompt_length: int = setting(4096, "tokens of a prompt, at most", at_least=16)
    max_response_length: int = setting(512, "tokens of a reply, end of text included, at most", at_least=4)


@dataclass(frozen=True, kw_only=True)
class GigpoSettings:
    step_advantage_w: float = setting(
        1.0, "weight of the step advantage", at_least=0, needs=[equal("algorithm.adv_estimator", "gigpo")]
    )
    mode: AdvantageMode = setting(
        "mean_norm",
        "also divide by the standard deviation? (with baseline=episode not where a group's returns are all equal)",
        only=get_args(AdvantageMode),
        needs=[equal("algorithm.adv_estimator", "gigpo", "grpo")],
    )
    baseline: Baseline = setting(
        "episode",
        "mean over episodes, or over rows as published",
        only=get_args(Baseline),
        needs=[equal("algorithm.adv_estimator", "gigpo", "grpo", "rloo")],
    )
    enable_similarity: bool = setting(
        False,
        "compare steps on similar pages, not only on equal ones",
        needs=[equal("algorithm.adv_estimator", "gigpo")],
    )
    similarity_thresh: float = setting(
        0.95,
        "least similarity of two pages",
        above=0,
        at_most=1,
        needs=[equal("algorithm.adv_estimator", "gigpo"), equal("algorithm.gigpo.enable_similarity", True)],
    )


@dataclass(frozen=True, kw_only=True)
class FilterSettings:
    enable: bool = setting(
        FilterConfig.enable,
        "learn from groups that hold different outcomes alone, and play on, with other goals, until they are enough",
    )
    max_num_gen_batches: int = setting(
        FilterConfig.max_num_gen_batches,
        "tries of an update, at most; other groups of the last make up what is missing",
        at_least=1,
        needs=[FILTER],
    )
    outcome: Outcome = setting(
        FilterConfig.outcome,
        "outcome that has to differ: won or not, or the score",
        only=get_args(Outcome),
        needs=[FILTER],
    )


@dataclass(frozen=True, kw_only=True)
class KlControlSettings:
    type: str = setting("fixed", "how its weight changes", only=("fixed",), why_only="the weight stays as it is")
    kl_coef: float = setting(
        0.001, "weight of the KL in the reward, reward units a nat", at_least=0, needs=[KL_IN_REWARD]
    )


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    adv_estimator: str = setting("gigpo", "advantage estimator", only=("gigpo", "grpo", "rloo", "reinforce++"))
    gamma: float = setting(0.95, "discount per environment step", above=0, at_most=1)
    gigpo: GigpoSettings = group(GigpoSettings)
    use_kl_in_reward: bool = setting(False, "take the KL to the frozen reference from the reward")
    kl_penalty: KlKind = setting("kl", "estimator of that KL", only=get_args(KlKind), needs=[KL_IN_REWARD])
    kl_ctrl: KlControlSettings = group(KlControlSettings)
    filter_groups: FilterSettings = group(FilterSettings)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    path: str = setting("embedded", "policy: embedded, smollm2-135m, a Hugging Face directory, or a hub id")
    enable_gradient_checkpointing: bool = setting(False, "trade compute for memory in the backward pass")
    lora_rank: int = setting(0, "rank of LoRA adapters, which are then all that is trained; 0 is none", at_least=0)
    lora_alpha: float = setting(16.0, "their outputs are multiplied by this over the rank", above=0, needs=[LORA])
    target_modules: tuple[str, ...] = setting(
        ("all-linear",),
        "names of the layers that get an adapter; all-linear is each but the output layer",
        needs=[LORA],
    )
    use_remove_padding: bool = setting(
        False, "rows of a pass one after the other, without padding; quick on a GPU in bfloat16 alone"
    )


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    lr: float = setting(1e-6, "learning rate of AdamW", at_least=0)
    weight_decay: float = setting(0.01, "decoupled weight decay of AdamW", at_least=0)
    lr_warmup_steps: int = setting(0, "updates over which the learning rate rises to lr", at_least=0)
    lr_scheduler_type: RateShape = setting(
        "constant", "how it goes on, over trainer.total_updates", only=get_args(RateShape)
    )
    min_lr_ratio: float = setting(
        0.0,
        "share of lr that a cosine has come to after the last update",
        at_least=0,
        at_most=1,
        needs=[equal(f"{_ACTOR}.optim.lr_scheduler_type", "cosine")],
    )


@dataclass(frozen=True, kw_only=True)
class ActorFsdpSettings:
    dtype: ComputeType = setting(
        "auto",
        "what layers compute in, of actor and reference; auto is bfloat16 on a GPU. Weights stay float32",
        only=get_args(ComputeType),
    )
    param_offload: bool = setting(False, "keep weights and optimizer state on the CPU, and optimise there")
    optimizer_offload: bool = setting(
        False,
        "keep optimizer state on the CPU, but for the moment of a step",
        needs=[equal(f"{_ACTOR}.fsdp_config.param_offload", False)],
    )


@dataclass(frozen=True, kw_only=True)
class RefFsdpSettings:
    param_offload: bool = setting(False, "keep the reference's weights on the CPU", needs=[REFERENCE, NO_LORA])


@dataclass(frozen=True, kw_only=True)
class ActorSettings:
    strategy: str = setting(
        "fsdp2",
        "how weights are sharded; fsdp is taken as fsdp2",
        only=("fsdp2",),
        why_only="models are those of transformers, which Megatron cannot run",
    )
    optim: OptimSettings = group(OptimSettings)
    grad_clip: float = setting(1.0, "largest gradient norm", above=0)
    ppo_mini_batch_size: int = setting(64, "rows over all ranks of one optimizer step", at_least=1)
    ppo_micro_batch_size_per_gpu: int = setting(8, "rows of one forward and backward pass, at most", at_least=1)
    ppo_max_token_len_per_gpu: int = setting(16384, "tokens of one forward and backward pass, at most", at_least=16)
    ppo_epochs: int = setting(1, "passes over the rows of an update", at_least=1)
    clip_ratio_low: float = setting(0.2, "a ratio under 1 minus this earns nothing more", at_least=0, at_most=0.999)
    clip_ratio_high: float = setting(0.2, "a ratio over 1 plus this earns nothing more", at_least=0)
    clip_ratio_c: float = setting(3.0, "dual clip for negative advantages", above=1)
    loss_agg_mode: Aggregation = setting(
        "token-mean", "how tokens are averaged over a mini-batch", only=get_args(Aggregation)
    )
    use_kl_loss: bool = setting(True, "add the KL to the frozen reference to the loss")
    kl_loss_coef: float = setting(0.01, "weight of that KL", at_least=0, needs=[equal(f"{_ACTOR}.use_kl_loss", True)])
    kl_loss_type: KlKind = setting(
        "low_var_kl", "its estimator", only=get_args(KlKind), needs=[equal(f"{_ACTOR}.use_kl_loss", True)]
    )
    entropy_coeff: float = setting(0.001, "weight of the entropy bonus", at_least=0)
    tis_imp_ratio_cap: float | None = setting(
        None, "cap of importance weights for the gap between engine and trainer, such as 2; null is off", above=0
    )
    use_invalid_action_penalty: bool = setting(True, "whether malformed replies cost reward")
    invalid_action_penalty_coef: float = setting(
        0.1, "what a malformed reply costs, reward units", at_least=0, needs=[PENALTY]
    )
    use_torch_compile: bool = setting(
        False, "compile the layers of actor and reference: a minute at the start, faster passes"
    )
    fsdp_config: ActorFsdpSettings = group(ActorFsdpSettings)


@dataclass(frozen=True, kw_only=True)
class ValSettings:
    temperature: float = setting(
        0.4,
        "sampling temperature of validations; 0 is greedy",
        at_least=0,
        needs=[equal("actor_rollout_ref.rollout.val_kwargs.do_sample", True)],
    )
    do_sample: bool = setting(True, "false takes the most probable token")


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    name: str = setting("hf", "generation engine: transformers, or vLLM beside the actor", only=("hf", "vllm"))
    temperature: float = setting(1.0, "sampling temperature of training rollouts", above=0)
    top_p: float = setting(1.0, "nucleus", only=(1.0,), why_only="log-probs are those of the whole distribution")
    top_k: int = setting(-1, "off is -1 or 0", only=(-1, 0), why_only="log-probs are those of the whole distribution")
    n: int = setting(1, "completions of a prompt", only=(1,), why_only="groups are made of environments: env.rollout.n")
    constrained: bool = setting(False, "decode only admissible actions inside the action tag")
    val_kwargs: ValSettings = group(ValSettings)
    gpu_memory_utilization: float = setting(
        0.6, "share of the GPU for vllm while it is awake", above=0, at_most=1, needs=[VLLM]
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "size of vllm's cache; null takes what is left of its share of the GPU, which other processes must not touch "
        "while it starts",
        at_least=1,
        needs=[VLLM],
    )
    tensor_model_parallel_size: int = setting(
        1, "ranks, and so GPUs, that share one vllm engine; must divide those of a machine", at_least=1, needs=[VLLM]
    )
    enforce_eager: bool = setting(False, "no CUDA graphs in vllm: starts sooner, generates slower", needs=[VLLM])
    free_cache_engine: bool = setting(True, "vllm gives its memory back while the actor learns", needs=[VLLM])
    max_num_seqs: int = setting(256, "replies that vllm writes at once, at most", at_least=1, needs=[VLLM])
    max_num_batched_tokens: int | None = setting(
        None, "tokens of one pass of vllm, at most; null is its own choice", at_least=1, needs=[VLLM]
    )
    enable_chunked_prefill: bool = setting(True, "vllm may read long prompts in pieces", needs=[VLLM])
    seeded_replies: bool = setting(
        True,
        "in vllm each reply has a generator of its own; false is faster: one for all, which repeats only the same "
        "requests in the same order",
        needs=[VLLM],
    )
    log_prob_micro_batch_size_per_gpu: int = setting(16, "rows of one pass for old log-probs, at most", at_least=1)


@dataclass(frozen=True, kw_only=True)
class RefSettings:
    log_prob_micro_batch_size_per_gpu: int = setting(16, "rows of one pass of the reference, at most", at_least=1)
    fsdp_config: RefFsdpSettings = group(RefFsdpSettings)


@dataclass(frozen=True, kw_only=True)
class ActorRolloutRefSettings:
    model: ModelSettings = group(ModelSettings)
    actor: ActorSettings = group(ActorSettings)
    rollout: RolloutSettings = group(RolloutSettings)
    ref: RefSettings = group(RefSettings)


LEARNS_FROM_NO_REWARD: dict[str, str] = dict.fromkeys(
    (
        *("env.reward", "env.success_reward", "env.rollout.n"),
        *("env.projection.penalise_cut", "env.projection.strict"),
        *("data.train_batch_size", "data.gen_batch_size", "data.val_batch_size", "data.row_mode"),
        "data.sample_by",
    ),
    "it is for training by reward",
)
"""`NO_USE` of commands that share the environment's settings with training: key -> why it does nothing there."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    total_updates: int = setting(150, "updates of the whole run", at_least=0)
    test_freq: int = setting(
        5, "updates between validations, the last update included; 0 or less is none but that of val_before_train"
    )
    max_nan_steps: int = setting(
        5, "optimizer steps in a row with a loss or gradient that is not finite, after which the run stops", at_least=1
    )
    save_freq: int = setting(10, "updates between checkpoints; 0 or less saves at the end only")
    checkpoint_format: CheckpointFormat = setting(
        "full",
        "whole tensors that the first rank writes, a Hugging Face directory among them; or each rank's part of them",
        only=get_args(CheckpointFormat),
    )
    max_actor_ckpt_to_keep: int | None = setting(2, "latest checkpoints that stay on the disk; null is all", at_least=1)
    val_before_train: bool = setting(True, "validate before the first update, whatever test_freq is")
    logger: tuple[str, ...] = setting(
        ("console", "tensorboard"), "where metrics go, besides metrics.jsonl: console, tensorboard, wandb"
    )
    project_name: str = setting("shopgym", "name of a family of runs, for wandb", needs=[WANDB])
    experiment_name: str = setting("", "name of the run; empty takes the recipe's")
    output_dir: str | None = setting(None, "run directory; null is outputs/<experiment_name>")
    resume_from: str | None = setting(None, "run directory or checkpoint to go on from")
    launcher: str = setting("none", "what starts ranks: python or torchrun, or Ray Train", only=("none", "ray"))
    n_gpus_per_node: int | None = setting(None, "ranks of a machine; null is what is there", at_least=1)
    nnodes: int = setting(1, "machines", at_least=1)
    seed: int = setting(0, "seed of goal order and sampling noise", at_least=0)

    def __post_init__(self) -> None:
        for name in self.logger:
            if name not in ("console", "tensorboard", "wandb"):
                raise SettingsError(
                    f"trainer.logger: there is no {name!r}; take some of console, tensorboard, wandb: "
                    "trainer.logger=[console,tensorboard]"
                )


@dataclass(frozen=True, kw_only=True)
class Settings:
    recipe: str = setting("tiny", "name in trainers/recipes, or a YAML file")
    env: EnvSettings = group(EnvSettings)
    data: DataSettings = group(DataSettings)
    algorithm: AlgorithmSettings = group(AlgorithmSettings)
    actor_rollout_ref: ActorRolloutRefSettings = group(ActorRolloutRefSettings)
    trainer: TrainerSettings = group(TrainerSettings)

    def __post_init__(self) -> None:
        if self.actor_rollout_ref.model.lora_rank and self.trainer.checkpoint_format != "full":
            raise SettingsError(
                "trainer.checkpoint_format=sharded is for whole policies; adapters are small: with "
                "actor_rollout_ref.model.lora_rank above 0 leave it out or set trainer.checkpoint_format=full"
            )
        if self.algorithm.filter_groups.enable and self.env.rollout.n == 1:
            raise SettingsError(
                "algorithm.filter_groups.enable=true waits for episodes of a group to differ, and with env.rollout.n=1 "
                "there is one in each; set env.rollout.n=2 or more"
            )
        if self.goals_of_a_try < self.data.train_batch_size:
            raise SettingsError(
                f"data.gen_batch_size={self.data.gen_batch_size} is less than data.train_batch_size="
                f"{self.data.train_batch_size}, which are chosen from it; raise it"
            )

    @property
    def goals_of_a_try(self) -> int:
        """Goals that are played at once: those of an update, or more of which some are learnt from."""
        is_filtered = self.algorithm.filter_groups.enable
        return (is_filtered and self.data.gen_batch_size) or self.data.train_batch_size


def leaves(settings: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every setting of the tree as (dotted key, field, value), in the order of the classes above."""
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f, value


def flatten(settings: Any) -> dict[str, Any]:
    """The resolved configuration as dotted key -> value (tuples as lists, ready for YAML and JSON)."""
    return {key: list(value) if isinstance(value, tuple) else value for key, _, value in leaves(settings)}


def build(values: Mapping[str, Any], kind: type[Any] = Settings) -> Any:
    """Settings from dotted keys that exist; what is not named keeps its default.

    Raises:
        SettingsError: Keys that do not exist, values of the wrong type or out of range: a line for each.
    """
    known = {key for key, _, _ in leaves(kind())}
    refusals = [unknown_key(key, kind) for key in values if key not in known]
    settings = _build(kind, values, "", refusals)
    if refusals:
        raise SettingsError("\n".join(refusals))
    return settings


def resolve(arguments: Sequence[str], kind: type[Any] = Settings) -> tuple[Any, list[str], dict[str, str]]:
    """Settings of a command line.

    Args:
        arguments: `key=value` words; `recipe=NAME|FILE` chooses the file of defaults. With `trainer.resume_from`
            the saved configuration of that run takes the place of the recipe.
        kind: The tree to fill; another command's own tree takes what it has in common with the recipe.

    Returns:
        The settings, notes for the user (keys that do nothing or mean something else, and why), and the source of each
        key that is not a built-in default.

    Raises:
        SettingsError: A line for each mistake.
    """
    notes: list[str] = []
    given, refusals = parse_arguments(arguments, kind)
    overrides, origins = translate(given, notes)
    base, origin = _base(overrides, notes)
    known = {key for key, _, _ in leaves(kind())}
    try:
        if kind is not Settings:  # what this command has no use for must be right all the same
            build({key: value for key, value in base.items() if key not in known})
            base = {key: value for key, value in base.items() if key in known}
        build(base, kind)
    except SettingsError as error:
        where = overrides.get("trainer.resume_from", "")
        lines = str(error).splitlines()
        raise SettingsError("\n".join(f"{origin}{where and f' ({where})'}: {line}" for line in lines)) from None
    try:
        settings = build({**base, **overrides}, kind)
    except SettingsError as error:
        raise SettingsError("\n".join([*refusals, str(error)])) from None
    if refusals:
        raise SettingsError("\n".join(refusals))
    sources = dict.fromkeys(base, origin)
    for key in overrides:
        sources[key] = f"command line, as {origins[key]}" if key in origins else "command line"
    return settings, notes + _without_effect(settings, overrides), sources


def parse_arguments(arguments: Sequence[str], kind: type[Any] = Settings) -> tuple[dict[str, Any], list[str]]:
    """`key=value` words as dotted key -> value, and a line for each word that is none.

    Args:
        arguments: The words.
        kind: The tree whose settings they are: those that are texts take the word as it was typed.
    """
    given: dict[str, Any] = {}
    refusals: list[str] = []
    texts = {key for key, f, _ in leaves(kind()) if f.type in ("str", "str | None")}
    for word in arguments:
        key, equals, text = word.partition("=")
        if equals:
            key = key.lstrip("+")
            given[key] = _parse_text(text) if key in texts else _parse_value(text)
        else:
            refusals.append(f"{word!r} is not key=value; --help lists the keys")
    return given, refusals


def _base(overrides: Mapping[str, Any], notes: list[str]) -> tuple[dict[str, Any], str]:
    """What the command line's words go over, and where that comes from: a recipe, or the run that is resumed."""
    if not overrides.get("trainer.resume_from"):
        recipe = str(overrides.get("recipe", "tiny"))
        return load_recipe(recipe, notes), f"recipe {recipe}"
    if overrides.get("trainer.output_dir"):
        raise SettingsError("trainer.output_dir: a run that is resumed goes on in its own directory; leave it out")
    if "recipe" in overrides:
        raise SettingsError("recipe: a run that is resumed goes on with its own settings; leave it out")
    directory = Path(os.path.expanduser(str(overrides["trainer.resume_from"])))
    return _saved_settings(directory), "the run that is resumed"


def load_recipe(name: str, notes: list[str] | None = None) -> dict[str, Any]:
    """A recipe as dotted key -> value, over the recipe that it names as its own `recipe`, if it names one.

    Args:
        name: Of a file in `trainers/recipes` without its ending, or the path of a YAML file; in a file that path is
            relative to the file.
        notes: Gets a line for each published key in it that means something else here, or nothing.
    """
    every_key = {key for key, _, _ in leaves(Settings())}
    seen: list[Path] = []
    values: dict[str, Any] = {}
    base: str | None = name
    while base is not None:
        path = _recipe_file(base, seen[-1].parent if seen else Path())
        if path.resolve() in seen:
            raise SettingsError(f"{path}: is a recipe over itself; take its line `recipe: {base}` out")
        seen.append(path.resolve())
        values = _read_settings(path, notes) | values
        under = values.pop("recipe", None)
        is_whole = every_key <= {*values, "recipe"}  # a run's settings.yaml: what it was made from says nothing more
        base = None if under is None or is_whole else str(under)
    return values


def _recipe_file(name: str, beside: Path) -> Path:
    """The file of a recipe, packaged or somebody's own."""
    for path in (RECIPES / f"{name}.yaml", beside / Path(name).expanduser()):
        if path.is_file():
            return path
    known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
    raise SettingsError(f"recipe {name!r} is neither a file nor one of the packaged recipes: {known}")


class _Loader(yaml.SafeLoader):
    """YAML in which no key may stand twice: the first value would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise SettingsError(f"{key.value!r} stands there twice, in line {key.start_mark.line + 1} again")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_settings(path: Path, notes: list[str] | None = None) -> dict[str, Any]:
    """What a file says, as dotted key -> value."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from None
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SettingsError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if tree is None:  # comments alone
        return {}
    if not isinstance(tree, dict):
        raise SettingsError(f"{path}: expected settings as `key: value`, got {type(tree).__name__}")
    return translate(dict(_dotted(tree, "")), [] if notes is None else notes)[0]


def unknown_key(key: str, kind: type[Any] = Settings) -> str:
    """The message for a key that does not exist: names the nearest one, or what a group holds."""
    members = [known_key for known_key, _, _ in leaves(kind()) if known_key.startswith(f"{key}.")]
    if members:
        return f"{key!r} is a group of settings, not one: {', '.join(members[:3])}{', ...' if members[3:] else ''}"
    known = [known_key for known_key, _, _ in leaves(kind())] + (list(ALIASES) if kind is Settings else [])
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    last = key.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == last][:1] or near
    return f"unknown setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else "; --help lists all")


def explain(settings: Any, sources: Mapping[str, str]) -> str:
    """One line per setting: its value, where it came from, what it means."""
    lines = []
    no_use: Mapping[str, str] = getattr(settings, "NO_USE", {})
    for key, f, value in leaves(settings):
        choices = f.metadata["only"]
        extra = f" [{' | '.join('null' if c is None else str(c) for c in choices)}]" if len(choices) > 1 else ""
        extra += "".join(f"; counts with {need.words}" for need in f.metadata["needs"])
        extra += f"; does nothing in this command: {no_use[key]}" if key in no_use else ""
        lines.append(f"{key}={_text(value)}\n    {f.metadata['meaning']}{extra} (from {sources.get(key, 'default')})")
    if isinstance(settings, Settings):
        lines += [f"{alias}\n    another name of {' and '.join(keys)}" for alias, keys in ALIASES.items()]
        lines += [f"{TRUNCATION}\n    {TRUNCATION_MEANING}"]
        lines += [f"{key}\n    taken, does nothing: {reason}" for key, reason in NOT_NEEDED.items()]
    return "\n".join(lines)


def _without_effect(settings: Any, given: Container[str]) -> list[str]:
    """Notes about values that somebody chose and that change nothing.

    Args:
        settings: Of training, or of a command that shares some of them and tells in `NO_USE` which do nothing there.
        given: Keys of the command line; of another command than training only they were chosen for it.
    """
    no_use: Mapping[str, str] = getattr(settings, "NO_USE", {})
    values = flatten(Settings()) | flatten(settings)
    notes = []
    for key, f, value in leaves(settings):
        missing = [need.words for need in f.metadata["needs"] if not need.holds(values)]
        if value == f.default or not (isinstance(settings, Settings) or key in given):
            continue
        if key in no_use:
            notes.append(f"{key}={_text(value)} does nothing here: {no_use[key]}")
        elif missing:
            notes.append(f"{key}={_text(value)} does nothing here: it counts with {' and '.join(missing)}")
    return notes


def _dotted(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _saved_settings(path: Path) -> dict[str, Any]:
    for directory in (path, *list(path.resolve().parents)[:2]):
        if (directory / "settings.yaml").is_file():
            return _read_settings(directory / "settings.yaml")
    raise SettingsError(f"trainer.resume_from: {path} holds no run (no settings.yaml there or above)")


def _parse_text(text: str) -> Any:
    """A name or path as it was typed: YAML would make a number of 0012 and end "run #3" at its blank."""
    is_written_as_value = text == "null" or text[:1] in ("'", '"', "[", "{")
    return _parse_value(text) if is_written_as_value else text


def _parse_value(text: str) -> Any:
    if re.fullmatch(r"[+-]?0\d+", text):  # to YAML 1.1 an octal number
        return int(text)
    try:
        value = yaml.safe_load(text) if text else ""
        return text if isinstance(value, datetime.date) else value  # a name such as 2025-01-31 is a text
    except yaml.YAMLError:
        return text


def _build(kind: type, values: Mapping[str, Any], prefix: str, refusals: list[str]) -> Any:
    """A group from what is right of its values; what is wrong is told in `refusals`."""
    hints = typing.get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for f in dataclasses.fields(kind):
        key, hint = f"{prefix}{f.name}", hints[f.name]
        try:
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                arguments[f.name] = _build(hint, values, f"{key}.", refusals)
            elif key in values:
                arguments[f.name] = _checked(key, values[key], hint, f.metadata)
        except SettingsError as error:
            refusals.append(str(error))
    try:
        return kind(**arguments)
    except SettingsError as error:
        refusals.append(str(error))
        return kind()


def _checked(key: str, value: Any, hint: Any, rule: Mapping[str, Any]) -> Any:
    value = _coerced(key, value, hint)
    if rule["only"] and value not in rule["only"]:
        choices = ", ".join(_text(choice) for choice in rule["only"])
        reason = f": {rule['why_only']}" if rule["why_only"] else ""
        advice = f"; leave it out or set {key}={_text(rule['only'][0])}" if reason else ""
        several = "one of " if len(rule["only"]) > 1 else ""
        raise SettingsError(f"{key} must be {several}{choices}, got {_text(value)}{reason}{advice}")
    if value is not None:
        for name, words, is_wrong in (
            ("at_least", "at least", lambda v, limit: v < limit),
            ("at_most", "at most", lambda v, limit: v > limit),
            ("above", "above", lambda v, limit: v <= limit),
        ):
            if rule[name] is not None and is_wrong(value, rule[name]):
                raise SettingsError(f"{key} must be {words} {rule[name]:g}, got {value}")
    return value


_TYPE_NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}


def _coerced(key: str, value: Any, hint: Any) -> Any:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)  # Literal | None is the second
    options = get_args(hint) if is_union else (hint,)
    if value is None and type(None) in options:
        return None
    wanted = next(option for option in options if option is not type(None))
    if typing.get_origin(wanted) is Literal:
        wanted = type(get_args(wanted)[0])
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if wanted is float and not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # YAML reads 1e-6 as text
            if math.isfinite(number):
                return number
    if wanted is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if typing.get_origin(wanted) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        if all(isinstance(item, str) for item in items):
            return tuple(items)
    name = _TYPE_NAMES.get(wanted, "a list of words")
    raise SettingsError(f"{key} must be {name}{' or null' if len(options) > 1 else ''}, got {value!r}")
