"""How good a policy is on a fixed list of goals, how sure that is, and whether two policies differ.

    python trainers/evaluation.py model=embedded goals=300 out=before.json
    python trainers/evaluation.py model=outputs/tiny/checkpoints/update_000030/policy goals=300 baseline=before.json
    python trainers/evaluation.py model=outputs/run/checkpoints/update_000100/policy engine=vllm split=test goals=500
    python trainers/evaluation.py endpoint.base_url=http://localhost:8000/v1 model=NAME env.prompt=think out=other.json
    python trainers/evaluation.py compare before.json other.json

One episode per goal. The sampling noise belongs to the goal's place in the list, so that two evaluations of the same
list with the same seed share it. `out` gets everything as JSON, and a row per goal as Parquet beside it.

Dimension: N goals.
"""

# ruff: noqa: RUF009  setting() and group() make dataclass fields

from __future__ import annotations

import os

if __name__ == "__main__":  # before torch: threads that wait by spinning starve each other on busy cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rollout.collector import CollectorConfig, TrajectoryCollector
from rollout.engines.openai import OpenAIEngine
from rollout.engines.prompts import PromptEncoder
from rollout.engines.vllm import VLLMConfig
from rollout.types import Engine, Policy, SamplingParams, StepBatch
from trainers.command import settings_of
from trainers.engines import open_fixed_engine
from trainers.errors import faults_told
from trainers.estimates import Estimate, cluster_estimate, mean_estimate, paired_share_estimate, share_estimate
from trainers.files import require_writable, write_atomically
from trainers.goals import goals_to_play, tell_of_fewer
from trainers.models import compute_dtype, load_model, load_tokenizer, refuse_other_prompts
from trainers.ranks import Ranks, joined_ranks
from trainers.rollouts import collect_over_ranks
from trainers.settings import (
    LEARNS_FROM_NO_REWARD,
    DataSettings,
    EnvSettings,
    Need,
    SettingsError,
    equal,
    group,
    setting,
)
from trainers.worlds import (
    World,
    drawing_seed,
    goal_ids,
    goal_products,
    make_grammar,
    make_manager,
    manager_for,
    open_world,
    prompt_hash,
    require_positions,
)

CountTokens = Callable[[str], int]

ENDPOINT = Need("endpoint.base_url", lambda values: values["endpoint.base_url"] is not None)
NO_ENDPOINT = equal("endpoint.base_url", None)
VLLM = equal("engine", "vllm")
NO_LIST = equal("data.val_files", None)
NOISE_UPDATE = -1
"""The noise of evaluations is that of update -1: never that of training, and the same before and after."""
COLUMNS = ("goal_index", "goal_id", "product", "won", "task_score", "episode_length")
"""What an evaluation says of each goal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GoalList:
    """Where the goals of an evaluation come from: what two of them must have in common to be compared."""

    environment: str
    variant: str | None
    goals: str
    split_by: str
    catalogue_hash: str
    env_seed: int | None = None
    """What WebShop-v0 draws prices and caps with; None elsewhere, and in files that do not say it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What became of each goal."""

    policy: str
    """Who played."""
    goal_list: GoalList
    split: str
    temperature: float
    seed: int
    setup: dict[str, Any]
    """What else a result depends on: prompt, limits, decoding."""
    goal_index: list[int]
    """[N], rising."""
    goal_id: list[str]
    """[N]."""
    product: list[str | None]
    """[N]: asin of the goal's product; None where goals are no products."""
    won: list[bool]
    """[N]."""
    task_score: list[float]
    """[N] in [0, 1]; 0 without a purchase."""
    episode_length: list[int]
    """[N] steps."""
    lost_goals: list[int] = field(default_factory=list)
    """Goals that were to be played too, rising, but whose environment was lost twice: nothing is known of them."""

    @property
    def asked_goals(self) -> list[int]:
        """All goals that were to be played, rising."""
        return sorted([*self.goal_index, *self.lost_goals])

    @property
    def goals_hash(self) -> str:
        """16 hex digits of the SHA-256 of the goals' ids: equal for the same goals of the same split."""
        return hashlib.sha256("\n".join(self.goal_id).encode()).hexdigest()[:16]

    @property
    def success(self) -> Estimate:
        """Share of goals won, with Wilson's interval."""
        return share_estimate(np.asarray(self.won))

    @property
    def score(self) -> Estimate:
        """Mean task score, with the normal interval cut to [0, 1]."""
        return mean_estimate(np.asarray(self.task_score), lowest=0.0)

    def estimates(self) -> dict[str, Estimate]:
        """Success and score over goals, and over products where the splits are cut between products."""
        found = {"success": self.success, "score": self.score}
        if self._has_clusters:
            products = [str(asin) for asin in self.product]
            found["success by product"] = cluster_estimate(np.asarray(self.won), products)
            found["score by product"] = cluster_estimate(np.asarray(self.task_score), products)
        return found

    @property
    def _has_clusters(self) -> bool:
        return self.goal_list.split_by != "goal" and None not in self.product

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


def paired_differences(before: Evaluation, after: Evaluation) -> dict[str, Estimate]:
    """How much `after` is better, goal by goal: success with a score interval, score with the normal one, 95 % each.

    Where the splits are cut between products, also the mean over products of their mean differences. Goals that either
    of the two lost are left out.

    Raises:
        SettingsError: The two were not made on the same goals of the same catalogue, or neither kept one that the
            other has.
    """
    require_same_goals(before, goal_list=after.goal_list, goal_index=after.asked_goals)
    lost = {*before.lost_goals, *after.lost_goals}
    kept = [[i for i, goal in enumerate(e.goal_index) if goal not in lost] for e in (before, after)]
    if not kept[0]:
        raise SettingsError(
            "the two evaluations have no goal in common whose environment was not lost; play them again"
        )
    won = np.asarray(before.won)[kept[0]], np.asarray(after.won)[kept[1]]
    score = np.asarray(after.task_score)[kept[1]] - np.asarray(before.task_score)[kept[0]]
    found = {"success": paired_share_estimate(*won), "score": mean_estimate(score, lowest=-1.0)}
    if after._has_clusters:
        products = [str(after.product[i]) for i in kept[1]]
        found["success by product"] = cluster_estimate(won[1].astype(float) - won[0], products)
        found["score by product"] = cluster_estimate(score, products)
    return found


def pairing_notes(before: Evaluation, after: Evaluation) -> list[str]:
    """What to tell beside a comparison: what the two had that differs, so that not only the policies do.

    What only one of them says, as files of different versions do, is no difference.
    """
    then = {"temperature": before.temperature, "seed": before.seed, **before.setup}
    now = {"temperature": after.temperature, "seed": after.seed, **after.setup}
    notes = [
        f"the earlier evaluation had {name} {then[name]}, this one has {now[name]}"
        for name in then
        if name in now and then[name] != now[name]
    ]
    if lost := {*before.lost_goals, *after.lost_goals}:
        notes.append(f"{len(lost)} of {len(after.asked_goals)} goals are not compared: their environments were lost")
    return notes


def require_same_goals(before: Evaluation, *, goal_list: GoalList, goal_index: list[int]) -> None:
    """Refuses to compare with an evaluation of other goals.

    Raises:
        SettingsError: It was made in another environment, on another catalogue or on other goals of it.
    """
    for part in fields(GoalList):
        then, now = getattr(before.goal_list, part.name), getattr(goal_list, part.name)
        is_unknown = part.name == "env_seed" and None in (then, now)
        if then != now and not is_unknown:
            name = part.name.replace("_", " ")
            raise SettingsError(
                f"the two evaluations differ in their {name}, {then} and {now}; they cannot be compared"
            )
    if before.asked_goals != sorted(goal_index):
        raise SettingsError("the two evaluations were made on different goals; use the same split and number of goals")


def evaluate(
    collector: TrajectoryCollector,
    policy: Policy,
    goals: np.ndarray,
    params: SamplingParams,
    ranks: Ranks,
    *,
    seed: int,
    world: World,
    goal_list: GoalList,
    split: str,
    setup: Mapping[str, Any],
    name: str,
    on_rows: Callable[[StepBatch], None] | None = None,
    weight_version: int | None = None,
) -> Evaluation:
    """Plays each goal once; `on_rows` gets all rows, on every rank. The policy is called `name` in the result.

    Goals whose environment is lost twice are `lost_goals` there.

    Where a `weight_version` is given, a policy of another is an error.
    """
    rows = collect_over_ranks(
        *(collector, policy, goals, params, ranks),
        group_size=1,
        update=NOISE_UPDATE,
        seed=seed,
        weight_version=weight_version,
    )
    if on_rows is not None:
        on_rows(rows)
    _, firsts = np.unique(rows.episode_id, return_index=True)
    played = rows.goal_index[firsts]
    return Evaluation(
        policy=name,
        goal_list=goal_list,
        split=split,
        temperature=params.temperature,
        seed=seed,
        setup=dict(setup),
        goal_index=played.tolist(),
        goal_id=goal_ids(world, played),
        product=goal_products(world, played),
        won=rows.won[firsts].tolist(),
        task_score=rows.task_score[firsts].astype(np.float64).tolist(),
        episode_length=rows.episode_length[firsts].tolist(),
        lost_goals=sorted((Counter(goals.tolist()) - Counter(played.tolist())).elements()),
    )


def save_evaluation(evaluation: Evaluation, path: Path) -> None:
    """Writes it as JSON, its figures first."""
    summary = {
        "goals_hash": evaluation.goals_hash,
        **{name: asdict(estimate) for name, estimate in evaluation.estimates().items()},
    }
    write_atomically(path, json.dumps({"summary": summary, **asdict(evaluation)}) + "\n")


def save_results(evaluation: Evaluation, path: Path) -> None:
    """Writes a row per goal as Parquet; what belongs to all of them is JSON in the schema's `shopgym_evaluation`."""
    import pyarrow
    from pyarrow import parquet

    columns = {name: getattr(evaluation, name) for name in COLUMNS}
    about = {name: value for name, value in asdict(evaluation).items() if name not in columns}
    about["goals_hash"] = evaluation.goals_hash
    table = pyarrow.table(columns).replace_schema_metadata({"shopgym_evaluation": json.dumps(about)})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    write_atomically(path, buffer.getvalue())


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
    fields_of_it = {name: value for name, value in saved.items() if name != "summary"}
    evaluation = Evaluation(**{**fields_of_it, "goal_list": GoalList(**saved.get("goal_list", {}))})
    columns = [getattr(evaluation, name) for name in COLUMNS]
    if not isinstance(evaluation.lost_goals, list):
        raise TypeError("lost goals are no list")
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
        env_seed=drawing_seed(env),
    )


def setup_of(env: EnvSettings, data: DataSettings, *, constrained: bool) -> dict[str, Any]:
    """What a result depends on besides policy, goals and sampling."""
    return {
        "env.prompt": env.prompt,
        "env.memory": env.memory,
        "env.history_length": env.history_length,
        "env.history_overflow": env.history_overflow,
        "env.memory_tokens": env.memory_tokens,
        "env.projection.reject_chinese": env.projection.reject_chinese,
        "env.max_steps": env.max_steps,
        "env.webshop.search": env.webshop.search,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        "constrained": constrained,
    }


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """A model behind an OpenAI-compatible endpoint."""

    base_url: str | None = setting(None, "where its API begins, such as http://localhost:8000/v1; null is no endpoint")
    api_key_env: str = setting(
        "OPENAI_API_KEY", "environment variable that holds the key; may be unset", needs=[ENDPOINT]
    )
    num_parallel: int = setting(16, "requests under way at once, at most", at_least=1, needs=[ENDPOINT])
    timeout_s: float = setting(120.0, "seconds of one try", above=0, needs=[ENDPOINT])
    max_tries: int = setting(4, "tries of one request, with growing pauses", at_least=1, needs=[ENDPOINT])
    tokenizer: str | None = setting(
        None,
        "policy whose tokenizer measures prompts for data.max_prompt_length; null leaves prompts whole",
        needs=[ENDPOINT],
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Settings of the command."""

    NO_USE: ClassVar[Mapping[str, str]] = LEARNS_FROM_NO_REWARD | {"data.train_files": "nothing is learnt"}

    recipe: str = setting("tiny", "where env and data settings come from")
    model: str = setting(
        "embedded", "policy: embedded, smollm2-135m, a Hugging Face directory, a hub id, or its name at the endpoint"
    )
    endpoint: EndpointSettings = group(EndpointSettings)
    split: str = setting(
        "eval", "goals to play, unless data.val_files lists them", only=("train", "eval", "test"), needs=[NO_LIST]
    )
    goals: int = setting(300, "how many goals of the split, a fixed choice", at_least=1, needs=[NO_LIST])
    temperature: float = setting(0.4, "sampling temperature; 0 is greedy", at_least=0)
    constrained: bool | None = setting(
        None, "decode only admissible actions; null does it unless there is an endpoint, which cannot"
    )
    seed: int = setting(0, "seed of the sampling noise", at_least=0)
    num_envs: int = setting(128, "episodes played at once", at_least=1)
    engine: str = setting(
        "hf", "what writes the replies: transformers, or vLLM", only=("hf", "vllm"), needs=[NO_ENDPOINT]
    )
    gpu_memory_utilization: float = setting(0.6, "share of the GPU for vllm", above=0, at_most=1, needs=[VLLM])
    enforce_eager: bool = setting(False, "no CUDA graphs in vllm: starts sooner, generates slower", needs=[VLLM])
    device: str = setting("auto", "auto, cpu or cuda", only=("auto", "cpu", "cuda"))
    out: str | None = setting(None, "JSON file for the results; those of each goal lie beside it as .parquet")
    baseline: str | None = setting(None, "file of another evaluation to compare with")
    env: EnvSettings = group(EnvSettings)
    data: DataSettings = group(DataSettings)

    def __post_init__(self) -> None:
        if self.endpoint.base_url and self.constrained:
            raise SettingsError("constrained=true: an endpoint cannot be held to a page's actions; leave it out")

    @property
    def decodes_constrained(self) -> bool:
        """What `constrained` comes down to."""
        return self.endpoint.base_url is None if self.constrained is None else self.constrained

    @property
    def engine_used(self) -> str:
        """What writes the replies."""
        return "endpoint" if self.endpoint.base_url else self.engine


def run(settings: EvaluationSettings, ranks: Ranks, baseline: Evaluation | None = None) -> Evaluation:
    """Evaluates one policy over the ranks; a baseline on other goals is refused before that."""
    world = open_world(settings.env)
    goals, split = goals_to_play(world, settings.env, settings.data, split=settings.split, num=settings.goals)
    if ranks.is_first and settings.data.val_files is None:
        tell_of_fewer(goals, f"the {split} split", key="goals", num=settings.goals)
    goal_list = goal_list_of(settings.env, world.catalogue_hash)
    if baseline is not None:
        require_same_goals(baseline, goal_list=goal_list, goal_index=goals.tolist())
    num_envs = min(settings.num_envs, -(-len(goals) // ranks.world))
    policy: Engine | OpenAIEngine
    if settings.endpoint.base_url:
        policy, count_tokens = _endpoint(settings)
        manager = make_manager(settings.env, settings.data, num_envs, count_tokens=count_tokens)
    else:
        template_hash = prompt_hash(settings.env)
        refuse_other_prompts(settings.model, prompt_template_hash=template_hash, environment=settings.env.env_name)
        policy = _local_engine(settings, ranks, num_envs)
        manager = manager_for(policy, settings.env, settings.data, num_envs)
    constrained = settings.decodes_constrained
    try:
        return evaluate(
            TrajectoryCollector(manager, CollectorConfig(constrained=constrained)),
            policy,
            goals,
            SamplingParams(temperature=settings.temperature, max_tokens=settings.data.max_response_length),
            ranks,
            seed=settings.seed,
            world=world,
            goal_list=goal_list,
            split=split,
            setup=setup_of(settings.env, settings.data, constrained=constrained) | {"engine": settings.engine_used},
            name=" at ".join(filter(None, (settings.model, settings.endpoint.base_url))),
        )
    finally:
        policy.close()


def _local_engine(settings: EvaluationSettings, ranks: Ranks, num_envs: int) -> Engine:
    tokenizer = load_tokenizer(settings.model)
    model = load_model(settings.model, dtype=compute_dtype(ranks.device))
    require_positions(model.config, settings.data)
    grammar = make_grammar(tokenizer, settings.env, settings.data) if settings.decodes_constrained else None
    config = None
    if settings.engine == "vllm":
        config = VLLMConfig(
            max_model_len=settings.data.max_prompt_length + settings.data.max_response_length,
            max_num_seqs=num_envs,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            enforce_eager=settings.enforce_eager,
            free_cache_engine=False,
            under_launcher=ranks.world > 1,
        )
    engine = open_fixed_engine(config, ranks, settings.model, model, tokenizer, grammar)
    if ranks.is_first:
        for note in engine.notes:
            print(f"note: {note}")
    return engine


def _endpoint(settings: EvaluationSettings) -> tuple[OpenAIEngine, CountTokens | None]:
    endpoint = settings.endpoint
    engine = OpenAIEngine(
        str(endpoint.base_url),
        settings.model,
        api_key=os.environ.get(endpoint.api_key_env, ""),
        num_parallel=endpoint.num_parallel,
        timeout_s=endpoint.timeout_s,
        max_tries=endpoint.max_tries,
    )
    if endpoint.tokenizer is None:
        return engine, None
    encoder = PromptEncoder(load_tokenizer(endpoint.tokenizer))
    return engine, lambda prompt: len(encoder.encode(prompt))


def main(arguments: list[str]) -> None:
    """Command line: evaluates, prints, saves, compares."""
    if arguments[:1] == ["compare"]:
        return compare(arguments[1:])
    resolved = settings_of(arguments, EvaluationSettings, __doc__)
    if resolved is None:
        return
    settings, notes = resolved
    baseline = load_evaluation(Path(settings.baseline).expanduser()) if settings.baseline else None
    out = Path(settings.out).expanduser() if settings.out else None
    if out is not None:
        if out.is_dir():
            raise SettingsError(f"out: {out} is a directory; name a file")
        if out.suffix == ".parquet":
            raise SettingsError(f"out: {out} is for JSON, name it .json; results of each goal come beside it")
        require_writable(out.parent, setting="out")
    with faults_told("the machine", _less_memory(settings)), joined_ranks(settings.device) as ranks:
        evaluation = run(settings, ranks, baseline)
    if ranks.is_first:
        for note in notes:
            print(f"note: {note}")
        print("\n".join(_figures(evaluation)))
        if out is not None:
            results = out.with_suffix(".parquet")
            with faults_told("the machine", "take a machine with more of it"):
                save_results(evaluation, results)
                save_evaluation(evaluation, out)
            print(f"results: {out}, per goal: {results}")
        if baseline is not None:
            print("\n".join(_comparison(baseline, evaluation)))


def _less_memory(settings: EvaluationSettings) -> str:
    data = settings.data
    share = f"gpu_memory_utilization ({settings.gpu_memory_utilization}), " if settings.engine == "vllm" else ""
    return (
        f"lower {share}num_envs ({settings.num_envs}), data.max_prompt_length ({data.max_prompt_length}) or "
        f"data.max_response_length ({data.max_response_length})"
    )


def compare(paths: Sequence[str]) -> None:
    """Prints how two saved evaluations differ, goal by goal.

    Raises:
        SettingsError: There are not two, one is no evaluation, or they were made on different goals.
    """
    if len(paths) != 2:
        raise SettingsError(f"compare takes two files that out= wrote, the earlier one first; got {len(paths)}")
    before, after = (load_evaluation(Path(path)) for path in paths)
    lines = _comparison(before, after)
    print("\n".join([*_figures(after), *lines]))


def _figures(evaluation: Evaluation) -> list[str]:
    num, lost, goals = len(evaluation.goal_index), len(evaluation.lost_goals), evaluation.goal_list
    return [
        f"{evaluation.policy} on {num} {evaluation.split} goals of {goals.environment} (catalogue "
        f"{goals.catalogue_hash[:16]}, goals {evaluation.goals_hash}), temperature {evaluation.temperature}, "
        f"seed {evaluation.seed}",
        *([f"{lost} goals lost their environments and are left out"] if lost else []),
        *(f"{name:7} {estimate}" for name, estimate in evaluation.estimates().items()),
    ]


def _comparison(before: Evaluation, after: Evaluation) -> list[str]:
    differences = paired_differences(before, after)
    return [
        f"compared with {before.policy}: success {before.success}, score {before.score}",
        *(f"note: {note}" for note in pairing_notes(before, after)),
        *(f"paired difference of {name} {difference}" for name, difference in differences.items()),
    ]


if __name__ == "__main__":
    from trainers.command import run_command

    run_command(main)
