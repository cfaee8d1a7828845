"""What an answer cost: usage, and what became of drafts."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.engine.request import RequestResult
from dspark.server.protocol import PromptTokensDetails, SpeculationReport, Usage


def usage_of(results: Sequence[RequestResult], *, completion_tokens: int | None = None) -> Usage:
    """Tokens of the results of one HTTP request.

    Args:
        completion_tokens: those shown, if not all are.
    """
    if completion_tokens is None:
        completion_tokens = sum(len(c.token_ids) for result in results for c in result.completions)
    return usage(
        sum(result.prompt_tokens for result in results),
        completion_tokens,
        cached_tokens=sum(result.reused_tokens for result in results),
    )


def usage(prompt_tokens: int, completion_tokens: int, *, cached_tokens: int | None = None) -> Usage:
    """Usage from counts."""
    made = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )
    if cached_tokens is not None:
        made.prompt_tokens_details = PromptTokensDetails(cached_tokens=cached_tokens)
    return made


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


def _by_position(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(of_position) for of_position in zip(*counts, strict=True)]
