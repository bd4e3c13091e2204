"""How the scripts of this directory begin and end: settings or an explanation; one line and exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trainers.settings import explain, resolve
from webshop_env.errors import ShopGymError, no_permission


def settings_of(arguments: Sequence[str], kind: type[Any], doc: str | None) -> tuple[Any, list[str]] | None:
    """Settings of a script and notes for its user; None after `--help` or `--explain`, which print everything.

    Args:
        arguments: Words of the command line.
        kind: The script's settings.
        doc: What the script says about itself.
    """
    wants_help = [word for word in arguments if word in ("--help", "-h", "--explain")]
    settings, notes, sources = resolve([word for word in arguments if word not in wants_help], kind)
    if not wants_help:
        return settings, notes
    print(doc)
    print(explain(settings, sources))
    for note in notes:
        print(f"note: {note}")
    return None


def run_command(main: Callable[[list[str]], None]) -> None:
    """Runs a script's `main` with the words of the command line, and exits; of many ranks the first one speaks."""
    try:
        main(sys.argv[1:])
    except ShopGymError as error:
        _refuse(str(error))
    except PermissionError as error:
        _refuse(no_permission(error))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def _refuse(why: str) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {why}", file=sys.stderr)
    sys.exit(2)
