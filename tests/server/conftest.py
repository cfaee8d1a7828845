"""A small server, in process and behind a socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from tests.server.small import ByteTarget, make_app, served


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """In process, over `ByteTarget`; shared by a module's tests."""
    app, engine, _ = make_app()
    with engine, TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def live() -> Iterator[tuple[str, ByteTarget, TestClient]]:
    """URL of a server of its own, its model, and a client of the same app in process."""
    app, engine, model = make_app()
    with engine, served(app) as url, TestClient(app, raise_server_exceptions=False) as client:
        try:
            yield url, model, client
        finally:
            model.gate.set()  # closing the engine waits for its pass
