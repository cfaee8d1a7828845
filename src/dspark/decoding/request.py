"""One generation that is asked for, and what came of it: what a batched generator takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.decoding.settings import SamplingSettings


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Continue ``prompt_ids`` by at most ``max_tokens`` tokens, or up to and including a stop token.

    ``messages`` is the conversation that ``prompt_ids`` spells, as (role, content), where it spells a whole one: some
    generators can only be asked that way.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    settings: SamplingSettings
    max_tokens: int
    stop_token_ids: frozenset[int]
    messages: tuple[tuple[str, str], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationCompletion:
    """What a request produced; a stop token that ended it is the last of ``token_ids``.

    ``finish_reason`` is ``stop`` (a stop token) or ``length`` (``max_tokens`` or the generator's own limit).
    ``exact`` is False where ``token_ids`` had to be recovered from text and may not be the tokens that the model drew
    (or not after ``prompt_ids``); the text is right either way.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str
    exact: bool = True
