"""The server's application, put together: routes, and what surrounds them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from dspark import __version__
from dspark.engine.engine import Engine
from dspark.server import chat, completions, status, tokenize
from dspark.server.errors import add_error_handlers
from dspark.server.middleware import OPEN_PATHS, BodyLimit, Gate, Reporting
from dspark.server.settings import ServerSettings
from dspark.server.state import Lifecycle, ServerState

__all__ = ["create_app", "loading_app"]


def loading_app(settings: ServerSettings) -> FastAPI:
    """The application before its models are there: it says so until ``app.state.lifecycle.become_ready``."""
    app = FastAPI(
        title="dspark",
        version=__version__,
        summary="An OpenAI-compatible server with lossless speculative decoding.",
        docs_url=None,  # these pages fetch their scripts from elsewhere
        redoc_url=None,
    )
    app.state.lifecycle = Lifecycle()
    add_error_handlers(app)
    for part in (status.router, chat.router, completions.router, tokenize.router):
        app.include_router(part)
    if settings.api_keys:
        _document_keys(app)
    app.add_middleware(BodyLimit, settings=settings)  # the last one added is the outermost
    app.add_middleware(Gate, lifecycle=app.state.lifecycle, settings=settings)
    app.add_middleware(Reporting, lifecycle=app.state.lifecycle)
    return app


def create_app(engine: Engine, settings: ServerSettings | None = None) -> FastAPI:
    """An ASGI application over a running engine, which remains the caller's to close.

    Args:
        settings: of them ``host``, ``port`` and ``drain_seconds`` are for `dspark.server.serving` only.
    """
    settings = settings or ServerSettings()
    app = loading_app(settings)
    app.state.lifecycle.become_ready(ServerState.of(engine, settings))
    return app


def _document_keys(app: FastAPI) -> None:
    """Say in the OpenAPI document which routes ask for a key, and how it is sent: a middleware is not in there."""
    document_of_routes = app.openapi

    def openapi() -> dict[str, Any]:
        document = document_of_routes()
        document["components"]["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            for operation in operations.values() if path not in OPEN_PATHS else ():
                operation["security"] = [{"api_key": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]
