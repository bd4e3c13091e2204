"""Many environments at once, spoken to in prompts and replies."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np

from env_manager.memory import Memory, MemoryEntry, MemoryLimits, fetched, make_memory
from env_manager.projection import CHINESE_TEXT, PROJECTIONS, REPLY_CUT, ParsedReply, thought_of
from env_manager.prompts import Prompt, Template, build_prompt, load_template, whole_prompt
from env_manager.registry import EnvSpec, View, get_env_spec
from env_manager.types import PageView, TokenCounter, one_line, require_page_view
from env_manager.vector import finite_number, info_of, make_vector_env
from webshop_env.errors import ShopGymError

# Dimensions: B slots (environments) of the manager, S slots of one step.


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """How environments are presented to the policy."""

    prompt: str | None = None
    """Template: a packaged name or a file; None takes the environment's own."""
    memory: str = "history"
    """Kind of memory: "history", "full", or one of your own as "module:name" (`memory.register_memory`)."""
    history_length: int = 2
    """Past steps that a prompt may show, at least 0."""
    memory_tokens: int | None = None
    """Tokens that a memory of the kind "full" keeps; None: as many as the prompt has room for."""
    history_overflow: str = "oldest"
    """What goes when a prompt is too long: "oldest" steps one by one, or "all" past 13,000 characters."""
    max_prompt_tokens: int | None = None
    """Budget of a whole prompt in tokens; None: prompts are never cut."""
    count_tokens: TokenCounter | None = None
    """Tokens of a prompt as the policy will see it; needed with `max_prompt_tokens` and `memory_tokens`."""
    encode_ahead: Callable[[Sequence[str]], object] | None = None
    """Gets the prompts of a step before they are counted one by one: where counting remembers what was encoded, the
    tokenizer then has them all at once. It changes nothing but time."""
    reject_chinese: bool = True
    """Replies with Chinese characters are malformed, as published (templates think and no_think)."""
    max_steps: int = 15
    """Steps after which an episode is truncated, at least 1."""
    success_reward: float | None = None
    """Reward of the step that wins, every other step giving 0; None (in training `env.reward=score`) passes on what the
    environment gives for each step: a shop the task score, for the purchase alone."""

    def __post_init__(self) -> None:
        if self.history_length < 0:
            raise ShopGymError(f"env.history_length must be at least 0, got {self.history_length}")
        if self.history_overflow not in ("oldest", "all"):
            raise ShopGymError(f"env.history_overflow must be 'oldest' or 'all', got {self.history_overflow!r}")
        if self.max_steps < 1:
            raise ShopGymError(f"env.max_steps must be at least 1, got {self.max_steps}")
        if self.memory_tokens is not None and self.memory_tokens < 0:
            raise ShopGymError(f"env.memory_tokens must be at least 0, got {self.memory_tokens}")
        for name in ("max_prompt_tokens", "memory_tokens"):
            if getattr(self, name) is not None and self.count_tokens is None:
                raise ShopGymError(f"{name} needs count_tokens, a function from a prompt to its tokens")
        self.make_memory()  # an unknown one is a mistake now, not at the first reset

    def make_memory(self) -> Memory:
        """An empty memory for one environment."""
        limits = MemoryLimits(length=self.history_length, max_tokens=self.memory_tokens, count_tokens=self.count_tokens)
        return make_memory(self.memory, limits)


@dataclass(slots=True, kw_only=True)
class Observations:
    """Where every slot stands. Lists have B entries; those of slots that are not live are empty."""

    prompts: list[str]
    """What the policy is asked."""
    anchors: list[str]
    """The page without history."""
    admissible: list[tuple[str, ...]]
    """The actions that the page offers and takes."""
    is_live: np.ndarray
    """bool [B]: the episode goes on."""
    prompt_is_cut: np.ndarray
    """bool [B]: something was left out of the prompt to make it fit."""


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What became of the replies; entry s belongs to slot `slots[s]`."""

    slots: np.ndarray
    """int32 [S]."""
    actions: list[str]
    """What the environment was given."""
    problems: list[str | None]
    """What was wrong with the reply's form; None when well formed."""
    reasons: list[str]
    """Why the page did not take the action, or the environment was lost; "" when it did."""
    format_valid: np.ndarray
    """bool [S]."""
    action_possible: np.ndarray
    """bool [S]."""
    reward: np.ndarray
    """float32 [S]."""
    terminated: np.ndarray
    """bool [S]: the episode ended by itself (a purchase)."""
    truncated: np.ndarray
    """bool [S]: it ran out of steps."""
    failed: np.ndarray
    """bool [S]: truncated because its environment was lost; the whole episode says nothing and is to be left out."""
    won: np.ndarray
    """bool [S]."""
    task_score: np.ndarray
    """float32 [S] in [0, 1]; 0 until the episode terminates."""
    observations: Observations
    """All B slots afterwards."""


@dataclass(slots=True)
class _Slot:
    observation: str
    info: dict[str, Any]
    view: PageView
    memory: Memory
    num_steps: int = 0
    is_live: bool = True
    prompt: Prompt = field(default_factory=lambda: Prompt("", False))


def hash_of_prompts(template: Template, spec: EnvSpec) -> str:
    """`EnvManager.prompt_hash`, known before there are environments."""
    return hashlib.sha256(f"{template.digest} {spec.view_version}".encode()).hexdigest()


def _view(spec: EnvSpec, template: Template) -> View:
    view: Callable[..., PageView] = (spec.compact_view if template.is_compact else None) or spec.full_view
    if template.text_words is None:
        return view
    if "text_words" not in inspect.signature(view).parameters:
        raise ShopGymError(
            f"template {template.name}: text_words needs pages with texts to shorten; those of {spec.env_id} have none"
        )
    return partial(view, text_words=template.text_words)


class EnvManager:
    """Holds B environments and turns pages into prompts, replies into actions.

    An episode that is over is neither stepped nor prompted again until the next reset.
    """

    def __init__(
        self,
        spec: EnvSpec | str,
        num_envs: int,
        config: EnvConfig | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        make_envs: Callable[..., gymnasium.vector.VectorEnv] = make_vector_env,
    ) -> None:
        """Makes the environments.

        Args:
            spec: What to drive, or the name that it is registered under.
            num_envs: B.
            config: How it is presented.
            env_kwargs: Constructor settings of the environment, over those of the spec.
            make_envs: The backend: `make_vector_env` in this process, `ray_backend.RayVectorEnv` in actors.
        """
        self.spec = get_env_spec(spec) if isinstance(spec, str) else spec
        self.config = config or EnvConfig()
        self.num_envs = num_envs
        self.template: Template = load_template(self.config.prompt or self.spec.template)
        projection = self.spec.projection or self.template.projection
        if projection not in PROJECTIONS:
            raise ShopGymError(
                f"EnvSpec.projection of {self.spec.env_id}: no projection is called {projection!r}; "
                f"there are {', '.join(sorted(PROJECTIONS))}"
            )
        self._projection = PROJECTIONS[projection]
        self._view: View = _view(self.spec, self.template)
        kwargs = {**self.spec.env_kwargs, **(env_kwargs or {})}
        if self.spec.max_steps_kwarg:
            kwargs.setdefault(self.spec.max_steps_kwarg, self.config.max_steps)
        self.vector_env = make_envs(self.spec.env_id, num_envs, wrappers=self.spec.wrappers, env_kwargs=kwargs)
        self._slots: list[_Slot] = []
        self.num_prompts = 0
        """Prompts made since construction."""
        self.num_cut_prompts = 0
        """How many of them were cut to fit."""
        self.prompt_seconds = 0.0
        """Time spent on them, in seconds."""

    @property
    def prompt_hash(self) -> str:
        """Names how prompts are made, template and views together; what a policy was trained on must be the same."""
        return hash_of_prompts(self.template, self.spec)

    def reset(self, goal_indexes: Sequence[int] | np.ndarray, *, group_size: int = 1) -> Observations:
        """Begins `group_size` episodes per given goal.

        Args:
            goal_indexes: 1 to B / group_size goals; the g-th goes to the slots from g * group_size to
                (g + 1) * group_size - 1. Slots beyond them rest until the next reset.
            group_size: Environments that get the same goal (`env.rollout.n`), at least 1.
        """
        if group_size < 1:
            raise ShopGymError(f"env.rollout.n must be at least 1, got {group_size}")
        goals = [int(goal) for goal in goal_indexes for _ in range(group_size)]
        if not 1 <= len(goals) <= self.num_envs:
            raise ShopGymError(
                f"reset takes 1 to {self.num_envs // group_size} goals for groups of {group_size}, "
                f"got {len(goal_indexes)}"
            )
        padded = goals + [goals[-1]] * (self.num_envs - len(goals))
        if self.spec.goal_option is None and min(goals) < 0:
            raise ShopGymError(f"goals of {self.spec.env_id} are seeds, at least 0, got {min(goals)}")
        self._slots = []  # until all have begun there is nothing to step
        if self.spec.goal_option is None:
            texts, infos = self.vector_env.reset(seed=padded)  # type: ignore[arg-type]  # a seed per slot is taken too
        else:
            texts, infos = self.vector_env.reset(options={self.spec.goal_option: np.asarray(padded, dtype=np.int32)})
        memories = [self.config.make_memory() for _ in padded]
        self._slots = [
            self._slot(texts[s], info_of(infos, s), memories[s], is_live=s < len(goals)) for s in range(self.num_envs)
        ]
        for slot in self._slots:
            slot.memory.reset()
        self._prepare_prompts(self._slots)
        return self._observations()

    def step(
        self,
        replies: Sequence[str],
        slots: Sequence[int] | None = None,
        *,
        is_cut: Sequence[bool] | None = None,
    ) -> StepResult:
        """Takes one step in some of the live slots.

        Args:
            replies: One raw reply per slot, without special tokens.
            slots: Which slots they belong to; None: all live ones, in order.
            is_cut: Which replies were ended by the length limit; that becomes the reason of a malformed one.

        Raises:
            ShopGymError: a slot's episode is over, a slot is named twice, or the counts differ.
        """
        chosen = self.live_slots() if slots is None else [int(slot) for slot in slots]
        self._check(chosen, replies)
        parsed = [self._parsed(reply) for reply in replies]
        cut = is_cut if is_cut is not None else [False] * len(chosen)
        problems = [REPLY_CUT if p.problem and c else p.problem for p, c in zip(parsed, cut, strict=True)]
        actions = [p.action or "" for p in parsed]
        to_take: list[str | None] = [None] * self.num_envs
        for index, action in zip(chosen, actions, strict=True):
            to_take[index] = action
        texts, rewards, terminations, truncations, infos = self.vector_env.step(to_take)

        num = len(chosen)
        result = StepResult(
            slots=np.asarray(chosen, dtype=np.int32),
            actions=actions,
            problems=problems,
            reasons=[],
            format_valid=np.asarray([p is None for p in problems], dtype=bool),
            action_possible=np.zeros(num, dtype=bool),
            reward=np.zeros(num, dtype=np.float32),
            terminated=np.zeros(num, dtype=bool),
            truncated=np.zeros(num, dtype=bool),
            failed=np.zeros(num, dtype=bool),
            won=np.zeros(num, dtype=bool),
            task_score=np.zeros(num, dtype=np.float32),
            observations=None,  # type: ignore[arg-type]  # made below, once the slots are up to date
        )
        for s, index in enumerate(chosen):
            slot, info = self._slots[index], info_of(infos, index)
            terminated = bool(terminations[index])
            reward = finite_number(rewards[index], f"{self.spec.env_id}: the reward of {one_line(actions[s])}")
            slot.num_steps += 1
            slot.memory.store(MemoryEntry(slot.num_steps, slot.view.anchor, actions[s], thought_of(replies[s])))
            won = terminated and bool(self.spec.won(reward, terminated, info))
            is_possible = bool(info.get("action_possible", actions[s] in slot.view.admissible))
            why = info.get("failure") or info.get("reason")
            result.reasons.append(str(why or ("" if is_possible else "not offered by the page")))
            result.action_possible[s] = is_possible
            result.terminated[s] = terminated
            result.truncated[s] = not terminated and (
                bool(truncations[index]) or slot.num_steps >= self.config.max_steps
            )
            result.failed[s] = bool(info.get("failed", False))
            result.won[s] = won
            if terminated:
                score = info.get("task_score", won)
                result.task_score[s] = finite_number(score, f'{self.spec.env_id}: "task_score" of an info')
            result.reward[s] = self._reward(reward, won)
            slot.is_live = not (terminated or result.truncated[s])
            slot.observation, slot.info, slot.view = texts[index], info, self._view_of(texts[index], info)
        self._prepare_prompts([self._slots[index] for index in chosen])
        result.observations = self._observations()
        return result

    def live_slots(self) -> list[int]:
        """Slots whose episode goes on, in order."""
        return [s for s, slot in enumerate(self._slots) if slot.is_live]

    def page(self, slot: int) -> tuple[str, dict[str, Any]]:
        """The environment's own observation and info, for policies that read the page and not the prompt."""
        return self._slots[slot].observation, self._slots[slot].info

    def view(self, slot: int) -> PageView:
        """The current page of a slot, taken apart."""
        return self._slots[slot].view

    def close(self) -> None:
        """Lets the environments go."""
        self.vector_env.close()

    def _slot(self, observation: str, info: dict[str, Any], memory: Memory, *, is_live: bool) -> _Slot:
        return _Slot(observation, info, self._view_of(observation, info), memory, is_live=is_live)

    def _view_of(self, observation: str, info: dict[str, Any]) -> PageView:
        if not isinstance(observation, str):
            raise ShopGymError(
                f"{self.spec.env_id}: an observation must be a text, got {one_line(observation)}; put a wrapper around "
                "the environment that makes it one (EnvSpec.wrappers)"
            )
        view = self._view(observation, info)
        require_page_view(view, self.spec.env_id)
        return view

    def _parsed(self, reply: str) -> ParsedReply:
        parsed = self._projection(reply)
        if parsed.problem == CHINESE_TEXT and not self.config.reject_chinese:
            return ParsedReply(parsed.action, None)  # it is looked for last: nothing else is wrong
        return parsed

    def _reward(self, reward: float, won: bool) -> float:
        if self.config.success_reward is None:
            return reward
        return self.config.success_reward if won else 0.0

    def _prepare_prompts(self, slots: Sequence[_Slot]) -> None:
        began = perf_counter()
        config = self.config
        live = [slot for slot in slots if slot.is_live]
        if config.encode_ahead is not None and config.max_prompt_tokens is not None:
            config.encode_ahead(
                [
                    whole_prompt(self.template, slot.view, fetched(slot.memory), step_number=slot.num_steps + 1)
                    for slot in live
                ]
            )
        for slot in slots:
            slot.prompt = Prompt("", False)
        for slot in live:
            slot.prompt = build_prompt(
                self.template,
                slot.view,
                fetched(slot.memory),
                step_number=slot.num_steps + 1,
                count_tokens=config.count_tokens,
                max_tokens=config.max_prompt_tokens,
                history_overflow=config.history_overflow,
            )
            self.num_cut_prompts += slot.prompt.is_cut
        self.num_prompts += len(live)
        self.prompt_seconds += perf_counter() - began

    def _observations(self) -> Observations:
        live = [slot.is_live for slot in self._slots]
        return Observations(
            prompts=[slot.prompt.text for slot in self._slots],
            anchors=[slot.view.anchor if slot.is_live else "" for slot in self._slots],
            admissible=[slot.view.taken if slot.is_live else () for slot in self._slots],
            is_live=np.asarray(live, dtype=bool),
            prompt_is_cut=np.asarray([slot.prompt.is_cut for slot in self._slots], dtype=bool),
        )

    def _check(self, chosen: Sequence[int], replies: Sequence[str]) -> None:
        if not self._slots:
            raise ShopGymError("step before the first reset: call reset with the goals first")
        if len(chosen) != len(replies):
            raise ShopGymError(f"step got {len(replies)} replies for {len(chosen)} slots")
        if len(set(chosen)) != len(chosen):
            raise ShopGymError(f"step was given a slot twice: {sorted(chosen)}")
        for slot in chosen:
            if not 0 <= slot < self.num_envs:
                raise ShopGymError(f"there is no slot {slot}; the manager has {self.num_envs}")
            if not self._slots[slot].is_live:
                raise ShopGymError(f"slot {slot} is finished; reset before stepping it again")
