"""Who is shopping: a bounded store of sessions, each played in an environment of its own and kept as an episode."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from webshop_env.episodes import Episode, EpisodeRecorder
from webshop_env.errors import ShopGymError
from webshop_env.shop import Shop
from webshop_env.text_env import WebShopTextEnv

ID_BYTES = 24
"""Random bytes of a session's id: it is all that keeps strangers out."""


class ShopSession:
    """One visitor's episode. Whoever reads or steps it holds `lock`.

    Args:
        recorder: The episode, just begun.
    """

    def __init__(self, recorder: EpisodeRecorder) -> None:
        self.session_id = secrets.token_urlsafe(ID_BYTES)
        self.lock = threading.Lock()
        self.recorder = recorder
        self.notice = ""
        """What is to be told on the next page, once."""
        self.last_click: int | None = None
        """Which of the page's actions was taken last, so that the keyboard stays where it was."""
        self.is_kept = False
        """The episode is in the log."""

    @property
    def env(self) -> WebShopTextEnv:
        return self.recorder.env

    @property
    def num_steps(self) -> int:
        return len(self.recorder.steps)

    @property
    def is_over(self) -> bool:
        steps = self.recorder.steps
        return bool(steps) and (steps[-1].terminated or steps[-1].truncated)


class EpisodeLog:
    """Appends episodes to a file of JSON lines; what was appended stays, whatever happens to the process.

    Args:
        directory: Where the file goes; made where it is missing.

    Raises:
        ShopGymError: The directory cannot be made or written.
    """

    def __init__(self, directory: Path) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        self.path = directory / f"people-{stamp}-{secrets.token_hex(4)}.jsonl"
        self._lock = threading.Lock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "x", encoding="ascii")  # noqa: SIM115  (open as long as the site is)
        except OSError as error:
            raise ShopGymError(f"--record: {directory} cannot be written ({error.strerror}); name another") from None

    def append(self, episode: Episode) -> None:
        line = episode.to_line() + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Ends the file; one in which nobody shopped is removed."""
        with self._lock:
            self._file.close()
            if self.path.stat().st_size == 0:
                self.path.unlink()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLimits:
    """How much of the machine visitors may take."""

    max_sessions: int = 2000
    """The one that nobody has looked at for longest makes room for a new one."""


class SessionStore:
    """Sessions by id, so many at most.

    Args:
        shop: Where everybody shops.
        settings: Of each session's environment, beside the shop.
        limits: How many.
        log: Takes each episode when it ends, or when its session is dropped half way.
    """

    def __init__(
        self,
        shop: Shop,
        settings: dict[str, Any],
        limits: StoreLimits | None = None,
        log: EpisodeLog | None = None,
    ) -> None:
        self.shop = shop
        self.settings = settings
        self.limits = limits or StoreLimits()
        self._log = log
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, ShopSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, choose: Callable[[], dict[str, Any]]) -> ShopSession:
        """A new session.

        Args:
            choose: Gives the reset options.

        Raises:
            ShopGymError: There is no such goal.
        """
        env = WebShopTextEnv(version=self.shop.version, shop=self.shop, **self.settings)
        session = ShopSession(EpisodeRecorder(env, made_by="human", reset_options=choose()))
        with self._lock:
            self._sessions[session.session_id] = session
            dropped = []
            while len(self._sessions) > self.limits.max_sessions:
                dropped.append(self._sessions.popitem(last=False)[1])
        for old in dropped:
            with old.lock:
                self.keep(old)
        return session

    def find(self, session_id: str) -> ShopSession | None:
        """The session of that id; looking at it saves it from being the next to be dropped."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None:
                self._sessions.move_to_end(session_id)
            return session

    def keep(self, session: ShopSession) -> None:
        """Puts the episode into the log, once, if anything was done in it. The caller holds the session's lock."""
        if self._log is not None and session.num_steps and not session.is_kept:
            session.is_kept = True
            self._log.append(session.recorder.episode())

    def close(self) -> None:
        """Drops all sessions and ends the log."""
        with self._lock:
            sessions, self._sessions = list(self._sessions.values()), OrderedDict()
        for session in sessions:
            with session.lock:
                self.keep(session)
        if self._log is not None:
            self._log.close()
