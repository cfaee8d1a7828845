"""Answers as events: whole characters, nothing of a stop string, errors at the end, and nobody left running."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from dspark.engine.engine import Engine
from dspark.engine.grammar import GrammarCompiler
from dspark.server import chat
from tests.server.small import ByteTarget, make_app, served, wait_until

HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def events_of(body: str) -> list[tuple[str, str]]:
    """Name and data of each event."""
    assert body.endswith("\n\n")
    events = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        assert set(fields) <= {"event", "data"}
        events.append((fields.get("event", "message"), fields["data"]))
    return events


def asked(path: str, **body: Any) -> dict[str, Any]:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "once"}
    return {**prompt, "max_tokens": 30, "seed": 1, **body}


def stream(client: TestClient, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    """Chunks of a stream that ends well."""
    response = client.post(path, json=asked(path, stream=True, **body))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-store"
    *events, done = events_of(response.text)
    assert done == ("message", "[DONE]")
    assert {name for name, _ in events} == {"message"}
    chunks = [json.loads(data) for _, data in events]
    for name in ("id", "created", "model", "object", "system_fingerprint"):
        assert len({chunk[name] for chunk in chunks}) == 1
    return chunks


def whole(client: TestClient, path: str = CHAT, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=asked(path, **body))
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def text_in(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


def texts_in(chunks: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + text_in(choice)
    return texts


def test_a_chat(client: TestClient) -> None:
    chunks = stream(client, ignore_eos=True)
    answer = whole(client, ignore_eos=True)
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert texts_in(chunks) == {0: answer["choices"][0]["message"]["content"]}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len(chunks) > 5


def test_a_completion(client: TestClient) -> None:
    chunks = stream(client, COMPLETIONS, ignore_eos=True)
    assert chunks[0]["object"] == "text_completion"
    assert texts_in(chunks) == {0: whole(client, COMPLETIONS, ignore_eos=True)["choices"][0]["text"]}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_choices_come_side_by_side(client: TestClient) -> None:
    chunks = stream(client, n=3, ignore_eos=True)
    answer = whole(client, n=3, ignore_eos=True)
    assert texts_in(chunks) == {choice["index"]: choice["message"]["content"] for choice in answer["choices"]}
    indices = [chunk["choices"][0]["index"] for chunk in chunks]
    assert indices != sorted(indices)
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["finish_reason"] == "length"


def test_several_prompts_come_side_by_side(client: TestClient) -> None:
    body: dict[str, Any] = {"prompt": ["once", "twice"], "n": 2, "ignore_eos": True}
    chunks = stream(client, COMPLETIONS, **body)
    answer = whole(client, COMPLETIONS, **body)
    assert texts_in(chunks) == {choice["index"]: choice["text"] for choice in answer["choices"]}
    indices = [chunk["choices"][0]["index"] for chunk in chunks]
    assert indices != sorted(indices)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_at_the_end(client: TestClient, path: str) -> None:
    *chunks, last = stream(client, path, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    usage = whole(client, path)["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == usage[name]
    assert "cached_tokens" in last["usage"]["prompt_tokens_details"]


def test_usage_all_along(client: TestClient) -> None:
    *chunks, last = stream(client, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in [*chunks, last]} == {len("<u>hello<a>")}


def test_speculation_at_the_end(client: TestClient) -> None:
    last = stream(client, return_speculation=True, ignore_eos=True)[-1]
    assert last["choices"] == []
    assert last["speculation"]["committed"] == 29
    assert "usage" not in last


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_no_chunk_has_half_a_character(client: TestClient, path: str) -> None:
    for seed in range(4):
        chunks = stream(client, path, structured_outputs={"regex": "(é|世|🙂|a){9}"}, max_tokens=60, seed=seed)
        (text,) = texts_in(chunks).values()
        assert len(text) == 9
        assert set(text) <= set("é世🙂a")
        assert sum(text_in(chunk["choices"][0]) != "" for chunk in chunks) > 3


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_no_chunk_has_the_beginning_of_a_stop_string(client: TestClient, path: str) -> None:
    letters = {"max_tokens": 40, "logit_bias": {str(token): 1000 for token in b"abcdefgh"}}
    answer = whole(client, path, **letters)["choices"][0]
    text = answer["text"] if path == COMPLETIONS else answer["message"]["content"]
    stop = text[18:24]
    chunks = stream(client, path, stop=stop, **letters)
    assert texts_in(chunks) == {0: text[: text.index(stop)]}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_log_probabilities_of_a_chat(client: TestClient) -> None:
    chunks = stream(client, logprobs=True, top_logprobs=2)
    streamed = [token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]


def test_log_probabilities_of_a_completion(client: TestClient) -> None:
    chunks = stream(client, COMPLETIONS, logprobs=2)
    expected = whole(client, COMPLETIONS, logprobs=2)["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert {name: [row for part in parts for row in part[name]] for name in expected} == expected


def test_echo(client: TestClient) -> None:
    chunks = stream(client, COMPLETIONS, echo=True, n=2)
    plain = texts_in(stream(client, COMPLETIONS, n=2))
    assert texts_in(chunks) == {index: "once" + text for index, text in plain.items()}


def test_what_is_wrong_with_a_request_is_told_before_the_stream(client: TestClient) -> None:
    assert client.post(CHAT, json=asked(CHAT, stream=True, temperature=-1)).status_code == 400
    assert client.post(COMPLETIONS, json=asked(COMPLETIONS, stream=True, prompt="x" * 999)).status_code == 400


@contextmanager
def slow_server() -> Iterator[tuple[str, Engine, ByteTarget]]:
    app, engine, model = make_app(policy="off", max_concurrency=2)
    model.pass_seconds = 0.005
    with engine, served(app) as url:
        try:
            yield url, engine, model
        finally:
            model.gate.set()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_error_in_the_middle_is_the_last_event(path: str) -> None:
    body = asked(path, stream=True, max_tokens=300, ignore_eos=True)
    with slow_server() as (url, _, model), httpx2.stream("POST", url + path, json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        model.failures = 1
        *_, (name, data) = events_of("\n".join([first, *lines, ""]))
    assert name == "error"
    assert json.loads(data)["error"]["type"] == "server_error"
    assert "memory" not in data


def test_an_engine_that_ends_cancels_no_answer_silently() -> None:
    body = asked(CHAT, stream=True, max_tokens=300, ignore_eos=True)
    with slow_server() as (url, engine, _), httpx2.stream("POST", url + CHAT, json=body) as response:
        lines = response.iter_lines()
        first = next(lines)
        engine.close()
        *_, (name, data) = events_of("\n".join([first, *lines, ""]))
    assert name == "error"
    assert json.loads(data)["error"]["code"] == "cancelled"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_whose_reader_goes_is_cancelled(path: str) -> None:
    body = asked(path, stream=True, n=3, max_tokens=350, ignore_eos=True)
    if path == COMPLETIONS:
        body["prompt"] = ["once", "twice"]
    with slow_server() as (url, engine, _):
        with httpx2.stream("POST", url + path, json=body) as response:
            lines = response.iter_lines()  # when the last reference to this goes, so does the connection
            next(lines)
            assert engine.statistics().running > 0
        wait_until(lambda: engine.statistics().running + engine.statistics().waiting == 0)
        finished = engine.statistics().finished
        assert finished.get("length", 0) == 0
        assert finished["cancelled"] == (6 if path == COMPLETIONS else 3)


@pytest.mark.parametrize("streamed", [False, True])
def test_who_goes_while_waiting_is_cancelled(streamed: bool) -> None:
    body = asked(CHAT, stream=streamed, max_tokens=350, ignore_eos=True)
    with slow_server() as (url, engine, model):
        model.gate.clear()
        with pytest.raises(httpx2.ReadTimeout):
            # The response's headers come at once if it is a stream, its first event does not.
            httpx2.post(url + CHAT, json=body, timeout=0.5)
        model.gate.set()
        wait_until(lambda: engine.statistics().finished.get("cancelled") == 1)
        assert engine.statistics().running == 0


def test_a_slow_reader_holds_up_neither_the_engine_nor_others() -> None:
    app, engine, _ = make_app()

    async def read(app: FastAPI) -> None:
        body = json.dumps(asked(CHAT, stream=True, max_tokens=300, ignore_eos=True)).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[bytes] = []
        reads_on = asyncio.Event()

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.Future()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                await reads_on.wait()
                sent.append(message["body"])

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": CHAT, "raw_path": CHAT.encode(), "root_path": "", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        task = asyncio.create_task(app(scope, receive, send))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while engine.statistics().finished.get("length") != 1:
                await asyncio.sleep(0.005)
        assert sent == []
        other = engine.submit(prompt_ids=(1,), max_tokens=3)
        assert len((await asyncio.to_thread(other.result, 60)).completions[0].token_ids) == 3
        reads_on.set()
        await task
        assert events_of(b"".join(sent).decode())[-1] == ("message", "[DONE]")

    with engine:
        asyncio.run(read(app))


@pytest.mark.parametrize("work", ["template", "grammar"])
def test_long_work_does_not_hold_up_the_loop(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, is_done = threading.Event(), threading.Event()

    def slow(*arguments: Any, **named: Any) -> Any:
        has_begun.set()
        assert is_done.wait(60)
        return [1, 2] if work == "template" else compiled(*arguments, **named)

    compiled = GrammarCompiler.compile
    if work == "template":
        monkeypatch.setattr(chat, "chat_token_ids", slow)
    else:
        monkeypatch.setattr(GrammarCompiler, "compile", slow)
    body = asked(CHAT, response_format={"type": "json_object"})
    with slow_server() as (url, _, _):
        answers: list[int] = []
        asking = threading.Thread(
            target=lambda: answers.append(httpx2.post(url + CHAT, json=body, timeout=60).status_code)
        )
        asking.start()
        assert has_begun.wait(60)
        assert httpx2.get(url + "/health").status_code == 200
        assert httpx2.post(url + COMPLETIONS, json=asked(COMPLETIONS, max_tokens=2)).status_code == 200
        assert answers == []
        is_done.set()
        asking.join()
        assert answers == [200]
