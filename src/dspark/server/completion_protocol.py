"""Requests and responses of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, model_validator

from dspark.server.protocol import MOST_LOGPROBS, Answer, GenerationParameters, Only, characters

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or several, as texts or tokens, as a list of prompts."""
    prompts = value if isinstance(value, list) and not _is_tokens(value) else [value]
    if prompts and (all(isinstance(prompt, str) for prompt in prompts) or all(map(_is_tokens, prompts))):
        return [characters(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists; none empty")


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(token) is int for token in value)


_Tokens = Annotated[list[int], Field(min_length=1)]


class CompletionRequest(GenerationParameters):
    """Continue texts as they are."""

    prompt: Annotated[
        list[Prompt],
        PlainValidator(
            _prompts,
            json_schema_input_type=str
            | _Tokens
            | Annotated[list[str], Field(min_length=1)]
            | Annotated[list[_Tokens], Field(min_length=1)],
        ),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    """The text begins with the prompt, and logprobs with the prompt's; max_tokens may then be 0."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Only if it is n."""
    suffix: Annotated[Any, Only((None, ""), "suffix is not supported: the model continues texts, it fills no gaps")] = (
        None
    )

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported unless it is n: all answers are returned")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0; it must be at least 1 unless the prompt is echoed")
        if self.stream and self.echo and (self.logprobs is not None or self.max_tokens == 0):
            raise ValueError("echo with logprobs, or alone, cannot be streamed: leave out stream")
        return self


class CompletionLogprobs(BaseModel):
    """By token, a stop token included: the model's own, before temperature and the like.

    ``text_offset`` is where a token begins in the choice's text, in characters. A token that is no valid UTF-8 by
    itself is written ``bytes:\\xNN``. A prompt's first token has no logprob.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One of the answers: those to the first prompt, those to the second, ..."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class CompletionResponse(Answer):
    """The answers, or in a stream a piece of them."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
