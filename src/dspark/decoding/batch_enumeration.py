"""Exact joint output distribution of a batch whose verify lengths are chosen together: proofs about schedulers.

``enumeration`` for several requests at once. Cost grows with the product of what the requests can draft and emit: two
or three requests, two or three tokens, a few steps.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from dspark.decoding.enumeration import (
    DraftedRound,
    Drafting,
    Rule,
    TokenModel,
    Tokens,
    autoregressive_law,
    block_law,
    verified_block,
)

BatchVerifyLengths = Callable[[Hashable, int, tuple[DraftedRound | None, ...]], tuple[tuple[int, ...], Hashable]]
"""(memory, step, the round of each request or None if it is not in the step) -> (how many draft tokens of each are
verified, what is remembered). Memory is None before the first step unless given."""

Learns = Callable[[Hashable, tuple[int | None, ...]], Hashable]
"""(memory, how many draft tokens of each request were accepted or None if it is not in the step) -> memory."""


@dataclass(frozen=True, kw_only=True)
class EnumeratedRequest:
    """One request of a batch.

    Attributes:
        target: its own (requests may sample differently).
        drafting: its drafter.
        rule: its acceptance rule.
        prefix: its prompt.
        horizon: tokens it generates; then it leaves.
        joins: the step it is first part of.
        shortens: draft no more than can still be used, horizon minus emitted minus 1; otherwise always whole blocks.
    """

    target: TokenModel
    drafting: Drafting
    rule: Rule
    prefix: Tokens
    horizon: int
    joins: int = 0
    shortens: bool = False


def joint_autoregressive_law(requests: Sequence[EnumeratedRequest]) -> dict[tuple[Tokens, ...], float]:
    """Joint law of what independent targets generate: the product of ``autoregressive_law``."""
    laws = [autoregressive_law(request.target, request.prefix, request.horizon) for request in requests]
    return {
        tuple(tokens for tokens, _ in outcomes): math.prod(mass for _, mass in outcomes)
        for outcomes in itertools.product(*(law.items() for law in laws))
    }


def joint_output_law(
    requests: Sequence[EnumeratedRequest],
    verify_lengths: BatchVerifyLengths,
    *,
    learns: Learns | None = None,
    num_steps: int | None = None,
    memory: Hashable = None,
    first_step: int = 0,
) -> dict[tuple[Tokens, ...], float]:
    """Joint law of what the requests of one batch emit, their lengths chosen together in every step.

    Each step drafts a block for every request in it, schedules, and accepts each request by its own rule with
    randomness of its own. Histories that the scheduler cannot tell apart (same emitted tokens and memory) are merged.

    Args:
        learns: what the scheduler makes of a step's acceptances once they are known; None if it does not look at them.
        num_steps: how many speculative steps, after which each target goes on alone; None: until all are done.
        memory: of the scheduler, before the first step.
        first_step: number of the first step.
    """
    batch = [_RequestLaws(request) for request in requests]
    law: defaultdict[tuple[Tokens, ...], float] = defaultdict(float)
    states: dict[tuple[tuple[Tokens, ...], Hashable], float] = {(((),) * len(batch), memory): 1.0}
    step = first_step
    while states:
        if num_steps is not None and step - first_step >= num_steps:
            for (emitted, _), mass in states.items():
                rests_of = (one.rest(tokens).items() for one, tokens in zip(batch, emitted, strict=True))
                for rests in itertools.product(*rests_of):
                    whole = tuple(tokens + rest for tokens, (rest, _) in zip(emitted, rests, strict=True))
                    law[whole] += mass * math.prod(rest_mass for _, rest_mass in rests)
            return law
        following: defaultdict[tuple[tuple[Tokens, ...], Hashable], float] = defaultdict(float)
        for (emitted, remembered), mass in states.items():
            if all(len(tokens) == one.request.horizon for one, tokens in zip(batch, emitted, strict=True)):
                law[emitted] += mass
                continue
            rounds_of = [one.rounds(tokens, step).items() for one, tokens in zip(batch, emitted, strict=True)]
            for drawn in itertools.product(*rounds_of):
                rounds = tuple(drafted for drafted, _ in drawn)
                lengths, remembers = verify_lengths(remembered, step, rounds)
                drawn_mass = mass * math.prod(block_mass for _, block_mass in drawn)
                outcomes_of = [
                    one.outcomes(tokens, drafted, length).items()
                    for one, tokens, drafted, length in zip(batch, emitted, rounds, lengths, strict=True)
                ]
                for outcomes in itertools.product(*outcomes_of):
                    accepted = tuple(num_accepted for (_, num_accepted), _ in outcomes)
                    knows = remembers if learns is None else learns(remembers, accepted)
                    state = (tuple(tokens for (tokens, _), _ in outcomes), knows)
                    following[state] += drawn_mass * math.prod(outcome_mass for _, outcome_mass in outcomes)
        states = following
        step += 1
    return law


class _RequestLaws:
    """The laws of one request's rounds, each computed once."""

    def __init__(self, request: EnumeratedRequest) -> None:
        self.request = request
        self._rounds: dict[tuple[Tokens, int], dict[DraftedRound | None, float]] = {}
        self._outcomes: dict[tuple[Tokens, Tokens], dict[tuple[Tokens, int | None], float]] = {}
        self._rests: dict[Tokens, dict[Tokens, float]] = {}

    def rounds(self, emitted: Tokens, step: int) -> Mapping[DraftedRound | None, float]:
        """Law of what is drafted; of None if the request is not in the step."""
        request, left = self.request, self.request.horizon - len(emitted)
        if step < request.joins or left == 0:
            return {None: 1.0}
        size = min(request.drafting.num_tokens, left - 1) if request.shortens else request.drafting.num_tokens
        if (emitted, size) not in self._rounds:
            prefix = request.prefix + emitted
            blocks = block_law(replace(request.drafting, num_tokens=size), prefix)
            self._rounds[emitted, size] = {(prefix, block): mass for block, mass in blocks.items()}
        return self._rounds[emitted, size]

    def outcomes(
        self, emitted: Tokens, drafted: DraftedRound | None, length: int
    ) -> Mapping[tuple[Tokens, int | None], float]:
        """Law of all tokens emitted after the round, cut at the horizon, and of how many draft tokens were accepted."""
        if drafted is None:
            return {(emitted, None): 1.0}
        request, verified = self.request, drafted[1][:length]
        if (emitted, verified) not in self._outcomes:
            law: defaultdict[tuple[Tokens, int | None], float] = defaultdict(float)
            block = verified_block(request.target, request.drafting, request.prefix + emitted, verified)
            for acceptance, mass in request.rule(block).items():
                tokens = (*emitted, *verified[: acceptance.num_accepted], acceptance.next_token)
                law[tokens[: request.horizon], acceptance.num_accepted] += mass
            self._outcomes[emitted, verified] = law
        return self._outcomes[emitted, verified]

    def rest(self, emitted: Tokens) -> Mapping[Tokens, float]:
        """Law of the tokens still to come if the target goes on alone."""
        if emitted not in self._rests:
            left = self.request.horizon - len(emitted)
            self._rests[emitted] = autoregressive_law(self.request.target, self.request.prefix + emitted, left)
        return self._rests[emitted]
