"""The server: waitress, a pool of threads, limits on everything that a visitor sends."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from waitress import wasyncore
from waitress.server import create_server

from webshop_env.errors import ShopGymError
from webshop_env.site.app import MAX_BODY_BYTES

if TYPE_CHECKING:
    from flask import Flask

THREADS = 8
_LIMITS: dict[str, Any] = {
    "threads": THREADS,
    "max_request_body_size": MAX_BODY_BYTES,
    "max_request_header_size": 32 * 1024,
    "channel_timeout": 60,
    "connection_limit": 500,
    "ident": "",
    "clear_untrusted_proxy_headers": True,
}


class SiteServer:
    """Serves an application until it is closed; as a context manager it does so in a thread of its own.

    Args:
        app: From `create_app`.
        host: Address to listen on.
        port: 0 takes a free one.

    Raises:
        ShopGymError: The address cannot be listened on.
    """

    def __init__(self, app: Flask, host: str = "127.0.0.1", port: int = 0) -> None:
        self.app = app
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # else it tells of every visitor who waits
        self._host = host
        try:
            self._server: Any = create_server(app, host=host, port=port, **_LIMITS)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ShopGymError(f"cannot listen on {host}:{port} ({reason}); name another --host or --port") from None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def url(self) -> str:
        """Where it is."""
        listening = getattr(self._server, "effective_listen", None)
        port = listening[0][1] if listening else self._server.effective_port
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}/"

    def run(self) -> None:
        """Serves until the process is interrupted."""
        self._server.run()

    def close(self) -> None:
        """Stops, lets go of the address, and drops all sessions; a second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):
            self._server.close()
        self._server.task_dispatcher.shutdown()
        wasyncore.close_all(self._server._map, ignore_all=True)
        if self._thread is not None:
            self._thread.join(timeout=10)
        self.app.extensions["store"].close()

    def __enter__(self) -> SiteServer:
        self._thread = threading.Thread(target=self._serve, daemon=True, name="shopgym-site")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        with suppress(OSError, ValueError):  # its sockets are closed under it
            self._server.run()
