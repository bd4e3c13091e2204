"""How the scripts of this directory begin and end: settings or an explanation; a line a mistake and exit code 2."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trainers.errors import TrainingError
from trainers.ranks import leave_process
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
    """Runs a script's `main` with the words of the command line, and exits.

    Of many ranks the first one speaks, but for what went wrong on another alone. Exit codes: 2 where the caller has
    to change something, 1 where the run could not go on, 130 where it was stopped at once.
    """
    try:
        main(sys.argv[1:])
        leave_process()
    except ShopGymError as error:
        _refuse(str(error))
    except PermissionError as error:
        _refuse(no_permission(error))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        _refuse(f"{str(error.filename)[:60]}...: the name is too long for a file; give a shorter one")
    except TrainingError as error:
        _refuse(str(error), code=1, on_every_rank=error.on_every_rank)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        leave_process(130)
        sys.exit(130)


def _refuse(why: str, *, code: int = 2, on_every_rank: bool = True) -> NoReturn:
    if os.environ.get("RANK", "0") == "0" or not on_every_rank:
        for line in why.splitlines():
            print(f"error: {line}", file=sys.stderr)
    leave_process(code)
    sys.exit(code)
