"""How good a policy is on a fixed list of goals, how sure that is, and whether two policies differ.

    python trainers/evaluation.py model=embedded goals=300 out=before.json
    python trainers/evaluation.py model=outputs/tiny/checkpoints/update_000030/policy goals=300 baseline=before.json

One episode per goal. The sampling noise belongs to the goal's place in the list, so that two evaluations of the same
list with the same seed share it.

Dimension: N goals.
"""

# ruff: noqa: RUF009  setting() and group() make dataclass fields

from __future__ import annotations

import os

if __name__ == "__main__":  # before torch: threads that wait by spinning starve each other on busy cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from rollout.collector import CollectorConfig, TrajectoryCollector
from rollout.types import Policy, SamplingParams, StepBatch
from trainers.command import settings_of
from trainers.files import require_writable, write_atomically
from trainers.ranks import Ranks, start_ranks, stop_ranks
from trainers.rollouts import collect_over_ranks
from trainers.settings import DataSettings, EnvSettings, SettingsError, group, setting

Z_95 = 1.959963984540054
"""Standard normal quantile of two-sided 95 %."""
NOISE_UPDATE = -1
"""The noise of evaluations is that of update -1: never that of training, and the same before and after."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float
    num: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.num})"


@dataclass(frozen=True, kw_only=True, slots=True)
class GoalList:
    """Where the goals of an evaluation come from: what two of them must have in common to be compared."""

    environment: str
    variant: str | None
    goals: str
    split_by: str
    catalogue_hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What became of each goal."""

    goal_list: GoalList
    split: str
    temperature: float
    seed: int
    goal_index: list[int]
    """[N], rising."""
    won: list[bool]
    """[N]."""
    task_score: list[float]
    """[N] in [0, 1]; 0 without a purchase."""
    episode_length: list[int]
    """[N] steps."""

    @property
    def success(self) -> Estimate:
        """Share of goals won, with Wilson's interval."""
        return share_estimate(np.asarray(self.won))

    @property
    def score(self) -> Estimate:
        """Mean task score, with the normal interval cut to [0, 1]."""
        return mean_estimate(np.asarray(self.task_score), lowest=0.0)

    def metrics(self) -> dict[str, float]:
        """Figures for the log."""
        success, score = self.success, self.score
        return {
            "validation/success_frac": success.mean,
            "validation/success_low_frac": success.low,
            "validation/success_high_frac": success.high,
            "validation/task_score": score.mean,
            "validation/task_score_low": score.low,
            "validation/task_score_high": score.high,
            "validation/episode_length_steps": float(np.mean(self.episode_length)),
            "validation/num_goals": float(success.num),
        }


def share_estimate(hits: np.ndarray) -> Estimate:
    """Share of True in bool [N] with Wilson's 95 % interval, which holds for 0 and for N hits too."""
    num = len(hits)
    if num == 0:
        raise ValueError("an estimate needs at least one value")
    share = float(np.mean(hits))
    centre = (share + Z_95**2 / (2 * num)) / (1 + Z_95**2 / num)
    half = Z_95 / (1 + Z_95**2 / num) * math.sqrt(share * (1 - share) / num + Z_95**2 / (4 * num**2))
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half), num)


def mean_estimate(values: np.ndarray, *, lowest: float) -> Estimate:
    """Mean of float [N] in [lowest, 1] with the normal 95 % interval, no wider than the values can be.

    Values that are all equal, a single one among them, have an interval of no width.
    """
    if len(values) == 0:
        raise ValueError("an estimate needs at least one value")
    values = np.asarray(values, dtype=np.float64)
    mean = float(values.mean())
    half = Z_95 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(mean, max(lowest, mean - half), min(1.0, mean + half), len(values))


def paired_share_estimate(before: np.ndarray, after: np.ndarray) -> Estimate:
    """How much larger the share of True is in `after` than in `before`, both bool [N], pair by pair.

    The 95 % interval holds the differences that Tango's score test for paired shares (Statistics in Medicine 17, 1998)
    does not reject. Where many pairs differ it is about the normal interval; where none does it is
    +-z^2 / (N + z^2), not a point.
    """
    num = len(before)
    if num == 0:
        raise ValueError("an estimate needs at least one pair")
    num_gained, num_lost = int(np.sum(~before & after)), int(np.sum(before & ~after))
    return Estimate(
        (num_gained - num_lost) / num,
        -_highest_share_difference(num_lost, num_gained, num),
        _highest_share_difference(num_gained, num_lost, num),
        num,
    )


def _highest_share_difference(num_gained: int, num_lost: int, num: int) -> float:
    """Upper end of Tango's interval, by halving what is left; its statistic falls as the difference grows."""
    low, high = (num_gained - num_lost) / num, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        linear = (2 * num - num_gained + num_lost) * middle - num_gained - num_lost
        lost_share = (math.sqrt(linear**2 + 8 * num * num_lost * middle * (1 - middle)) - linear) / (4 * num)
        variance = num * (2 * lost_share + middle * (1 - middle))
        if (num * middle - num_gained + num_lost) ** 2 > Z_95**2 * variance:
            high = middle
        else:
            low = middle
    return high


def paired_differences(before: Evaluation, after: Evaluation) -> dict[str, Estimate]:
    """How much `after` is better, goal by goal: success with a score interval, score with the normal one, 95 % each.

    Raises:
        SettingsError: The two were not made on the same goals of the same catalogue.
    """
    require_same_goals(before, goal_list=after.goal_list, goal_index=after.goal_index)
    return {
        "success": paired_share_estimate(np.asarray(before.won), np.asarray(after.won)),
        "score": mean_estimate(np.asarray(after.task_score) - np.asarray(before.task_score), lowest=-1.0),
    }


def pairing_notes(before: Evaluation, *, temperature: float, seed: int) -> list[str]:
    """What to tell beside a comparison: whether the two sampled otherwise, so that not only the policies differ."""
    here = {"temperature": temperature, "seed": seed}
    return [
        f"the earlier evaluation had {name} {getattr(before, name)}, this one has {value}"
        for name, value in here.items()
        if getattr(before, name) != value
    ]


def require_same_goals(before: Evaluation, *, goal_list: GoalList, goal_index: list[int]) -> None:
    """Refuses to compare with an evaluation of other goals.

    Raises:
        SettingsError: It was made in another environment, on another catalogue or on other goals of it.
    """
    for field in fields(GoalList):
        then, now = getattr(before.goal_list, field.name), getattr(goal_list, field.name)
        if then != now:
            name = field.name.replace("_", " ")
            raise SettingsError(
                f"the two evaluations differ in their {name}, {then} and {now}; they cannot be compared"
            )
    if before.goal_index != goal_index:
        raise SettingsError("the two evaluations were made on different goals; use the same split and number of goals")


def evaluate(
    collector: TrajectoryCollector,
    policy: Policy,
    goals: np.ndarray,
    params: SamplingParams,
    ranks: Ranks,
    *,
    seed: int,
    goal_list: GoalList,
    split: str,
    on_rows: Callable[[StepBatch], None] | None = None,
) -> Evaluation:
    """Plays each goal once; `on_rows` gets all rows, on every rank."""
    rows = collect_over_ranks(collector, policy, goals, params, ranks, group_size=1, update=NOISE_UPDATE, seed=seed)
    if on_rows is not None:
        on_rows(rows)
    _, firsts = np.unique(rows.episode_id, return_index=True)
    return Evaluation(
        goal_list=goal_list,
        split=split,
        temperature=params.temperature,
        seed=seed,
        goal_index=rows.goal_index[firsts].tolist(),
        won=rows.won[firsts].tolist(),
        task_score=rows.task_score[firsts].astype(np.float64).tolist(),
        episode_length=rows.episode_length[firsts].tolist(),
    )


def save_evaluation(evaluation: Evaluation, path: Path) -> None:
    """Writes it as JSON."""
    write_atomically(path, json.dumps(asdict(evaluation)) + "\n")


def load_evaluation(path: Path) -> Evaluation:
    """Reads what `save_evaluation` wrote.

    Raises:
        SettingsError: The file is missing or is no evaluation.
    """
    try:
        return read_evaluation(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise SettingsError(f"{path} is no saved evaluation ({error.__class__.__name__}); make one with out=") from None


def read_evaluation(saved: Mapping[str, Any]) -> Evaluation:
    """An evaluation from what `dataclasses.asdict` made of it.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(saved, Mapping):
        raise TypeError("not an object")
    evaluation = Evaluation(**{**saved, "goal_list": GoalList(**saved.get("goal_list", {}))})
    columns = (evaluation.goal_index, evaluation.won, evaluation.task_score, evaluation.episode_length)
    if not all(isinstance(column, list) and len(column) == len(columns[0]) > 0 for column in columns):
        raise TypeError("columns of other lengths")
    return evaluation


def goal_list_of(env: EnvSettings, catalogue_hash: str) -> GoalList:
    """Where the goals come from that these settings name."""
    return GoalList(
        environment=env.env_name,
        variant=env.variant,
        goals=env.webshop.goals,
        split_by=env.webshop.split_by,
        catalogue_hash=catalogue_hash,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Settings of the command."""

    recipe: str = setting("tiny", "where env and data settings come from")
    model: str = setting("embedded", "policy: embedded, smollm2-135m, a Hugging Face directory, or a hub id")
    split: str = setting("eval", "goals to play", only=("train", "eval", "test"))
    goals: int = setting(300, "how many of them, a fixed choice", at_least=1)
    temperature: float = setting(0.4, "sampling temperature; 0 is greedy", at_least=0)
    constrained: bool = setting(True, "decode only admissible actions")
    seed: int = setting(0, "seed of the sampling noise", at_least=0)
    num_envs: int = setting(128, "episodes played at once", at_least=1)
    device: str = setting("auto", "auto, cpu or cuda", only=("auto", "cpu", "cuda"))
    out: str | None = setting(None, "file for the results of each goal")
    baseline: str | None = setting(None, "file of another evaluation to compare with")
    env: EnvSettings = group(EnvSettings)
    data: DataSettings = group(DataSettings)


def run(settings: EvaluationSettings, ranks: Ranks, baseline: Evaluation | None = None) -> Evaluation:
    """Evaluates one policy over the ranks; a baseline on other goals is refused before that."""
    from rollout.engines.hf import HFEngine
    from trainers.goals import fixed_goals
    from trainers.models import compute_dtype, load_model, load_tokenizer, refuse_other_prompts
    from trainers.worlds import make_grammar, make_manager, open_world, require_positions

    world = open_world(settings.env)
    goals = fixed_goals(world, settings.split, settings.goals)
    goal_list = goal_list_of(settings.env, world.catalogue_hash)
    if baseline is not None:
        require_same_goals(baseline, goal_list=goal_list, goal_index=goals.tolist())
    tokenizer = load_tokenizer(settings.model)
    grammar = make_grammar(tokenizer, settings.env, settings.data) if settings.constrained else None
    engine = HFEngine(
        load_model(settings.model, dtype=compute_dtype(ranks.device)),
        tokenizer,
        grammar=grammar,
        copy_model=False,
        device=ranks.device,
    )
    require_positions(engine.model.config, settings.data)
    num_envs = min(settings.num_envs, -(-len(goals) // ranks.world))
    manager = make_manager(settings.env, settings.data, num_envs, count_tokens=engine.count_tokens)
    refuse_other_prompts(settings.model, prompt_template_hash=manager.prompt_hash, environment=settings.env.env_name)
    return evaluate(
        TrajectoryCollector(manager, CollectorConfig(constrained=settings.constrained)),
        engine,
        goals,
        SamplingParams(temperature=settings.temperature, max_tokens=settings.data.max_response_length),
        ranks,
        seed=settings.seed,
        goal_list=goal_list,
        split=settings.split,
    )


def main(arguments: list[str]) -> None:
    """Command line: evaluates, prints, saves, compares."""
    resolved = settings_of(arguments, EvaluationSettings, __doc__)
    if resolved is None:
        return
    settings, notes = resolved
    baseline = load_evaluation(Path(settings.baseline)) if settings.baseline else None
    if settings.out:
        if Path(settings.out).is_dir():
            raise SettingsError(f"out: {settings.out} is a directory; name a file")
        require_writable(Path(settings.out).parent, setting="out")
    ranks = start_ranks(settings.device)
    try:
        evaluation = run(settings, ranks, baseline)
    finally:
        stop_ranks()
    if ranks.is_first:
        _report(settings, notes, evaluation, baseline)


def _report(
    settings: EvaluationSettings, notes: list[str], evaluation: Evaluation, baseline: Evaluation | None
) -> None:
    for note in notes:
        print(f"note: {note}")
    num = len(evaluation.goal_index)
    print(f"{settings.model} on {num} {settings.split} goals, temperature {settings.temperature}")
    print(f"success {evaluation.success}")
    print(f"score   {evaluation.score}")
    if settings.out:
        save_evaluation(evaluation, Path(settings.out))
        print(f"per goal: {settings.out}")
    if baseline is not None:
        print(f"baseline success {baseline.success}, score {baseline.score}")
        for note in pairing_notes(baseline, temperature=evaluation.temperature, seed=evaluation.seed):
            print(f"note: {note}")
        for name, difference in paired_differences(baseline, evaluation).items():
            print(f"paired difference of {name} {difference}")


if __name__ == "__main__":
    from trainers.command import run_command

    run_command(main)
