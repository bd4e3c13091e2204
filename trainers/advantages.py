"""How the rewards of a rollout become one advantage per row (section 7 of the design).

Pure functions of numpy arrays; the order of the rows never matters, to the last bit, because every sum runs over
sorted values. Each costs a few sorts of the rows.

No estimator here has a critic. One would go where the reference goes: a model that fills a column of values per reply
token before `with_advantages`, an estimator (GAE) in `ESTIMATORS` that reads it, and a loss of its own in the actor.

Dimensions: N rows (one per real environment step), G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import get_args

import numpy as np

from rollout.types import StepBatch
from trainers.kl_in_reward import row_kl
from trainers.settings import (
    ActorSettings,
    AdvantageMode,
    AlgorithmSettings,
    Baseline,
    GigpoSettings,
    KlControlSettings,
    KlKind,
    ProjectionSettings,
    Settings,
)

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """How returns become advantages; the defaults are those of the settings."""

    adv_estimator: str = AlgorithmSettings.adv_estimator
    """Name in `ESTIMATORS`."""
    gamma: float = AlgorithmSettings.gamma
    """Discount per environment step, in (0, 1]."""
    step_advantage_w: float = GigpoSettings.step_advantage_w
    """Weight of the step advantage against the episode advantage, at least 0."""
    mode: AdvantageMode = GigpoSettings.mode
    """Whether a difference to the mean is also divided by the sample standard deviation."""
    baseline: Baseline = GigpoSettings.baseline
    """What the mean of a group runs over: each episode once without penalties, or every row with them."""
    enable_similarity: bool = GigpoSettings.enable_similarity
    """Compare steps on similar pages of a group, not only on equal ones."""
    similarity_thresh: float = GigpoSettings.similarity_thresh
    """Least ratio of difflib's SequenceMatcher between similar pages, in (0, 1]."""
    invalid_action_penalty_coef: float = ActorSettings.invalid_action_penalty_coef
    """Reward units taken from the row of a malformed reply, at least 0; 0 is off."""
    penalise_cut: bool = ProjectionSettings.penalise_cut
    """Malformed replies that the length limit ended are penalised too."""
    strict: bool = ProjectionSettings.strict
    """Actions that the page does not offer are penalised too."""
    use_kl_in_reward: bool = AlgorithmSettings.use_kl_in_reward
    """Take the KL to the reference from each row's episode score (`kl_in_reward.py`)."""
    kl_coef: float = KlControlSettings.kl_coef
    """Reward units that a nat of it costs, at least 0."""
    kl_penalty: KlKind = AlgorithmSettings.kl_penalty
    """How it is estimated."""

    def __post_init__(self) -> None:
        if self.adv_estimator not in ESTIMATORS:
            raise ValueError(f"adv_estimator must be one of {', '.join(ESTIMATORS)}, got {self.adv_estimator!r}")
        if not 0.0 < self.gamma <= 1.0:
            raise ValueError(f"gamma must be in (0, 1], got {self.gamma}")
        if self.step_advantage_w < 0.0:
            raise ValueError(f"step_advantage_w must be at least 0, got {self.step_advantage_w}")
        if self.mode not in get_args(AdvantageMode):
            raise ValueError(f"mode must be mean_norm or mean_std_norm, got {self.mode!r}")
        if self.baseline not in get_args(Baseline):
            raise ValueError(f"baseline must be episode or step, got {self.baseline!r}")
        if not 0.0 < self.similarity_thresh <= 1.0:
            raise ValueError(f"similarity_thresh must be in (0, 1], got {self.similarity_thresh}")
        if self.invalid_action_penalty_coef < 0.0:
            raise ValueError(f"invalid_action_penalty_coef must be at least 0, got {self.invalid_action_penalty_coef}")
        if self.kl_coef < 0.0:
            raise ValueError(f"kl_coef must be at least 0, got {self.kl_coef}")
        if self.kl_penalty not in get_args(KlKind):
            raise ValueError(f"kl_penalty must be one of {', '.join(get_args(KlKind))}, got {self.kl_penalty!r}")

    @classmethod
    def of(cls, settings: Settings) -> AdvantageConfig:
        """What the settings of a run say."""
        actor, gigpo = settings.actor_rollout_ref.actor, settings.algorithm.gigpo
        return cls(
            adv_estimator=settings.algorithm.adv_estimator,
            gamma=settings.algorithm.gamma,
            step_advantage_w=gigpo.step_advantage_w,
            mode=gigpo.mode,
            baseline=gigpo.baseline,
            enable_similarity=gigpo.enable_similarity,
            similarity_thresh=gigpo.similarity_thresh,
            invalid_action_penalty_coef=actor.invalid_action_penalty_coef if actor.use_invalid_action_penalty else 0.0,
            penalise_cut=settings.env.projection.penalise_cut,
            strict=settings.env.projection.strict,
            use_kl_in_reward=settings.algorithm.use_kl_in_reward,
            kl_coef=settings.algorithm.kl_ctrl.kl_coef,
            kl_penalty=settings.algorithm.kl_penalty,
        )


def with_advantages(batch: StepBatch, config: AdvantageConfig) -> StepBatch:
    """The batch with `step_return` and `advantage` filled in: the one call that the main loop makes.

    `step_return` is the discounted return less the penalty of its own row; `row_kl` is there with the KL in reward.
    Rows of weight 0 get 0 in these columns and have no influence on the others, as if they were not there.
    """
    step_return, advantage, kl = np.zeros((3, len(batch)), dtype=np.float32)
    real = np.flatnonzero(batch.row_weight > 0)
    if len(real):
        rows = batch.select(real)
        returns = rows.discounted_return
        if returns is None:
            returns = discounted_returns(rows.reward, rows.episode_id, rows.step_index, gamma=config.gamma)
        if config.use_kl_in_reward:
            kl[real] = row_kl(rows, kind=config.kl_penalty)
        rows = replace(rows, step_return=returns - penalties(rows, config), row_kl=kl[real])
        step_return[real] = rows.step_return
        advantage[real] = ESTIMATORS[config.adv_estimator](rows, config)
    return replace(batch, step_return=step_return, advantage=advantage, row_kl=kl if config.use_kl_in_reward else None)


def discounted_returns(
    rewards: np.ndarray, episode_ids: np.ndarray, step_index: np.ndarray, *, gamma: float
) -> np.ndarray:
    """What each step still had ahead of it: G_t = r_t + gamma G_{t+1} within its episode.

    Args:
        rewards: float32 [N], from the environment alone.
        episode_ids: int64 [N].
        step_index: int32 [N], rising within an episode; the order of the rows is free.
        gamma: Discount per step.

    Returns:
        float32 [N] (added up in float64).
    """
    order = np.lexsort((step_index, episode_ids))
    ordered_ids = episode_ids[order]
    starts = np.flatnonzero(np.r_[True, ordered_ids[1:] != ordered_ids[:-1]]) if len(order) else np.zeros(0, int)
    lengths = np.diff(np.r_[starts, len(order)])
    returns = np.asarray(rewards, dtype=np.float64)[order]
    for offset in range(2, int(lengths.max(initial=0)) + 1):  # from the second-last step of every episode backwards
        rows = (starts + lengths - offset)[lengths >= offset]
        returns[rows] += gamma * returns[rows + 1]
    result = np.empty(len(order), dtype=np.float32)
    result[order] = returns
    return result


def penalties(batch: StepBatch, config: AdvantageConfig) -> np.ndarray:
    """float32 [N]: what a malformed reply costs its own row; earlier steps never see it."""
    is_penalised = ~batch.format_valid
    if config.strict:
        is_penalised = is_penalised | ~batch.action_possible
    if not config.penalise_cut and batch.reply_is_cut is not None:
        is_penalised = is_penalised & (batch.format_valid | ~batch.reply_is_cut)
    return np.where(is_penalised, config.invalid_action_penalty_coef, 0.0).astype(np.float32)


def compare_within_groups(values: np.ndarray, group_ids: np.ndarray, *, mode: str = "mean_norm") -> np.ndarray:
    """Compare each row only with its own group.

    Args:
        values: float32 [N], in reward units.
        group_ids: int64 [N], equal for rows that may be compared.
        mode: "mean_norm" subtracts the group's mean; "mean_std_norm" also divides by its sample standard deviation.

    Returns:
        float32 [N]. A group of one, and a group of equal values, get exactly 0.
    """
    group, mean, std, is_constant = _group_moments(values, group_ids)
    return _normalise(values, mean[group], std[group], is_constant[group], mode=mode)


def episode_advantages(batch: StepBatch, config: AdvantageConfig) -> np.ndarray:
    """How much better each row's episode did than its siblings, float32 [N].

    A group of one episode gets exactly 0, whatever the baseline: there is nothing to compare it with. The published
    code gives such a group its raw scores, and with `baseline="step"` would compare its rows by their penalties.
    """
    group = _compare_episodes(batch, config)
    return _normalise(group.scores, group.mean, group.std, group.is_zero, mode=config.mode)


def step_advantages(batch: StepBatch, config: AdvantageConfig) -> np.ndarray:
    """How much better it went on from a page than from the same page elsewhere in the group, float32 [N]."""
    values = _step_scores(batch)
    if config.enable_similarity:
        pages = similar_pages(batch, threshold=config.similarity_thresh)
    else:
        pages = batch.anchor_id
    _, page = np.unique(pages, return_inverse=True)
    _, group = np.unique(batch.group_id, return_inverse=True)
    return compare_within_groups(values, group * (page.max(initial=0) + 1) + page, mode=config.mode)


def similar_pages(batch: StepBatch, *, threshold: float) -> np.ndarray:
    """int64 [N]: the anchor that stands for each row's page within its group.

    First fit against the first anchor of each cluster, rows taken by (episode_id, step_index). An anchor seen
    before falls where it fell before, so that each distinct anchor of a group is compared once.
    """
    leaders: dict[int, list[int]] = {}
    chosen: dict[tuple[int, int], int] = {}
    result = np.empty(len(batch), dtype=np.int64)
    for row in np.lexsort((batch.step_index, batch.episode_id)):
        group, anchor = int(batch.group_id[row]), int(batch.anchor_id[row])
        if (group, anchor) not in chosen:
            known = leaders.setdefault(group, [])
            leader = next(_near(known, anchor, batch.anchor_texts, threshold=threshold), anchor)
            if leader == anchor:
                known.append(anchor)
            chosen[group, anchor] = leader
        result[row] = chosen[group, anchor]
    return result


def _near(known: list[int], anchor: int, texts: tuple[str, ...], *, threshold: float) -> Iterator[int]:
    """Those of the known anchors that are near enough to another, in their order."""
    matcher = SequenceMatcher(b=texts[anchor])  # what it finds out about b serves every comparison
    for leader in known:
        matcher.set_seq1(texts[leader])
        # Two upper bounds come first: they are cheap, and most pages are far apart.
        if all(ratio() >= threshold for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)):
            yield leader


def gigpo(batch: StepBatch, config: AdvantageConfig) -> np.ndarray:
    """Group-in-group: the episode among its siblings, plus the step among the visits to its page."""
    return episode_advantages(batch, config) + np.float32(config.step_advantage_w) * step_advantages(batch, config)


def grpo(batch: StepBatch, config: AdvantageConfig) -> np.ndarray:
    """The episode among its siblings, the same credit for each of its steps."""
    return episode_advantages(batch, config)


def rloo(batch: StepBatch, config: AdvantageConfig) -> np.ndarray:
    """The episode against the mean of the others of its group, itself left out; `mode` has no say.

    Ahmadian et al., "Back to Basics" (arXiv 2402.14740), equation 8: R_i - (sum of R_j over j != i) / (n - 1). With
    `baseline="step"` it is one row that is left out, as in the published code, and n counts rows.
    """
    group = _compare_episodes(batch, config)
    others = group.mean - (group.values - group.mean) / np.maximum(group.counts - 1, 1)
    return _normalise(group.scores, others, group.std, group.is_zero, mode="mean_norm")


def reinforce_plus_plus(batch: StepBatch, config: AdvantageConfig) -> np.ndarray:
    """What each step still had ahead of it, against all rows of the update: no groups; always divided by the deviation.

    Hu et al., "REINFORCE++" (arXiv 2501.03262): returns normalised over the whole batch. There a return is discounted
    from token to token within one reply; here it is `step_return`, discounted from step to step of the environment,
    less the row's own KL where that is part of the reward.
    """
    values = _step_scores(batch) - _kl_costs(batch, config)
    return compare_within_groups(values, np.zeros(len(batch), dtype=np.int64), mode="mean_std_norm")


ESTIMATORS: dict[str, Callable[[StepBatch, AdvantageConfig], np.ndarray]] = {
    "gigpo": gigpo,
    "grpo": grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
}
"""Estimator by name: (rows with `step_return`, config) -> float32 [N]. Register another by adding it here."""


@dataclass(frozen=True, slots=True)
class _EpisodeGroups:
    """What each row is compared with, all [N]."""

    scores: np.ndarray
    """float32: return of the row's episode, less what the row itself cost."""
    values: np.ndarray
    """float32: what the row, or its episode, adds to the mean."""
    mean: np.ndarray
    std: np.ndarray
    counts: np.ndarray
    """int64: values in that mean."""
    is_zero: np.ndarray
    """bool: nothing in the group differs, or nothing is there to differ from."""


def _compare_episodes(batch: StepBatch, config: AdvantageConfig) -> _EpisodeGroups:
    kl_costs = _kl_costs(batch, config)
    scores = batch.episode_return - penalties(batch, config) - kl_costs
    _, first_rows = np.unique(batch.episode_id, return_index=True)
    returns = batch.episode_return[first_rows]
    by_episode, mean, std, is_constant_return = _group_moments(returns, batch.group_id[first_rows])
    group, row_mean, row_std, is_constant = _group_moments(scores, batch.group_id)
    counts = np.bincount(by_episode)
    is_zero = is_constant | (counts == 1)
    values = batch.episode_return
    if config.use_kl_in_reward:  # a reward, unlike the penalty: an episode counts with the mean of its rows
        episode, episode_kl, _, _ = _group_moments(kl_costs, batch.episode_id)
        values = values - episode_kl[episode].astype(np.float32)
        _, mean, _, _ = _group_moments(values[first_rows], batch.group_id[first_rows])
    if config.baseline == "step":
        values, mean, std, counts = scores, row_mean, row_std, np.bincount(group)
    else:  # where only a penalty, or the KL, tells the rows apart there is no spread of returns to divide by
        std = np.where(is_constant_return, 1.0 - EPSILON, std)
    return _EpisodeGroups(scores, values, mean[group], std[group], counts[group], is_zero[group])


def _kl_costs(batch: StepBatch, config: AdvantageConfig) -> np.ndarray:
    """float32 [N]: what each row pays for its distance to the reference."""
    if not config.use_kl_in_reward:
        return np.zeros(len(batch), dtype=np.float32)
    if batch.row_kl is None:
        raise ValueError("row_kl is missing: with_advantages(batch, config) fills it in")
    return np.float32(config.kl_coef) * batch.row_kl


def _step_scores(batch: StepBatch) -> np.ndarray:
    """float32 [N]: what went on from each step."""
    if batch.step_return is None:
        raise ValueError("step_return is missing: with_advantages(batch, config) fills it in")
    return batch.step_return


def _group_moments(values: np.ndarray, group_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Group number [N], and per group [G]: mean, sample standard deviation (0 for one value), all values equal."""
    _, group = np.unique(group_ids, return_inverse=True)
    order = np.lexsort((values, group))  # sums over sorted values do not depend on the order of the rows
    counts = np.bincount(group)
    starts = np.cumsum(counts) - counts
    ordered = np.asarray(values, dtype=np.float64)[order]
    is_constant = ordered[starts] == ordered[starts + counts - 1]
    mean = np.where(is_constant, ordered[starts], np.add.reduceat(ordered, starts) / counts)
    squares = np.add.reduceat((ordered - np.repeat(mean, counts)) ** 2, starts)
    return group, mean, np.sqrt(squares / np.maximum(counts - 1, 1)), is_constant


def _normalise(values: np.ndarray, mean: np.ndarray, std: np.ndarray, is_zero: np.ndarray, *, mode: str) -> np.ndarray:
    difference = np.asarray(values, dtype=np.float64) - mean
    if mode == "mean_std_norm":
        difference = difference / (std + EPSILON)
    return np.where(is_zero, 0.0, difference).astype(np.float32)
