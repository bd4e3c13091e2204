"""What does an episode look like? A rule-based shopper plays one and every step is printed.

Run: python examples/one_episode.py [goal_index]
"""

from __future__ import annotations

import argparse
import sys

import gymnasium

import webshop_env
from webshop_env.command_line import run_safely
from webshop_env.policies import RulePolicy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("goal_index", nargs="?", type=int, default=0)
    goal_index = parser.parse_args().goal_index
    shop = webshop_env.open_shop()
    env = gymnasium.make("WebShop-v1", shop=shop)
    policy = RulePolicy(shop)

    observation, info = env.reset(options={"goal_index": goal_index})
    print("goal:", info["instruction_text"])
    is_over = False
    while not is_over:
        action = policy.act(observation, info)
        observation, reward, terminated, truncated, info = env.step(action)
        print(f"{action} (reward {reward:g})\n    {observation[:160]}")
        is_over = terminated or truncated
    print(f"score {info['task_score']:.3f}, won: {info['won']}, because {info['reward_breakdown']}")
    return 0


if __name__ == "__main__":
    sys.exit(run_safely(main))
