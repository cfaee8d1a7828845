"""What regeneration asks of a batched generator.

The engine offers one; training does not import the engine, so the command that uses both wires them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dspark.decoding.settings import SamplingSettings


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One generation: continue ``prompt_ids`` by at most ``max_tokens`` tokens, or up to and including a stop token."""

    request_id: str
    prompt_ids: tuple[int, ...]
    settings: SamplingSettings
    max_tokens: int
    stop_token_ids: frozenset[int]


class GenerationCompletion(Protocol):
    """The outcome of a request: ``token_ids`` has the stop token at its end when ``finish_reason`` is "stop"."""

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def finish_reason(self) -> str: ...


#: Runs requests in a batch. It pulls a request whenever it has room (None: nothing at this moment, ask again after the
#: next completion; end of the iterator: no more will come) and yields every completion as soon as it is there.
BatchGenerate = Callable[[Iterator[GenerationRequest | None]], Iterator[GenerationCompletion]]
