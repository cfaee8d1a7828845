"""From the port to the last answer: HTTP in a thread of its own, and an orderly end when one is asked for."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from dspark.server.connection import KEEP_ALIVE_SECONDS, MOST_HEAD_BYTES, HttpConnection
from dspark.server.settings import ServerSettings
from dspark.server.state import Lifecycle

__all__ = ["HttpServer", "allow_many_connections", "serve_until_told"]

_LOOK_SECONDS = 0.25
_FAREWELL_SECONDS = 5.0  # for answers that are complete to reach their clients
_BACKLOG = 2048
_MOST_FILES = 65536
_log = logging.getLogger("dspark.server")


class HttpServer:
    """Listens from the moment it is made, answers from `start` to `stop`; computing is left to other threads.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        self._socket = _listening(settings.host, settings.port)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                http=HttpConnection,
                h11_max_incomplete_event_size=MOST_HEAD_BYTES,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(_FAREWELL_SECONDS),
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="dspark-http", daemon=True
        )

    @property
    def is_alive(self) -> bool:
        """Whether requests are heard."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Answer requests."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port and, a few seconds later at most, all connections."""
        self._server.should_exit = True
        self._thread.join(timeout=3 * _FAREWELL_SECONDS)


def serve_until_told(http: HttpServer, lifecycle: Lifecycle, settings: ServerSettings) -> int:
    """Wait in the main thread for SIGTERM or Ctrl-C, then end in good order; a second signal ends the process at once.

    In good order: new requests are refused with 503, those that run may finish for ``drain_seconds`` and are cancelled
    then, and every answer still goes out.

    Returns:
        The process's exit code: 0, or 1 if the engine or HTTP has ended by itself.
    """
    assert lifecycle.state is not None, "the server is ready"
    engine = lifecycle.state.engine
    told = threading.Event()

    def tell(number: int, frame: FrameType | None) -> None:
        if told.is_set():
            os._exit(128 + number)
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    while not told.wait(_LOOK_SECONDS):
        if not engine.is_alive or not http.is_alive:
            _log.critical("%s has ended: the server ends, too", "HTTP" if engine.is_alive else "the engine")
            _wait_for_answers(lifecycle, _FAREWELL_SECONDS)
            http.stop()
            return 1
    lifecycle.drain()
    _log.info("shutting down: %d requests may finish in %g s", lifecycle.num_open, settings.drain_seconds)
    if not _wait_for_answers(lifecycle, settings.drain_seconds):
        _log.warning("shutting down: %d requests are cancelled", lifecycle.num_open)
    engine.close()
    _wait_for_answers(lifecycle, _FAREWELL_SECONDS)
    http.stop()
    return 0


def _wait_for_answers(lifecycle: Lifecycle, seconds: float) -> bool:
    """Whether all open requests were answered in time."""
    end = time.monotonic() + seconds
    while lifecycle.num_open > 0 and time.monotonic() < end:
        time.sleep(0.02)
    return lifecycle.num_open == 0


def allow_many_connections() -> None:
    """Let the process have as many files open as it may: a connection is one, and 1,024 are few beside a queue."""
    with suppress(ImportError, ValueError, OSError):  # where there is no such limit, or it cannot be changed
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen at {host}, port {port}: {reason} (choose another --host or --port)") from error
