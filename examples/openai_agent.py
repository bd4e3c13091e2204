"""How good is a model behind an OpenAI-compatible endpoint? It plays a few goals, many at a time, none waiting.

Run: OPENAI_API_KEY=... python examples/openai_agent.py --base-url http://localhost:8000/v1 --model NAME [--goals 8]

Any server with POST {base-url}/chat/completions will do (`rollout/engines/openai.py`). For figures with intervals and
for comparisons use `python trainers/evaluation.py endpoint.base_url=... model=NAME`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

import webshop_env
from env_manager import EnvConfig, EnvManager
from rollout import SamplingParams, TrajectoryCollector, save_batch
from rollout.engines.openai import OpenAIEngine
from rollout.report import sample_report
from trainers.files import require_writable
from webshop_env.command_line import run_safely, say
from webshop_env.errors import ShopGymError


def at_least_one(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {word}")
    return int(word)


def temperature(word: str) -> float:
    if not math.isfinite(value := float(word)) or value < 0:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {word}")
    return value


def require_place(path: Path) -> None:
    """Replies are paid for: what becomes of them must be sure before the first request."""
    if path.is_dir():
        raise ShopGymError(f"--out: {path} is a directory; name a file")
    require_writable(path.parent, setting="--out")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True, help="where the API begins, such as http://localhost:8000/v1")
    parser.add_argument("--model", required=True, help="name of the model at that endpoint")
    parser.add_argument("--goals", type=at_least_one, default=8, help="goals to play, once each")
    parser.add_argument("--temperature", type=temperature, default=0.4)
    parser.add_argument("--max-tokens", type=at_least_one, default=512, help="of a reply")
    parser.add_argument("--parallel", type=at_least_one, default=16, help="requests under way at once")
    parser.add_argument("--out", type=Path, help="Parquet file for the episodes")
    options = parser.parse_args()
    if options.out:
        require_place(options.out)
    shop = webshop_env.open_shop()
    if options.goals > len(shop.goals):
        raise ShopGymError(f"--goals must be at most {len(shop.goals)}, the goals of the shop, got {options.goals}")

    policy = OpenAIEngine(
        options.base_url,
        options.model,
        api_key=os.environ.get("OPENAI_API_KEY", ""),
        num_parallel=options.parallel,
    )
    collector = TrajectoryCollector(EnvManager("WebShop-v1", options.goals, EnvConfig(prompt="think"), {"shop": shop}))
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    try:
        batch = collector.collect(range(options.goals), policy, params, group_size=1, update=0, seed=0)
    finally:
        policy.close()
    say(sample_report(batch, num_episodes=2, decode=lambda ids: bytes(ids.tolist()).decode()))
    figures = collector.statistics
    say(f"success {figures['rollout/success_frac']:.3f}, score {figures['rollout/task_score']:.3f}")
    if options.out:
        say(f"{len(batch)} steps saved to {save_batch(batch, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(run_safely(main))
