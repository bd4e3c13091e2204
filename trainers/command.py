"""How the scripts of this directory end: a caller's mistake is one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

from webshop_env.errors import ShopGymError, no_permission


def run_command(main: Callable[[list[str]], None]) -> None:
    """Runs a script's `main` with the words of the command line, and exits."""
    try:
        main(sys.argv[1:])
    except ShopGymError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except PermissionError as error:
        print(f"error: {no_permission(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
