"""What an engine has done, and what it holds now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dspark.engine.memory import MemoryStatistics
from dspark.scheduling import StepCost, StepRecord


@dataclass(kw_only=True)
class StepTotals:
    """Sums over all steps.

    Attributes:
        steps, drafting_steps: all, and those that drafted.
        rounds: one for every decoding choice of every step.
        drafted, verified, accepted: draft tokens proposed, sent to the target, accepted.
        prefill_tokens: prompt tokens computed, those of preempted choices again.
        preemptions: choices that lost their memory to others.
        draft_seconds, schedule_seconds, verify_seconds: time of steps. The first is all of the drafter's, with what it
            catches up with (`StepSeconds.drafter`); the last is the target's pass, with acceptance.
        predicted_seconds: of the steps whose cost was known beforehand; ``known_seconds`` is what these took.
    """

    steps: int = 0
    drafting_steps: int = 0
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    draft_seconds: float = 0.0
    schedule_seconds: float = 0.0
    verify_seconds: float = 0.0
    predicted_seconds: float = 0.0
    known_seconds: float = 0.0

    def add(self, record: StepRecord) -> None:
        """Take in a step that is over."""
        assert record.measured is not None, "the step is not over"
        assert record.accepted_R is not None, "the step is not over"
        self.steps += 1
        self.drafting_steps += record.plan.drafts
        self.rounds += record.plan.batch.num_requests
        self.drafted += 0 if record.drafts is None else record.drafts.num_drafted
        self.verified += int(record.verify_lengths_R.sum())
        self.accepted += int(record.accepted_R.sum())
        self.prefill_tokens += record.plan.batch.prefill_tokens
        self.draft_seconds += record.measured.drafter
        self.schedule_seconds += record.measured.schedule
        self.verify_seconds += record.measured.verify
        if record.predicted is not None:
            self.predicted_seconds += record.predicted.total
            self.known_seconds += record.measured.total

    def copy(self) -> StepTotals:
        """As it is now."""
        return replace(self)


@dataclass(frozen=True, kw_only=True)
class EngineStatistics:
    """An engine at one moment.

    Attributes:
        waiting, running: choices (a request's further choices count from when its prompt is computed).
        finished: choices by finish reason since the start; those of a request that its own error ended by ``error``.
        memory: blocks of keys and values, and prompt tokens found there.
        steps: sums over all steps.
        cost: of a step, as corrected so far; None if it is not known.
        acceptance_odds_ratio: odds that a draft token is accepted over those by its confidence, as learned from all
            requests (``Correction.shared``); 1 for right ones.
    """

    waiting: int
    running: int
    finished: Mapping[str, int]
    memory: MemoryStatistics
    steps: StepTotals
    cost: StepCost | None
    acceptance_odds_ratio: float
