"""Clients that leave, and clients that do not read."""

from __future__ import annotations

import json
import socket

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.small import make_app, served, wait_until

LONG = {"prompt": "abc", "max_tokens": 390, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def slow():
    """URL, app, engine and model of a server whose steps take a while."""
    app, engine, model = make_app(policy="off")
    model.pass_seconds = 0.01
    with engine, served(app) as url:
        yield url, app, engine, model


def sent(url: str, body: dict[str, object]) -> socket.socket:
    """A connection with little room, on which a request was sent and nothing is read."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def aborted(url: str) -> float:
    families = text_string_to_metric_families(httpx2.get(f"{url}/metrics").text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "vllm:request_success_total" and sample.labels["finished_reason"] == "abort"
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_who_leaves_is_not_answered_any_more(slow, stream, n):
    url, app, engine, _ = slow
    connection = sent(url, {**LONG, "stream": stream, "n": n})
    wait_until(lambda: engine.statistics().running == n)
    if stream:
        assert connection.recv(100)
    connection.close()
    wait_until(lambda: engine.statistics().running == 0)
    statistics = engine.statistics()
    assert statistics.finished == {"cancelled": n}
    assert statistics.memory.num_used_blocks == 0
    wait_until(lambda: app.state.lifecycle.num_open == 0)
    assert aborted(url) == n
    shown = httpx2.get(f"{url}/metrics").text
    assert ('status="499"' in shown) is not stream  # a stream had its 200 already
    assert 'status="503"' not in shown
    assert "dspark_requests_refused_total{" not in shown


def test_who_leaves_while_waiting_gives_its_place_back(slow):
    url, app, engine, model = slow
    model.gate.clear()
    connections = [sent(url, LONG) for _ in range(6)]  # two more than run at once
    try:
        wait_until(lambda: app.state.lifecycle.num_open == 6)
        for connection in connections:
            connection.close()
    finally:
        model.gate.set()
    wait_until(lambda: app.state.lifecycle.num_open == 0)
    wait_until(lambda: engine.statistics().running == engine.statistics().waiting == 0)
    assert aborted(url) == 6


def test_who_does_not_read_holds_up_nobody(slow):
    url, _, engine, model = slow
    model.pass_seconds = 0.0
    with sent(url, {**LONG, "n": 4, "stream": True, "logprobs": 5}):
        wait_until(lambda: sum(engine.statistics().finished.values()) == 4)  # it was computed all the same
        answer = httpx2.post(f"{url}/v1/completions", json=LONG, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 390
        assert httpx2.get(f"{url}/health").status_code == 200
