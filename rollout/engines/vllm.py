"""Generation with vLLM inside the trainer's process, on the actor's own device: the engine of serious runs.

Requests are taken while others are being answered, so that no episode waits for another. Equal beginnings of prompts
are computed once (prefix caching). Under constrained decoding vLLM writes only what lies between the first choice and
the last: what every reply to a page begins with stands in the prompt, and vLLM stops where nothing is left to choose.
The engine adds both, with the log-prob that they have under the mask, 0.

While the actor learns the engine gives its memory back; the actor's new weights wake it, first the place for the
weights, then, when these are in it, the cache. vLLM's CPU build has no sleep: there memory stays with the engine.

Replies are the same for the same requests in the same order on the same engine, since the seed of a reply comes from
its name (`NoiseKey`). Where all replies share a generator, the name of the first request that an idle engine gets seeds
it: neither validations nor restarts change what a collection draws. Which tokens a seed draws is vLLM's business, so
other engines draw others.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollout.engines.prompts import PromptEncoder
from rollout.engines.vllm_install import prepare_vllm
from rollout.noise import seed_of
from rollout.types import Generation, GenerationRequest, NoiseKey, SamplingParams
from webshop_env.errors import ShopGymError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollout.constrained import ActionGrammar, Cursor

CPU_CACHE_BYTES = 2**30
"""Of the CPU build's cache, where the config names no size."""
GRAPH_SIZES = (
    *(1, 2, 4, *range(8, 256, 8), *range(256, 512, 16)),  # as vLLM has them
    *(*range(512, 1024, 64), *range(1024, 2048, 128), *range(2048, 4097, 256)),
)
"""Tokens of a pass for which a CUDA graph is kept; a pass takes the next larger one. Beyond 512, where vLLM ends, lie
the passes that read a new prompt or two beside replies that are written: most of a rollout's."""
STAGES = ("sleep", "wake_weights", "sync", "wake_cache")
"""What the engine does besides generating: gives memory back, takes it in two stages, copies weights."""

_NOTHING = GenerationRequest(np.zeros(1, np.int32), NoiseKey(0, 0, 0, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMConfig:
    """How much an engine takes, and how it schedules."""

    max_model_len: int
    """Tokens of a prompt and its reply together, at most."""
    max_num_seqs: int = 256
    """Replies that are written at once, at most; others wait."""
    gpu_memory_utilization: float = 0.6
    """Share of the GPU for weights and cache while the engine is awake; so much must be free at the start."""
    kv_cache_memory_bytes: int | None = None
    """Size of the cache, without looking at what else the GPU holds, so that several processes can share it. None: on a
    GPU what is left of the share."""
    enforce_eager: bool = False
    """No CUDA graphs: starts sooner, generates slower."""
    max_num_batched_tokens: int | None = None
    """Tokens of one forward pass, at most; None is vLLM's choice."""
    enable_chunked_prefill: bool = True
    """Let long prompts be read in pieces, beside replies that are being written; never on the CPU."""
    free_cache_engine: bool = True
    """Give the memory back while the actor learns."""
    seeded_replies: bool = True
    """A generator for each reply, seeded by its name: a kernel more for each reply and token. False: one for all."""
    under_launcher: bool = False
    """This process is one of several that share a torch process group (torchrun)."""
    tensor_parallel_size: int = 1
    """Of these, so many neighbours hold a part of one engine each and must use it alike (`led.py`)."""


@dataclass(slots=True)
class _Asked:
    """A reply that vLLM writes, or a part of it."""

    head: list[int]
    """Tokens without a choice that begin it: for vLLM they belong to the prompt."""
    cursor: Cursor | None
    """Behind them; None: anything may be written, and vLLM writes it all."""


class VLLMEngine:
    """Answers prompts with a model of its own inside vLLM; it has no weights worth a reply before `load_weights`."""

    def __init__(
        self,
        model_path: str,
        tokenizer: PreTrainedTokenizerBase,
        config: VLLMConfig,
        *,
        weight_shapes: Mapping[str, torch.Size],
        eos_ids: frozenset[int],
        device: torch.device,
        grammar: ActionGrammar | None = None,
    ) -> None:
        """Starts vLLM: seconds on a CPU, a minute on a GPU. It is asleep afterwards, where it can sleep.

        Args:
            model_path: Hugging Face directory or hub id whose config.json describes the model. Weights are not read.
            tokenizer: Its chat template is used where it has one.
            config: Sizes.
            weight_shapes: Names and shapes of the transformers model's weights, tied copies too: each load brings all.
            eos_ids: Tokens that end a reply; each belongs to the reply.
            device: The CPU, or this process's GPU.
            grammar: Needed for requests that name their admissible actions.

        Raises:
            ShopGymError: vLLM is missing, does not fit, or refuses the model or the config.
        """
        self.notes = prepare_vllm(device)
        """What to tell the user before a long run."""
        self.tokenizer, self.grammar, self.config, self.eos_ids = tokenizer, grammar, config, eos_ids
        self._ends = sorted(eos_ids)
        self._shapes = dict(weight_shapes)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        """What the weights are kept in: a caller that gathers them can convert them before."""
        self.weight_version = -1
        self.num_sampled_tokens = 0
        """Tokens of all replies so far."""
        self.num_passes = 0
        """Of the model so far."""
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        """Of those, the ones that were not computed because an earlier prompt began alike."""
        self._can_sleep = config.free_cache_engine and device.type == "cuda"
        if config.free_cache_engine and device.type == "cpu":
            self.notes.append("vLLM's CPU build cannot sleep: its memory is not given back while the actor learns")
        self.device = device
        self._is_asleep = False
        self._is_cpu = device.type == "cpu"
        self._prompts = PromptEncoder(tokenizer)
        self._num_requests = 0
        self._waiting: dict[int, _Asked] = {}
        """Unfinished requests by number, in the order of their coming."""
        self._ready: list[tuple[int, Generation]] = []
        """Finished, but not yet handed over."""
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._has_own_group = not torch.distributed.is_initialized()
        self._engine = self._start(model_path)
        self.sleep()

    def encode(self, prompt: str) -> np.ndarray:
        """One user message -> int32 [P] through the chat template, or the plain text where there is none."""
        return self._prompts.encode(prompt)

    def encode_all(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Several prompts, each as `encode` does it, which then finds them done; quicker than one by one."""
        return self._prompts.encode_all(prompts)

    def count_tokens(self, prompt: str) -> int:
        """Length of `encode(prompt)`; remembered, so that a prompt that was counted is not tokenised again."""
        return len(self.encode(prompt))

    def submit(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[int]:
        """Takes requests without waiting for replies.

        Returns:
            A number for each, in order, that no other request of this engine has or had.

        Raises:
            ShopGymError: A request is too long, or constrained and the engine has no fitting grammar.
            RuntimeError: The engine has no weights (it is asleep, or none were ever loaded).
        """
        if self.weight_version < 0 or self._is_asleep:
            raise RuntimeError("the engine has no weights: load_weights gives it some, and wakes it")
        self._check(requests, params)
        if requests and not self._waiting and not self.config.seeded_replies:
            default_generator(self.device).manual_seed(seed_of(requests[0].noise))
        numbers = []
        for request in requests:
            number, self._num_requests = self._num_requests, self._num_requests + 1
            numbers.append(number)
            asked = self._asked(request)
            if asked.cursor is not None and asked.cursor.is_done:
                self._ready.append((number, self._generation(asked, [], [])))
                continue
            prompt = {"prompt_token_ids": [*np.asarray(request.prompt_ids).tolist(), *asked.head]}
            self._engine.add_request(str(number), prompt, self._sampling(request, params, len(asked.head)))
            self._waiting[number] = asked
        return numbers

    def poll(self) -> list[tuple[int, Generation]]:
        """Works until at least one reply is finished, and hands over what is; nothing when nothing is asked for."""
        finished, self._ready = self._ready, []
        while self._waiting and not finished:
            self.num_passes += 1
            for output in self._engine.step():
                if output.finished:
                    number = int(output.request_id)
                    finished.append((number, self._finished(self._waiting.pop(number), output)))
        return finished

    def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Generation]:
        """Answers in the order of the requests."""
        numbers = self.submit(requests, params)
        mine = set(numbers)
        answers: dict[int, Generation] = {}
        others: list[tuple[int, Generation]] = []
        while len(answers) < len(numbers):
            for number, generation in self.poll():
                if number in mine:
                    answers[number] = generation
                else:
                    others.append((number, generation))
        self._ready += others
        return [answers[number] for number in numbers]

    def load_weights(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """Takes the actor's weights over, in place and one tensor after the other, and wakes up.

        Requests that are still being answered are ended where they are and stamped with the new version, so that a
        collector that waits for them stops with an error.

        Args:
            weights: Full tensors under the names of the transformers model, tied copies too (the CPU build unties
                them). Each is dropped before the next is asked for. After an error the engine holds a mixture.
            version: Stamped on every reply from now on.

        Raises:
            ValueError: A name or shape does not fit the model, or a weight is missing.
        """
        items = weights.items() if isinstance(weights, Mapping) else weights
        if self._is_asleep:
            with self._timed("wake_weights"):
                _empty_cache()
                self._engine.wake_up(["weights"])
        self.weight_version = version
        self._end_requests()
        with self._timed("sync"):
            self._copy(items)
            if not self._engine.reset_prefix_cache():
                raise RuntimeError("vLLM did not drop keys and values of the old weights")
        if self._is_asleep:
            with self._timed("wake_cache"):
                _empty_cache()  # what gathering the weights took
                self._engine.wake_up(["kv_cache"])
            self._is_asleep = False

    def sleep(self) -> None:
        """Gives the memory of weights and cache back, until `load_weights`; nothing happens where it cannot sleep."""
        self._end_requests()
        if self._can_sleep and not self._is_asleep:
            with self._timed("sleep"):
                self._engine.sleep(level=2)  # the weights need not be kept: new ones wake it
                gc.collect()
                _empty_cache()
            self._is_asleep = True

    def pop_seconds(self) -> dict[str, float]:
        """Seconds of each stage (`time/engine_<stage>_s`) since this was last asked."""
        spent = {f"time/engine_{stage}_s": seconds for stage, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(STAGES, 0.0)
        return spent

    def close(self) -> None:
        """Ends vLLM; a process group that was there before it stays."""
        self.sleep()
        if self.config.tensor_parallel_size > 1:
            _drop_queue()
        if self._has_own_group:
            self._engine.engine_core.shutdown()
        else:
            self._engine.model_executor.shutdown()

    def _start(self, model_path: str) -> Any:
        from vllm import EngineArgs, LLMEngine
        from vllm.usage.usage_lib import UsageContext

        arguments: dict[str, Any] = {
            "model": model_path,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # nothing about sampling but what a request says
            "dtype": "float32" if self._is_cpu else "bfloat16",
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature and under the mask
            "enable_prefix_caching": True,
            "max_model_len": self.config.max_model_len,
            "max_num_seqs": self.config.max_num_seqs,
            "max_num_batched_tokens": self.config.max_num_batched_tokens,
            # After a piece vLLM winds a seeded generator back, which those of the CPU cannot do.
            "enable_chunked_prefill": self.config.enable_chunked_prefill and not self._is_cpu,
            "gpu_memory_utilization": self.config.gpu_memory_utilization,
            "kv_cache_memory_bytes": self.config.kv_cache_memory_bytes,
            "enforce_eager": self.config.enforce_eager or self._is_cpu,
            "enable_sleep_mode": self._can_sleep,
            "disable_log_stats": True,
        }
        compilation: dict[str, Any] = {}
        if self._is_cpu:
            arguments["kv_cache_memory_bytes"] = self.config.kv_cache_memory_bytes or CPU_CACHE_BYTES
        elif not self.config.enforce_eager:
            compilation["cudagraph_capture_sizes"] = list(GRAPH_SIZES)
        if self.config.under_launcher:
            arguments["distributed_executor_backend"] = "external_launcher"
        if self.config.tensor_parallel_size > 1:
            arguments["tensor_parallel_size"] = self.config.tensor_parallel_size
            arguments["async_scheduling"] = False  # what it does next depends on how fast a rank was
            # NCCL alone adds up: the others need memory that does not sleep, or NVLink multicast.
            arguments["disable_custom_all_reduce"] = True
            compilation["pass_config"] = {"fuse_allreduce_rms": False}
        if self.grammar is not None:
            from rollout.engines.vllm_mask import mask_class

            arguments["logits_processors"] = [mask_class(self.grammar)]
            arguments["async_scheduling"] = False  # a mask needs the token before it
        if compilation:
            arguments["compilation_config"] = compilation
        shares_memory = self._is_cpu and self.config.tensor_parallel_size > 1
        try:
            if shares_memory:
                _forget_shared_memory(self.config.tensor_parallel_size)
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments), UsageContext.LLM_CLASS)  # sizes for throughput
            if shares_memory:
                _forget_shared_memory(self.config.tensor_parallel_size)
            if not self._has_own_group:
                _keep_process_group(engine)
            if self._is_cpu:  # that build finds out at the first token whether it can run a model
                one_token = self._sampling(_NOTHING, SamplingParams(max_tokens=1))
                engine.add_request("0", {"prompt_token_ids": [0]}, one_token)
                while engine.has_unfinished_requests():
                    engine.step()
            return engine
        except (ValueError, RuntimeError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise ShopGymError(
                f"rollout.name=vllm: vLLM does not start with {model_path}: {' '.join(lines)}"
            ) from error

    def _check(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> None:
        longest = max((len(request.prompt_ids) for request in requests), default=0)
        if longest + params.max_tokens > self.config.max_model_len:
            raise ShopGymError(
                f"a prompt of {longest} tokens and a reply of {params.max_tokens} do not fit into the engine's "
                f"{self.config.max_model_len}; raise data.max_prompt_length"
            )
        if any(request.admissible is not None for request in requests):
            if self.grammar is None:
                raise ShopGymError("constrained requests need an engine that was made with a grammar")
            self.grammar.require_room(params.max_tokens)

    def _asked(self, request: GenerationRequest) -> _Asked:
        if request.admissible is None or self.grammar is None:
            return _Asked([], None)
        cursor = self.grammar.start(request.admissible)
        return _Asked(cursor.take_forced(), cursor)

    def _sampling(self, request: GenerationRequest, params: SamplingParams, num_written: int = 0) -> Any:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        masked: dict[str, Any] = {}
        ends = self._ends
        if request.admissible is not None and self.grammar is not None:
            from rollout.engines.vllm_mask import ADMISSIBLE

            masked = {"extra_args": {ADMISSIBLE: request.admissible}}
            ends = [self.grammar.eos, *self.grammar.deciding_tokens(request.admissible)]
        return VLLMSamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=seed_of(request.noise) if self.config.seeded_replies else None,
            max_tokens=params.max_tokens - num_written,
            stop_token_ids=ends,
            logprobs=0,  # that of the sampled token alone
            flat_logprobs=True,  # else two objects a token, which take twice as long to make
            detokenize=False,
            skip_clone=True,  # nobody else has these
            output_kind=RequestOutputKind.FINAL_ONLY,
            **masked,
        )

    def _finished(self, asked: _Asked, output: Any) -> Generation:
        written = output.outputs[0]
        if written.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a reply with {written.finish_reason!r} ({written.stop_reason})")
        self.num_prompt_tokens += len(output.prompt_token_ids) - len(asked.head)
        self.num_cached_prompt_tokens += output.num_cached_tokens or 0
        tokens = [int(token) for token in written.token_ids]
        flat = written.logprobs  # of each token the sampled one's is the first
        if [flat.token_ids[i] for i in flat.start_indices] != tokens:
            raise RuntimeError("vLLM gives log-probs of other tokens than it wrote")
        return self._generation(asked, tokens, [flat.logprobs[i] for i in flat.start_indices])

    def _generation(self, asked: _Asked, tokens: list[int], log_probs: list[float]) -> Generation:
        """The whole reply, from what vLLM wrote of it."""
        reply, cursor = tokens, asked.cursor
        if cursor is not None:
            num_chosen = 0
            while not cursor.is_forced:
                cursor.advance(tokens[num_chosen])
                num_chosen += 1
            tail = cursor.take_forced()  # what vLLM wrote beyond is an EOS in its place
            reply = [*asked.head, *tokens[:num_chosen], *tail]
            log_probs = [*[0.0] * len(asked.head), *log_probs[:num_chosen], *[0.0] * len(tail)]
        self.num_sampled_tokens += len(reply)
        return Generation(
            reply_ids=np.asarray(reply, dtype=np.int32),
            log_probs=np.asarray(log_probs, dtype=np.float32),
            text=str(self.tokenizer.decode(reply, skip_special_tokens=True, clean_up_tokenization_spaces=False)),
            is_cut=cursor is None and reply[-1] not in self.eos_ids,
            weight_version=self.weight_version,
        )

    def _copy(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        runner = self._engine.model_executor.driver_worker.model_runner
        seen: set[str] = set()
        wrong: list[str] = []

        def fitting() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                seen.add(name)
                if self._shapes.get(name) == tensor.shape:
                    yield name, tensor
                else:  # vLLM never sees it: what it does half-way it cannot take back
                    wrong.append(f"{name} {list(tensor.shape)}")

        with torch.no_grad():
            if self._is_cpu:  # that build packs its linear weights anew, and only its own way round knows how
                runner.reload_weights(weights_iterator=fitting())
            else:
                runner.get_model().load_weights(fitting())
        missing = sorted(self._shapes.keys() - seen)
        if wrong or missing:
            raise ValueError(f"weights do not fit the engine's model: missing {missing[:3]}, unlike it {wrong[:3]}")

    def _end_requests(self) -> None:
        """Ends unfinished requests with an empty reply of the present version."""
        if self._waiting:
            self._engine.abort_request([str(number) for number in self._waiting])
            nothing = np.empty(0, np.int32), np.empty(0, np.float32)
            self._ready += [(n, Generation(*nothing, "", True, self.weight_version)) for n in self._waiting]
            self._waiting.clear()

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        _synchronize()
        began = perf_counter()
        yield
        _synchronize()
        self._seconds[stage] += perf_counter() - began


def _keep_process_group(engine: Any) -> None:
    """Newer versions destroy every group of the process when the engine is collected, the trainer's among them."""
    finalizer = getattr(engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def _forget_shared_memory(num_parts: int) -> None:
    """Takes the name of the CPU build's memory between parts away, which is in use by then, or left from another run.

    It is the same in every run, and who finds it there does not start.
    """
    rank = torch.distributed.get_rank()
    first = rank - rank % num_parts
    parts = "-".join(str(part) for part in range(first, first + num_parts))
    Path(f"/dev/shm/-tp:0-[{parts}]-cpushm_{rank - first}").unlink(missing_ok=True)


def _drop_queue() -> None:
    """vLLM's own queue between parts of an engine: nothing is sent over it, its memory would be told as leaked."""
    from vllm.distributed.parallel_state import get_tp_group

    get_tp_group().mq_broadcaster = None


def default_generator(device: torch.device) -> torch.Generator:
    """What draws on a device where no other generator is named."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
