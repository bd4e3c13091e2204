"""What the data commands have in common: `shopgym data NAME` and `python -m data.NAME` are the same command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from webshop_env.command_line import run_safely


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
        return run_safely(lambda: self.run(parser.parse_args(argv)))
