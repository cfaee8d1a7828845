"""What happens to every request before a route sees it, and to every response: id, log, key, readiness, size."""

from __future__ import annotations

import asyncio
import logging
import re
from hashlib import sha256
from hmac import compare_digest
from time import perf_counter
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.server.errors import ApiError, api_error
from dspark.server.settings import ServerSettings
from dspark.server.state import Lifecycle

__all__ = ["BodyLimit", "Gate", "Reporting"]

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
"""Answered without a key, and while the server is not ready."""

_RETRY_SECONDS = 5
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_UNPRINTABLE = re.compile(r"[^!-~]")
_MOST_LOGGED = 200  # characters of a path
_MOST_DISCARDED = 64 * 2**20  # bytes of a body that is too large: read on, so that its sender gets to see the answer
_log = logging.getLogger("dspark.server")


class Reporting:
    """Gives each request an id, logs a line of it (never its content), counts its response, and answers what failed."""

    def __init__(self, app: ASGIApp, *, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `BodyLimit` for the order."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            _log.exception("%s failed", request_id)
            if status == 0:
                await api_error(error).response()(scope, receive, send_with_id)
        finally:
            seconds = perf_counter() - began
            _log.info("%s %s %s %d %.3f s", request_id, scope["method"], _path(scope), status, seconds)
            if self._lifecycle.state is not None:
                route = getattr(scope.get("route"), "path", "other")
                self._lifecycle.state.metrics.response_sent(route, status)


class Gate:
    """Lets those in who have a key, when the server is ready; counts them in ``Lifecycle.num_open``."""

    def __init__(self, app: ASGIApp, *, lifecycle: Lifecycle, settings: ServerSettings) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._digests = [sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `BodyLimit` for the order."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        digest = sha256(_sent_key(scope))
        if self._digests and not _is_one_of(digest.digest(), self._digests):
            message = "a valid API key is needed: send it as `Authorization: Bearer KEY`"
            headers = {"WWW-Authenticate": "Bearer"}
            await ApiError(401, message, code="invalid_api_key", headers=headers).response()(scope, receive, send)
            return
        if self._digests:
            scope.setdefault("state", {})["key_digest"] = digest.hexdigest()
        self._lifecycle.num_open += 1  # before looking: a drain that begins now waits for this one
        try:
            if (why := self._lifecycle.why_unavailable) is not None:
                headers = {"Retry-After": str(_RETRY_SECONDS)}
                await ApiError(503, why, code="unavailable", headers=headers).response()(scope, receive, send)
                return
            await self._app(scope, receive, send)
        finally:
            self._lifecycle.num_open -= 1


class BodyLimit:
    """Reads a request's body up to ``max_body_bytes``, however it is sent, and hands it on whole.

    The order of the three: `Reporting` around `Gate` around this one.
    """

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                body = await _body(receive, self._settings.max_body_bytes)
        except _Gone:
            return
        except (TimeoutError, ApiError) as error:
            slow = ApiError(408, f"the body did not arrive in {self._settings.body_seconds:g} seconds")
            answer = error if isinstance(error, ApiError) else slow
            answer.headers["Connection"] = "close"  # what is left of the body is not read
            await answer.response()(scope, receive, send)
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, receive_again, send)


class _Gone(Exception):
    """The client has left in the middle of its request."""


async def _body(receive: Receive, most: int) -> bytes:
    """The whole body; ApiError 413 once it is longer than ``most`` bytes, of which no more than these are kept."""
    parts: list[bytes] = []
    length, more = 0, True
    while more and length <= most + _MOST_DISCARDED:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        part = message.get("body", b"")
        length += len(part)
        if length > most:
            parts.clear()
        else:
            parts.append(part)
        more = message.get("more_body", False)
    if length > most:
        raise ApiError(413, f"the body is larger than {most} bytes, the most that is taken", code="body_too_large")
    return b"".join(parts)


def _request_id(scope: Scope) -> str:
    """What the client calls it, if that can stand in a header and a log line; one of our own otherwise."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid4().hex}"


def _path(scope: Scope) -> str:
    """As it was sent, without the query; nothing in it can begin a log line or move a terminal's cursor."""
    sent: bytes = scope.get("raw_path") or scope["path"].encode()
    return _UNPRINTABLE.sub("?", sent.decode("latin-1"))[:_MOST_LOGGED]


def _sent_key(scope: Scope) -> bytes:
    """What stands behind ``Bearer``; empty if nothing does."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
    return b""


def _is_one_of(digest: bytes, digests: list[bytes]) -> bool:
    """In a time that tells nothing of where they differ, of how long a key is, or of which one it is."""
    return sum(compare_digest(digest, known) for known in digests) > 0
