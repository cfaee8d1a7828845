"""Measuring what a step costs: the engine itself, under a made-up load, told how much to draft and to verify.

1. *Where the curve jumps.* For each number of requests R (1, 2, 4, ...) the target's step is timed at the fewest and
   the most tokens that fewer requests do not reach, and between them until neighbours are alike (``measure_curve``).
2. *Rounds.* Each round times every point once, and the median over rounds counts: a minute in which the machine does
   something else makes some rounds slow and bends no curve. Where the pieces of different R meet, each of these R is
   timed at the same number of tokens, and some again with a long context: from equal tokens the fit tells what
   requests and context cost.
3. *The fit* (``StepCost.fitted``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import median

import numpy as np

from dspark.drafters.protocol import Drafter
from dspark.engine.made_up_load import MadeUpLoad
from dspark.engine.profile import ProfileKey, ProfilePoints, StoredProfile
from dspark.models.target import Target
from dspark.scheduling import (
    Delayed,
    DraftPoint,
    Drafts,
    History,
    PrefillPoint,
    StepBatch,
    StepCost,
    VerifyPoint,
    measure_curve,
)

__all__ = ["measure_step_cost", "measured_profile"]

_CONTEXT, _LONG_CONTEXT = 32, 512
_ROOM = 512
"""Tokens that a request may grow by."""
_CHUNKS = (8, 32, 128, 256)
_FEW_REQUESTS = (1, 4)
"""With so many, long contexts and prompt chunks are timed: with more they would take most of the time."""
_TOLERANCE = 0.05
_MOST_SIZES = 10
"""Sizes of a step that are looked at for each number of requests."""
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15


def measured_profile(
    key: ProfileKey,
    target: Target,
    drafter: Drafter,
    *,
    progress: Callable[[str], None] = lambda message: None,
) -> StoredProfile:
    """Measure now what `measure_step_cost` measures, for the ``max_concurrency`` of ``key``; nothing is stored yet.

    Raises:
        ValueError: that many requests do not fit in memory.
    """
    began = time.perf_counter()
    cost, points = measure_step_cost(target, drafter, max_concurrency=key.max_concurrency, progress=progress)
    return StoredProfile(
        key=key,
        cost=cost,
        points=points,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds_taken=round(time.perf_counter() - began, 1),
    )


def measure_step_cost(
    target: Target,
    drafter: Drafter,
    *,
    max_concurrency: int,
    seconds: float | None = None,
    kv_memory_bytes: int | None = None,
    progress: Callable[[str], None] = lambda message: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[StepCost, ProfilePoints]:
    """The cost of the engine's steps with up to ``max_concurrency`` requests at once, and the points it goes through.

    Args:
        target: as it will be served.
        drafter: as it will be used.
        max_concurrency: requests that decode together at most.
        seconds: to take, about; by default 40 and one and a half for each request. No fewer than 3 rounds are made.
        kv_memory_bytes: of the engine that is timed, as of ``EngineSettings``.
        progress: told what is being done.
        clock: seconds.

    Raises:
        ValueError: that many requests do not fit in memory.
    """
    deadline = clock() + (40.0 + 1.5 * max_concurrency if seconds is None else seconds)
    sizes = _Sizes.within(target.config.max_position_embeddings, drafter.block_size)
    load = MadeUpLoad(
        target,
        drafter,
        max_requests=max_concurrency,
        max_context=sizes.long_context,
        room=min(_ROOM, target.config.max_position_embeddings - sizes.long_context),
        max_chunk=sizes.chunks[-1],
        kv_memory_bytes=kv_memory_bytes,
        clock=clock,
    )
    pieces = _pieces(load, sizes, max_concurrency, progress)
    samples = _Samples()
    rounds, longest = 0, 0.0
    while rounds < _LEAST_ROUNDS or (rounds < _MOST_ROUNDS and clock() + longest < deadline):
        progress(f"timing, round {rounds + 1}")
        began = clock()
        _round(load, sizes, pieces, samples)
        rounds, longest = rounds + 1, max(longest, clock() - began)
    points = samples.points()
    cost = StepCost.fitted(points.verify, points.draft, points.prefill)
    schedule_seconds = _schedule_seconds(cost, max_concurrency, drafter.block_size, clock)
    return replace(cost, schedule_seconds=schedule_seconds), points


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Of drafts, contexts and prompt chunks, in tokens."""

    block: int
    context: int
    long_context: int
    chunks: tuple[int, ...]

    @classmethod
    def within(cls, max_length: int, block: int) -> _Sizes:
        """The usual sizes, or what a short context has room for."""
        long_context = min(_LONG_CONTEXT, max_length // 2)
        return cls(
            block=block,
            context=min(_CONTEXT, max_length // 4),
            long_context=long_context,
            chunks=tuple(sorted({min(size, long_context) for size in _CHUNKS})),
        )


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Sizes of a step, in tokens, to be timed with ``requests``."""

    requests: int
    sizes: tuple[int, ...]


@dataclass(kw_only=True)
class _Samples:
    """Seconds by what was timed: (requests, draft tokens, long context), (requests, block length), prompt tokens."""

    verify: dict[tuple[int, int, bool], list[tuple[int, float]]] = field(default_factory=dict)
    draft: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    prefill: dict[int, list[float]] = field(default_factory=dict)

    def add(self, load: MadeUpLoad, requests: int, verified: int, block: int, *, is_long: bool) -> None:
        """Time one step. It drafts no more than it has to, so that short drafts are timed as well."""
        length = 0 if verified == 0 else 1 if verified <= requests else block
        step = load.step(draft_length=length, verified=verified)
        self.verify.setdefault((requests, verified, is_long), []).append((step.context_tokens, step.seconds.verify))
        if length > 0:
            self.draft.setdefault((requests, length), []).append(step.seconds.draft)

    def points(self) -> ProfilePoints:
        """Medians."""
        return ProfilePoints(
            verify=tuple(
                VerifyPoint(
                    tokens=requests + verified,
                    requests=requests,
                    context_tokens=int(median(context for context, _ in values)),
                    seconds=median(seconds for _, seconds in values),
                )
                for (requests, verified, _), values in sorted(self.verify.items())
            ),
            draft=tuple(
                DraftPoint(requests=requests, block_length=length, seconds=median(values))
                for (requests, length), values in sorted(self.draft.items())
            ),
            prefill=tuple(
                # A few tokens can cost less than what the clock tells apart, but not nothing.
                PrefillPoint(tokens=tokens, seconds=max(median(values), 1e-6))
                for tokens, values in sorted(self.prefill.items())
            ),
        )


def _pieces(load: MadeUpLoad, sizes: _Sizes, max_concurrency: int, progress: Callable[[str], None]) -> list[_Piece]:
    """What to time with 1, 2, 4, ... requests: the sizes that matter, and the ends of the pieces of fewer requests."""
    pieces: list[_Piece] = []
    reached = 1
    for requests in sorted({min(2**power, max_concurrency) for power in range(max_concurrency.bit_length() + 1)}):
        progress(f"looking where the curve jumps: {requests} of {max_concurrency} requests")
        load.fill(requests, sizes.context)

        def seconds(tokens: int, requests: int = requests) -> float:
            steps = [load.step(draft_length=sizes.block, verified=tokens - requests) for _ in range(2)]
            return min(step.seconds.verify for step in steps)

        low, high = max(reached, requests), requests * (1 + sizes.block)
        curve = measure_curve(seconds, [low, (low + high) // 2, high], tolerance=_TOLERANCE, most_points=_MOST_SIZES)
        shared = [size for piece in pieces if (size := piece.sizes[-1]) >= requests]
        pieces.append(_Piece(requests=requests, sizes=tuple(sorted({requests, 2 * requests, *shared, *curve.sizes}))))
        reached = high
    load.clear()
    return pieces


def _round(load: MadeUpLoad, sizes: _Sizes, pieces: Sequence[_Piece], samples: _Samples) -> None:
    """Time every point once."""
    for piece in pieces:
        load.fill(piece.requests, sizes.context)
        for tokens in piece.sizes:
            samples.add(load, piece.requests, tokens - piece.requests, sizes.block, is_long=False)
        if piece.requests in _FEW_REQUESTS:
            for tokens in sizes.chunks:
                samples.prefill.setdefault(tokens, []).append(load.seconds_of_prompt(tokens))
    load.clear()
    for piece in pieces:
        if piece.requests in _FEW_REQUESTS:
            load.fill(piece.requests, sizes.long_context)
            for verified in (0, piece.requests * sizes.block):
                samples.add(load, piece.requests, verified, sizes.block, is_long=True)
    load.clear()


def _schedule_seconds(cost: StepCost, requests: int, block_size: int, clock: Callable[[], float]) -> float:
    """For deciding about a full batch by the delayed policy: the median of some tries on made-up confidences."""
    random = np.random.default_rng(0)
    ids_R, lengths_R = np.arange(requests), np.full(requests, block_size)

    def drafts(step: int) -> Drafts:
        confidences_RG = random.uniform(0.5, 1.0, (requests, block_size))
        return Drafts(step=step, request_ids_R=ids_R, lengths_R=lengths_R, confidences_RG=confidences_RG)

    policy, past = Delayed(), History().after(drafts(0)).after(drafts(1)).past
    seconds = []
    for step in range(2, 22):
        batch = StepBatch(step=step, request_ids_R=ids_R, draftable_R=lengths_R, context_tokens=0)
        drafted = drafts(step)
        began = clock()
        plan = policy.plan(batch, past, cost)
        policy.verify_lengths(replace(plan, draft_lengths_R=lengths_R), drafted, cost)
        seconds.append(clock() - began)
    return median(seconds)
