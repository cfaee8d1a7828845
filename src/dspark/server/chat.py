"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from dspark.engine.grammar import Grammar
from dspark.engine.request import Completion, RequestResult, TokenLogprob
from dspark.engine.request import Request as EngineRequest
from dspark.engine.submitted import Generation
from dspark.models.chat import chat_token_ids
from dspark.server.chat_protocol import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    LikelyToken,
    TokenLogprobs,
)
from dspark.server.engine_requests import check_length, check_model, engine_requests, submit, user_errors
from dspark.server.errors import ERROR_RESPONSES
from dspark.server.state import CurrentState, ServerState
from dspark.server.streaming import STREAM_RESPONSES, EventStream, finish_reason, together, until_finished
from dspark.server.structured_output import compiled_grammar
from dspark.server.token_texts import TokenTexts, finite
from dspark.server.usage import StreamedUsage, speculation_of, usage_of

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatResponse,
    responses={**ERROR_RESPONSES, **STREAM_RESPONSES},
)
async def create_chat_completion(body: ChatRequest, request: Request, state: CurrentState) -> Response:
    """Answer a conversation."""
    with user_errors("messages"):
        check_model(state, body.model)
        grammar = await compiled_grammar(state, request, body)
        asked = await run_in_threadpool(_asked, state, request, body, grammar)
        generations = submit(state, asked)
    if body.stream:
        return EventStream(_chunks(state, request, body, generations), generations)
    await until_finished(state, generations, request)
    return await run_in_threadpool(_response, state, body, generations[0].result())


def _asked(state: ServerState, request: Request, body: ChatRequest, grammar: Grammar | None) -> list[EngineRequest]:
    prompt_ids = chat_token_ids(state.tokenizer, [message.for_template() for message in body.messages])
    check_length(state, prompt_ids, "messages")
    if body.logprobs:
        _ = state.token_texts  # takes a while, the first time
    return engine_requests(
        state,
        request,
        body,
        [prompt_ids],
        grammar,
        max_tokens=body.max_completion_tokens or body.max_tokens or state.engine.max_length,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _response(state: ServerState, body: ChatRequest, result: RequestResult) -> Response:
    response = ChatResponse(
        **state.heading("chatcmpl"),
        object="chat.completion",
        choices=[_choice(state, index, completion) for index, completion in enumerate(result.completions)],
        usage=usage_of([result]),
    )
    if body.return_speculation:
        response.speculation = speculation_of([result])
    return Response(response.model_dump_json(exclude_unset=True), media_type="application/json")


def _choice(state: ServerState, index: int, completion: Completion) -> ChatChoice:
    reason = finish_reason(completion.finish_reason)
    assert reason is not None
    return ChatChoice(
        index=index,
        message=AnswerMessage(role="assistant", content=completion.text, refusal=None),
        logprobs=_logprobs(state, completion.logprobs),
        finish_reason=reason,
    )


async def _chunks(
    state: ServerState, request: Request, body: ChatRequest, generations: Sequence[Generation]
) -> AsyncGenerator[ChatChunk, None]:
    """An answer's first chunk has the role, its last one the finish reason; usage and the like come behind them all."""
    (generation,) = generations
    counting = StreamedUsage(body, len(generation.request.prompt_ids))
    shared = {**state.heading("chatcmpl"), "object": "chat.completion.chunk"}
    begun: set[int] = set()
    async for _, delta in together(state, generations, request):
        counting.completion_tokens += len(delta.token_ids)
        if delta.choice not in begun:
            begun.add(delta.choice)
            first = ChatDelta(role="assistant", content="")
            choice = ChatChunkChoice(index=delta.choice, delta=first, logprobs=None, finish_reason=None)
            yield ChatChunk(**shared, choices=[choice], **counting.so_far())
        if delta.text or delta.logprobs or delta.finish_reason:
            added = ChatDelta(content=delta.text) if delta.text or not delta.finish_reason else ChatDelta()
            logprobs = _logprobs(state, delta.logprobs or None)
            reason = finish_reason(delta.finish_reason)
            choice = ChatChunkChoice(index=delta.choice, delta=added, logprobs=logprobs, finish_reason=reason)
            yield ChatChunk(**shared, choices=[choice], **counting.so_far())
    if last := counting.at_the_end([generation.result()]):
        yield ChatChunk(**shared, choices=[], **last)


def _logprobs(state: ServerState, logprobs: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    if logprobs is None:
        return None
    texts = state.token_texts
    content = [
        TokenLogprobs(
            **_likely(texts, token.token_id, token.logprob),
            top_logprobs=[LikelyToken(**_likely(texts, other, logprob)) for other, logprob in token.top],
        )
        for token in logprobs
    ]
    return ChatLogprobs(content=content, refusal=None)


def _likely(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": texts.text_of(token_id),
        "logprob": finite(logprob),
        "bytes": list(texts.bytes_of(token_id)),
    }
