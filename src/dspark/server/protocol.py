"""What requests and responses of the API's routes have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MOST_LOGPROBS = 20
MOST_STOPS = 16
MOST_STOP_TOKENS = 128
LONGEST_STOP = 256


def characters(text: str) -> str:
    """The text, if it is one: JSON can escape what is none, and no tokenizer takes that."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("holds half of a surrogate pair, which is no character")
    return text


Text = Annotated[str, AfterValidator(characters)]


class Body(BaseModel):
    """A part of a request: types are not bent, and what is unknown is an error."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # into the OpenAPI document
    )


@dataclass(frozen=True)
class Only:
    """Annotation of a parameter that may be there, with values that ask for nothing.

    Attributes:
        why: what is told of any other value.
    """

    accepted: tuple[Any, ...]
    why: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, core_schema.any_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.accepted), "description": self.why}

    def _checked(self, value: Any) -> Any:
        if value not in self.accepted:
            raise PydanticCustomError("not_supported", "{why}", {"why": self.why})
        return value


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _speculation(value: Any) -> Any:
    return {"policy": "off"} if value is False else value


class StreamOptions(Body):
    """What a stream holds besides the answer."""

    include_usage: bool | None = None
    """A last chunk, without choices, has the usage."""
    continuous_usage_stats: bool | None = None
    """Every chunk has the usage so far."""
    include_obfuscation: Annotated[Any, Only((None, False), "chunks are not padded against traffic analysis")] = None


class SpeculationOptions(Body):
    """How drafts of this request are made; its answer does not depend on it."""

    policy: (
        Annotated[str, Field(pattern=r"^(off|fixed:[0-9]{1,4}|threshold:[0-9]*\.?[0-9]+)$", max_length=30)] | None
    ) = None
    """``off``, ``fixed:K`` or ``threshold:C``, instead of the server's."""
    max_draft_tokens: Annotated[int, Field(ge=0)] | None = None


class JsonSchemaFormat(Body):
    """A schema that the answer obeys, ``strict`` or not."""

    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and with no other")
        return self


class StructuredOutputs(Body):
    """What the answer has to be: exactly one of these."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    """A JSON schema."""
    json_object: bool | None = None
    regex: Annotated[Text, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: Annotated[Text, Field(min_length=1)] | None = None
    """Lark syntax, with llguidance's extensions."""

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        given = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in given) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice and grammar")
        return self


class GenerationParameters(Body):
    """Parameters of chats and completions alike. ``null`` is as good as left out."""

    model: Text | None = None
    """The served model's name, as /v1/models lists it; the served model if left out."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        Annotated[list[Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)]
        | None,
        BeforeValidator(_texts, json_schema_input_type=str | list[str] | None),
    ] = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MOST_STOP_TOKENS)] | None
    ) = None
    """Tokens that end an answer besides the model's own."""
    ignore_eos: bool | None = None
    """The model's own stop tokens do not end an answer."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Only with ignore_eos and without other stops, where max_tokens decides anyway."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    """Users take turns when requests wait."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: Annotated[
        SpeculationOptions | None,
        BeforeValidator(_speculation, json_schema_input_type=SpeculationOptions | Literal[False] | None),
    ] = None
    return_speculation: bool | None = None

    @model_validator(mode="after")
    def _options_of_streams(self) -> GenerationParameters:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream, true")
        return self


class PromptTokensDetails(BaseModel):
    """``cached_tokens`` had been computed for earlier requests."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens; stop tokens are counted, a prompt once however many answers it got."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class SpeculationReport(BaseModel):
    """What became of a request's draft tokens, over all of its answers; see `SpeculationCounts` of the engine."""

    rounds: int
    drafted: int
    verified: int
    accepted: int
    committed: int
    accepted_length: float
    accepted_per_position: list[int]
    reached_per_position: list[int]
    verified_per_position: list[int]


class Answer(BaseModel):
    """What every response and chunk begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    speculation: SpeculationReport | None = None
