"""A generation as the server runs it: ended when its client has gone, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request

from dspark.engine.grammar import GrammarError
from dspark.engine.request import Delta
from dspark.engine.submitted import EngineError, Generation
from dspark.server.errors import ApiError
from dspark.server.state import ServerState

__all__ = ["is_gone", "observed"]


async def observed(state: ServerState, generation: Generation, request: Request) -> AsyncGenerator[Delta, None]:
    """The deltas of a generation; every generation of the server goes through here once.

    It is cancelled when the client disconnects (it then ends with what there was) and when the iterator is closed.

    Raises:
        EngineError: the request was lost.
        ApiError: 400, its own grammar has ended it.
    """
    watcher = asyncio.create_task(_cancel_when_gone(request, generation))
    observation = state.metrics.observe(generation.request)
    try:
        async with aclosing(generation.__aiter__()) as deltas:
            async for delta in deltas:
                observation.delta(delta)
                yield delta
        observation.finished(generation.result())
    except EngineError as error:
        observation.end_open("error")
        if isinstance(error.__cause__, GrammarError):
            raise ApiError(400, str(error.__cause__), code="grammar_failed") from error
        raise
    finally:
        watcher.cancel()
        generation.cancel()
        observation.end_open("abort")


async def _cancel_when_gone(request: Request, generation: Generation) -> None:
    """The body has been read: all that can still come from the client is that it is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    request.state.is_gone = True
    generation.cancel()


def is_gone(request: Request) -> bool:
    """Whether the client of a request that is `observed` has disconnected."""
    return bool(getattr(request.state, "is_gone", False))
