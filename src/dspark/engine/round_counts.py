"""What became of the draft tokens of one answer, counted round by round."""

from __future__ import annotations

from dspark.engine.request import SpeculationCounts

__all__ = ["RoundCounts", "num_judged"]


class RoundCounts:
    """`SpeculationCounts` that grow with every round.

    Args:
        block_size: draft tokens of a round at most.
    """

    def __init__(self, block_size: int) -> None:
        self._rounds = self._drafted = self._verified = self._accepted = self._committed = 0
        self._accepted_per_position = [0] * block_size
        self._reached_per_position = [0] * block_size
        self._verified_per_position = [0] * block_size

    def add(self, *, drafted: int, verified: int, accepted: int, committed: int, kept: int) -> None:
        """Take in a round that committed ``committed`` tokens, of which ``kept`` came before the end of the answer."""
        accepted = min(accepted, kept)
        self._rounds += 1
        self._drafted += drafted
        self._verified += verified
        self._accepted += accepted
        self._committed += kept
        for position in range(num_judged(verified=verified, committed=committed, kept=kept)):
            self._verified_per_position[position] += 1
            self._reached_per_position[position] += position <= accepted
            self._accepted_per_position[position] += position < accepted

    def counts(self) -> SpeculationCounts:
        """So far."""
        return SpeculationCounts(
            rounds=self._rounds,
            drafted=self._drafted,
            verified=self._verified,
            accepted=self._accepted,
            committed=self._committed,
            accepted_per_position=tuple(self._accepted_per_position),
            reached_per_position=tuple(self._reached_per_position),
            verified_per_position=tuple(self._verified_per_position),
        )


def num_judged(*, verified: int, committed: int, kept: int) -> int:
    """Verified draft tokens whose fate is known: what lies behind the end of an answer is neither kept nor rejected."""
    return verified if kept == committed else kept
