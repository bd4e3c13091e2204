"""Many sessions of one shop as one Gymnasium vector environment, stepped together or in part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Tuple as TupleSpace
from gymnasium.vector import AutoresetMode, VectorEnv

from webshop_env.errors import ShopGymError
from webshop_env.spaces import TextSpace
from webshop_env.text_env import WebShopTextEnv, make_settings, options_dict

# Dimension: B sessions (slots).

_ARRAY_TYPES = {"goal_index": np.int32, "task_score": np.float64, "won": np.bool_, "action_possible": np.bool_}


class WebShopVectorEnv(VectorEnv):
    """B sessions over one shared shop; each slot gives the episodes that a single environment gives.

    By default nothing is reset by itself, as the training of agents wants it: a finished slot stays as it is until it
    is reset. None as a slot's action leaves it untouched, in every mode. A slot costs a few kilobytes, so hundreds
    are cheap.

    Args:
        num_envs: B, at least 1.
        autoreset_mode: A mode of Gymnasium, or its value: "Disabled"; "NextStep", where the step after an end ignores
            the slot's action and resets it; "SameStep", where an end resets the slot at once and the step's infos hold
            what it ended with: `final_obs` (B texts, None where nothing ended), `final_info` (a dict of columns) and
            the masks `_final_obs`, `_final_info` (bool [B]). Goals are then drawn from the split.
        settings: As for `WebShopTextEnv`.
    """

    metadata = {  # noqa: RUF012  (as Gymnasium declares it)
        "render_modes": ["ansi"],
        "render_fps": 1,
        "autoreset_mode": AutoresetMode.DISABLED,
    }

    def __init__(
        self, num_envs: int = 1, *, autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED, **settings: Any
    ) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
            raise ShopGymError(f"num_envs must be a whole number of at least 1, got {num_envs!r}")
        try:
            self._autoreset = AutoresetMode(autoreset_mode)
        except ValueError:
            modes = ", ".join(mode.value for mode in AutoresetMode)
            raise ShopGymError(f"autoreset_mode must be one of {modes}, got {autoreset_mode!r}") from None
        self.metadata = {**self.metadata, "autoreset_mode": self._autoreset}
        self.settings = make_settings(**settings)
        self.shop = self.settings.open()
        shared = {"version": self.settings.version, "shop": self.shop} | {
            name: value for name, value in settings.items() if name not in _SHOP_ONLY
        }
        if self.settings.variant is not None:
            shared["reward"] = self.settings.reward
        self.num_envs = int(num_envs)
        self.envs = tuple(WebShopTextEnv(**shared) for _ in range(self.num_envs))
        self.render_mode = self.settings.render_mode
        self.single_observation_space = self.single_action_space = TextSpace()
        self.observation_space = TupleSpace([TextSpace() for _ in range(self.num_envs)])
        self.action_space = TupleSpace([TextSpace() for _ in range(self.num_envs)])
        self._observations = [""] * self.num_envs
        self._infos: list[dict[str, Any]] = [{}] * self.num_envs
        self._terminations = np.zeros(self.num_envs, dtype=bool)
        self._truncations = np.zeros(self.num_envs, dtype=bool)
        self._is_reset = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Start an episode in every slot, or in some.

        Args:
            seed: One number s seeds slot i with s + i, as Gymnasium does; or one for each slot.
            options: `{"goal_index": B numbers}` or `{"goal_id": B texts}`; with `"reset_mask"`, bool [B], only the
                slots with True are reset (the others' goals are not looked at).

        Returns:
            Observations, B texts, and infos, B long, with the keys of a single environment's.
        """
        options = options_dict(options)
        mask = self._mask(options.pop("reset_mask", None))
        seeds = self._seeds(seed)
        per_slot = self._options_per_slot(options)
        for i in np.flatnonzero(mask):  # all before the first is reset: no mixture is left when one is refused
            self.envs[i].named_goal(per_slot[i])
        for i in np.flatnonzero(mask):
            self._observations[i], self._infos[i] = self.envs[i].reset(seed=seeds[i], options=per_slot[i])
            self._terminations[i] = self._truncations[i] = False
        self._is_reset = True
        return tuple(self._observations), self._gathered_infos(self._infos)

    def step(
        self, actions: Sequence[str | None]
    ) -> tuple[tuple[str, ...], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one action in every slot; None leaves a slot untouched.

        Returns:
            Observations (B texts), rewards float64 [B], terminations bool [B], truncations bool [B], infos. An
            untouched slot has reward 0 and everything else as it was; in "SameStep" that is an episode's beginning,
            so that its end is told once.
        """
        if not self._is_reset:
            raise ShopGymError("call reset before step")
        if isinstance(actions, str) or not isinstance(actions, Sequence | np.ndarray):
            raise ShopGymError(f"step takes one action for each slot, in a list, got {actions!r}")
        if len(actions) != self.num_envs:
            raise ShopGymError(f"{self.num_envs} slots need {self.num_envs} actions, got {len(actions)}")
        for action in actions:  # before the first slot is stepped
            if action is not None and not isinstance(action, str):
                raise ShopGymError(f"an action is a text such as 'search[red mug]', got {type(action).__name__}")
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        if self._autoreset is AutoresetMode.SAME_STEP:
            self._terminations[:] = self._truncations[:] = False
        for i, action in enumerate(actions):
            if action is None:
                continue
            if self._autoreset is AutoresetMode.NEXT_STEP and (self._terminations[i] or self._truncations[i]):
                self._observations[i], self._infos[i] = self.envs[i].reset()
                self._terminations[i] = self._truncations[i] = False
                continue
            observation, reward, terminated, truncated, info = self.envs[i].step(action)
            self._observations[i], self._infos[i], rewards[i] = observation, info, reward
            self._terminations[i], self._truncations[i] = terminated, truncated
        finals = self._reset_ended() if self._autoreset is AutoresetMode.SAME_STEP else {}
        infos = self._gathered_infos(self._infos) | finals
        return tuple(self._observations), rewards, self._terminations.copy(), self._truncations.copy(), infos

    def render(self) -> tuple[Any, ...] | None:
        """The pages for people (`render_mode="ansi"`), else None."""
        return None if self.render_mode is None else tuple(env.render() for env in self.envs)

    def _reset_ended(self) -> dict[str, Any]:
        """Begin anew where an episode has just ended; returns what it ended with, in Gymnasium's form."""
        is_over = self._terminations | self._truncations
        if not is_over.any():
            return {}
        observations, infos = np.full(self.num_envs, None, dtype=object), list(self._infos)
        nothing = dict.fromkeys(self._infos[0])
        for i in range(self.num_envs):
            if is_over[i]:
                observations[i] = self._observations[i]
                self._observations[i], self._infos[i] = self.envs[i].reset()
            else:
                infos[i] = nothing | {key: kind(0) for key, kind in _ARRAY_TYPES.items()}
        finals = self._gathered_infos(infos)
        return {"final_obs": observations, "_final_obs": is_over, "final_info": finals, "_final_info": is_over.copy()}

    def _gathered_infos(self, slot_infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for key in slot_infos[0]:
            values = [info[key] for info in slot_infos]
            if key in _ARRAY_TYPES:
                infos[key] = np.array(values, dtype=_ARRAY_TYPES[key])
            else:
                column = np.empty(self.num_envs, dtype=object)
                column[:] = values
                infos[key] = column
        return infos

    def _mask(self, mask: Any) -> np.ndarray:
        if mask is None:
            return np.ones(self.num_envs, dtype=bool)
        mask = np.asarray(mask, dtype=bool)
        if mask.shape != (self.num_envs,):
            raise ShopGymError(f"reset_mask must have {self.num_envs} entries, got shape {mask.shape}")
        if not self._is_reset and not mask.all():
            raise ShopGymError("the first reset must be of all slots")
        return mask

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)):
            seed = [int(seed) + i for i in range(self.num_envs)]
        is_list = isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str)
        if not is_list or not all(one is None or isinstance(one, int | np.integer) for one in seed):
            raise ShopGymError(f"a seed is a whole number, or a list of one for each slot, got {seed!r}")
        seeds = [None if one is None else int(one) for one in seed]
        if len(seeds) != self.num_envs:
            raise ShopGymError(f"{self.num_envs} slots need {self.num_envs} seeds, got {len(seeds)}")
        if any(one is not None and one < 0 for one in seeds):
            raise ShopGymError(f"a seed is at least 0, got {min(one for one in seeds if one is not None)}")
        return seeds

    def _options_per_slot(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        per_slot: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for name, values in options.items():
            if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != self.num_envs:
                raise ShopGymError(f"reset option {name} needs one entry for each of the {self.num_envs} slots")
            for slot, value in zip(per_slot, values, strict=True):
                slot[name] = value
        return per_slot


_SHOP_ONLY = {"version", "shop", "data_dir", "goals", "split_by", "search", "preseed", "num_products", "variant",
              "limit_goals", "filter_goals"}  # fmt: skip
