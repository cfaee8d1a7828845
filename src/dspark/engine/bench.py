"""Policies measured against each other at one concurrency, in turns on the same requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from dspark.drafters.protocol import Drafter
from dspark.engine.closed_loop import Answer, ClosedLoop, Turn
from dspark.engine.request_stream import RequestStream
from dspark.models.target import Target
from dspark.scheduling import Off, Policy, StepCost, StepRecord

__all__ = ["METRICS", "BenchStep", "Cell", "Spread", "measure_cell"]

_SLICE_SECONDS = 0.25

METRICS: Mapping[str, Callable[[Turn], float | None]] = {
    "tokens_per_second": lambda turn: turn.tokens / turn.seconds,
    "user_tokens_per_second": lambda turn: turn.user_tokens_per_second,
    "accepted_length": lambda turn: _ratio(turn.round_tokens, turn.steps.rounds),
    "drafted": lambda turn: _ratio(turn.steps.drafted, turn.steps.rounds),
    "verified": lambda turn: _ratio(turn.steps.verified, turn.steps.rounds),
    "accepted": lambda turn: _ratio(turn.steps.accepted, turn.steps.rounds),
    "drafting_steps": lambda turn: turn.steps.drafting_steps / turn.steps.steps,
    "requests_per_step": lambda turn: turn.steps.rounds / turn.steps.steps,
    "prefill_tokens_per_step": lambda turn: turn.steps.prefill_tokens / turn.steps.steps,
    "step_seconds": lambda turn: _step_seconds(turn) / turn.steps.steps,
    "draft_seconds": lambda turn: turn.steps.draft_seconds / turn.steps.steps,
    "schedule_seconds": lambda turn: turn.steps.schedule_seconds / turn.steps.steps,
    "verify_seconds": lambda turn: turn.steps.verify_seconds / turn.steps.steps,
    "first_token_seconds": lambda turn: turn.first_token_seconds,
}
"""What a turn comes to, by name; None where nothing of the kind happened. Draft tokens and the accepted length are a
request's in one step; ``drafting_steps`` is a share of the steps."""


@dataclass(frozen=True, kw_only=True)
class BenchStep:
    """A step that a benchmark made, in round ``round`` (from 0; None while the loop was being filled)."""

    round: int | None
    record: StepRecord


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median over the rounds that have a value, and the lowest and highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """None if no round has one."""
        known = [value for value in values if value is not None]
        return cls(median=median(known), low=min(known), high=max(known)) if known else None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What the policies did at one concurrency.

    Attributes:
        requests: that finished in a round under each policy.
        turns: of each policy, by round.
        fill_seconds: until every request of the first ``concurrency`` had its first token, before the first round.
        baseline: the policy whose answers the others' were compared with; None where answers are not comparable.
        compared: answers, finished or not, that the baseline and the policy both began.
        differing: those of them that are not the same tokens.
    """

    concurrency: int
    requests: int
    turns: Mapping[str, Sequence[Turn]]
    fill_seconds: Mapping[str, float]
    baseline: str | None
    compared: Mapping[str, int]
    differing: Mapping[str, int]

    def spread(self, policy: str, metric: str) -> Spread | None:
        """One of `METRICS` over the rounds."""
        return Spread.of([METRICS[metric](turn) for turn in self.turns[policy]])

    def speed_against(self, policy: str, reference: str) -> Spread | None:
        """Tokens per second of a policy / those of another in the same round; None if that one was not measured."""
        if reference not in self.turns:
            return None
        speed = METRICS["tokens_per_second"]
        pairs = zip(self.turns[policy], self.turns[reference], strict=True)
        return Spread.of([_ratio(speed(turn), speed(other)) for turn, other in pairs])

    @property
    def best_fixed(self) -> str | None:
        """The fixed length with the most tokens per second; None if none was measured."""
        fixed = [policy for policy in self.turns if policy.startswith("fixed:")]
        return max(fixed, key=lambda policy: _speed(self.turns[policy]), default=None)

    def to_json(self) -> dict[str, Any]:
        """All numbers, ready for ``json.dumps``."""
        best_fixed = self.best_fixed
        policies = {}
        for policy, turns in self.turns.items():
            policies[policy] = {
                **{metric: _json(self.spread(policy, metric)) for metric in METRICS},
                "against_off": _json(self.speed_against(policy, Off().name)),
                "against_best_fixed": None if best_fixed is None else _json(self.speed_against(policy, best_fixed)),
                "compared_answers": self.compared.get(policy),
                "differing_answers": self.differing.get(policy),
                "fill_seconds": self.fill_seconds[policy],
                "rounds": [asdict(turn) for turn in turns],
            }
        return {
            "concurrency": self.concurrency,
            "requests": self.requests,
            "best_fixed": best_fixed,
            "baseline": self.baseline,
            "policies": policies,
        }


def measure_cell(
    target: Target,
    drafter: Drafter | None,
    policies: Sequence[Policy],
    stream: RequestStream,
    *,
    concurrency: int,
    requests: int,
    rounds: int,
    cost: StepCost | None = None,
    kv_memory_bytes: int | None = None,
    on_step: Callable[[BenchStep], None] | None = None,
    on_turn: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Cell:
    """Run every policy's closed loop by turns.

    All loops are filled first, outside the measurement. Then each round takes every loop on until ``requests`` more of
    the stream have finished, in slices of a quarter of a second by turns, so that in a round all policies see the same
    requests and the same moods of the machine; each round begins with another policy.

    Args:
        drafter: None if the only policy is off.
        policies: with names of their own.
        cost: where each policy's engine begins to correct it.
        on_step: is given every step, those of the filling too.
        on_turn: is called with the policy's name before each filling, and at the beginning of each turn.

    Raises:
        ValueError: naming what does not fit.
    """
    for name, value in (("concurrency", concurrency), ("requests", requests), ("rounds", rounds)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    names = [policy.name for policy in policies]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"policies are {', '.join(names) or 'none'}: give at least one, and each once")
    current: int | None = None

    def take_in(record: StepRecord) -> None:
        if on_step is not None:
            on_step(BenchStep(round=current, record=record))

    def announce(policy: str) -> None:
        if on_turn is not None:
            on_turn(policy)

    loops: dict[str, ClosedLoop] = {}
    fill_seconds: dict[str, float] = {}
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    try:
        for policy in policies:
            announce(policy.name)
            loops[policy.name] = ClosedLoop(
                target,
                drafter,
                stream,
                policy=policy,
                cost=cost,
                concurrency=concurrency,
                kv_memory_bytes=kv_memory_bytes,
                on_step=take_in,
                clock=clock,
            )
            fill_seconds[policy.name] = loops[policy.name].fill()
        for current in range(rounds):
            first = current % len(names)
            order = names[first:] + names[:first]
            for name in order:
                announce(name)
                loops[name].begin_turn(requests)
            unfinished = order
            while unfinished:
                unfinished = [name for name in unfinished if not loops[name].advance(_SLICE_SECONDS)]
            for name in order:
                turns[name].append(loops[name].end_turn())
    finally:
        for loop in loops.values():
            loop.close()
    baseline = (Off().name if Off().name in names else names[0]) if stream.is_greedy else None
    pairs = {} if baseline is None else {name: _pairs(loops[baseline], loops[name]) for name in names}
    return Cell(
        concurrency=concurrency,
        requests=requests,
        turns=turns,
        fill_seconds=fill_seconds,
        baseline=baseline,
        compared={name: len(found) for name, found in pairs.items()},
        differing={name: sum(not a.agrees(b) for a, b in found) for name, found in pairs.items()},
    )


def _pairs(baseline: ClosedLoop, loop: ClosedLoop) -> list[tuple[Answer, Answer]]:
    both = zip(baseline.answers, loop.answers, strict=False)
    return [(a, b) for a, b in both if a.token_ids and b.token_ids]


def _json(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else asdict(spread)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _step_seconds(turn: Turn) -> float:
    return turn.steps.draft_seconds + turn.steps.schedule_seconds + turn.steps.verify_seconds


def _speed(turns: Sequence[Turn]) -> float:
    return median(turn.tokens / turn.seconds for turn in turns)
