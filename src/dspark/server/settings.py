"""What a server may do, whom it serves, and how it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dspark.engine.request import check_whole_number

__all__ = ["ServerSettings"]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP side; those of memory and concurrency are `dspark.engine.settings.EngineSettings`.

    Attributes:
        host: address to listen at.
        port: 0 for any that is free.
        api_keys: who sends one of them is served; empty: everybody is.
        model_name: what clients call the model; None for the target's name.
        max_body_bytes: of a request, at most.
        body_seconds: in which a request's body has to arrive.
        separate_keys: prompts that were computed for one API key are never reused for another.
        drain_seconds: for running requests to finish when the server is told to end.

    Raises:
        ValueError: naming the field.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    model_name: str | None = None
    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 60.0
    separate_keys: bool = False
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_whole_number("port", self.port, least=0)
        if self.port > 65535:
            raise ValueError(f"port is {self.port}; it must be at most 65535")
        check_whole_number("max_body_bytes", self.max_body_bytes, least=1)
        for name in ("body_seconds", "drain_seconds"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value:g}; give seconds of at least 0")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("api_keys must be visible ASCII characters without spaces, at least one")
        if self.model_name is not None and not self.model_name.strip():
            raise ValueError("model_name is empty: give what clients are to call the model, or leave it out")
        if self.separate_keys and not self.api_keys:
            raise ValueError("separate_keys separates those who use different API keys: give api_keys, too")
