"""What is compared on one GPU: starts that imitation makes, arms that go on from them, and the settings of each."""

from __future__ import annotations

from dataclasses import dataclass

from webshop_env.errors import ShopGymError

RECIPE = "webshop_smollm2_135m"

STARTS: dict[str, tuple[str, ...]] = {
    "published": (),
    "product": ("env.webshop.split_by=product:{cut}",),
    "v1": ("env.env_name=WebShop-v1",),
    "listed": ("env.prompt=compact_listed", "data.max_prompt_length=2048"),
}
"""Pages, prompts and splits that a policy is imitated for, and measured on."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A training run, but for its seed and its length."""

    start: str
    """Of `STARTS`: an arm goes on from a policy that has seen its pages, and none of its test goals."""
    words: tuple[str, ...] = ()
    """Settings beside those of the recipe and the start."""


ARMS: dict[str, Arm] = {
    "gigpo": Arm("published"),
    "grpo": Arm("published", ("algorithm.adv_estimator=grpo",)),
    "baseline_step": Arm("published", ("algorithm.gigpo.baseline=step",)),
    "gigpo_v1": Arm("v1"),
    "product": Arm("product"),
    "product_grpo": Arm("product", ("algorithm.adv_estimator=grpo",)),
    "unconstrained": Arm("published", ("actor_rollout_ref.rollout.constrained=false",)),
    "listed": Arm("listed"),
    "listed_unconstrained": Arm("listed", ("actor_rollout_ref.rollout.constrained=false",)),
}
"""`gigpo` is the recipe as it is, with `baseline: episode`; the others differ from it in what their names say."""

TINY = (
    *("recipe=tiny", "data.train_batch_size=2", "env.rollout.n=4", "env.max_steps=6"),
    *("data.max_prompt_length=400", "data.max_response_length=40"),
)
"""The embedded policy and catalogue in place of the recipe: all of it in a minute on a CPU."""


def arm(name: str) -> Arm:
    """An arm by its name."""
    if name not in ARMS:
        raise ShopGymError(f"there is no arm {name!r}; there are {', '.join(ARMS)}")
    return ARMS[name]


def shop_words(start: str, *, cut: int, data: str | None, tiny: bool) -> list[str]:
    """Settings of what is played: recipe, catalogue, pages and split.

    Args:
        start: Of `STARTS`.
        cut: Number of a product cut.
        data: Directory of the catalogue; None is the embedded one.
        tiny: A smoke run.
    """
    words = [word.format(cut=cut) for word in STARTS[start]]
    place = [] if data is None else [f"env.webshop.data_dir={data}"]
    return [*place, *words, *(TINY if tiny else (f"recipe={RECIPE}",))]


def place_name(start: str, *, cut: int) -> str:
    """A start in a word: "published", "product:1"."""
    return f"{start}:{cut}" if start == "product" else start
