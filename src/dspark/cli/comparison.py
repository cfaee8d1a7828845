"""The numbers of prompts answered both ways: by the target alone and with speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.cli.prompts import Prompt
    from dspark.engine.result import GenerationResult


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One prompt answered both ways."""

    prompt: Prompt
    plain: GenerationResult
    speculative: GenerationResult

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs, or that only one output has; None when the outputs are identical."""
        ours, theirs = self.speculative.token_ids, self.plain.token_ids
        if ours == theirs:
            return None
        pairs = enumerate(zip(ours, theirs, strict=False))
        return next((index for index, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


@dataclass(frozen=True, kw_only=True)
class Report:
    """All comparisons, and their numbers pooled.

    ``repeatable`` says whether both outputs have to be identical (greedy, or seeded); otherwise they are two samples of
    one distribution.
    """

    comparisons: tuple[Comparison, ...]
    repeatable: bool

    @property
    def plain_tokens_per_second(self) -> float:
        return tokens_per_second([comparison.plain for comparison in self.comparisons])

    @property
    def speculative_tokens_per_second(self) -> float:
        return tokens_per_second([comparison.speculative for comparison in self.comparisons])

    @property
    def speed_up(self) -> float:
        return self.speculative_tokens_per_second / max(self.plain_tokens_per_second, 1e-9)

    @property
    def accepted_length(self) -> float:
        """Committed tokens a round, over all rounds of all prompts."""
        return pooled_accepted_length([comparison.speculative for comparison in self.comparisons])

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Rounds in which the draft was accepted up to position k, k = 1, 2, ..."""
        return _sum_columns([comparison.speculative.accepted_per_position for comparison in self.comparisons])

    @property
    def reached_per_position(self) -> tuple[int, ...]:
        """Rounds in which position k of the draft was verified and all before it were accepted."""
        return _sum_columns([comparison.speculative.reached_per_position for comparison in self.comparisons])

    @property
    def verified_per_position(self) -> tuple[int, ...]:
        """Rounds in which position k of the draft was verified."""
        return _sum_columns([comparison.speculative.verified_per_position for comparison in self.comparisons])

    @property
    def differing(self) -> tuple[int, ...]:
        """Indices of the prompts whose two outputs differ."""
        return tuple(
            index for index, comparison in enumerate(self.comparisons) if comparison.first_difference is not None
        )

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "identical": not self.differing if self.repeatable else None,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "speculative_tokens_per_second": self.speculative_tokens_per_second,
            "speed_up": self.speed_up,
            "accepted_length": self.accepted_length,
            "accepted_per_position": self.accepted_per_position,
            "reached_per_position": self.reached_per_position,
            "verified_per_position": self.verified_per_position,
            "prompts": [
                {
                    "domain": comparison.prompt.domain,
                    "prompt": comparison.prompt.turns[0],
                    "first_difference": comparison.first_difference if self.repeatable else None,
                    "plain": comparison.plain.to_json(),
                    "speculative": comparison.speculative.to_json(),
                }
                for comparison in self.comparisons
            ],
        }


def tokens_per_second(results: Sequence[GenerationResult]) -> float:
    """Speed over all answers together, prefill included."""
    return sum(len(result.token_ids) for result in results) / max(sum(result.seconds for result in results), 1e-9)


def pooled_accepted_length(results: Sequence[GenerationResult]) -> float:
    """Tokens committed in rounds / rounds, over all rounds of all answers; 0 without a round."""
    rounds = sum(result.rounds for result in results)
    return sum(result.accepted_length * result.rounds for result in results) / max(rounds, 1)


def _sum_columns(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    width = max((len(row) for row in rows), default=0)
    return tuple(sum(row[column] for row in rows if column < len(row)) for column in range(width))
