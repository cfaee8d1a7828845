"""An engine over a table of bytes, which can be held or made to fail, and a live server in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from dspark.engine.engine import Engine
from dspark.engine.settings import EngineSettings
from dspark.models.loading import LoadedTarget
from dspark.models.target import TargetOutput
from dspark.server.app import create_app
from dspark.server.settings import ServerSettings
from tests.engine.confident import ConfidentTableDrafter, make_cost
from tests.engine.table_models import TableTarget, random_table
from tests.server.byte_tokenizer import END, VOCABULARY_SIZE, byte_tokenizer

CONTEXT = 400


class ByteTarget(TableTarget):
    """Says random bytes, and counts passes as they begin.

    Waits in a pass while ``gate`` is closed; raises while ``failures`` is above 0.
    """

    fingerprint = "0123456789abcdef"
    compute_dtype = "float32"

    def __init__(self) -> None:
        table_SV = random_table(VOCABULARY_SIZE, 0)
        table_SV[:, END] *= 0.05  # answers are not over at once
        super().__init__(table_SV / table_SV.sum(-1, keepdim=True), context=CONTEXT)
        self.gate = threading.Event()
        self.gate.set()
        self.failures = 0
        self.pass_seconds = 0.0
        self.passes = 0

    def forward(self, *arguments, **named) -> TargetOutput:  # type: ignore[no-untyped-def]
        self.passes += 1
        self.gate.wait()
        time.sleep(self.pass_seconds)
        if self.failures > 0:
            self.failures -= 1
            raise MemoryError("no memory left")
        return super().forward(*arguments, **named)


def make_engine(policy: str = "fixed:3", **settings: object) -> tuple[Engine, ByteTarget]:
    """An engine with small memory, and its model."""
    model = ByteTarget()
    near = (model.table_SV + 0.3 * random_table(VOCABULARY_SIZE, 1)) / 1.3
    target = LoadedTarget(
        model=model,  # type: ignore[arg-type]
        tokenizer=byte_tokenizer(),
        name="bytes",
        stop_token_ids=frozenset({END}),
    )
    chosen = {"kv_memory_bytes": 10**6, "max_concurrency": 4, **settings}
    made = EngineSettings(**chosen)  # type: ignore[arg-type]
    drafter = ConfidentTableDrafter(near, 3)
    return Engine(target, drafter, policy=policy, cost=make_cost(), settings=made), model


def make_app(
    policy: str = "fixed:3", *, settings: ServerSettings | None = None, **engine_settings: object
) -> tuple[FastAPI, Engine, ByteTarget]:
    """An app that is ready. The engine is the caller's to close."""
    engine, model = make_engine(policy, **engine_settings)
    return create_app(engine, settings), engine, model


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The app behind a real socket; gives the URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    (listening,) = server.servers
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Poll; AssertionError if it does not come to hold."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.005)
