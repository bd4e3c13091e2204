"""Is WebShop-v0 the published benchmark? Replay recordings of the original and count the differences.

    python -m webshop_env.conformance GOLDEN_DIR --data DATA_DIR

Every file of GOLDEN_DIR that is there is replayed; its README describes the format. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from webshop_env.catalog import index_document, load_catalog
from webshop_env.command_line import run_safely, say
from webshop_env.errors import CatalogError, ShopGymError
from webshop_env.goals import Variant, original_record
from webshop_env.reward import score_v0
from webshop_env.search.analyzer import analyze
from webshop_env.shop import Shop, open_shop
from webshop_env.text_env import WebShopTextEnv
from webshop_env.types import Goal

PROJECTION_HOOK = "env_manager.projection"
"""Where the published projection lives; only looked for when recordings of it are there."""
_WRONG_VALUE = (TypeError, LookupError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What comes of a record with values of other kinds than the original's."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that is not as recorded."""

    kind: str
    where: str
    field: str
    expected: Any
    got: Any


@dataclass(slots=True)
class Report:
    """What was compared and what differed."""

    num_checks: Counter[str] = field(default_factory=Counter)
    """Kind -> compared fields."""
    num_records: Counter[str] = field(default_factory=Counter)
    """Kind -> replayed records (steps, queries, goals ...)."""
    differences: list[Difference] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Files that could not be replayed, and why."""

    def compare(self, kind: str, where: str, name: str, expected: Any, got: Any) -> None:
        self.num_checks[kind] += 1
        if expected != got or isinstance(expected, bool) != isinstance(got, bool):
            self.differences.append(Difference(kind, where, name, expected, got))

    def lines(self, num_shown: int = 5) -> Iterator[str]:
        """The report for people: counts of each kind, then its first differences."""
        for kind in self.num_records:
            found = [difference for difference in self.differences if difference.kind == kind]
            counts = f"{self.num_records[kind]} records, {self.num_checks[kind]} fields, {len(found)} differences"
            yield f"{kind}: {counts}"
            for difference in found[:num_shown]:
                yield f"  {difference.where}: {difference.field}"
                yield f"    expected {_around_difference(difference.expected, difference.got)}"
                yield f"    got      {_around_difference(difference.got, difference.expected)}"
        yield from (f"skipped: {text}" for text in self.skipped)
        yield f"total: {sum(self.num_checks.values())} fields, {len(self.differences)} differences"


def _around_difference(value: Any, other: Any) -> str:
    """Long texts are shown from shortly before the first character that differs."""
    if not (isinstance(value, str) and isinstance(other, str)) or len(value) <= 160:
        return repr(value)[:400]
    pairs = enumerate(zip(value, other, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(value), len(other)))
    start = max(first - 40, 0)
    return f"...[{start}:] {value[start : start + 160]!r}"


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a gzip'd JSON lines file."""
    records = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    records.append(json.loads(line))
                except (ValueError, RecursionError) as error:
                    raise ShopGymError(f"{path}: line {number}: not JSON: {error}") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ShopGymError(f"{path}: not a gzip'd file of JSON lines: {error}") from None
    return records


class _Records(list[dict[str, Any]]):
    """Records that know which of them is being replayed, for whoever has to say where that went wrong."""

    line = 0
    """Of the file, from 1; 0 before the first."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for self.line, record in enumerate(super().__iter__(), start=1):
            yield record


def replay(golden_dir: Path, data_dir: Path) -> Report:
    """Replay everything in a directory of recordings against WebShop-v0."""
    if not golden_dir.is_dir():
        raise ShopGymError(f"{golden_dir}: no such directory of recordings")
    report = Report()
    num_found = 0
    for name, check in _CHECKS.items():
        path = golden_dir / f"{name}.jsonl.gz"
        if path.exists():
            num_found += 1
            records = _Records(read_records(path))
            if not records:
                raise ShopGymError(f"{path}: holds no record; fetch the recordings again")
            for number, record in enumerate(records):
                if not isinstance(record, dict) or (lacking := sorted(_REQUIRED[name] - record.keys())):
                    lack = f"lacks {', '.join(lacking)}" if isinstance(record, dict) else "is not an object"
                    raise ShopGymError(f"{path}: line {number + 1}: record {number} {lack}; fetch the recordings again")
            records.line = 0
            try:
                check(report, records, data_dir)
            except CatalogError:
                raise
            except ShopGymError as error:
                where = f"{path}: line {records.line}" if records.line else str(path)
                raise ShopGymError(f"{where}: cannot be replayed with {data_dir}: {error}") from error
            except _WRONG_VALUE as error:
                if not records.line:  # no record has been looked at: none of them is to blame
                    raise
                what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                raise ShopGymError(
                    f"{path}: line {records.line}: a value is missing or of the wrong kind ({what}); "
                    "fetch the recordings again, report it if they are whole"
                ) from error
    if not num_found:
        raise ShopGymError(f"{golden_dir}: none of {', '.join(_CHECKS)} (.jsonl.gz) is there")
    return report


def _check_goals(report: Report, records: list[dict[str, Any]], data_dir: Path, variant: Variant = None) -> None:
    kind = "verl goals" if variant else "goals"
    shop = open_shop(data_dir, version="v0", variant=variant)
    report.compare(kind, "the list", "number of goals", len(records), len(shop.goals))
    for record in records:
        report.num_records[kind] += 1
        index = record["index"]
        got = original_record(shop.goals[index]) if 0 <= index < len(shop.goals) else {}
        for name in record.keys() - {"index"}:
            report.compare(kind, f"goal {index}", name, record[name], got.get(name))


def _check_prices(report: Report, records: list[dict[str, Any]], data_dir: Path) -> None:
    shop = open_shop(data_dir, version="v0")
    for record in records:
        report.num_records["prices"] += 1
        report.compare("prices", record["asin"], "price", record["price"], shop.price_of(record["asin"]))


def _check_construct(report: Report, records: list[dict[str, Any]], data_dir: Path) -> None:
    fresh = WebShopTextEnv(version="v0", data_dir=data_dir)
    named: WebShopTextEnv | None = None
    for record in records:
        kind = f"construct/{record['kind']}"
        report.num_records[kind] += 1
        if record["kind"] == "construct":
            shop = fresh.shop
            first = record["first_reset"]
            report.compare(kind, "shop", "number of goals", record["n_goals"], len(shop.goals))
            report.compare(kind, "first session", "session", first["session"], fresh.first_draw[1])
            goal_index = fresh.first_draw[0].goal_index
            report.compare(kind, "first session", "goal_index", first["goal_index"], goal_index)
            _compare_hashes(report, kind, record, shop)
        elif record["kind"] == "reset_default":
            fresh.reset()
            _compare_session(report, kind, f"reset {record['k']}", record, fresh)
        elif record["kind"] == "reset_named":
            if named is None:
                named = WebShopTextEnv(version="v0", data_dir=data_dir)
                named.seed_draws(7)
            named.reset(options={"session": record["session_arg"]})
            _compare_session(report, kind, f"session {record['session_arg']!r}", record, named)
        elif record["kind"] == "prefix":
            env = WebShopTextEnv(version="v0", data_dir=data_dir, session_prefix=record["session_prefix"])
            env.reset(options={"session": 5})
            report.compare(kind, "session 5", "session", record["session_after_reset_5"], env.session.session_id)
            report.compare(kind, "session 5", "url", record["url"], env.page.url)
        elif record["kind"] == "limit_goals":
            settings = {"preseed": record["preseed"], "limit_goals": record["limit"]}
            env = WebShopTextEnv(version="v0", data_dir=data_dir, **settings)
            report.compare(kind, "goals", "goals", record["goals"], [_short_record(goal) for goal in env.shop.goals])
            report.compare(kind, "first session", "session", record["first_session"], env.first_draw[1])
        elif record["kind"] == "filter_goals":
            _check_filtered(report, kind, record, data_dir)
        elif record["kind"] == "preseed":
            _check_preseed(report, kind, record, data_dir)
        else:
            raise ShopGymError(f"unknown kind {record['kind']!r}; fetch the recordings again")


def _check_filtered(report: Report, kind: str, record: dict[str, Any], data_dir: Path) -> None:
    """The recorded filter is a function; what it kept is known. Keeping just that must give the same list and draws."""
    kept = record.get("goals")
    if not isinstance(kept, list):
        report.skipped.append("construct filter_goals: neither the filter nor the goals that it kept are recorded")
        return
    as_record = bool(kept) and isinstance(kept[0], dict)
    known = {json.dumps(goal) for goal in kept}
    env = WebShopTextEnv(
        version="v0",
        data_dir=data_dir,
        preseed=record.get("preseed", 0),
        filter_goals=lambda _, goal: json.dumps(original_record(goal) if as_record else _short_record(goal)) in known,
    )
    got = [original_record(goal) if as_record else _short_record(goal) for goal in env.shop.goals]
    report.compare(kind, "goals", "goals", kept, got)
    if "first_session" in record:
        report.compare(kind, "first session", "session", record["first_session"], env.first_draw[1])


def _short_record(goal: Goal) -> list[Any]:
    return [goal.asin, goal.options, goal.price_upper, goal.instruction_text]


def _check_preseed(report: Report, kind: str, record: dict[str, Any], data_dir: Path) -> None:
    env = WebShopTextEnv(version="v0", data_dir=data_dir, preseed=record["preseed"])
    where = f"preseed {record['preseed']}"
    report.compare(kind, where, "first session", record["first_session"], env.first_draw[1])
    _compare_hashes(report, kind, record, env.shop)
    first = [original_record(goal) for goal in env.shop.goals[: len(record["first_goals"])]]
    report.compare(kind, where, "first goals", record["first_goals"], first)


def _check_verl_construct(report: Report, records: list[dict[str, Any]], data_dir: Path) -> None:
    kind = "verl construct"
    for record in records:
        report.num_records[kind] += 1
        env = WebShopTextEnv(version="v0", data_dir=data_dir, variant="verl", preseed=record["seed"])
        where = f"seed {record['seed']}"
        report.compare(kind, where, "number of goals", record["n_goals"], len(env.shop.goals))
        report.compare(kind, where, "first session", record["first_session"], env.first_draw[1])
        got = env.first_draw[0].goal_index
        report.compare(kind, where, "first goal", record["first_goal_index"], got)
        _compare_hashes(report, kind, record, env.shop)


def _compare_hashes(report: Report, kind: str, record: dict[str, Any], shop: Shop) -> None:
    goals = [original_record(goal) for goal in shop.goals]
    prices = {asin: shop.price_of(asin) for asin in shop.products}
    report.compare(kind, "shop", "goals_sha256", record["goals_sha256"], _json_hash(goals))
    report.compare(kind, "shop", "prices_sha256", record["prices_sha256"], _json_hash(prices))


def _json_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _compare_session(report: Report, kind: str, where: str, record: dict[str, Any], env: WebShopTextEnv) -> None:
    report.compare(kind, where, "session", record["session"], env.session.session_id)
    report.compare(kind, where, "goal_index", record["goal_index"], env.session.goal.goal_index)


def _check_sessions(report: Report, records: list[dict[str, Any]], data_dir: Path) -> None:
    shop = open_shop(data_dir, version="v0")
    for record in records:
        env = WebShopTextEnv(version="v0", shop=shop, **record["env_kwargs"])
        _replay_session(report, "sessions", record, env)


def _check_human_mode(report: Report, records: list[dict[str, Any]], data_dir: Path) -> None:
    env = WebShopTextEnv(version="v0", data_dir=data_dir, goals="human")
    for record in records:
        if record["kind"] == "goals":
            report.num_records["human goals"] += 1
            got = [original_record(goal) for goal in env.shop.goals]
            report.compare("human goals", "the list", "goals", record["goals"], got)
            where = "first session"
            report.compare("human goals", where, "session", record["first_session"], env.first_draw[1])
        else:
            _replay_session(report, "human sessions", record, env)


def _replay_session(report: Report, kind: str, record: dict[str, Any], env: WebShopTextEnv) -> None:
    name = f"{record.get('id', 'session')} (goal {record['session']})"
    observation, info = env.reset(options={"goal_index": record["session"]})
    report.compare(kind, name, "reset", record["reset"]["obs_text"], observation)
    instruction = record["instruction_text"].removeprefix("Instruction: ")
    report.compare(kind, name, "instruction_text", instruction, info["instruction_text"])
    _compare_page(report, kind, f"{name} reset", record["reset"], env)
    for number, step in enumerate(record["steps"]):
        where = f"{name} step {number} {step['action'][:60]!r}"
        if "seed_before" in step:
            env.seed_draws(step["seed_before"])
        observation, reward, terminated, _, info = env.step(step["action"])
        _compare_page(report, kind, where, step, env)
        if "error" in step:
            report.compare(kind, where, "action_possible", False, info["action_possible"])
        else:
            report.compare(kind, where, "returned", step.get("obs_returned", step["obs_text"]), observation)
            report.compare(kind, where, "reward", step["reward"], reward)
            report.compare(kind, where, "done", step["done"], terminated)


def _compare_page(report: Report, kind: str, where: str, record: dict[str, Any], env: WebShopTextEnv) -> None:
    report.num_records[kind] += 1
    page = env.page
    report.compare(kind, where, "obs_text", record["obs_text"], page.text)
    if "obs_rich" in record:
        report.compare(kind, where, "obs_rich", record["obs_rich"], page.text_rich)
    report.compare(kind, where, "available_actions", record["available_actions"], env.get_available_actions())
    report.compare(kind, where, "url", record["url"], page.url)


def _check_verl_sessions(report: Report, records: list[dict[str, Any]], data_dir: Path) -> None:
    kind = "verl sessions"
    for record in records:
        env = WebShopTextEnv(version="v0", data_dir=data_dir, variant="verl", preseed=record["seed"])
        observation, info = env.reset(options={"goal_index": record["session"]})
        _compare_verl(report, kind, f"{record['id']} reset", record["reset"], env, observation, info)
        for number, step in enumerate(record["steps"]):
            where = f"{record['id']} step {number} {step['action'][:60]!r}"
            observation, reward, terminated, _, info = env.step(step["action"])
            report.compare(kind, where, "reward", step["reward"], reward)
            report.compare(kind, where, "done", step["done"], terminated)
            report.compare(kind, where, "task_score", step["info"]["task_score"], info["task_score"])
            _compare_verl(report, kind, where, step, env, observation, info)


def _compare_verl(
    report: Report,
    kind: str,
    where: str,
    record: dict[str, Any],
    env: WebShopTextEnv,
    observation: str,
    info: dict[str, Any],
) -> None:
    report.num_records[kind] += 1
    report.compare(kind, where, "obs", record["obs"], observation)
    report.compare(kind, where, "won", record["info"]["won"], info["won"])
    if not record.get("done"):  # Else actions and url are those of the episode that the copy has begun by itself.
        actions = record["info"]["available_actions"]
        report.compare(kind, where, "available_actions", actions, env.get_available_actions())
        report.compare(kind, where, "url", record["url"], env.page.url)


def _check_search(report: Report, records: list[dict[str, Any]], data_dir: Path) -> None:
    shop = open_shop(data_dir, version="v0")
    for record in records:
        report.num_records["search"] += 1
        query = record["query"]
        where = repr(query[:60])
        if "tokens" in record:
            report.compare("search", where, "tokens", record["tokens"], analyze(query))
        try:
            hits = list(shop.search([query]))
        except ShopGymError:
            report.compare("search", where, "error", record.get("error"), record.get("error", "a refusal"))
            continue
        expected = [asin for asin, _ in record["hits"]] if "hits" in record else record["error"]
        report.compare("search", where, "hits", expected, hits)


def _check_doc_tokens(report: Report, records: list[dict[str, Any]], data_dir: Path) -> None:
    products = load_catalog(data_dir, version="v0").products
    for record in records:
        report.num_records["doc_tokens"] += 1
        if record["asin"] not in products:
            raise ShopGymError(f"no product has asin {record['asin']!r}")
        tokens = analyze(index_document(products[record["asin"]]))
        report.compare("doc_tokens", record["asin"], "tokens", record["tokens"], tokens)


def _check_reward(report: Report, records: list[dict[str, Any]], data_dir: Path) -> None:
    shop, nouns = open_shop(data_dir, version="v0"), load_catalog(data_dir, version="v0").nouns
    for number, record in enumerate(records):
        report.num_records["reward"] += 1
        where = f"{record['kind']} {number} ({record['asin']})"
        goal = _recorded_goal(record["goal"]) if "goal" in record else shop.goal_at(record["goal_index"])
        product, price = shop.products[record["asin"]], record["price"]
        score, info = score_v0(product, goal, record["options"], price_usd=price, nouns=nouns)
        if "error" in record:  # The original crashed (a price cap of 0 or less); v0 has some score and goes on.
            report.compare("reward", where, "score in [0, 1]", True, 0.0 <= score <= 1.0)
            continue
        report.compare("reward", where, "reward", record["reward"], score)
        report.compare("reward", where, "info", record["info"], info)


def _recorded_goal(record: dict[str, Any]) -> Goal:
    options = record["goal_options"]
    return Goal(
        goal_id="",
        goal_index=-1,
        asin=record["asin"],
        instruction_text=record["instruction_text"],
        attributes=tuple(record["attributes"]),
        options=dict(options) if isinstance(options, dict) else tuple(options),
        price_upper=float(record["price_upper"]),
        name=record["name"],
        category=record["category"],
        query=record["query"],
        product_category=record["product_category"],
        weight=float(record["weight"]),
    )


def _check_projection(report: Report, records: list[dict[str, Any]], data_dir: Path) -> None:
    try:
        project = importlib.import_module(PROJECTION_HOOK).project_think
    except (ImportError, AttributeError):
        report.skipped.append(f"projection: {PROJECTION_HOOK} is not installed")
        return
    for number, record in enumerate(records):
        report.num_records["projection"] += 1
        reply = project(record["text"])
        report.compare("projection", f"reply {number}", "action", record["action"], reply.action)
        report.compare("projection", f"reply {number}", "valid", bool(record["valid"]), reply.format_valid)


def _check_verl_goals(report: Report, records: list[dict[str, Any]], data_dir: Path) -> None:
    _check_goals(report, records, data_dir, variant="verl")


_CHECKS: dict[str, Callable[[Report, list[dict[str, Any]], Path], None]] = {
    "goals": _check_goals,
    "prices": _check_prices,
    "construct": _check_construct,
    "sessions": _check_sessions,
    "human_mode": _check_human_mode,
    "search": _check_search,
    "doc_tokens": _check_doc_tokens,
    "reward": _check_reward,
    "verl_goals_seed0": _check_verl_goals,
    "verl_construct": _check_verl_construct,
    "verl_sessions": _check_verl_sessions,
    "projection": _check_projection,
}


_REQUIRED: dict[str, frozenset[str]] = {
    "goals": frozenset({"index"}),
    "prices": frozenset({"asin", "price"}),
    "construct": frozenset({"kind"}),
    "sessions": frozenset({"env_kwargs", "session", "instruction_text", "reset", "steps"}),
    "human_mode": frozenset({"kind"}),
    "search": frozenset({"query"}),
    "doc_tokens": frozenset({"asin", "tokens"}),
    "reward": frozenset({"kind", "asin", "options", "price"}),
    "verl_goals_seed0": frozenset({"index"}),
    "verl_construct": frozenset({"seed", "n_goals", "first_session", "first_goal_index"}),
    "verl_sessions": frozenset({"id", "seed", "session", "reset", "steps"}),
    "projection": frozenset({"text", "action", "valid"}),
}
"""File -> the fields without which its records are none."""


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m webshop_env.conformance", description=__doc__.split("\n")[0])
    parser.add_argument("golden_dir", type=Path, help="directory of recordings")
    parser.add_argument("--data", type=Path, required=True, help="directory of the catalogue that was recorded")
    parser.add_argument("--show", type=int, default=5, metavar="N", help="differences to print of each kind")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # recordings may hold what no terminal can show
    return run_safely(lambda: _replay_command(options))


def _replay_command(options: argparse.Namespace) -> int:
    if options.show < 0:
        raise ShopGymError(f"--show must be a whole number of at least 0, got {options.show}")
    report = replay(options.golden_dir, options.data)
    for line in report.lines(options.show):
        say(line)
    return 1 if report.differences else 0


if __name__ == "__main__":
    sys.exit(main())
