"""How good is a model behind an OpenAI-compatible endpoint? It plays a few goals, many at a time, none waiting.

Run: OPENAI_API_KEY=... python examples/openai_agent.py --base-url http://localhost:8000/v1 --model NAME [--goals 8]

Any server with POST {base-url}/chat/completions will do (`rollout/engines/openai.py`). For figures with intervals and
for comparisons use `python trainers/evaluation.py endpoint.base_url=... model=NAME`.
"""

from __future__ import annotations

import argparse
import os
import sys

from env_manager import EnvConfig, EnvManager
from rollout import SamplingParams, TrajectoryCollector, save_batch
from rollout.engines.openai import OpenAIEngine
from rollout.report import sample_report
from webshop_env.errors import ShopGymError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True, help="where the API begins, such as http://localhost:8000/v1")
    parser.add_argument("--model", required=True, help="name of the model at that endpoint")
    parser.add_argument("--goals", type=int, default=8, help="goals to play, once each")
    parser.add_argument("--temperature", type=float, default=0.4)
    parser.add_argument("--max-tokens", type=int, default=512, help="of a reply")
    parser.add_argument("--parallel", type=int, default=16, help="requests under way at once")
    parser.add_argument("--out", help="Parquet file for the episodes")
    options = parser.parse_args()

    policy = OpenAIEngine(
        options.base_url,
        options.model,
        api_key=os.environ.get("OPENAI_API_KEY", ""),
        num_parallel=options.parallel,
    )
    collector = TrajectoryCollector(EnvManager("WebShop-v1", options.goals, EnvConfig(prompt="think")))
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    try:
        batch = collector.collect(range(options.goals), policy, params, group_size=1, update=0, seed=0)
    finally:
        policy.close()
    print(sample_report(batch, num_episodes=2, decode=lambda ids: bytes(ids.tolist()).decode()))
    figures = collector.statistics
    print(f"success {figures['rollout/success_frac']:.3f}, score {figures['rollout/task_score']:.3f}")
    if options.out:
        print(f"{len(batch)} steps saved to {save_batch(batch, options.out)}")


if __name__ == "__main__":
    try:
        main()
    except ShopGymError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
