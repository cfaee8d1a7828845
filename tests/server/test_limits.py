"""Requests that are too large, too slow, too many or no JSON at all."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from fastapi.testclient import TestClient

from dspark.server.settings import ServerSettings
from tests.server.small import make_app, served, wait_until

LIMIT = 2000


@pytest.fixture(scope="module")
def narrow():
    """URL of a live server with little room for a body, and little patience."""
    app, engine, _ = make_app(settings=ServerSettings(max_body_bytes=LIMIT, body_seconds=0.5))
    with engine, served(app) as url:
        yield url


def body(length: int) -> bytes:
    """A request of that many bytes."""
    text = json.dumps({"prompt": "", "max_tokens": 1})
    return text.replace('""', '"' + "a" * (length - len(text)) + '"').encode()


def test_a_body_up_to_the_limit_is_read(narrow):
    answer = httpx2.post(f"{narrow}/v1/completions", content=body(LIMIT), headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "tokens" in answer.json()["error"]["message"]  # it got as far as the context's limit


@pytest.mark.parametrize("length", [LIMIT + 1, 3 * 2**20])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_larger_one_is_refused_however_it_is_sent(narrow, length, is_chunked):
    whole = body(length)
    content = (whole[start : start + 1000] for start in range(0, length, 1000)) if is_chunked else whole
    answer = httpx2.post(f"{narrow}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert str(LIMIT) in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "body_too_large"
    assert httpx2.get(f"{narrow}/health").status_code == 200


def test_a_body_that_does_not_arrive_is_not_waited_for(narrow):
    host, port = narrow.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"error"' in answer


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"prompt": "a\xff"}',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"max_tokens": ' + b"9" * 5000 + b', "prompt": "a"}',
        b'{"prompt": "a", "temperature": NaN}',
    ],
    ids=lambda content: repr(content[:24]),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_what_is_no_request_is_the_clients_error(client, path, content):
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_full_queue_refuses_and_takes_requests_again():
    app, engine, model = make_app(max_concurrency=1, max_waiting=2)
    request = {"prompt": "abc", "max_tokens": 4}
    with engine, TestClient(app) as client, ThreadPoolExecutor(3) as pool:
        model.gate.clear()
        try:
            lifecycle = app.state.lifecycle
            answers = []
            for number in range(3):  # one in the held pass, two waiting
                answers.append(pool.submit(client.post, "/v1/completions", json=request))
                wait_until(lambda number=number: lifecycle.num_open == number + 1)
                wait_until(lambda number=number: engine._core.num_waiting + engine._submitted >= number)
                if number == 0:
                    wait_until(lambda: len(engine._core._slots.running) == 1)
            refused = client.post("/v1/completions", json=request)
        finally:
            model.gate.set()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert [answer.result().status_code for answer in answers] == [200] * 3
        assert client.post("/v1/completions", json=request).status_code == 200
        assert (
            'dspark_requests_refused_total{engine="0",model_name="bytes",reason="queue full"} 1.0'
            in client.get("/metrics").text
        )
        assert lifecycle.num_open == 0


def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten(narrow):
    host, port = narrow.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert threading.active_count() < 100
    assert httpx2.get(f"{narrow}/v1/models").status_code == 200
