"""OpenAI's own client against a live server over the embedded target and drafter."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel

from dspark.decoding import SamplingSettings
from dspark.engine.engine import Engine
from dspark.engine.loading import Parts, load_parts
from dspark.engine.settings import EngineSettings
from dspark.models.embedded import NAME as MODEL
from dspark.scheduling import Fixed
from dspark.server.app import create_app
from dspark.server.chat_protocol import ChatRequest
from dspark.server.completion_protocol import CompletionRequest
from dspark.server.settings import ServerSettings
from tests.server.small import served

POLICY = Fixed(length=4)
SEA: Any = [{"role": "user", "content": "Say something about the sea."}]
COUNT = "one two three four five six seven"


@pytest.fixture(scope="session")
def parts() -> Parts:
    settings = EngineSettings()
    return load_parts("embedded", None, policy=POLICY, dtype="int8", device="cpu", cost=None, settings=settings)


@pytest.fixture(scope="session")
def engine(parts: Parts) -> Iterator[Engine]:
    settings = EngineSettings(max_length=512, max_concurrency=8)
    with Engine(parts.target, parts.drafter, policy=POLICY, settings=settings) as engine:
        yield engine


@pytest.fixture(scope="session")
def url(engine: Engine) -> Iterator[str]:
    app = create_app(engine, ServerSettings(api_keys=("secret",)))
    with served(app) as url:
        yield url


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=120) as client:
        yield client


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_greedy_text_is_the_engines(client: OpenAI, engine: Engine) -> None:
    (expected,) = engine.submit(messages=SEA, max_tokens=40).result(120).completions
    answer = client.chat.completions.create(model=MODEL, messages=SEA, temperature=0, max_tokens=40)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == MODEL
    assert answer.object == "chat.completion"


def test_a_sampled_answer_is_the_engines(client: OpenAI, engine: Engine) -> None:
    sampling = SamplingSettings(
        temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.3,
        repetition_penalty=1.1, seed=7, logit_bias={260: -5.0},
    )  # fmt: skip
    expected = engine.submit(messages=SEA, max_tokens=30, n=2, sampling=sampling).result(120)
    answer = client.chat.completions.create(
        model=MODEL, messages=SEA, max_completion_tokens=30, n=2, seed=7, temperature=0.8, top_p=0.9,
        presence_penalty=0.5, frequency_penalty=0.3, logit_bias={"260": -5},
        extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1},
    )  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == [one.text for one in expected.completions]


def test_a_stream_is_the_answer_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=SEA, seed=3, max_tokens=40)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=SEA, seed=3, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}


def test_the_clients_accumulator_takes_our_stream(client: OpenAI) -> None:
    parameters: dict[str, Any] = {
        "model": MODEL,
        "messages": SEA,
        "seed": 3,
        "n": 2,
        "max_tokens": 30,
        "logprobs": True,
        "top_logprobs": 1,
        "extra_body": {"structured_outputs": {"regex": "[a-z ]{10,20}[.]"}},  # this helper wants finished answers
    }
    with client.chat.completions.stream(**parameters) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.delta"} <= set(events)
    whole = client.chat.completions.create(**parameters)
    for ours, theirs in zip(whole.choices, streamed.choices, strict=True):
        assert theirs.message.content == ours.message.content
        assert theirs.finish_reason == ours.finish_reason == "stop"
        assert theirs.logprobs == ours.logprobs


def test_emoji_stay_whole_in_a_stream(client: OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL, messages=SEA, max_tokens=80, stream=True, seed=1,
        extra_body={"structured_outputs": {"regex": "(🐙|🌊|ö|鱼){12}"}},
    )  # fmt: skip
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert set("".join(pieces)) <= set("🐙🌊ö鱼")
    assert len("".join(pieces)) == 12
    assert sum(map(bool, pieces)) > 2


def test_what_a_client_echoes_is_understood(client: OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=SEA, temperature=0, max_tokens=10)
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        *SEA,
        first.choices[0].message,
        first.choices[0].message.model_dump(),
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5)
    assert answer.choices[0].message.content is not None


def test_stop_strings(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=COUNT, temperature=0, max_tokens=20).choices[0].text
    stop = whole[10:14]
    for given in (stop, [stop, "zzz"]):
        choice = client.completions.create(model=MODEL, prompt=COUNT, temperature=0, max_tokens=20, stop=given).choices[
            0
        ]
        assert choice.text == whole[: whole.index(stop)]
        assert choice.finish_reason == "stop"


def test_length_and_ignored_ends(client: OpenAI) -> None:
    short = client.chat.completions.create(model=MODEL, messages=SEA, max_tokens=3)
    assert short.choices[0].finish_reason == "length"
    ended = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say only: yes"}], temperature=0, max_tokens=200
    )
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage is not None
    on = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say only: yes"}], temperature=0,
        max_tokens=ended.usage.completion_tokens + 5, extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert on.choices[0].finish_reason == "length"


def test_log_probabilities_of_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=SEA, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    for token in content:
        assert bytes(token.bytes or ()).decode() == token.token
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob <= 0  # greedy
    shown = content[:-1] if answer.choices[0].finish_reason == "stop" else content
    assert "".join(token.token for token in shown) == answer.choices[0].message.content


def test_log_probabilities_of_a_completion(client: OpenAI) -> None:
    prompts = [COUNT, "The capital of France is"]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, temperature=0, max_tokens=4, logprobs=2, echo=True, n=1, best_of=1
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None
        assert choice.text.startswith(prompt)
        assert logprobs.tokens is not None
        assert logprobs.text_offset is not None
        assert logprobs.token_logprobs is not None
        assert "".join(logprobs.tokens) == choice.text
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert choice.text.startswith(token, offset)
        assert logprobs.token_logprobs[0] is None


def test_a_prompts_log_probabilities_are_those_of_generating_it(client: OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt=COUNT, temperature=0, max_tokens=8, logprobs=0).choices[0]
    read = client.completions.create(
        model=MODEL, prompt=COUNT + made.text, max_tokens=0, logprobs=0, echo=True
    ).choices[0]
    assert made.logprobs is not None
    assert read.logprobs is not None
    assert made.logprobs.token_logprobs is not None
    assert read.logprobs.token_logprobs is not None
    assert read.logprobs.token_logprobs[-8:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-4)
    assert read.text == COUNT + made.text


def test_prompts_as_tokens(client: OpenAI, parts: Parts) -> None:
    ids = list(parts.target.tokenizer(COUNT)["input_ids"])
    answers = [
        client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8).choices
        for prompt in (COUNT, ids, [COUNT, COUNT], [ids])
    ]
    assert {choice.text for choices in answers for choice in choices} == {answers[0][0].text}


class City(BaseModel):
    name: str
    country: str
    coastal: bool


def test_json_by_schema_is_parsed(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Describe Lisbon."}], response_format=City, max_tokens=200,
        temperature=0,
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, City)


def test_json_objects(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "A short JSON object about a cat."}], max_tokens=60,
        response_format={"type": "json_object"}, temperature=0,
    )  # fmt: skip
    content = answer.choices[0].message.content or ""
    assert content.startswith("{")
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(content), dict)


def test_other_structures(client: OpenAI) -> None:
    for structure, pattern in (
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"regex": r"\d{4}-\d{2}-\d{2}"}, r"\d{4}-\d{2}-\d{2}"),
        ({"grammar": 'start: "x" "=" NUMBER\nNUMBER: /[0-9]{1,3}/'}, r"x=\d{1,3}"),
    ):
        answer = client.chat.completions.create(
            model=MODEL, messages=SEA, max_tokens=40, extra_body={"structured_outputs": structure}
        )
        assert re.fullmatch(pattern, answer.choices[0].message.content or "")


def test_speculation(client: OpenAI) -> None:
    texts = []
    for speculation, drafts in (
        (None, True),
        (False, False),
        ({"policy": "fixed:2"}, True),
        ({"policy": "off"}, False),
    ):
        answer = client.chat.completions.create(
            model=MODEL, messages=SEA, temperature=0, max_tokens=16,
            extra_body={"speculation": speculation, "return_speculation": True},
        )  # fmt: skip
        report = answer.model_extra["speculation"]  # type: ignore[index]
        assert (report["drafted"] > 0) is drafts
        assert (report["accepted_length"] > 1) is drafts
        texts.append(answer.choices[0].message.content)
    assert len(set(texts)) == 1


def test_cached_tokens(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Once upon a time in a land of cached tokens. " * 10}]
    answers = [client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1) for _ in range(2)]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]  # type: ignore[union-attr]
    assert cached[0] == 0 or cached[0] < 32
    assert cached[1] > 32  # type: ignore[operator]


def test_every_official_parameter_is_known() -> None:
    chat = chat_create_params.CompletionCreateParamsBase.__annotations__
    assert {*chat, "stream"} - set(ChatRequest.model_fields) == set()
    completion = completion_create_params.CompletionCreateParamsBase.__annotations__
    assert {*completion, "stream"} - set(CompletionRequest.model_fields) == set()


def test_official_parameters_that_change_nothing(client: OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=SEA, seed=1, max_tokens=10)
    same = client.chat.completions.create(
        model=MODEL, messages=SEA, seed=1, max_tokens=10, user="anna", metadata={"run": "1"}, store=False,
        service_tier="auto", parallel_tool_calls=False, modalities=["text"], prompt_cache_key="a",
        safety_identifier="b", tool_choice="none", response_format={"type": "text"}, reasoning_effort="none",
        prediction={"type": "content", "content": "the sea"},
    )  # fmt: skip
    assert same.choices == plain.choices


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"temperature": 9e99}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_what_is_refused(client: OpenAI, parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": SEA, **parameters})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_errors_of_other_kinds(client: OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=SEA)
    assert caught.value.code == "model_not_found"
    with (
        OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_the_asynchronous_client(url: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=SEA, max_tokens=10, seed=seed, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(seed % 3) for seed in range(12)))

    texts = asyncio.run(ask())
    assert texts[:3] * 4 == texts
    assert len(set(texts)) > 1
