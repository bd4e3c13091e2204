"""What lies under the directory that the viewer was given; nothing else can be named.

A place is a path relative to that directory. Whatever it leads to, through links or dots, must lie in it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from webshop_env.errors import ShopGymError

MAX_DEPTH = 6
MAX_FILES = 20_000
"""Entries that are looked at before the list is cut."""
_HEAD_BYTES = 200
_MOST_FOOTER_BYTES = 1 << 26


@dataclass(slots=True)
class Found:
    """What there is to look at, as places in order of their names."""

    runs: list[str] = field(default_factory=list)
    """Directories of training runs."""
    rollouts: list[str] = field(default_factory=list)
    """Parquet files."""
    playbacks: list[str] = field(default_factory=list)
    """Episode files."""
    texts: list[str] = field(default_factory=list)
    """Reports of validations."""
    is_cut: bool = False

    def under(self, run: str) -> Found:
        """What belongs to a run."""
        lead = f"{run}/" if run != "." else ""
        return Found(
            rollouts=[place for place in self.rollouts if place.startswith(lead)],
            playbacks=[place for place in self.playbacks if place.startswith(lead)],
            texts=[place for place in self.texts if place.startswith(lead)],
        )


class Places:
    """A directory, or one file of it.

    Args:
        view: What the user named.

    Raises:
        ShopGymError: It is not there, or a file of another kind.
    """

    def __init__(self, view: Path) -> None:
        try:
            resolved = view.resolve(strict=True)
        except (OSError, RuntimeError):
            raise ShopGymError(f"{view}: does not exist; name a run directory, a rollout or an episode file") from None
        self.only = resolved.name if resolved.is_file() else None
        """The one file that may be seen, where the user named a file."""
        self.root = resolved.parent if self.only else resolved
        if self.only and (resolved.suffix not in (".parquet", ".jsonl", ".txt") or _is_other_table(resolved)):
            raise ShopGymError(f"{view}: is none of the files that are shown here; name a rollout or an episode file")

    def find(self, place: str) -> Path:
        """The file or directory of a place.

        Raises:
            ShopGymError: There is none, or it lies elsewhere.
        """
        refusal = ShopGymError("There is nothing of that name here.")
        if not place or len(place) > 1000 or "\0" in place or place.startswith(("/", "\\")):
            raise refusal
        try:
            path = (self.root / place).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            raise refusal from None
        if not path.is_relative_to(self.root) or not (path.is_file() or path.is_dir()):
            raise refusal
        if self.only is not None and path != self.root / self.only:
            raise refusal
        return path

    def look(self) -> Found:
        """Everything that can be shown. Links are not followed, hidden names not listed."""
        found = Found()
        if self.only is not None:
            self._take(found, self.root / self.only)
            return found
        seen = 0
        for folder, folders, files in os.walk(self.root, followlinks=False):
            here = Path(folder)
            depth = len(here.relative_to(self.root).parts)
            folders[:] = sorted(n for n in folders if not n.startswith(".") and depth < MAX_DEPTH)
            seen += len(files) + len(folders)
            if seen > MAX_FILES:
                found.is_cut = True
                break
            for name in sorted(files):
                path = here / name
                if not name.startswith(".") and not path.is_symlink() and _is_text(str(path)):
                    self._take(found, path)
        return found

    def _take(self, found: Found, path: Path) -> None:
        place = path.relative_to(self.root).as_posix()
        if path.name == "metrics.jsonl":
            found.runs.append(path.parent.relative_to(self.root).as_posix())
        elif path.suffix == ".parquet" and not _is_other_table(path):
            found.rollouts.append(place)
        elif path.suffix == ".jsonl" and _begins_an_episode(path):
            found.playbacks.append(place)
        elif path.suffix == ".txt" and path.parent.name == "validations":
            found.texts.append(place)


def _is_text(name: str) -> bool:
    """Whether a name can stand in an address."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _begins_an_episode(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return b'"shopgym_episode"' in file.read(_HEAD_BYTES)
    except OSError:
        return False


def _is_other_table(path: Path) -> bool:
    """Whether it is a whole Parquet file, but no rollout: results of an evaluation, a list of goals.

    The names of columns stand in the file's last part, which this reads without the libraries for such files.
    """
    try:
        with open(path, "rb") as file:
            file.seek(-8, os.SEEK_END)
            length, mark = int.from_bytes(file.read(4), "little"), file.read(4)
            if mark != b"PAR1" or length > _MOST_FOOTER_BYTES:
                return False
            file.seek(-8 - length, os.SEEK_END)
            return b"action_possible" not in file.read(length)
    except OSError:
        return False


def read_metrics(path: Path, max_bytes: int = 64 * 1024 * 1024) -> list[dict[str, float]]:
    """Lines of a run's metrics.jsonl, the newest where it is very long; one that is being written is left out."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - max_bytes, 0))
            data = file.read(max_bytes)
    except OSError as error:
        raise ShopGymError(f"The metrics cannot be read: {error.strerror}.") from None
    lines = []
    for text in data.decode("utf-8", "replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("update"), int):
            lines.append({key: value for key, value in line.items() if _is_number(value)})
    return lines


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) < 1e300
