"""What a request's body says of its answer's structure, compiled."""

from __future__ import annotations

import re

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool

from dspark.engine.grammar import Grammar, GrammarSource
from dspark.engine.queue import QueueFull
from dspark.server.errors import ApiError, client_gone
from dspark.server.protocol import GenerationParameters, StructuredOutputs
from dspark.server.state import ServerState, prefix_namespace

MOST_WAITING_TO_COMPILE = 32


async def compiled_grammar(state: ServerState, http: HttpRequest, body: GenerationParameters) -> Grammar | None:
    """What the body says of its answer's structure; None if nothing.

    What was compiled before, or refused, is there at once. Compiling can take seconds, of a few threads: other requests
    do not wait for it, and not more than so many may wait to be compiled.

    Raises:
        ApiError: 400, it cannot be compiled; 499, the client has gone.
        QueueFull: too many wait.
    """
    structured = _structure(body)
    if structured is None:
        return None
    compiler, namespace = state.engine.grammars, prefix_namespace(http, state)
    try:
        source = await run_in_threadpool(_source, structured)
        if (known := compiler.known(source, namespace=namespace)) is not None:
            return known
        if state.compiling.statistics().tasks_waiting >= MOST_WAITING_TO_COMPILE:
            raise QueueFull(f"{MOST_WAITING_TO_COMPILE} grammars are waiting to be compiled")
        async with state.compiling:
            if await http.is_disconnected():
                raise client_gone()
            return await run_in_threadpool(compiler.compile, source, namespace=namespace)
    except QueueFull:
        raise
    except ValueError as error:
        param = "response_format" if body.structured_outputs is None else "structured_outputs"
        raise ApiError(400, f"{param}: {error}", param, "invalid_value") from error


def _structure(body: GenerationParameters) -> StructuredOutputs | None:
    wanted, structured = body.response_format, body.structured_outputs
    if wanted is not None and wanted.type != "text":
        if structured is not None:
            raise ApiError(400, "response_format and structured_outputs say the same: give one", "structured_outputs")
        schema = None if wanted.json_schema is None else wanted.json_schema.schema_
        structured = StructuredOutputs.model_construct(json_=schema, json_object=schema is None)
    return structured


def _source(structured: StructuredOutputs) -> GrammarSource:
    if structured.json_ is not None:
        return GrammarSource.json_schema(structured.json_)
    if structured.regex is not None:
        return GrammarSource("regex", structured.regex)
    if structured.choice is not None:
        return GrammarSource("regex", "|".join(re.escape(choice) for choice in structured.choice))
    if structured.grammar is not None:
        return GrammarSource("lark", structured.grammar)
    return GrammarSource.json_object()
