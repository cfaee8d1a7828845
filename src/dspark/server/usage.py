"""What an answer cost: usage, and what became of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark.engine.request import RequestResult
from dspark.server.protocol import GenerationParameters, PromptTokensDetails, SpeculationReport, Usage


def usage_of(results: Sequence[RequestResult], *, completion_tokens: int | None = None) -> Usage:
    """Tokens of the results of one HTTP request.

    Args:
        completion_tokens: those shown, if not all are.
    """
    if completion_tokens is None:
        completion_tokens = sum(len(c.token_ids) for result in results for c in result.completions)
    return _usage(
        sum(result.prompt_tokens for result in results),
        completion_tokens,
        cached_tokens=sum(result.reused_tokens for result in results),
    )


def speculation_of(results: Sequence[RequestResult]) -> SpeculationReport:
    """Counts over all answers."""
    counts = [completion.counts for result in results for completion in result.completions]
    rounds, committed = sum(count.rounds for count in counts), sum(count.committed for count in counts)
    return SpeculationReport(
        rounds=rounds,
        drafted=sum(count.drafted for count in counts),
        verified=sum(count.verified for count in counts),
        accepted=sum(count.accepted for count in counts),
        committed=committed,
        accepted_length=committed / rounds if rounds else 0.0,
        accepted_per_position=_by_position([count.accepted_per_position for count in counts]),
        reached_per_position=_by_position([count.reached_per_position for count in counts]),
        verified_per_position=_by_position([count.verified_per_position for count in counts]),
    )


class StreamedUsage:
    """What chunks say about usage.

    Attributes:
        completion_tokens: so far.
    """

    def __init__(self, body: GenerationParameters, prompt_tokens: int) -> None:
        options = body.stream_options
        self._at_the_end = bool(options and options.include_usage)
        self._always = bool(options and options.continuous_usage_stats)
        self._speculation = bool(body.return_speculation)
        self._prompt_tokens = prompt_tokens
        self.completion_tokens = 0

    def so_far(self) -> dict[str, Any]:
        """Of a chunk with a choice: null if usage comes at the end, nothing if it does not."""
        if self._always:
            return {"usage": _usage(self._prompt_tokens, self.completion_tokens)}
        return {"usage": None} if self._at_the_end else {}

    def at_the_end(self, results: Sequence[RequestResult]) -> dict[str, Any]:
        """Of the chunk without choices; empty if there is none."""
        last: dict[str, Any] = {}
        if self._at_the_end:
            last["usage"] = usage_of(results)
        if self._speculation:
            last["speculation"] = speculation_of(results)
        return last


def _usage(prompt_tokens: int, completion_tokens: int, *, cached_tokens: int | None = None) -> Usage:
    made = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )
    if cached_tokens is not None:
        made.prompt_tokens_details = PromptTokensDetails(cached_tokens=cached_tokens)
    return made


def _by_position(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(of_position) for of_position in zip(*counts, strict=True)]
