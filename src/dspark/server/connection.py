"""A client's connection, on which nobody can send a request's head without end or for ever."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["KEEP_ALIVE_SECONDS", "MOST_HEAD_BYTES", "HttpConnection"]

KEEP_ALIVE_SECONDS = 60
"""A connection without a request is kept for."""
MOST_HEAD_BYTES = 64 * 2**10
"""Of a request's first line and headers, which are held before anybody can look for a key; 400 above."""


class HttpConnection(H11Protocol):
    """HTTP as uvicorn speaks it with h11, which limits what a head may hold: with httptools heads have no end.

    Attributes:
        head_seconds: in which a request's head has to have arrived, or the connection is closed without an answer. More
            than a connection is kept without a request.
    """

    head_seconds = KEEP_ALIVE_SECONDS + 15.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio.Protocol."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Called behind every response."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio.Protocol."""
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        """Let the time run while a head is waited for, however many pieces of it come, and only then."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.head_seconds, self.timeout_keep_alive_handler)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
