"""Environments of one's own, and what is said where they break Gymnasium's contract."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

import webshop_env  # noqa: F401  (registers the shops)
from env_manager import EnvManager, EnvSpec, PageView
from env_manager.registry import won_by_reward
from env_manager.vector import Absent, make_vector_env
from webshop_env.errors import ShopGymError
from webshop_env.spaces import TextSpace


class OwnEnv(gymnasium.Env):
    """Gives what the tests below set; "nogo" is refused, "end" ends with a score where the seed is no 0."""

    observation_space, action_space = TextSpace(), TextSpace()
    reward: Any = 0.0
    begun: Any = ("page", {})
    taken: Any = None

    def __init__(self, size: int = 3) -> None:
        self.size = size

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._seed = seed
        return self.begun

    def step(self, action: str) -> Any:
        info: dict[str, Any] = {"action_possible": False} if action == "nogo" else {}
        if action == "end" and self._seed:
            info["task_score"] = 0.5
        return self.taken or ("page", self.reward, action == "end", False, info)


gymnasium.register(id="Own-v0", entry_point=OwnEnv)
gymnasium.register(id="OwnUnchecked-v0", entry_point=OwnEnv, disable_env_checker=True)


def view(page: str, info: dict[str, Any]) -> PageView:
    return PageView(task="Go.", anchor=page, pieces=(page,), admissible=("go", "end"))


def own(num_envs: int = 1, **spec: Any) -> EnvManager:
    return EnvManager(EnvSpec(**{"env_id": "Own-v0", "full_view": view, "won": won_by_reward, **spec}), num_envs)


def say(*actions: str) -> list[str]:
    return [f"<action>{action}</action>" for action in actions]


def test_what_a_slot_is_told_does_not_depend_on_its_neighbours() -> None:
    manager = own(2)
    manager.reset([0, 1])
    result = manager.step(say("go", "nogo"))
    assert result.action_possible.tolist() == [True, False]
    assert manager.page(0) == ("page", {})
    assert manager.step(say("end", "end")).task_score.tolist() == [0.0, 0.5]


def test_columns_of_infos_say_where_a_key_is_missing() -> None:
    env = make_vector_env("Own-v0", 2)
    env.reset(seed=0)
    *_, infos = env.step(["go", "nogo"])
    assert infos["action_possible"].tolist() == [Absent, False]


def test_wrappers_around_a_vector_environment_are_refused() -> None:
    with pytest.raises(ShopGymError, match=r"EnvSpec\.wrappers: webshop_env:WebShop-v1 .* takes none; register an id"):
        own(env_id="webshop_env:WebShop-v1", wrappers=(gymnasium.Wrapper,))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "much", [1.0, 2.0]])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # Gymnasium's
def test_a_reward_that_is_no_finite_number_is_refused(monkeypatch: pytest.MonkeyPatch, reward: Any) -> None:
    manager = own()
    manager.reset([0])
    monkeypatch.setattr(OwnEnv, "reward", reward)
    with pytest.raises(ShopGymError, match=r"^Own-v0: the reward of 'go' must be a finite number, got "):
        manager.step(say("go"))


def test_a_score_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = own()
    manager.reset([0])
    monkeypatch.setattr(OwnEnv, "taken", ("page", 1.0, True, False, {"task_score": None}))
    with pytest.raises(ShopGymError, match=r"^Own-v0: \"task_score\" of an info must be a finite number, got None$"):
        manager.step(say("go"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"env_id": "Nope-v0"}, r"^EnvSpec\.env_id: Gymnasium does not know 'Nope-v0'"),
        ({"env_id": "no_such_module:Own-v0"}, r"^EnvSpec\.env_id: .* wants the module 'no_such_module'"),
        ({"env_kwargs": {"colour": 1}}, r"^Own-v0 does not take the settings colour of .*argument 'colour'$"),
        (
            {"max_steps_kwarg": "limit"},
            r"^Own-v0 does not take the settings limit of EnvSpec\.env_kwargs and max_steps",
        ),
        ({"projection": "nope"}, r"^EnvSpec\.projection of Own-v0: no projection is called 'nope'; there are "),
    ],
)
def test_a_spec_that_fits_nothing_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ShopGymError, match=message):
        own(**spec)


def test_a_fault_inside_a_constructor_keeps_its_traceback() -> None:
    class Faulty(OwnEnv):
        def __init__(self) -> None:
            len(3)  # type: ignore[arg-type]

    gymnasium.register(id="Faulty-v0", entry_point=Faulty)
    with pytest.raises(TypeError, match="has no len"):
        own(env_id="Faulty-v0")


@pytest.mark.parametrize(
    ("begun", "message"),
    [
        ("page", r": reset must return the tuple \(observation, info\) with a dict as info, got 'page'$"),
        (("page", None), r": reset must return the tuple \(observation, info\) with a dict as info"),
        ((5, {}), r": an observation must be a text, got 5; put a wrapper"),
    ],
)
@pytest.mark.parametrize("env_id", ["Own-v0", "OwnUnchecked-v0"])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # Gymnasium's
def test_a_reset_of_another_form_is_refused(
    monkeypatch: pytest.MonkeyPatch, env_id: str, begun: Any, message: str
) -> None:
    monkeypatch.setattr(OwnEnv, "begun", begun)
    with pytest.raises(ShopGymError, match=f"^{env_id}{message}"):
        own(env_id=env_id).reset([0])


@pytest.mark.parametrize("env_id", ["Own-v0", "OwnUnchecked-v0"])
@pytest.mark.parametrize("taken", [("page", 0.0, False, {}), ("page", 0.0, False, False, None), ["page"]])
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # Gymnasium's
def test_a_step_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch, env_id: str, taken: Any) -> None:
    manager = own(env_id=env_id)
    manager.reset([0])
    monkeypatch.setattr(OwnEnv, "taken", taken)
    with pytest.raises(ShopGymError, match=rf"^{env_id}: step must return the tuple \(observation, .*\) with a dict"):
        manager.step(say("go"))


def test_an_error_of_an_environment_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnEnv, "reset", lambda self, **how: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        own().reset([0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"admissible": "left"}, "PageView.admissible as a tuple of texts, got 'left'"),
        ({"admissible": ("left", 3)}, "PageView.admissible as a tuple of texts, got ('left', 3)"),
        ({"pieces": "at 1"}, "PageView.pieces as a tuple of texts, got 'at 1'"),
        ({"anchor": ["at", "1"]}, "PageView.anchor as a text, got ['at', '1']"),
        ({"task": None}, "PageView.task as a text, got None"),
        ({"refused": "left"}, "PageView.refused as a frozenset, got 'left'"),
    ],
)
def test_a_view_of_other_types_is_refused(fields: dict[str, Any], message: str) -> None:
    manager = own(full_view=lambda page, info: PageView(**{"task": "t", "anchor": "a", "pieces": ("a",), **fields}))
    with pytest.raises(ShopGymError) as refused:
        manager.reset([0])
    assert str(refused.value) == f"Own-v0: its view must give {message}"


def test_what_is_no_view_is_refused() -> None:
    with pytest.raises(ShopGymError, match=r"^Own-v0: its view must return a PageView, got 'page'$"):
        own(full_view=lambda page, info: page).reset([0])


def test_a_success_that_the_info_does_not_tell_is_refused() -> None:
    spec = EnvSpec(env_id="Own-v0", full_view=view)
    manager = EnvManager(spec, 1)
    manager.reset([0])
    with pytest.raises(ShopGymError, match=r'^EnvSpec\.won: .* no "won".*won_by_reward'):
        manager.step(say("end"))


class Costly(gymnasium.Wrapper):
    """A shop in which every step costs something."""

    def step(self, action: str) -> Any:
        page, reward, *rest = self.env.step(action)
        return page, float(reward) - 1.0, *rest


def test_a_wrapped_shop_is_driven_as_the_refusal_says_and_takes_its_goals_by_seeds() -> None:
    gymnasium.register(id="OwnShop-v0", entry_point=lambda **how: Costly(gymnasium.make("WebShop-v1", **how)))
    manager = own(2, env_id="OwnShop-v0", max_steps_kwarg="max_steps", env_kwargs={"split": "test"})
    manager.reset([3], group_size=2)
    goals = [manager.page(slot)[1]["goal_index"] for slot in (0, 1)]
    assert goals[0] == goals[1] < 500
    assert manager.step(say("search[mug]", "jump")).reward.tolist() == [-1.0, -1.0]
