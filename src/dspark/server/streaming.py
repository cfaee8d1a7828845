"""Answers as they grow, as server-sent events, for as long as the client is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from json import dumps
from typing import Any, Literal

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dspark.engine.request import Delta, FinishReason
from dspark.engine.submitted import Generation
from dspark.server.errors import ApiError, api_error, client_gone
from dspark.server.running import is_gone, observed
from dspark.server.state import ServerState

STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, server-sent events, each a chunk of it in JSON, and `[DONE]`",
        "content": {"text/event-stream": {}},  # OpenAPI 3.1 has no words for the schema of an event
    }
}
"""``responses`` of a route that may answer with an `EventStream`."""

_MOST_PENDING = 16
_log = logging.getLogger("dspark.server")


class EventStream(StreamingResponse):
    """Sends what comes as events; when it ends, for whatever reason, so do the generations it is made of.

    Args:
        pieces: each becomes an event. An exception becomes an ``error`` event, which is the last.
        generations: what is cancelled at the end, which is nothing to those that have finished.
    """

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncGenerator[BaseModel, None], generations: Sequence[Generation]) -> None:
        # What lies between server and client must neither keep events back nor keep them for others.
        super().__init__(_events(pieces), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generation in self._generations:
                generation.cancel()


async def together(
    state: ServerState, generations: Sequence[Generation], request: Request
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas of several generations as they come, each with the place of its generation.

    Raises:
        EngineError: a request was lost.
        ApiError: one was cancelled: 503 because the server ends, 499 because the client has gone.
    """
    pending: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(_MOST_PENDING)

    async def pump(place: int, generation: Generation) -> None:
        try:
            async with aclosing(observed(state, generation, request)) as deltas:
                async for delta in deltas:
                    await pending.put((place, delta))
        except Exception as error:
            await pending.put(error)
        else:
            await pending.put(None)

    pumps = [asyncio.create_task(pump(place, generation)) for place, generation in enumerate(generations)]
    try:
        num_open = len(pumps)
        while num_open:
            match await pending.get():
                case None:
                    num_open -= 1
                case Exception() as error:
                    raise error
                case place, delta:
                    if delta.finish_reason == "cancelled" and is_gone(request):
                        raise client_gone()
                    finish_reason(delta.finish_reason)
                    yield place, delta
    finally:
        for task in pumps:
            task.cancel()


async def until_finished(state: ServerState, generations: Sequence[Generation], request: Request) -> None:
    """Wait for all of them; if one fails or the client goes, all end.

    Raises:
        EngineError, ApiError: as `together`.
    """
    try:
        async with aclosing(together(state, generations, request)) as deltas:
            async for _ in deltas:
                pass
    finally:
        for generation in generations:
            generation.cancel()


def finish_reason(reason: FinishReason | None) -> Literal["stop", "length"] | None:
    """As clients know it. ApiError for ``cancelled``: that is no answer."""
    if reason == "cancelled":
        raise ApiError(503, "the request was cancelled: the server is shutting down", code="cancelled")
    return reason


async def _events(pieces: AsyncGenerator[BaseModel, None]) -> AsyncGenerator[str, None]:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                yield f"data: {piece.model_dump_json(exclude_unset=True)}\n\n"
    except Exception as error:
        told = api_error(error)
        if told.status == 500:
            _log.error("a stream has failed", exc_info=error)
        yield f"event: error\ndata: {dumps(told.body())}\n\n"
    else:
        yield "data: [DONE]\n\n"
