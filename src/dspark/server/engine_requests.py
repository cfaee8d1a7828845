"""From a request's body to requests of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import Request as HttpRequest

from dspark.decoding import SamplingSettings
from dspark.engine.grammar import Grammar
from dspark.engine.queue import QueueFull
from dspark.engine.request import Request
from dspark.engine.submitted import EngineError, Generation
from dspark.server.errors import ApiError, first_word
from dspark.server.protocol import GenerationParameters
from dspark.server.state import ServerState, prefix_namespace, turn

_NAMES: Mapping[str, str] = {
    "max_draft_tokens": "speculation.max_draft_tokens",
    "policy": "speculation.policy",
    "stop_strings": "stop",
}
"""The engine's names of parameters that are called something else here."""

_OWN_NAMES = frozenset({*GenerationParameters.model_fields, "logprobs"})


def check_model(state: ServerState, model: str | None) -> None:
    """ApiError 404 unless it is the served one, or none is named."""
    if model is not None and model != state.model_name:
        raise ApiError(404, f"there is no model {model!r} here: it is {state.model_name}", "model", "model_not_found")


def check_length(state: ServerState, prompt_ids: Sequence[int], param: str) -> None:
    """ApiError 400 unless there is a prompt, and room for a token behind it."""
    if not prompt_ids:
        raise ApiError(400, f"{param} is empty: give at least one token", param, "invalid_value")
    if len(prompt_ids) >= state.engine.max_length:
        raise ApiError(
            400,
            f"{param} has {len(prompt_ids)} tokens; here a prompt and its answer have {state.engine.max_length} "
            "together at most",
            param,
            "context_length_exceeded",
        )


def engine_requests(
    state: ServerState,
    http: HttpRequest,
    body: GenerationParameters,
    prompts: Sequence[Sequence[int]],
    grammar: Grammar | None,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> list[Request]:
    """One for each prompt.

    Raises:
        ValueError, ApiError: the message begins with the parameter.
    """
    stops = frozenset(body.stop_token_ids or ())
    if body.ignore_eos and grammar is not None:
        raise ApiError(400, "ignore_eos cannot go with structured output: a stop token is its end", "ignore_eos")
    if body.min_tokens and (not body.ignore_eos or body.stop or stops or body.min_tokens > max_tokens):
        raise ApiError(
            400,
            "min_tokens is supported only with ignore_eos, without stop and stop_token_ids, and up to max_tokens",
            "min_tokens",
            "unsupported_parameter",
        )
    speculation, sampling = body.speculation, _sampling(body)
    return [
        Request(
            prompt_ids=tuple(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_token_ids=stops if body.ignore_eos else stops | state.target.stop_token_ids,
            stop_strings=tuple(body.stop or ()),
            n=body.n or 1,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            max_draft_tokens=None if speculation is None else speculation.max_draft_tokens,
            policy=None if speculation is None else speculation.policy,
            user=turn(http, body.user),
            prefix_namespace=prefix_namespace(http, state),
        )
        for prompt in prompts
    ]


def submit(state: ServerState, requests: Sequence[Request]) -> list[Generation]:
    """All of them or none. Does not take long.

    Raises:
        ValueError: the message begins with the parameter.
        QueueFull: too many wait.
        ApiError: 503, the engine has ended.
    """
    generations: list[Generation] = []
    try:
        for request in requests:
            generations.append(state.engine.submit_request(request))
    except BaseException as error:
        for generation in generations:
            generation.cancel()
        if isinstance(error, EngineError):
            raise ApiError(503, "the server is shutting down, or its engine has ended", code="unavailable") from error
        raise
    return generations


@contextmanager
def user_errors(prompt: str) -> Iterator[None]:
    """A ValueError of engine, tokenizer or template inside becomes a 400 that names the parameter.

    Args:
        prompt: what the prompt is called.
    """
    try:
        yield
    except QueueFull:
        raise
    except ValueError as error:
        name = first_word(str(error)) or ""
        param = _NAMES.get(name, name if name in _OWN_NAMES else prompt)
        raise ApiError(400, str(error), param, "invalid_value") from error


def _sampling(body: GenerationParameters) -> SamplingSettings:
    given: dict[str, Any] = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_k": body.top_k if body.top_k is not None and body.top_k > 0 else None,
        "seed": body.seed,
        "logit_bias": {int(token): bias for token, bias in (body.logit_bias or {}).items()},
    }
    for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if (value := getattr(body, name)) is not None:
            given[name] = value
    return SamplingSettings(**given)
