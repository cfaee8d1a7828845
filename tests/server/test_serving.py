"""How a server ends: told to, twice told, or by itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx2
import pytest

from dspark.server.serving import HttpServer, allow_many_connections, serve_until_told
from dspark.server.settings import ServerSettings
from tests.server.small import make_app, wait_until

REQUEST = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def signals():
    """Handlers are as before afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Serving:
    """A server that the main thread runs while another thread plays its clients."""

    def __init__(self, drain_seconds: float) -> None:
        self.settings = ServerSettings(port=0, drain_seconds=drain_seconds)
        self.app, self.engine, self.model = make_app(settings=self.settings)
        self.http = HttpServer(self.app, self.settings)
        self.url = self.http.url
        self.pool = ThreadPoolExecutor()

    def run(self, scene) -> tuple[int, object]:
        """The exit code, and what ``scene``, beside it, came to."""
        self.http.start()
        played = self.pool.submit(scene)
        played.add_done_callback(lambda played: end() if played.exception() is not None else None)
        with self.engine, self.pool:
            code = serve_until_told(self.http, self.app.state.lifecycle, self.settings)
            self.model.gate.set()
        return code, played.result()

    def ask(self, **more: object) -> Future[httpx2.Response]:
        """A request on its way."""
        before = self.app.state.lifecycle.num_open
        answer = self.pool.submit(httpx2.post, f"{self.url}/v1/completions", json={**REQUEST, **more}, timeout=60)
        wait_until(lambda: self.app.state.lifecycle.num_open == before + 1)
        return answer


def end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_drain_refuses_what_is_new_and_finishes_what_runs(signals):
    serving = Serving(drain_seconds=60.0)
    serving.model.gate.clear()

    def scene():
        running = serving.ask()
        end()
        wait_until(lambda: serving.app.state.lifecycle.phase == "draining")
        refused = httpx2.post(f"{serving.url}/v1/completions", json=REQUEST)
        health = httpx2.get(f"{serving.url}/health")
        serving.model.gate.set()
        return refused, health, running.result()

    code, (refused, health, answer) = serving.run(scene)
    assert code == 0
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert health.status_code == 503
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 300
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{serving.url}/health")


def test_what_does_not_finish_in_time_is_cancelled_and_told_so(signals):
    serving = Serving(drain_seconds=0.1)
    serving.model.pass_seconds = 0.05

    def scene():
        answers = [serving.ask(), serving.ask(stream=True)]
        end()
        return [answer.result() for answer in answers]

    began = time.monotonic()
    code, (whole, stream) = serving.run(scene)
    assert code == 0
    assert time.monotonic() - began < 10.0  # 300 tokens take longer, and so does the grace for slow readers
    assert whole.status_code == 503
    assert "shutting down" in whole.json()["error"]["message"]
    assert stream.status_code == 200
    assert "event: error" in stream.text
    assert "[DONE]" not in stream.text


def test_a_server_whose_engine_has_ended_ends_loudly(signals, caplog):
    serving = Serving(drain_seconds=60.0)
    serving.model.failures = 3

    def scene():
        statuses = [httpx2.post(f"{serving.url}/v1/completions", json=REQUEST).status_code for _ in range(3)]
        wait_until(lambda: not serving.engine.is_alive)
        return statuses

    code, statuses = serving.run(scene)
    assert code == 1
    assert set(statuses) == {500}
    assert "the engine has ended" in caplog.text


def test_an_address_in_use_is_an_error_that_says_what_to_do():
    serving = Serving(drain_seconds=0.0)
    port = int(serving.url.rpartition(":")[2])
    with serving.engine, pytest.raises(OSError, match=f"port {port}: Address already in use .*--port"):
        HttpServer(serving.app, ServerSettings(port=port))
    serving.http.start()
    serving.http.stop()
    assert not any(thread.name == "dspark-http" for thread in threading.enumerate())


def test_a_process_may_have_as_many_connections_as_the_system_lets():
    resource = pytest.importorskip("resource")
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= 1024:
        pytest.skip("the system lets no more")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1024
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
