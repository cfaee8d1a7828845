"""An OpenAI-compatible server on a socket whose model is ``FakeGenerator``, and that fails when told to."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from dspark.decoding.request import GenerationCompletion, GenerationRequest
from dspark.decoding.settings import SamplingSettings
from dspark.training.data.endpoint import Endpoint, EndpointGenerator, Retries
from tests.training.data.fakes import END, SELF, TARGET, FakeGenerator, make_settings, make_tokenizer, run

MODEL = "org/fake"
Style = Literal["ids", "logprobs", "text", "text without usage"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What to do instead of an answer: a status with a body, after ``pause_s``, or hang up without one.

    drip_s: time between the bytes of the body.
    """

    status: int = 200
    body: str = '{"error": {"message": "the fake is unwell"}}'
    headers: dict[str, str] = field(default_factory=dict)
    pause_s: float = 0.0
    drip_s: float = 0.0
    hang_up: bool = False


class FakeServer:
    """A context manager; ``url`` is the base URL of the API.

    style: how answers are given. fault: asked for every generation with its number from 0. pause_s: time of an answer.
    change: alters an answer before it is sent.
    """

    def __init__(
        self,
        *,
        style: Style = "ids",
        fault: Callable[[int], Fault | None] = lambda number: None,
        pause_s: float = 0.0,
        models: tuple[dict[str, Any], ...] = ({"id": MODEL},),
        change: Callable[[dict[str, Any]], None] = lambda answer: None,
        port: int = 0,
    ) -> None:
        self.style = style
        self.fault = fault
        self.pause_s = pause_s
        self.models = models
        self.change = change
        self.tokenizer = make_tokenizer()
        self.model = FakeGenerator(self.tokenizer)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.largest_load = 0
        self._load = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _handler(self))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        chat = path.endswith("/chat/completions")
        prompt_ids = body.get("prompt")
        if chat:
            text = self.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
            prompt_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        request = GenerationRequest(
            request_id="",
            prompt_ids=tuple(prompt_ids),
            settings=SamplingSettings(temperature=body["temperature"], top_p=body["top_p"], seed=body["seed"]),
            max_tokens=body["max_tokens"],
            stop_token_ids=frozenset(body.get("stop_token_ids", [END])),
        )
        completion = self.model.complete(request)
        stopped = completion.finish_reason == "stop"
        text = self.tokenizer.decode(completion.token_ids[:-1] if stopped else completion.token_ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": completion.finish_reason}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if self.style == "ids":
            choice |= {"token_ids": completion.token_ids, "prompt_token_ids": prompt_ids}
        elif self.style == "logprobs":
            choice["logprobs"] = {
                "content": [{"id": token, "token": "?", "logprob": -1.0} for token in completion.token_ids]
            }
        elif stopped and "stop_token_ids" in body:
            choice["stop_reason"] = completion.token_ids[-1]
        answer: dict[str, Any] = {"object": "text_completion", "choices": [choice]}
        if self.style != "text without usage":
            answer["usage"] = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(completion.token_ids)}
        self.change(answer)
        return answer

    def enter(self, body: dict[str, Any]) -> int:
        with self._lock:
            self._load += 1
            self.largest_load = max(self.largest_load, self._load)
            self.bodies.append(body)
            return len(self.bodies) - 1

    def leave(self) -> None:
        with self._lock:
            self._load -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            server.keys.append(self.headers.get("Authorization"))
            if self.path == "/v1/models":
                self._send(200, json.dumps({"object": "list", "data": server.models}))
            else:
                self._send(404, '{"detail": "Not Found"}')

        def do_POST(self) -> None:
            server.keys.append(self.headers.get("Authorization"))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = server.enter(body)
            try:
                fault = server.fault(number)
                if fault is None:
                    time.sleep(server.pause_s)
                    content = json.dumps(server.answer(self.path, body))
            finally:
                server.leave()
            if fault is None:
                self._send(200, content)
                return
            time.sleep(fault.pause_s)
            if fault.hang_up:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self._send(fault.status, fault.body, fault.headers, fault.drip_s)

        def _send(self, status: int, content: str, headers: dict[str, str] | None = None, drip_s: float = 0.0) -> None:
            payload = content.encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            if not drip_s:
                self.wfile.write(payload)
                return
            for byte in payload:
                self.wfile.write(bytes([byte]))
                time.sleep(drip_s)

    return Handler


QUICK = Retries(attempts=4, first_wait_s=0.01, longest_wait_s=0.02, timeout_s=20.0)


def make_generator(
    url: str, *, retries: Retries = QUICK, max_concurrency: int = 8, on_wait: Any = None, **endpoint: Any
) -> EndpointGenerator:
    generator = EndpointGenerator(
        Endpoint(url=url, **endpoint),
        tokenizer=make_tokenizer(),
        end_of_answer_id=END,
        vocab_size=TARGET.vocab_size,
        max_concurrency=max_concurrency,
        retries=retries,
        on_wait=on_wait,
    )
    generator.connect()
    return generator


def in_process(requests: Any) -> Any:
    """What the server's model answers, without a server."""
    model = FakeGenerator(make_tokenizer())
    for request in requests:
        settings = SamplingSettings(
            temperature=request.settings.temperature,
            top_p=request.settings.top_p,
            seed=request.settings.seed % 2**31,
        )
        completion = model.complete(
            GenerationRequest(
                request_id=request.request_id,
                prompt_ids=request.prompt_ids,
                settings=settings,
                max_tokens=request.max_tokens,
                stop_token_ids=request.stop_token_ids,
            )
        )
        yield GenerationCompletion(
            request_id=request.request_id, token_ids=completion.token_ids, finish_reason=completion.finish_reason
        )


if __name__ == "__main__":  # a run to be killed: DIRECTORY URL ROWS
    run(
        Path(sys.argv[1]),
        sources=[SELF],
        settings=make_settings(rows=int(sys.argv[3])),
        generator=make_generator(sys.argv[2], max_concurrency=4).run,
    )
