"""Requests without end for a benchmark: real prompts, the domains taking turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from dspark.decoding import SamplingSettings
from dspark.engine.request import Request

__all__ = ["RequestStream", "StreamPrompt"]


@dataclass(frozen=True, kw_only=True)
class StreamPrompt:
    """A prompt as the target reads it."""

    domain: str
    prompt_ids: tuple[int, ...]


class RequestStream:
    """Request 0, 1, 2, ...: each of the next domain, which goes through its prompts over and over.

    A request depends on its number and the seed alone, so that whoever takes the first n asks the same. At temperature
    0 its answer is the same, too; above, it is drawn by the p/q rule, whose answers depend on what was drafted.

    Args:
        prompts: at least one.
        max_tokens: of an answer at most.
        seed: orders each domain's prompts, and samples.

    Raises:
        ValueError: there is no prompt, or ``max_tokens`` is below 1.
    """

    def __init__(
        self,
        prompts: Sequence[StreamPrompt],
        *,
        temperature: float = 0.0,
        max_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
    ) -> None:
        if not prompts:
            raise ValueError("prompts is empty: give at least one")
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
        self.max_tokens = max_tokens
        self._sampling = SamplingSettings(temperature=temperature)
        self._stop_token_ids = stop_token_ids
        self._seed = seed
        by_domain: dict[str, list[tuple[int, ...]]] = {}
        for prompt in prompts:
            by_domain.setdefault(prompt.domain, []).append(prompt.prompt_ids)
        for domain, alike in by_domain.items():
            random.Random(f"{seed} {domain}").shuffle(alike)
        self._domains = list(by_domain.values())

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(len(prompt) for domain in self._domains for prompt in domain) + self.max_tokens

    @property
    def is_greedy(self) -> bool:
        """Whether a request's answer is the same under every policy."""
        return self._sampling.is_greedy

    def request(self, number: int, *, max_tokens: int | None = None) -> Request:
        """The request with this number; ``max_tokens`` makes its answer shorter."""
        round_number, place = divmod(number, len(self._domains))
        prompts = self._domains[place]
        return Request(
            prompt_ids=prompts[round_number % len(prompts)],
            sampling=self._sampling,
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            stop_token_ids=self._stop_token_ids,
            random=random.Random(f"{self._seed} {number}").random,
        )
