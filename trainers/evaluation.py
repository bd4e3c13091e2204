"""How good a policy is on a fixed list of goals, how sure that is, and whether two policies differ.

    python trainers/evaluation.py model=embedded goals=300 out=before.json
    python trainers/evaluation.py model=outputs/tiny/policy goals=300 baseline=before.json

One episode per goal. The sampling noise belongs to the goal, so that two evaluations of the same list share it.

Dimension: N goals.
"""

# ruff: noqa: RUF009  setting() and group() make dataclass fields

from __future__ import annotations

import os

if __name__ == "__main__":  # before torch: threads that wait by spinning starve each other on busy cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rollout.collector import CollectorConfig, TrajectoryCollector
from rollout.flatten import concatenate
from rollout.types import Policy, SamplingParams, StepBatch
from trainers.files import require_writable, write_atomically
from trainers.ranks import Ranks
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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What became of each goal."""

    catalogue_hash: str
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
        """Mean task score, with the normal interval."""
        return mean_estimate(np.asarray(self.task_score))

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


def mean_estimate(values: np.ndarray) -> Estimate:
    """Mean of float [N] with the normal 95 % interval; a single value has an interval of no width."""
    if len(values) == 0:
        raise ValueError("an estimate needs at least one value")
    values = np.asarray(values, dtype=np.float64)
    mean = float(values.mean())
    half = Z_95 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(mean, mean - half, mean + half, len(values))


def paired_differences(before: Evaluation, after: Evaluation) -> dict[str, Estimate]:
    """How much `after` is better, goal by goal: success and score, each with the normal 95 % interval.

    Raises:
        SettingsError: The two were not made on the same goals of the same catalogue.
    """
    require_same_goals(before, catalogue_hash=after.catalogue_hash, goal_index=after.goal_index)
    won = np.asarray(after.won, dtype=np.float64) - np.asarray(before.won, dtype=np.float64)
    return {
        "success": mean_estimate(won),
        "score": mean_estimate(np.asarray(after.task_score) - np.asarray(before.task_score)),
    }


def require_same_goals(before: Evaluation, *, catalogue_hash: str, goal_index: list[int]) -> None:
    """Refuses to compare with an evaluation of other goals.

    Raises:
        SettingsError: It was made on another catalogue or on other goals of it.
    """
    if before.catalogue_hash != catalogue_hash:
        raise SettingsError("the two evaluations were made on different catalogues; they cannot be compared")
    if before.goal_index != goal_index:
        raise SettingsError("the two evaluations were made on different goals; use the same split and number of goals")


def collect_over_ranks(
    collector: TrajectoryCollector,
    policy: Policy,
    goals: np.ndarray,
    params: SamplingParams,
    ranks: Ranks,
    *,
    group_size: int,
    update: int,
    seed: int,
    first_group: int = 0,
) -> StepBatch:
    """Plays whole groups on each rank, then gives every rank all rows, by (episode_id, step_index).

    Groups are numbered from `first_group` on.
    """
    mine = ranks.block(len(goals))
    share = None
    if len(mine):
        share = collector.collect(
            goals[mine.start : mine.stop],
            policy,
            params,
            group_size=group_size,
            update=update,
            seed=seed,
            first_episode=(first_group + mine.start) * group_size,
        )
    return concatenate([part for part in ranks.gather(share) if part is not None])


def evaluate(
    collector: TrajectoryCollector,
    policy: Policy,
    goals: np.ndarray,
    params: SamplingParams,
    ranks: Ranks,
    *,
    seed: int,
    catalogue_hash: str,
    split: str,
    on_rows: Callable[[StepBatch], None] | None = None,
) -> Evaluation:
    """Plays each goal once; `on_rows` gets all rows, on every rank."""
    rows = collect_over_ranks(collector, policy, goals, params, ranks, group_size=1, update=NOISE_UPDATE, seed=seed)
    if on_rows is not None:
        on_rows(rows)
    _, firsts = np.unique(rows.episode_id, return_index=True)
    return Evaluation(
        catalogue_hash=catalogue_hash,
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
        evaluation = Evaluation(**json.loads(path.read_text(encoding="utf-8")))
        columns = (evaluation.goal_index, evaluation.won, evaluation.task_score, evaluation.episode_length)
        if not all(isinstance(column, list) and len(column) == len(columns[0]) > 0 for column in columns):
            raise TypeError("columns of other lengths")
        return evaluation
    except (OSError, TypeError, ValueError) as error:
        raise SettingsError(f"{path} is no saved evaluation ({error.__class__.__name__}); make one with out=") from None


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


def run(settings: EvaluationSettings, baseline: Evaluation | None = None) -> Evaluation:
    """Evaluates one policy in this process; a baseline on other goals is refused before that."""
    import torch

    from rollout.engines.hf import HFEngine
    from trainers.models import load_model, load_tokenizer, refuse_other_prompts
    from trainers.ranks import start_ranks
    from trainers.worlds import fixed_goals, make_grammar, make_manager, open_world, require_positions

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device=cuda, but there is no GPU that torch can use")
    shop = open_world(settings.env)
    goals = fixed_goals(shop, settings.split, settings.goals)
    if baseline is not None:
        require_same_goals(baseline, catalogue_hash=shop.catalogue_hash, goal_index=goals.tolist())
    device = "cuda" if settings.device == "auto" and torch.cuda.is_available() else settings.device
    tokenizer = load_tokenizer(settings.model)
    grammar = make_grammar(tokenizer, settings.env, settings.data) if settings.constrained else None
    engine = HFEngine(
        load_model(settings.model),
        tokenizer,
        grammar=grammar,
        copy_model=False,
        device="cpu" if device == "auto" else device,
    )
    require_positions(engine.model.config, settings.data)
    manager = make_manager(
        settings.env, settings.data, min(settings.num_envs, len(goals)), count_tokens=engine.count_tokens
    )
    refuse_other_prompts(settings.model, prompt_template_hash=manager.prompt_hash, environment=settings.env.env_name)
    return evaluate(
        TrajectoryCollector(manager, CollectorConfig(constrained=settings.constrained)),
        engine,
        goals,
        SamplingParams(temperature=settings.temperature, max_tokens=settings.data.max_response_length),
        start_ranks(),
        seed=settings.seed,
        catalogue_hash=shop.catalogue_hash,
        split=settings.split,
    )


def main(arguments: list[str]) -> None:
    """Command line: evaluates, prints, saves, compares."""
    from trainers.settings import explain, resolve

    wants_help = [word for word in arguments if word in ("--help", "-h", "--explain")]
    settings, notes, sources = resolve([word for word in arguments if word not in wants_help], EvaluationSettings)
    if wants_help:
        print(__doc__)
        print(explain(settings, sources))
    for note in notes:
        print(f"note: {note}")
    if wants_help:
        return
    baseline = load_evaluation(Path(settings.baseline)) if settings.baseline else None
    if settings.out:
        if Path(settings.out).is_dir():
            raise SettingsError(f"out: {settings.out} is a directory; name a file")
        require_writable(Path(settings.out).parent, setting="out")
    evaluation = run(settings, baseline)
    num = len(evaluation.goal_index)
    print(f"{settings.model} on {num} {settings.split} goals, temperature {settings.temperature}")
    print(f"success {evaluation.success}")
    print(f"score   {evaluation.score}")
    if settings.out:
        save_evaluation(evaluation, Path(settings.out))
        print(f"per goal: {settings.out}")
    if baseline is not None:
        print(f"baseline success {baseline.success}, score {baseline.score}")
        for name, difference in paired_differences(baseline, evaluation).items():
            print(f"paired difference of {name} {difference}")


if __name__ == "__main__":
    from trainers.command import run_command

    run_command(main)
