"""What a client sends before anybody has looked for its key is bounded, in bytes and in time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx2
import pytest

from dspark.server.connection import MOST_HEAD_BYTES, HttpConnection
from dspark.server.serving import HttpServer
from dspark.server.settings import ServerSettings
from tests.server.small import ByteTarget, make_app, wait_until


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HttpServer, int, ByteTarget]]:
    """A server with little patience, its port and its model."""
    monkeypatch.setattr(HttpConnection, "head_seconds", 0.5)
    settings = ServerSettings(port=0)
    app, engine, model = make_app(settings=settings)
    http = HttpServer(app, settings)
    http.start()
    with engine:
        yield http, int(http.url.rsplit(":", 1)[1]), model
        model.gate.set()
        http.stop()


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(10)
    return connection


def test_a_head_without_end_is_refused(serving: tuple[HttpServer, int, ByteTarget]) -> None:
    with connect(serving[1]) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\na: ")
        sent = 0
        with suppress(ConnectionError):  # it is closed while we send
            while sent < 8 * MOST_HEAD_BYTES:
                sent += connection.send(b"a" * 4096)
        answer = b""
        with suppress(ConnectionError):
            while part := connection.recv(4096):
                answer += part
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")  # empty where the reset overtook it


def test_a_head_that_does_not_arrive_is_not_waited_for(serving: tuple[HttpServer, int, ByteTarget]) -> None:
    http, port, _ = serving
    with connect(port) as silent, connect(port) as slow, connect(port) as behind:
        slow.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        behind.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea")
        assert behind.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert silent.recv(4096) == b""
        assert slow.recv(4096) == b""
        while part := behind.recv(4096):
            assert b"HTTP" not in part  # what is left of the answer
    assert httpx2.get(f"{http.url}/health").status_code == 200


def test_a_request_may_take_longer_than_its_head(serving: tuple[HttpServer, int, ByteTarget]) -> None:
    http, _, _ = serving
    with httpx2.Client(base_url=http.url) as client:
        body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "n": 6}
        for _ in range(2):
            assert client.post("/v1/completions", json=body, timeout=60).status_code == 200


def test_requests_behind_one_another_end_with_their_client(serving: tuple[HttpServer, int, ByteTarget]) -> None:
    _, port, model = serving
    body = b'{"prompt": "abc", "max_tokens": 300, "ignore_eos": true}'
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request += b"content-length: %d\r\n\r\n%b" % (len(body), body)
    model.pass_seconds = 0.02
    with connect(port) as connection:
        connection.sendall(3 * request)
        wait_until(lambda: model.passes > 0)
    begun = model.passes
    time.sleep(0.5)  # a second one would begin
    assert model.passes < begun + 10
