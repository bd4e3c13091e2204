"""What the data commands have in common: `shopgym data NAME` and `python -m data.NAME` are the same command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from webshop_env.errors import ShopGymError, no_permission


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what it takes and what it does."""

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit code; a caller's mistake is raised as ShopGymError."""

    def main(self, argv: Sequence[str] | None = None) -> int:
        """The command on its own; returns the exit code, 2 for a caller's mistake."""
        parser = argparse.ArgumentParser(prog=f"python -m data.{self.name}", description=self.summary)
        self.add_arguments(parser)
        return self.run_safely(parser.parse_args(argv))

    def run_safely(self, arguments: argparse.Namespace) -> int:
        try:
            return self.run(arguments)
        except ShopGymError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except PermissionError as error:
            print(f"error: {no_permission(error)}", file=sys.stderr)
            return 2
