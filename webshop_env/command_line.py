"""How commands speak and end: without a traceback for what their user did, and without losing work to a closed pipe."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from webshop_env.errors import ShopGymError, no_permission


def run_safely(action: Callable[[], int]) -> int:
    """Runs a command; however it ends, there is no traceback for what its user did.

    A reader who has seen enough, as `head` has, ends a command that prints without `say`: that is no error.

    Returns:
        The exit code: the action's own, 2 for a caller's mistake, which is told on stderr, 130 after Ctrl-C.
    """
    code, why = 0, ""
    try:
        code = action()
    except ShopGymError as error:
        code, why = 2, str(error)
    except PermissionError as error:
        code, why = 2, no_permission(error)
    except BrokenPipeError:
        _silence()
    except OSError as error:
        if error.filename is not None:  # such as a name that is too long
            code, why = 2, f"{error.filename}: {error.strerror}; name another place"
        elif error.errno == errno.ENOSPC:  # files that are written have their own line for it, this is `print`
            _silence()
            code, why = 2, _cannot_print(error)
        else:
            raise
    except KeyboardInterrupt:
        code = 130
    finally:
        try:
            if sys.stdout is not None:
                sys.stdout.flush()  # now, not at Python's end, where it can no longer be caught
        except OSError as error:
            _silence()
            if not isinstance(error, BrokenPipeError) and not why:
                code, why = 2, _cannot_print(error)
    told = "stopped\n" if code == 130 else "".join(f"error: {line}\n" for line in why.splitlines())
    with suppress(OSError):  # stderr may have gone with stdout; the exit code still tells
        if told:
            sys.stderr.write(told)
            sys.stderr.flush()
    return code


def say(text: str) -> None:
    """Prints at once. A reader who has seen enough ends the talking and not the work.

    Raises:
        ShopGymError: The output goes to a place that cannot be written; an OSError would be taken for one of the work.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _silence()
    except OSError as error:
        _silence()
        raise ShopGymError(_cannot_print(error)) from None


def _cannot_print(error: OSError) -> str:
    return f"standard output: cannot be written ({error.strerror}); send it elsewhere"


def _silence() -> None:
    """Sends the rest of stdout nowhere, also what is left in its buffer, which Python would write at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
