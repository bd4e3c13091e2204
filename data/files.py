"""Files of one making that appear together: all of them, or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trainers.files import sync
from webshop_env.errors import ShopGymError


@contextmanager
def new_files(out: Path, names: Sequence[str]) -> Iterator[Path]:
    """A scratch folder inside `out`, whose files move to `out` when the block ends without an error.

    Args:
        out: Folder, made if missing; one that was made goes again where nothing came of it.
        names: Files that the block makes; they move in this order, so the one that speaks of the others is the last.

    Raises:
        ShopGymError: One of the names is a folder in `out`, which no file can replace.
        OSError: `out` cannot be made or written.
    """
    for name in names:
        if (out / name).is_dir():
            raise ShopGymError(f"--out {out}: {name} is a folder there; move it away or name another")
    made = [path for path in (out, *out.parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as scratch:
            yield Path(scratch)
            for name in names:
                sync(Path(scratch, name))
            for name in names:
                os.replace(Path(scratch, name), out / name)
        sync(out)
    except BaseException:  # Ctrl-C too
        for path in made:
            with suppress(OSError):  # something is in it, or it was never made
                path.rmdir()
        raise
