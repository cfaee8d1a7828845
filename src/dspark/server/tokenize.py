"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field, model_validator

from dspark.models.chat import chat_token_ids, text_token_ids
from dspark.server.chat_protocol import Message
from dspark.server.engine_requests import check_model, user_errors
from dspark.server.errors import ERROR_RESPONSES, ApiError
from dspark.server.protocol import Body, Text
from dspark.server.state import CurrentState

router = APIRouter(responses=ERROR_RESPONSES)


class TokenizeRequest(Body):
    """A text as it is, or a conversation through the chat template."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    """Of a ``prompt``: those that the tokenizer puts around any text; conversations have their template's."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages: give exactly one")
        return self


class TokenizeResponse(BaseModel):
    """``max_model_len``: tokens of a prompt and its answer together at most."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Tokens, special ones included."""

    model: Text | None = None
    tokens: list[int]


class DetokenizeResponse(BaseModel):
    """Their text."""

    prompt: str


@router.post("/tokenize")
def tokenize(body: TokenizeRequest, state: CurrentState) -> TokenizeResponse:
    """Token ids of a text or a conversation."""
    check_model(state, body.model)
    with user_errors("prompt" if body.messages is None else "messages"):
        if body.messages is not None:
            tokens = chat_token_ids(state.tokenizer, [message.for_template() for message in body.messages])
        elif body.add_special_tokens:
            tokens = text_token_ids(state.tokenizer, body.prompt or "")
        else:
            tokens = list(state.tokenizer(body.prompt or "", add_special_tokens=False)["input_ids"])
        strings = [state.token_texts.text_of(token) for token in tokens] if body.return_token_strs else None
    return TokenizeResponse(count=len(tokens), max_model_len=state.engine.max_length, tokens=tokens, token_strs=strings)


@router.post("/detokenize")
def detokenize(body: DetokenizeRequest, state: CurrentState) -> DetokenizeResponse:
    """Text of token ids."""
    check_model(state, body.model)
    vocab_size = state.target.model.config.vocab_size
    if not all(0 <= token < vocab_size for token in body.tokens):
        raise ApiError(400, f"tokens holds one outside the vocabulary 0..{vocab_size - 1}", "tokens", "invalid_value")
    text = state.tokenizer.decode(body.tokens, skip_special_tokens=False)
    assert isinstance(text, str)
    return DetokenizeResponse(prompt=text)
