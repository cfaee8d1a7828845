"""What routes work with, and whether the server is ready for them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

from anyio import CapacityLimiter
from fastapi import Depends, Request
from transformers import PreTrainedTokenizerBase

from dspark import __version__
from dspark.engine.engine import Engine
from dspark.models.loading import LoadedTarget
from dspark.server.errors import ApiError
from dspark.server.metrics import ServerMetrics
from dspark.server.settings import ServerSettings
from dspark.server.token_texts import TokenTexts

__all__ = ["CurrentState", "Lifecycle", "ServerState", "prefix_namespace", "turn"]

_MOST_COMPILING = 2

Phase = Literal["loading", "ready", "draining"]


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """What answers requests.

    Attributes:
        model_name: what clients call the model.
        created: from when it is served, in seconds since 1970.
    """

    engine: Engine
    settings: ServerSettings
    model_name: str
    metrics: ServerMetrics
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, engine: Engine, settings: ServerSettings) -> Self:
        """To serve ``engine``, which is watched from now on."""
        name = settings.model_name or engine.target.public_name
        return cls(engine=engine, settings=settings, model_name=name, metrics=ServerMetrics(engine, model_name=name))

    @property
    def target(self) -> LoadedTarget:
        """The engine's."""
        return self.engine.target

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's."""
        return self.target.tokenizer

    @cached_property
    def system_fingerprint(self) -> str:
        """Changes when the same request may give another answer: with the weights, their format, or our version."""
        model = self.target.model
        facts = f"{model.fingerprint} {model.compute_dtype} {model.device} {__version__}"
        return f"fp_{sha256(facts.encode()).hexdigest()[:16]}"

    def heading(self, kind: str) -> dict[str, Any]:
        """What a response begins with, and all chunks of a stream alike; ``kind`` begins its id."""
        return {
            "id": f"{kind}-{uuid4().hex}",
            "created": int(time.time()),
            "model": self.model_name,
            "system_fingerprint": self.system_fingerprint,
        }

    @cached_property
    def compiling(self) -> CapacityLimiter:
        """Threads that compile grammars."""
        return CapacityLimiter(_MOST_COMPILING)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Single tokens as text; takes a while, the first time. ValueError: this tokenizer's cannot be had."""
        return TokenTexts(self.tokenizer, self.target.model.config.vocab_size)


class Lifecycle:
    """Loading, then ready, then draining; ``app.state.lifecycle`` of every app. Any thread may use it."""

    def __init__(self) -> None:
        self.phase: Phase = "loading"
        self.state: ServerState | None = None
        self.num_open = 0  # requests that are being answered, those of /health and the like aside

    def become_ready(self, state: ServerState) -> None:
        """Requests are answered from now on."""
        self.state = state
        self.phase = "ready"

    def drain(self) -> None:
        """Refuse new requests; those that run go on."""
        self.phase = "draining"

    @property
    def why_unavailable(self) -> str | None:
        """Why new requests are refused; None if they are not."""
        if self.phase == "loading" or self.state is None:
            return "the models are still loading"
        if self.phase == "draining":
            return "the server is shutting down"
        if not self.state.engine.is_alive:
            return "the engine has ended"
        return None


def current_state(request: Request) -> ServerState:
    """The state, for a route's parameter; ApiError 503 while there is none."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    if lifecycle.state is None:
        raise ApiError(503, lifecycle.why_unavailable or "the server is not ready")
    return lifecycle.state


CurrentState = Annotated[ServerState, Depends(current_state)]
"""Annotation of a route's parameter that is given the `ServerState`."""


def prefix_namespace(request: Request, state: ServerState) -> str:
    """`dspark.engine.request.Request.prefix_namespace` of an HTTP request: one for each API key, if so set."""
    return _key_digest(request) if state.settings.separate_keys else ""


def turn(request: Request, user: str | None) -> str:
    """`dspark.engine.request.Request.user` of an HTTP request: its API key's, and within it the user it names."""
    return f"{_key_digest(request)}:{user or ''}"


def _key_digest(request: Request) -> str:
    """What the authentication left: a digest of the key; empty where none is asked for."""
    digest: str = getattr(request.state, "key_digest", "")
    return digest
