"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from itertools import chain

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from dspark.engine.grammar import Grammar
from dspark.engine.request import Completion, TokenLogprob
from dspark.engine.request import Request as EngineRequest
from dspark.engine.submitted import Generation
from dspark.models.chat import text_token_ids
from dspark.server.completion_protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Prompt,
)
from dspark.server.engine_requests import check_length, check_model, engine_requests, submit, user_errors
from dspark.server.errors import ERROR_RESPONSES, ApiError
from dspark.server.state import CurrentState, ServerState
from dspark.server.streaming import STREAM_RESPONSES, EventStream, finish_reason, together, until_finished
from dspark.server.structured_output import compiled_grammar
from dspark.server.token_texts import TextOffsets, TokenTexts, finite
from dspark.server.usage import StreamedUsage, speculation_of, usage_of

router = APIRouter()

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MOST_ECHOED_LOGPROBS = 2**20  # of all answers together: 30 MB or more, which are written out at once


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses={**ERROR_RESPONSES, **STREAM_RESPONSES},
)
async def create_completion(body: CompletionRequest, request: Request, state: CurrentState) -> Response:
    """Continue one text or several, as they are."""
    with user_errors("prompt"):
        check_model(state, body.model)
        grammar = await compiled_grammar(state, request, body)
        asked = await run_in_threadpool(_asked, state, request, body, grammar)
        generations = submit(state, asked)
    if body.stream:
        return EventStream(_chunks(state, request, body, generations), generations)
    await until_finished(state, generations, request)
    return await run_in_threadpool(_response, state, body, generations)


def _asked(
    state: ServerState, request: Request, body: CompletionRequest, grammar: Grammar | None
) -> list[EngineRequest]:
    num_answers, most = len(body.prompt) * (body.n or 1), state.engine.settings.max_waiting
    if num_answers > most:
        raise ApiError(400, f"prompt and n ask for {num_answers} answers; {most} may wait here", "prompt")
    prompts = [text_token_ids(state.tokenizer, prompt) if isinstance(prompt, str) else prompt for prompt in body.prompt]
    for prompt_ids in prompts:
        check_length(state, prompt_ids, "prompt")
    if body.logprobs is not None:
        echoed = sum(map(len, prompts)) * (body.n or 1) * (1 + body.logprobs) if body.echo else 0
        if echoed > MOST_ECHOED_LOGPROBS:
            raise ApiError(
                400,
                f"logprobs and echo ask for {echoed} log-probabilities of prompts, n times each; a request has "
                f"{MOST_ECHOED_LOGPROBS} at most",
                "logprobs",
                "invalid_value",
            )
        _ = state.token_texts  # takes a while, the first time
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return engine_requests(
        state,
        request,
        body,
        prompts,
        grammar,
        max_tokens=max(max_tokens, 1),  # the engine makes one; `_choice` drops it
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def _response(state: ServerState, body: CompletionRequest, generations: Sequence[Generation]) -> Response:
    results = [generation.result() for generation in generations]
    choices = [
        _choice(state, body, place, generation, completion)
        for place, generation in enumerate(generations)
        for completion in results[place].completions
    ]
    for index, choice in enumerate(choices):
        choice.index = index
    response = CompletionResponse(
        **state.heading("cmpl"),
        object="text_completion",
        choices=choices,
        usage=usage_of(results, completion_tokens=0 if body.max_tokens == 0 else None),
    )
    if body.return_speculation:
        response.speculation = speculation_of(results)
    return Response(response.model_dump_json(exclude_unset=True), media_type="application/json")


def _choice(
    state: ServerState, body: CompletionRequest, place: int, generation: Generation, completion: Completion
) -> CompletionChoice:
    echo = _echoed(state, body.prompt[place]) if body.echo else ""
    generated = completion.logprobs or ()
    text, reason = completion.text, finish_reason(completion.finish_reason)
    if body.max_tokens == 0:
        generated, text, reason = (), "", "length"
    logprobs = None
    if body.logprobs is not None:
        rows = _LogprobRows(state.token_texts)
        if body.echo:
            others = generation.result().prompt_logprobs
            assert others is not None
            rows.add_prompt(generation.request.prompt_ids[0], others, echo)
        rows.add(generated)
        logprobs = rows.taken()
    return CompletionChoice(index=0, text=echo + text, logprobs=logprobs, finish_reason=reason)


async def _chunks(
    state: ServerState, request: Request, body: CompletionRequest, generations: Sequence[Generation]
) -> AsyncGenerator[CompletionResponse, None]:
    """An answer's first chunk begins with what is echoed, its last one has the finish reason."""
    counting = StreamedUsage(body, sum(len(generation.request.prompt_ids) for generation in generations))
    shared = {**state.heading("cmpl"), "object": "text_completion"}
    rows: dict[int, _LogprobRows] = {}
    begun: set[int] = set()
    async for place, delta in together(state, generations, request):
        counting.completion_tokens += len(delta.token_ids)
        index = place * (body.n or 1) + delta.choice
        text, logprobs = delta.text, None
        if index not in begun:
            begun.add(index)
            text = _echoed(state, body.prompt[place]) + text if body.echo else text
        if delta.logprobs:
            of_choice = rows.setdefault(index, _LogprobRows(state.token_texts))
            of_choice.add(delta.logprobs)
            logprobs = of_choice.taken()
        if text or logprobs or delta.finish_reason:
            reason = finish_reason(delta.finish_reason)
            choice = CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)
            yield CompletionResponse(**shared, choices=[choice], **counting.so_far())
    if last := counting.at_the_end([generation.result() for generation in generations]):
        yield CompletionResponse(**shared, choices=[], **last)


def _echoed(state: ServerState, prompt: Prompt) -> str:
    text = prompt if isinstance(prompt, str) else state.tokenizer.decode(prompt, skip_special_tokens=False)
    assert isinstance(text, str)
    return text


class _LogprobRows:
    """Log-probabilities of an answer as they come."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offsets = TextOffsets()
        self._rows = _no_rows()

    def add_prompt(self, first: int, others: Sequence[TokenLogprob], text: str) -> None:
        """An echoed prompt: the first token has no log-probability.

        Args:
            text: as it is echoed; special tokens that the tokenizer has put around it are not in it.
        """
        for token_id, token in chain([(first, None)], ((other.token_id, other) for other in others)):
            is_shown = not self._texts.is_special(token_id) or text.startswith(
                self._texts.text_of(token_id), self._offsets.position
            )
            self._add(token_id, token, is_shown)

    def add(self, tokens: Sequence[TokenLogprob]) -> None:
        """Generated tokens."""
        for token in tokens:
            self._add(token.token_id, token, not self._texts.is_special(token.token_id))

    def taken(self) -> CompletionLogprobs:
        """Those added since the last time."""
        rows, self._rows = self._rows, _no_rows()
        return rows

    def _add(self, token_id: int, token: TokenLogprob | None, is_shown: bool) -> None:
        text = self._texts.text_of(token_id)
        self._rows.tokens.append(text)
        self._rows.text_offset.append(self._offsets.push(self._texts.bytes_of(token_id) if is_shown else b""))
        if token is None:
            self._rows.token_logprobs.append(None)
            self._rows.top_logprobs.append(None)
            return
        # The likeliest first: whoever looks for the greatest finds it even if the token itself is as likely.
        top: dict[str, float] = {}
        for other, logprob in (*token.top, (token_id, token.logprob)):
            top.setdefault(self._texts.text_of(other), finite(logprob))
        self._rows.token_logprobs.append(finite(token.logprob))
        self._rows.top_logprobs.append(top)


def _no_rows() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
