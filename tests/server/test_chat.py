"""POST /v1/chat/completions without streams."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from dspark.decoding import SamplingSettings
from dspark.engine.engine import Engine
from dspark.server.chat_protocol import ChatRequest
from dspark.server.settings import ServerSettings
from tests.server.byte_tokenizer import END, VOCABULARY_SIZE
from tests.server.small import CONTEXT, ByteTarget, make_app, make_engine, wait_until

HELLO = [{"role": "user", "content": "hello"}]
PROMPT = "<u>hello<a>"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Without a server."""
    engine, _ = make_engine()
    with engine:
        yield engine


def post(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 6, "seed": 1, **body})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def refused(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={"messages": HELLO, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]  # type: ignore[no-any-return]


def text(client: TestClient, **body: Any) -> str:
    return post(client, **body)["choices"][0]["message"]["content"]  # type: ignore[no-any-return]


def test_the_whole_response(client: TestClient) -> None:
    answer = post(client)
    choice = answer["choices"][0]
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 0
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {
        "object": "chat.completion",
        "model": "bytes",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": choice["message"]["content"], "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 6,
            "total_tokens": len(PROMPT) + 6,
            "prompt_tokens_details": {"cached_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"]},
        },
    }


def test_the_answer_is_the_engines(engine: Engine, client: TestClient) -> None:
    (expected,) = engine.submit(messages=HELLO, max_tokens=30).result(60).completions
    assert text(client, temperature=0, max_tokens=30) == expected.text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        {"role": "user", "content": "hello", "name": "Anna", "refusal": None, "tool_calls": [], "audio": None},
        {"role": "user", "content": "hello", "type": "text"},  # of lm-evaluation-harness
        {
            "role": "user",
            "content": [{"type": "text", "text": "hello", "prompt_cache_breakpoint": {"ttl": "30m"}}],
        },
    ],
)
def test_ways_to_say_the_same(client: TestClient, message: dict[str, Any]) -> None:
    assert text(client, messages=[message]) == text(client)


def test_developer_is_system(client: TestClient) -> None:
    answers = [post(client, messages=[{"role": role, "content": "be"}, *HELLO]) for role in ("system", "developer")]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == len("<s>be" + PROMPT)


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "at least 1"),
        ("hello", "messages", "list"),
        ([{"role": "tool", "content": "x"}], "messages[0].role", "assistant"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"role": "assistant", "content": None}], "messages[0].content", "text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
         "messages[0].content[0].type", "no audio, images or files"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
         "messages[0].content[0].type", "no audio, images or files"),
        ([*HELLO, {"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[1].tool_calls", "not supported"),
        ([{"role": "user", "content": "refuse me"}], "messages", "as you wish"),
        ([{"role": "user", "content": "x" * CONTEXT}], "messages", "tokens"),
        ([{"role": "user", "content": "x", "images": []}], "messages[0].images", "unknown parameter"),
        ([{"role": "user", "content": "x", "type": "image"}], "messages[0].type", "text only"),
    ],
)  # fmt: skip
def test_conversations_that_cannot_be(client: TestClient, messages: Any, param: str, says: str) -> None:
    error = refused(client, messages=messages)
    assert error["param"] == param
    assert says in error["message"]


def test_a_conversation_that_is_too_long_has_a_code(client: TestClient) -> None:
    error = refused(client, messages=[{"role": "user", "content": "x" * CONTEXT}])
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "limits", [{"max_tokens": 4}, {"max_completion_tokens": 4}, {"max_completion_tokens": 4, "max_tokens": 4}]
)
def test_both_names_of_the_limit(client: TestClient, limits: dict[str, int]) -> None:
    answer = post(client, **{"max_tokens": None, **limits})
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"


def test_without_a_limit_the_context_is_one(client: TestClient) -> None:
    answer = post(client, max_tokens=None, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == CONTEXT
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_default_temperature_is_one(client: TestClient) -> None:
    assert text(client) == text(client, temperature=1)
    assert text(client, max_tokens=20) != text(client, max_tokens=20, temperature=0)


def test_a_seed_says_what_comes_and_choices_differ(client: TestClient) -> None:
    answer = post(client, n=3, max_tokens=20)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [text(client, seed=seed, max_tokens=20) for seed in (1, 2, 3)]
    assert answer["usage"]["completion_tokens"] == 60
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


def test_truncation_reaches_the_sampler(client: TestClient) -> None:
    greedy = text(client, temperature=0)
    assert text(client, top_k=1) == greedy
    assert text(client, top_p=1e-9) == greedy
    assert text(client, min_p=1) == greedy
    for off in ({"top_k": 0}, {"top_k": -1}, {"top_p": 1}, {"min_p": 0}):
        assert text(client, **off) == text(client)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.3},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.7},
        {"logit_bias": {65: 5.0}},
        {"seed": 77},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_each_parameter_reaches_the_sampler(engine: Engine, client: TestClient, sampling: dict[str, Any]) -> None:
    settings = SamplingSettings(**{"temperature": 1.0, "seed": 1, **sampling})
    (expected,) = engine.submit(messages=HELLO, max_tokens=60, sampling=settings).result(60).completions
    assert text(client, max_tokens=60, **sampling) == expected.text
    assert text(client, max_tokens=60) != expected.text


def test_stop_tokens_and_ignore_eos(client: TestClient) -> None:
    ended = post(client, logit_bias={str(END): 1000}, logprobs=True)
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["message"]["content"] == ""
    assert [token["token"] for token in ended["choices"][0]["logprobs"]["content"]] == ["<end>"]
    assert ended["usage"]["completion_tokens"] == 1
    on = post(client, logit_bias={str(END): 1000}, ignore_eos=True, min_tokens=6)
    assert on["choices"][0]["finish_reason"] == "length"
    assert on["usage"]["completion_tokens"] == 6
    own = post(client, logit_bias={"65": 1000}, stop_token_ids=[65])
    assert own["choices"][0]["finish_reason"] == "stop"
    assert own["usage"]["completion_tokens"] == 1


def test_stop_strings_end_an_answer_and_are_not_shown(client: TestClient) -> None:
    letters = {"max_tokens": 40, "logit_bias": {str(token): 1000 for token in b"abcdefgh"}}
    whole = text(client, **letters)
    stop = whole[20:23]
    for stops in (stop, ["zz", stop]):
        answer = post(client, stop=stops, **letters)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["message"]["content"] == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e30}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
        ({"logit_bias": {str(VOCABULARY_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e300}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 5, "ignore_eos": True, "stop": "a"}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5, "ignore_eos": True}, "min_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"user": 3}, "user"),
        ({"speculation": {"policy": "delayed"}}, "speculation.policy"),
        ({"speculation": {"policy": "fixed"}}, "speculation.policy"),
        ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens"),
        ({"speculation": True}, "speculation"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {}}, "moderation"),
        ({"best_of": 2}, "best_of"),
        ({"guided_json": {}}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_parameter(client: TestClient, body: dict[str, Any], param: str) -> None:
    error = refused(client, **body)
    assert error["param"] == param
    assert any(part in error["message"] for part in param.split("."))


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": {"a": "b"}},
        {"parallel_tool_calls": True},
        {"prediction": {"type": "content", "content": "x"}},
        {"prompt_cache_key": "x", "prompt_cache_retention": "24h", "safety_identifier": "x"},
        {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
        {"tools": [], "tool_choice": "auto"},
        {"functions": [], "function_call": "none"},
        {"store": False, "service_tier": "auto", "modalities": ["text"], "reasoning_effort": "none"},
        {"response_format": {"type": "text"}},
        {"model": "bytes", "user": "anna"},
        dict.fromkeys(sorted(set(ChatRequest.model_fields) - {"messages", "max_tokens", "seed"})),
    ],
    ids=lambda body: next(iter(body)),
)  # fmt: skip
def test_what_asks_for_nothing_changes_nothing(client: TestClient, body: dict[str, Any]) -> None:
    assert text(client, **body) == text(client)


def test_another_model_is_not_found(client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json={"messages": HELLO, "model": "gpt-4"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


def test_log_probabilities_are_the_targets_own(client: TestClient) -> None:
    answer = post(client, logprobs=True, top_logprobs=2, max_tokens=3, temperature=0.3, logit_bias={"65": 1000})
    table_SV = ByteTarget().table_SV
    state = sum(PROMPT.encode()) % len(table_SV)
    for token in answer["choices"][0]["logprobs"]["content"]:
        probs = table_SV[state]
        assert (token["token"], token["bytes"]) == ("A", [65])
        assert token["logprob"] == pytest.approx(math.log(probs[65]), rel=1e-4)
        assert [top["logprob"] for top in token["top_logprobs"]] == pytest.approx(probs.log().topk(2).values.tolist())
        state = (state + 65) % len(table_SV)


def test_without_top_logprobs_only_the_tokens_own(client: TestClient) -> None:
    content = post(client, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    assert all(token["top_logprobs"] == [] for token in content)
    assert post(client, logprobs=False)["choices"][0]["logprobs"] is None


def test_tokens_make_up_the_text(client: TestClient) -> None:
    answer = post(client, logprobs=True, max_tokens=40, ignore_eos=True, logit_bias={str(END): -100})
    joined = b"".join(bytes(token["bytes"]) for token in answer["choices"][0]["logprobs"]["content"])
    assert joined.decode(errors="replace") == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("speculation", "drafted"),
    [
        ({"policy": "fixed:2"}, {2}),
        ({"max_draft_tokens": 1}, {1}),
        ({"policy": "threshold:0.0"}, {3}),
        ({"policy": "off"}, {0}),
        (False, {0}),
        ({}, {3}),
        (None, {3}),
    ],
)
def test_speculation_of_a_request(client: TestClient, speculation: Any, drafted: set[int]) -> None:
    answer = post(client, speculation=speculation, return_speculation=True, max_tokens=21, seed=5, ignore_eos=True)
    report = answer["speculation"]
    most = report["rounds"] * max(drafted)
    assert most - 2 * max(drafted) <= report["drafted"] <= most  # the last rounds need fewer
    assert report["committed"] == 20  # the first token is the prompt's
    assert report["accepted_length"] == pytest.approx(20 / report["rounds"])
    assert sum(report["accepted_per_position"]) == report["accepted"]
    assert len(report["accepted_per_position"]) == len(report["reached_per_position"]) == 3


def test_speculation_is_reported_over_all_answers_and_only_when_asked_for(client: TestClient) -> None:
    both = post(client, n=2, seed=5, return_speculation=True)["speculation"]
    each = [post(client, seed=seed, return_speculation=True)["speculation"] for seed in (5, 6)]
    assert both["committed"] == sum(one["committed"] for one in each)
    assert "speculation" not in post(client)


def test_speculation_does_not_change_the_answer(client: TestClient) -> None:
    assert text(client, max_tokens=40, temperature=0) == text(client, max_tokens=40, temperature=0, speculation=False)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}c"}}, "[ab]{3}c"),
        ({"structured_outputs": {"choice": ["yes.", "no (1|2)", "é"]}}, r"yes\.|no \(1\|2\)|é"),
        ({"structured_outputs": {"grammar": 'start: "x" y y "."\ny: "y"'}}, r"xyy\."),
        ({"structured_outputs": {"json": {"enum": [1, "two"]}}}, '1|"two"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}},
         "true|false"),
    ],
)  # fmt: skip
def test_structured_output(client: TestClient, wanted: dict[str, Any], pattern: str) -> None:
    answer = post(client, max_tokens=20, **wanted)
    assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"])
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "wanted", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_json_objects(client: TestClient, wanted: dict[str, Any]) -> None:
    for seed in range(5):
        (choice,) = post(client, max_tokens=350, seed=seed, logit_bias={"125": 8, "34": 8}, **wanted)["choices"]
        assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_structures_that_cannot_be(client: TestClient, body: dict[str, Any], param: str) -> None:
    error = refused(client, **body)
    assert error["param"] == param
    assert param in error["message"]


def test_cached_tokens() -> None:
    app, engine, _ = make_app()
    long = [{"role": "user", "content": "hello " * 20}]
    with engine, TestClient(app) as client:
        first, second = (post(client, messages=long)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]


def test_a_full_queue_is_a_429() -> None:
    app, engine, model = make_app(max_waiting=1, max_concurrency=1)
    with engine, TestClient(app, raise_server_exceptions=False) as client:
        model.gate.clear()
        running = engine.submit(prompt_ids=(1,), max_tokens=1)
        try:
            wait_until(lambda: model.passes == 1)
            waiting = engine.submit(prompt_ids=(1,), max_tokens=1)
            response = client.post("/v1/chat/completions", json={"messages": HELLO})
        finally:
            model.gate.set()
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        for generation in (running, waiting):
            generation.result(60)
        assert text(client) != ""


def test_an_error_in_the_engine_is_a_500_and_the_server_goes_on() -> None:
    app, engine, model = make_app()
    with engine, TestClient(app, raise_server_exceptions=False) as client:
        model.failures = 1
        response = client.post("/v1/chat/completions", json={"messages": HELLO})
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "memory" not in response.text
        assert text(client) != ""


def test_a_server_that_ends_is_a_503() -> None:
    app, engine, _ = make_app()
    with TestClient(app, raise_server_exceptions=False) as client:
        engine.close()
        assert client.post("/v1/chat/completions", json={"messages": HELLO}).status_code == 503


def test_users_of_one_key_do_not_share_prompts_with_those_of_another() -> None:
    settings = ServerSettings(api_keys=("one", "two"), separate_keys=True)
    app, engine, _ = make_app(settings=settings)
    body = {"messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 2}
    with engine, TestClient(app) as client:
        cached = [
            client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}).json()["usage"][
                "prompt_tokens_details"
            ]["cached_tokens"]
            for key in ("one", "two", "one")
        ]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0
