"""The Gymnasium environment: one shop, one session at a time, texts in and texts out."""

from __future__ import annotations

import difflib
import math
import random
import string
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from webshop_env.catalog import Version
from webshop_env.errors import ShopGymError
from webshop_env.pages import OBSERVATION_MODES, SEP, Page, page_book
from webshop_env.session import begin, take
from webshop_env.shop import Shop, check_whole, open_shop
from webshop_env.spaces import TextSpace
from webshop_env.types import Goal, Session

VERSIONS = ("v0", "v1")
_DEFAULT: Any = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSettings:
    """The keyword arguments of `gymnasium.make("WebShop-v1", ...)`; an unknown one is an error."""

    version: Version = "v1"
    """Set by the id: "v0" is the published benchmark, "v1" the corrected one."""
    shop: Shop | None = None
    """An open shop to share; then none of the settings of the shop may be given."""
    data_dir: str | Path | None = None
    """Folder of the catalogue; None is the embedded one."""
    goals: str = "synthetic"
    """Or "human"."""
    split_by: str = "goal"
    """Or "product": no product in two splits."""
    search: str = "bm25"
    """Search engine."""
    preseed: int = 0
    """Seed of prices, price caps and draws (v0 only)."""
    num_products: int | None = None
    """Only the first so many products of the catalogue."""
    limit_goals: int | None = None
    """Only so many goals, drawn by weight."""
    filter_goals: Callable[[int, Goal], bool] | None = None
    """Only the goals for which this says yes, given (index, goal)."""
    variant: str | None = None
    """"verl" (v0 only): one seed for prices and shuffle, sparse reward."""
    split: str | None = None
    """"train", "eval", "test" or "all": where `reset` draws goals from when it is given none. None is "all", and in
    v0 the published draw by weight."""
    observation_mode: str = "text"
    """"text", "text_rich", "html" or "url"."""
    max_steps: int | None = _DEFAULT
    """Steps after which an episode is truncated; None for no limit. 15 in v1, None in v0."""
    reward: str | None = None
    """"score" in [0, 1], or "sparse": `success_reward` for a score of exactly 1, else 0."""
    success_reward: float = 10.0
    """What "sparse" pays."""
    show_attrs: bool = False
    """Items have a page with their attributes."""
    page_size: int = 10
    """Products on a page of results."""
    num_prev_obs: int = 0
    """How many earlier observations to put before the current one."""
    num_prev_actions: int = 0
    """How many earlier actions to put before the current observation."""
    session_prefix: str = ""
    """Put before the session's name in urls."""
    render_mode: str | None = None
    """"ansi": `render()` gives the page for people to read."""

    def __post_init__(self) -> None:
        _check("version", self.version, VERSIONS)
        _check("observation_mode", self.observation_mode, OBSERVATION_MODES)
        _check("reward", self.reward, (None, "score", "sparse"))
        _check("split", self.split, (None, "train", "eval", "test", "all"))
        _check("render_mode", self.render_mode, (None, "ansi"))
        for name, least in (("page_size", 1), ("num_prev_obs", 0), ("num_prev_actions", 0)):
            check_whole(name, getattr(self, name), least)
        if isinstance(self.success_reward, bool) or not isinstance(self.success_reward, int | float | np.number):
            raise ShopGymError(f"success_reward must be a number, got {self.success_reward!r}")
        if not -math.inf < self.success_reward < math.inf:
            raise ShopGymError(f"success_reward must be finite, got {self.success_reward!r}")
        _check("show_attrs", self.show_attrs, (False, True))
        if not isinstance(self.session_prefix, str):
            raise ShopGymError(f"session_prefix must be a text, got {self.session_prefix!r}")
        if self.max_steps is _DEFAULT:
            object.__setattr__(self, "max_steps", None if self.version == "v0" else 15)
        if self.max_steps is not None:
            check_whole("max_steps", self.max_steps, 1)
        if self.reward is None:
            object.__setattr__(self, "reward", "sparse" if self.variant == "verl" else "score")
        if self.version == "v1" and self.preseed != 0:
            raise ShopGymError("preseed belongs to WebShop-v0: v1 draws neither prices nor caps")
        if self.version == "v1" and self.variant is not None:
            raise ShopGymError(f"variant={self.variant!r} belongs to WebShop-v0")
        if self.shop is not None:
            self._check_shared_shop(self.shop)

    def _check_shared_shop(self, shop: Shop) -> None:
        if not isinstance(shop, Shop):
            raise ShopGymError(f"shop must be an open shop (webshop_env.open_shop), got {shop!r}")
        given = [field.name for field in fields(self) if field.name in _SHOP_SETTINGS and _is_given(self, field)]
        if given:
            raise ShopGymError(f"shop= is already open: {', '.join(given)} can only be given without it")
        if shop.version != self.version:
            raise ShopGymError(f"WebShop-{self.version} was given a shop of version {shop.version}")

    def open(self) -> Shop:
        """The shop to use: the shared one, or the one that these settings open."""
        if self.shop is not None:
            return self.shop
        return open_shop(version=self.version, **{name: getattr(self, name) for name in _SHOP_SETTINGS})


_SHOP_SETTINGS = ("data_dir", "goals", "split_by", "search", "preseed", "num_products", "variant", "limit_goals",
                  "filter_goals")  # fmt: skip


def _is_given(settings: EnvSettings, field: Any) -> bool:
    return getattr(settings, field.name) != field.default


def _check(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value is choice or value == choice for choice in allowed):
        choices = ", ".join(str(choice) for choice in allowed)
        raise ShopGymError(f"{name} must be one of {choices}, got {value!r}")


def options_dict(options: Any) -> dict[str, Any]:
    """A copy of the `options` of a reset; None is none."""
    if options is not None and not isinstance(options, dict):
        raise ShopGymError(f"reset options are a dict such as {{'goal_index': 3}}, got {options!r}")
    return dict(options or {})


def make_settings(**settings: Any) -> EnvSettings:
    """Settings from keyword arguments, with one clear line for a name that does not exist."""
    names = [field.name for field in fields(EnvSettings)]
    for name in settings:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names[1:])}"
            raise ShopGymError(f"WebShop has no setting {name!r}; {hint}")
    return EnvSettings(**settings)


class WebShopTextEnv(gymnasium.Env[str, str]):
    """WebShop as text: `search[words]` and `click[text]` in, pages out, the score as reward on purchase.

    Args:
        settings: See `EnvSettings`. `gymnasium.make("webshop_env:WebShop-v1", split="train")`.

    Every `reset` and `step` gives the same keys in `info`: `available_actions`, `goal_index`, `goal_id`,
    `instruction_text`, `page_kind`, `asin`, `selected_options`, `task_score`, `won`, `action_possible`, `reason`,
    `reward_breakdown`. The breakdown is empty until the purchase, not None: Gymnasium's own vector environments merge
    the infos of their slots and need every value of a key to be of one kind.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  (as Gymnasium declares it)

    def __init__(self, **settings: Any) -> None:
        self.settings = make_settings(**settings)
        self.shop = self.settings.open()
        self.render_mode = self.settings.render_mode
        self.observation_space = TextSpace()
        self.action_space = TextSpace()
        self._book = page_book(self.shop, self.settings.page_size, self.settings.show_attrs)
        self._max_steps = self.settings.max_steps
        self._is_sparse = self.settings.reward == "sparse"
        self._rng = self.shop.new_rng() if self.settings.version == "v0" else random.Random(0)
        self._named_goals: dict[str, Goal] = {}
        self._previous_obs: deque[str] = deque(maxlen=self.settings.num_prev_obs)
        self._previous_actions: deque[str] = deque(maxlen=self.settings.num_prev_actions)
        self._has_history = bool(self.settings.num_prev_obs or self.settings.num_prev_actions)
        self._session: Session | None = None
        self._page: Page | None = None
        self._num_steps = 0
        self._is_over = False
        # The original begins a session when it is built; v0 draws for it too, so that later draws are the same.
        self._first_draw = self._draw_as_published() if self.settings.version == "v0" else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: Of the draws of goals from here on; in v0 also of everything else that it draws.
            options: `{"goal_index": i}` or `{"goal_id": id}` names the goal. v0 also takes `{"session": name}`: an
                integer takes that goal, a new name draws one and keeps it, as published. Without, a goal of the
                split is drawn.
        """
        super().reset(seed=seed)
        if seed is not None:
            self._rng.seed(seed)
        goal, session_id = self._pick_goal(options_dict(options))
        self._session, self._page = begin(self._book, goal, f"{self.settings.session_prefix}{session_id}")
        self._num_steps, self._is_over = 0, False
        self._previous_obs.clear()
        self._previous_actions.clear()
        observation = self._page.render(self.settings.observation_mode)
        self._previous_obs.append(observation)
        return observation, self._info("")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action; whatever text it is, the answer is a page and never an exception.

        Returns:
            Observation, reward, terminated (a purchase; in v1 it stays so), truncated (`max_steps` reached), info.
        """
        session, page = self._session, self._page
        if session is None or page is None:
            raise ShopGymError("call reset before step")
        if not isinstance(action, str):
            raise ShopGymError(f"an action is a text such as 'search[red mug]', got {type(action).__name__}")
        if self._is_over and self.settings.version != "v0":
            terminated = session.is_done
            observation = page.render(self.settings.observation_mode)
            return observation, 0.0, terminated, not terminated, self._info("the episode is over")
        outcome = take(self._book, session, page, action, self._rng)
        self._page = outcome.page
        self._num_steps += 1
        truncated = not outcome.is_done and self._max_steps is not None and self._num_steps >= self._max_steps
        self._is_over = outcome.is_done or truncated
        reward = outcome.reward
        if self._is_sparse:
            reward = self.settings.success_reward if outcome.is_done and reward == 1.0 else 0.0
        observation = outcome.page.render(self.settings.observation_mode)
        if self._has_history:
            observation = self._with_history(observation, action)
        return observation, reward, outcome.is_done, truncated, self._info(outcome.reason)

    def render(self) -> str | None:
        """The page for people (`render_mode="ansi"`), else None."""
        if self.render_mode is None or self._page is None:
            return None
        return self._page.text_rich

    @property
    def page(self) -> Page:
        """The page that the session is on."""
        if self._page is None:
            raise ShopGymError("call reset first")
        return self._page

    @property
    def session(self) -> Session:
        """The session; changing it is not foreseen."""
        if self._session is None:
            raise ShopGymError("call reset first")
        return self._session

    @property
    def first_draw(self) -> tuple[Goal, str]:
        """Goal and name of the session that v0 draws when it is built, as the original does."""
        if self._first_draw is None:
            raise ShopGymError("only WebShop-v0 draws a session when it is built")
        return self._first_draw

    def get_available_actions(self) -> dict[str, Any]:
        """What can be done here, in the original's form: `has_search_bar` and the texts of `clickables`."""
        body = self.page.body
        return {"has_search_bar": body.has_search_bar, "clickables": list(body.clicks)}

    def seed_draws(self, seed: int) -> None:
        """Seed what v0 draws from (sessions, `<r>`), as `random.seed` did for the original."""
        self._rng.seed(seed)

    def named_goal(self, options: dict[str, Any]) -> Goal | None:
        """The goal that options of `reset` name by its index or id; None where they name none.

        Raises:
            ShopGymError: `reset` would refuse them; nothing has begun.
        """
        known = ("goal_index", "goal_id", "session") if self.settings.version == "v0" else ("goal_index", "goal_id")
        unknown = [name for name in options if name not in known]
        if unknown or len(options) > 1:
            raise ShopGymError(f"reset options are one of {', '.join(known)}, got {', '.join(map(str, options))}")
        if options.get("goal_index") is not None:
            return self.shop.goal_at(options["goal_index"])
        if options.get("goal_id") is not None:
            return self.shop.goal_by_id(options["goal_id"])
        if isinstance(options.get("session"), int | np.integer):
            self.shop.goal_at(options["session"])
        return None

    def _pick_goal(self, options: dict[str, Any]) -> tuple[Goal, str]:
        named = self.named_goal(options)
        if named is not None:
            goal = named
        elif options.get("session") is not None:
            return self._named_session(options["session"])
        elif self.settings.version == "v0" and self.settings.split is None:
            return self._draw_as_published()
        else:
            indexes = self.shop.split(self.settings.split or "all")
            if len(indexes) == 0:
                raise ShopGymError(f"the split {self.settings.split!r} of this catalogue has no goals")
            goal = self.shop.goals[int(indexes[self.np_random.integers(len(indexes))])]
        return goal, str(goal.goal_index)

    def _draw_as_published(self) -> tuple[Goal, str]:
        name = "".join(self._rng.choices(string.ascii_lowercase, k=10))
        return self.shop.draw_goal(self._rng), name

    def _named_session(self, name: Any) -> tuple[Goal, str]:
        key = str(name)
        if key not in self._named_goals:
            is_index = isinstance(name, (int, np.integer))
            self._named_goals[key] = self.shop.goal_at(name) if is_index else self.shop.draw_goal(self._rng)
        return self._named_goals[key], key

    def _with_history(self, observation: str, action: str) -> str:
        """Put the last observations and actions, in turn and newest last, before the current observation."""
        self._previous_actions.append(action)
        actions, pages = list(self._previous_actions)[::-1], list(self._previous_obs)[::-1]
        texts = [observation]
        for i in range(max(len(actions), len(pages))):
            texts += actions[i : i + 1] + pages[i : i + 1]
        self._previous_obs.append(observation)
        return SEP.join(texts[::-1])

    def _info(self, reason: str) -> dict[str, Any]:
        session, page = self.session, self.page
        goal = session.goal
        return {
            "available_actions": page.body.actions,
            "goal_index": goal.goal_index,
            "goal_id": goal.goal_id,
            "instruction_text": goal.instruction_text,
            "page_kind": page.kind,
            "asin": session.asin or "",
            "selected_options": dict(session.options),
            "task_score": session.score,
            "won": session.is_done and session.score == 1.0,
            "action_possible": not reason,
            "reason": reason,
            "reward_breakdown": session.reward_breakdown or {},
        }
