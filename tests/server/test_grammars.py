"""Grammars of many clients: compiling them is bounded, and one that fails is its own request's error."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from dspark.engine.grammar import GrammarCompiler, GrammarError, GrammarState
from dspark.server import structured_output
from tests.server.small import make_app, served, wait_until

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 4, "response_format": {"type": "json_object"}}


def regex(pattern: str) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": pattern}}


def test_while_others_compile_what_is_known_does_not_wait_and_what_is_too_much_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, engine, _ = make_app()
    is_done, compile_one, compiled = threading.Event(), GrammarCompiler._compile, []

    def slow(self: GrammarCompiler, source: Any) -> Any:
        compiled.append(source.text)
        assert is_done.wait(60)
        return compile_one(self, source)

    with engine, served(app) as url, httpx2.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(8) as pool:
        assert client.post("/v1/completions", json=BODY).status_code == 200
        monkeypatch.setattr(GrammarCompiler, "_compile", slow)
        monkeypatch.setattr(structured_output, "MOST_WAITING_TO_COMPILE", 1)
        try:
            first = [pool.submit(client.post, "/v1/completions", json=regex(f"a{{{i}}}")) for i in (1, 2)]
            wait_until(lambda: len(compiled) == 2)
            waiting = httpx2.Client(base_url=url, timeout=60)
            third = pool.submit(waiting.post, "/v1/completions", json=regex("b"))
            state = app.state.lifecycle.state
            wait_until(lambda: state.compiling.statistics().tasks_waiting == 1)
            assert client.post("/v1/completions", json=BODY).status_code == 200
            refused = client.post("/v1/completions", json=regex("c"))
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
        finally:
            is_done.set()
        assert [answer.result().status_code for answer in (*first, third)] == [200] * 3
        waiting.close()


def test_who_leaves_while_waiting_is_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    app, engine, _ = make_app()
    is_done, compile_one, compiled = threading.Event(), GrammarCompiler._compile, []

    def slow(self: GrammarCompiler, source: Any) -> Any:
        compiled.append(source.text)
        assert is_done.wait(60)
        return compile_one(self, source)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    with engine, served(app) as url, ThreadPoolExecutor(8) as pool:
        try:
            first = [pool.submit(httpx2.post, f"{url}/v1/completions", json=regex(text), timeout=60) for text in "ab"]
            wait_until(lambda: len(compiled) == 2)
            with pytest.raises(httpx2.TimeoutException):
                httpx2.post(f"{url}/v1/completions", json=regex("c"), timeout=0.3)
        finally:
            is_done.set()
        assert [answer.result().status_code for answer in first] == [200] * 2
        wait_until(lambda: app.state.lifecycle.num_open == 0)
        assert sorted(compiled) == ["a", "b"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_comes_to_a_limit_is_the_clients_error(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: GrammarState, token_ids: Any) -> None:
        raise GrammarError("grammar: too many items")

    monkeypatch.setattr(GrammarState, "extend", fail)
    app, engine, _ = make_app()
    with engine, served(app) as url:
        answer = httpx2.post(f"{url}/v1/completions", json={**BODY, "stream": stream}, timeout=60)
        assert "grammar: too many items" in answer.text
        assert answer.status_code == (200 if stream else 400)
        assert httpx2.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200
        assert engine.statistics().memory.num_used_blocks == 0
