"""The command `shopgym`: says what a catalogue holds, and checks, fetches and builds catalogues."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from webshop_env.command_line import run_safely, say
from webshop_env.datatools.build import BUILD
from webshop_env.datatools.check import CHECK
from webshop_env.datatools.command import Command
from webshop_env.datatools.fetch import FETCH


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code (2 for a caller's mistake)."""
    import webshop_env

    parser = argparse.ArgumentParser(prog="shopgym", description="WebShop environments and their catalogues.")
    parser.add_argument("--version", action="version", version=f"shopgym {webshop_env.__version__}")
    commands = parser.add_subparsers(title="commands")
    _add(commands, DESCRIBE)
    data = commands.add_parser("data", help="check, fetch and build catalogues")
    data.set_defaults(parser=data)
    data_commands = data.add_subparsers(title="commands")
    for command in (CHECK, FETCH, BUILD):
        _add(data_commands, command)
    return run_safely(lambda: _run(parser, argv))


def _run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    arguments = parser.parse_args(argv)
    if "command" not in arguments:
        getattr(arguments, "parser", parser).print_help()
        return 0
    command: Command = arguments.command
    return command.run(arguments)


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], command: Command) -> None:
    parser = commands.add_parser(command.name, help=command.summary, description=command.summary)
    command.add_arguments(parser)
    parser.set_defaults(command=command)


def _add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", default=None, help="directory in WebShop's format (default: the embedded one)")
    parser.add_argument("--goals", default="synthetic", choices=["synthetic", "human"])


def _describe(arguments: argparse.Namespace) -> int:
    from webshop_env.shop import open_shop

    say(json.dumps(open_shop(arguments.data_dir, goals=arguments.goals).describe(), indent=2, ensure_ascii=False))
    return 0


DESCRIBE = Command(
    "describe", "Print what a catalogue holds: products, goals, splits, hash.", _add_describe_arguments, _describe
)


if __name__ == "__main__":
    sys.exit(main())
