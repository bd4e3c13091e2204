"""The command `shopgym`: says what is installed and what a catalogue holds."""

from __future__ import annotations

import argparse
import json
import sys

from webshop_env.errors import ShopGymError


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code (2 for a caller's mistake)."""
    import webshop_env

    parser = argparse.ArgumentParser(prog="shopgym", description="WebShop environments and their catalogues.")
    parser.add_argument("--version", action="version", version=f"shopgym {webshop_env.__version__}")
    commands = parser.add_subparsers(dest="command")
    describe = commands.add_parser("describe", help="print what a catalogue holds: products, goals, splits, hash")
    describe.add_argument("--data-dir", default=None, help="directory in WebShop's format (default: the embedded one)")
    describe.add_argument("--goals", default="synthetic", choices=["synthetic", "human"])
    args = parser.parse_args(argv)

    if args.command is None:
        parser.print_help()
        return 0
    try:
        from webshop_env.shop import open_shop

        print(json.dumps(open_shop(args.data_dir, goals=args.goals).describe(), indent=2, ensure_ascii=False))
    except ShopGymError as error:
        print(f"shopgym: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
