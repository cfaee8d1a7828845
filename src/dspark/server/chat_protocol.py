"""Requests and responses of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from dspark.server.protocol import MOST_LOGPROBS, Answer, Body, GenerationParameters, Only, Text

_NO_TOOLS = "tools and functions are not supported"
_NO_MEDIA = "audio and images are not supported: text only"
_NOTHING: tuple[Any, ...] = (None, [])


class TextPart(Body):
    """A part of a message."""

    type: Annotated[Any, Only(("text",), 'only parts of type "text" are supported: no audio, images or files')]
    text: Text
    prompt_cache_breakpoint: dict[str, Any] | None = None
    """Without effect: what is computed is kept anyway."""


def _parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError('must be a text, or a list of {"type": "text", "text": ...}')
    return value


class Message(Body):
    """A turn of the conversation. ``developer`` is another name for ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])]
    name: Text | None = None
    """Given to the chat template, which may leave it out."""
    type: Annotated[Any, Only((None, "text"), "messages are text only")] = None
    """No parameter of OpenAI's, but of lm-evaluation-harness, which sends it with every message."""
    refusal: Annotated[Any, Only((None,), "refusals are not supported: put the text into content")] = None
    annotations: Annotated[Any, Only(_NOTHING, "annotations are not supported")] = None
    audio: Annotated[Any, Only((None,), _NO_MEDIA)] = None
    tool_calls: Annotated[Any, Only(_NOTHING, _NO_TOOLS)] = None
    function_call: Annotated[Any, Only((None,), _NO_TOOLS)] = None

    def for_template(self) -> dict[str, str]:
        """As chat templates know it."""
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": "".join(part.text for part in self.content),
        }
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(GenerationParameters):
    """Continue a conversation."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    # Accepted, and without effect: what they are for does not exist here, or does not change the answer.
    metadata: dict[str, Text] | None = None
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Text | None = None
    safety_identifier: Text | None = None

    # Accepted with values that ask for nothing.
    audio: Annotated[Any, Only((None,), _NO_MEDIA)] = None
    modalities: Annotated[Any, Only((None, ["text"]), _NO_MEDIA)] = None
    tools: Annotated[Any, Only(_NOTHING, _NO_TOOLS)] = None
    tool_choice: Annotated[Any, Only((None, "none", "auto"), _NO_TOOLS)] = None
    functions: Annotated[Any, Only(_NOTHING, _NO_TOOLS)] = None
    function_call: Annotated[Any, Only((None, "none", "auto"), _NO_TOOLS)] = None
    store: Annotated[Any, Only((None, False), "answers are not stored")] = None
    service_tier: Annotated[Any, Only((None, "auto", "default"), "there is one service tier, the default")] = None
    reasoning_effort: Annotated[Any, Only((None, "none"), "reasoning effort cannot be set")] = None
    verbosity: Annotated[Any, Only((None, "medium"), "verbosity cannot be set: ask for it in a message")] = None
    moderation: Annotated[Any, Only((None,), "moderation is not supported")] = None
    web_search_options: Annotated[Any, Only((None,), "web search is not supported")] = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs, true")
        if self.max_tokens == 0:
            raise ValueError("max_tokens is 0; it must be at least 1")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self


class LikelyToken(BaseModel):
    """A token with the natural logarithm of its probability. ``bytes`` are those of its text, in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(LikelyToken):
    """A token of the answer, and the most likely ones in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    """By token of the answer, a stop token included: the model's own, before temperature and the like."""

    content: list[TokenLogprobs]
    refusal: None = None


class AnswerMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One of the answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class ChatResponse(Answer):
    """The answers to a conversation."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatDelta(BaseModel):
    """What a chunk adds to an answer; the first of an answer has the role."""

    role: Literal["assistant"] | None = None
    content: Text | None = None


class ChatChunkChoice(BaseModel):
    """A chunk's part in one of the answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class ChatChunk(Answer):
    """A piece of a stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
