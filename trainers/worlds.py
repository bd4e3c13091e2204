"""From settings to environments: worlds, managers, the grammar of constrained decoding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from env_manager import EnvConfig, EnvManager, get_env_spec
from env_manager.base import hash_of_prompts
from env_manager.prompts import load_template
from env_manager.ray_backend import RayVectorEnv
from env_manager.vector import make_vector_env
from rollout.constrained import ActionGrammar
from trainers.settings import DataSettings, EnvSettings, SettingsError
from webshop_env.actions import BACK, BUY
from webshop_env.goals import splits
from webshop_env.shop import Shop, open_shop

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv
    from transformers import PreTrainedTokenizerBase

    from env_manager import PageView
    from rollout.types import Engine
    from webshop_env.catalog import Version

NUM_SEEDS = 11_500
"""Goals of an environment that is no shop: seeds 0-499 are its test split, 500-1499 eval, the rest train."""


class World(Protocol):
    """What training has to know of an environment: its goals and a name for what results depend on."""

    @property
    def catalogue_hash(self) -> str:
        """Equal for two runs whose goals mean the same."""
        ...

    def split(self, name: str, /) -> np.ndarray:
        """int32, rising: the goals of "train", "eval", "test" or "all"."""
        ...


@dataclass(frozen=True, slots=True)
class SeedWorld:
    """Any registered environment that is no shop: its goals are the seeds of its resets."""

    env_name: str
    num_goals: int = NUM_SEEDS

    @property
    def catalogue_hash(self) -> str:
        return hashlib.sha256(f"{self.env_name}, {self.num_goals} seeds".encode()).hexdigest()

    def split(self, name: str, /) -> np.ndarray:
        places = splits(self.num_goals) | {"all": range(self.num_goals)}
        return np.asarray(places[name], dtype=np.int32)


def is_shop(env: EnvSettings) -> bool:
    """Whether the environment is one of the package's shops, with a catalogue."""
    return env.env_name.startswith("WebShop-")


def drawing_seed(env: EnvSettings) -> int | None:
    """The seed by which the environment draws what goals mean (v0: prices and caps); None where it draws nothing."""
    return env.seed if env.env_name == "WebShop-v0" else None


def open_world(env: EnvSettings) -> World:
    """The shop that the settings name, shared by all environments of this process, or the seeds of something else.

    Raises:
        ShopGymError: No such environment is registered, or its goals are not chosen by seeds.
    """
    if is_shop(env):
        return open_shop_world(env)
    spec = get_env_spec(env.env_name)
    if spec.goal_option is not None:
        raise SettingsError(
            f"env.env_name: {env.env_name} takes its goals by the reset option {spec.goal_option!r}, training knows "
            "only those of shops; leave EnvSpec.goal_option out and choose the goal by the seed of the reset"
        )
    return SeedWorld(env.env_name)


def open_shop_world(env: EnvSettings) -> Shop:
    """The shop that the settings name.

    Raises:
        SettingsError: They name something else.
    """
    if not is_shop(env):
        raise SettingsError(f"env.env_name: {env.env_name!r} is not a shop; take WebShop-v0 or WebShop-v1")
    version = cast("Version", env.env_name.removeprefix("WebShop-"))  # open_shop refuses other versions
    return open_shop(
        env.webshop.data_dir,
        version=version,
        goals=env.webshop.goals,
        split_by=env.webshop.split_by,
        search=env.webshop.search,
        preseed=env.seed if version == "v0" else 0,
        num_products=env.webshop.num_products,
        variant=env.variant,
    )


def prompt_hash(env: EnvSettings) -> str:
    """Names how the prompts of these settings are made, as `EnvManager.prompt_hash` does."""
    return hash_of_prompts(load_template(env.prompt), get_env_spec(env.env_name))


def make_manager(
    env: EnvSettings,
    data: DataSettings,
    num_envs: int,
    *,
    count_tokens: Callable[[str], int] | None,
    encode_ahead: Callable[[Sequence[str]], object] | None = None,
) -> EnvManager:
    """Environments that show prompts as the settings say.

    Args:
        env: What to play.
        data: The limit of a prompt.
        num_envs: Environments.
        count_tokens: Tokens of a prompt as the policy sees it; None leaves prompts uncut.
        encode_ahead: Gets all prompts of a step before they are counted.
    """
    config = EnvConfig(
        prompt=env.prompt,
        memory=env.memory,
        history_length=env.history_length,
        history_overflow=env.history_overflow,
        memory_tokens=None if count_tokens is None else env.memory_tokens,
        max_prompt_tokens=None if count_tokens is None else data.max_prompt_length,
        count_tokens=count_tokens,
        encode_ahead=encode_ahead,
        reject_chinese=env.projection.reject_chinese,
        max_steps=env.max_steps,
        success_reward=env.success_reward if env.reward == "sparse" else None,
    )
    if count_tokens is not None:
        _require_room(env, data, count_tokens)
    kwargs = {"shop": open_shop_world(env)} if is_shop(env) else None
    return EnvManager(env.env_name, num_envs, config, kwargs, make_envs=_backend(env))


def manager_for(engine: Engine, env: EnvSettings, data: DataSettings, num_envs: int) -> EnvManager:
    """`make_manager` with prompts as long as an engine's tokenizer says, which has those of a step all at once."""
    return make_manager(env, data, num_envs, count_tokens=engine.count_tokens, encode_ahead=engine.encode_all)


def _backend(env: EnvSettings) -> Callable[..., VectorEnv]:
    """What makes the environments run where the settings say."""
    if env.backend == "local":
        return make_vector_env
    workers = env.resources_per_worker
    return partial(RayVectorEnv, num_cpus=workers.num_cpus, timeout_s=workers.timeout_s)


def _require_room(env: EnvSettings, data: DataSettings, count_tokens: Callable[[str], int]) -> None:
    """Refuses a limit of prompts that what is never cut, wording and task, does not keep to."""
    template = load_template(env.prompt)
    if is_shop(env):
        task = open_shop_world(env).longest_task()
    else:
        task = _first_page(env).task
    empty = {"page": "", "actions": "", "history": "", "num_taken": 0, "num_shown": 0, "step": 1}
    num_fixed = count_tokens(template.first.format(task=task, **empty))
    if num_fixed > data.max_prompt_length:
        raise SettingsError(
            f"data.max_prompt_length={data.max_prompt_length} is less than the {num_fixed} tokens of the template "
            f"{env.prompt} and the longest task, with no page yet; raise it, or take a shorter env.prompt"
        )


def _first_page(env: EnvSettings) -> PageView:
    """Where an environment that is no shop begins its first training goal."""
    manager = EnvManager(env.env_name, 1, EnvConfig(prompt=env.prompt))
    try:
        manager.reset(open_world(env).split("train")[:1])
        return manager.view(0)
    finally:
        manager.close()


def require_positions(config: Any, data: DataSettings) -> None:
    """Refuses lengths that the policy was not made for.

    Args:
        config: The model's transformers config; one that names no number of positions takes any length.
        data: The limits of prompts and replies.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions and data.max_prompt_length + data.max_response_length > positions:
        raise SettingsError(
            f"data.max_prompt_length={data.max_prompt_length} and data.max_response_length={data.max_response_length} "
            f"are more than the {positions} positions of the policy; lower them"
        )


def make_grammar(tokenizer: PreTrainedTokenizerBase, env: EnvSettings, data: DataSettings) -> ActionGrammar:
    """The grammar of replies for the settings' template.

    Raises:
        SettingsError: Not even the shortest episode of a shop, a search, a product, a purchase, fits into the limit of
            replies, or not all actions of another environment's first page do, or that page offers none.
    """
    grammar = ActionGrammar(
        tokenizer, free_prefix=load_template(env.prompt).thinks, max_tokens=data.max_response_length
    )
    if is_shop(env):
        asin = next(iter(open_shop_world(env).products)).lower()
        needed: tuple[str, ...] = ("search[a]", f"click[{asin}]", f"click[{BACK}]".lower(), f"click[{BUY}]".lower())
    else:
        needed = _first_page(env).admissible
    if not needed:
        raise SettingsError(
            f"the first page of {env.env_name} offers no actions, and constrained decoding writes nothing else; give "
            "PageView.admissible, or set actor_rollout_ref.rollout.constrained=false"
        )
    longest = max(needed, key=lambda action: len(grammar.encode_reply(action)))
    num_tokens = len(grammar.encode_reply(longest))
    if num_tokens > data.max_response_length:
        raise SettingsError(
            f"data.max_response_length={data.max_response_length} is less than the {num_tokens} tokens of "
            f"{longest}, which no episode can do without; raise it"
        )
    return grammar


def goal_ids(world: World, goals: np.ndarray) -> list[str]:
    """What names each goal whatever the split: a shop's `goal_id`, elsewhere the seed."""
    return [world.goal_at(int(goal)).goal_id if isinstance(world, Shop) else str(goal) for goal in goals]


def goal_products(world: World, goals: np.ndarray) -> list[str | None]:
    """The asin of each goal's product; None for each where the world is no shop."""
    return [world.goal_at(int(goal)).asin if isinstance(world, Shop) else None for goal in goals]


def world_notes(world: World) -> list[str]:
    """What to tell about a catalogue before long work begins: whether any of its rows had to be repaired."""
    if not isinstance(world, Shop) or not world.warnings:
        return []
    counts = ", ".join(f"{kind} {count}" for kind, count in world.describe()["warnings"].items())
    directory = world.describe()["directory"]
    return [f"odd rows of the catalogue were repaired or skipped: {counts} (shopgym data check {directory})"]
