"""Which environments can be driven, and what has to be known about each.

A new environment is a Gymnasium id, a way to see its pages, a template and a success rule; see `FrozenLake-v1` below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from env_manager import frozen_lake, text_world, webshop
from env_manager.plugins import import_plugin
from env_manager.types import PageView
from webshop_env.errors import ShopGymError

View = Callable[[str, Mapping[str, Any]], PageView]
"""From an observation and its info to what the manager works with."""
SuccessRule = Callable[[float, bool, Mapping[str, Any]], bool]
"""From a step's reward, `terminated` and info to whether the episode is won."""


def won_by_info(reward: float, terminated: bool, info: Mapping[str, Any]) -> bool:
    """The environment says so itself: `info["won"]`.

    Raises:
        ShopGymError: It does not.
    """
    if "won" not in info:
        raise ShopGymError(
            'EnvSpec.won: the info of an episode\'s last step has no "won", by which success is told unless the spec '
            "says otherwise; put it there, or give the spec won=won_by_reward (env_manager.registry)"
        )
    return bool(info["won"])


def won_by_reward(reward: float, terminated: bool, info: Mapping[str, Any]) -> bool:
    """The episode ended by itself, with a reward: the usual case of a game without such an info key."""
    return terminated and reward > 0


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """All that the manager has to know about an environment."""

    env_id: str
    """Gymnasium id, "module:Id" to import its module first."""
    full_view: View
    """Its pages as templates show them that want the whole text."""
    compact_view: View | None = None
    """Its pages in short, for small models; None: the full ones serve."""
    view_version: str = "1"
    """Changes whenever a view shows the same page otherwise: policies that were made for other prompts are refused."""
    template: str = "no_think"
    """Template of an `EnvConfig` that names none. Training always names one: "think" where `env.prompt` is not set."""
    projection: str | None = None
    """How replies become actions (`projection.PROJECTIONS`); None takes the template's."""
    won: SuccessRule = won_by_info
    goal_option: str | None = None
    """Reset option that takes the goal index; None: the goal index is the seed of the reset."""
    max_steps_kwarg: str | None = None
    """Constructor setting that takes the most steps of an episode, where there is one."""
    wrappers: tuple[Callable[[gymnasium.Env], gymnasium.Env], ...] = ()
    """Put around each environment; refused for ids with an own vector environment, such as the shops."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Constructor settings that this use of the environment needs."""


_SPECS: dict[str, EnvSpec] = {}


def register_env(spec: EnvSpec, *, name: str | None = None) -> None:
    """Makes an environment known under a name, its Gymnasium id if none is given; a later one replaces it."""
    _SPECS[name or spec.env_id] = spec


def get_env_spec(name: str) -> EnvSpec:
    """What is registered under the name; for "module:name" nobody knows, the module is imported to register it.

    Raises:
        ShopGymError: nothing is.
    """
    if name not in _SPECS:
        bare_name = import_plugin(name, setting="env.env_name")
        name = name if name in _SPECS else bare_name
    if name not in _SPECS:
        raise ShopGymError(
            f"env.env_name: {name!r} is not registered; there are {', '.join(sorted(_SPECS))}; one of your own is "
            "named with the module that registers it, as in custom_env:Guess-v0"
        )
    return _SPECS[name]


for _version in ("v0", "v1"):
    register_env(
        EnvSpec(
            env_id=f"webshop_env:WebShop-{_version}",
            full_view=webshop.full_view,
            compact_view=webshop.compact_view,
            view_version=webshop.VIEW_VERSION,
            template="think",
            goal_option="goal_index",
            max_steps_kwarg="max_steps",
        ),
        name=f"WebShop-{_version}",
    )
register_env(
    EnvSpec(
        env_id="FrozenLake-v1",
        full_view=frozen_lake.view,
        wrappers=(frozen_lake.TextFrozenLake,),
        env_kwargs={"render_mode": "ansi", "is_slippery": False},
    )
)
register_env(
    EnvSpec(env_id="env_manager.text_world:TextWorld-v0", full_view=text_world.view),
    name="TextWorld-v0",
)
