"""Measuring the cost of steps on table models whose time is known: the cost found is the one that was made up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dspark.engine.made_up_load import MadeUpLoad
from dspark.engine.profile_measurement import measure_step_cost
from tests.engine.table_models import TableDrafter, TableTarget, random_table

VOCAB, BLOCK, MOST = 6, 4, 6
PER_REQUEST, PER_CONTEXT_TOKEN = 0.0005, 0.00001


def stairs(tokens: int) -> float:
    """Flat but for jumps behind 4, 8, 12, ... tokens."""
    return 0.02 + 0.006 * ((tokens - 1) // 4)


def draft_seconds(requests: int, length: int) -> float:
    return 0.002 + 0.001 * length + 0.0004 * requests


class Clock:
    """Time that passes only when models run; ``slow`` says how much longer than usual things take at a moment."""

    def __init__(self, slow: Callable[[float], float] = lambda now: 1.0) -> None:
        self.now = 0.0
        self.slow = slow

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds * self.slow(self.now)


class TimedTarget(TableTarget):
    def __init__(self, clock: Clock, context: int = 256) -> None:
        super().__init__(random_table(VOCAB, seed=0), context=context)
        self.clock = clock

    def forward(self, token_ids_N, segments, cache, tap_layers=(), logit_rows=()):
        context = sum(segment.start for segment in segments)
        self.clock.spend(stairs(len(token_ids_N)) + PER_REQUEST * len(segments) + PER_CONTEXT_TOKEN * context)
        return super().forward(token_ids_N, segments, cache, tap_layers, logit_rows)


class TimedDrafter(TableDrafter):
    def __init__(self, clock: Clock, block_size: int = BLOCK) -> None:
        super().__init__(random_table(VOCAB, seed=1), block_size)
        self.clock = clock

    def propose(self, cache, slots, anchors_R, sample, num_tokens=None):
        self.clock.spend(draft_seconds(len(slots), num_tokens or self.block_size))
        return super().propose(cache, slots, anchors_R, sample, num_tokens)


def measured(clock: Clock, *, context: int = 256, block_size: int = BLOCK, seconds: float = 0.0):
    target, drafter = TimedTarget(clock, context), TimedDrafter(clock, block_size)
    return measure_step_cost(target, drafter, max_concurrency=MOST, seconds=seconds, clock=clock)


def worst_ratio(cost, block_size: int = BLOCK) -> float:
    """The largest factor that a predicted target step is off, over all batches."""
    factors = []
    for requests in range(1, MOST + 1):
        for verified in range(block_size * requests + 1):
            truth = stairs(requests + verified) + PER_REQUEST * requests + PER_CONTEXT_TOKEN * 50 * requests
            found = float(cost.verify_seconds(verified, requests=requests, context_tokens=50 * requests))
            factors.append(max(found / truth, truth / found))
    return max(factors)


@pytest.mark.parametrize("context", [256, 64])
def test_the_cost_that_was_made_up_is_found(context):
    cost, points = measured(Clock(), context=context)
    assert cost.seconds_per_request == pytest.approx(PER_REQUEST, rel=0.05)
    assert cost.seconds_per_context_token == pytest.approx(PER_CONTEXT_TOKEN, rel=0.05)
    assert worst_ratio(cost) < 1.02
    for requests in (1, 3, MOST):
        for length in range(1, BLOCK + 1):
            assert cost.draft_seconds(requests, length) == pytest.approx(draft_seconds(requests, length), rel=1e-6)
    assert {point.requests for point in points.verify} == {1, 2, 4, MOST}
    assert {point.block_length for point in points.draft} == {1, BLOCK}


def test_prompts_cost_what_they_add():
    cost, points = measured(Clock())
    assert [point.tokens for point in points.prefill] == [8, 32, 128]
    for tokens in (8, 32, 128):
        # Beside 1 and 4 requests: two of the jumps more, or not.
        added = [stairs(tokens + requests) - stairs(requests) + PER_REQUEST for requests in (1, 4)]
        assert min(added) <= cost.prefill_seconds(tokens) <= max(added) + 1e-4  # contexts grow meanwhile


def test_a_slow_minute_bends_no_curve():
    quiet, _ = measured(Clock())
    spent = Clock()
    measured(spent)
    # The last of three rounds is at least a fifth of the time.
    noisy, _ = measured(Clock(lambda now: 3.0 if 0.85 * spent.now < now < 0.97 * spent.now else 1.0))
    tokens = np.arange(1, MOST * (1 + BLOCK) + 1)
    np.testing.assert_allclose(noisy.verify(tokens), quiet.verify(tokens), rtol=0.01)
    assert noisy.draft_seconds(4, BLOCK) == pytest.approx(quiet.draft_seconds(4, BLOCK), rel=0.01)


def test_a_drafter_of_one_token_has_one_draft_length():
    cost, points = measured(Clock(), block_size=1)
    assert {point.block_length for point in points.draft} == {1}
    assert worst_ratio(cost, block_size=1) < 1.02


def test_it_takes_the_time_it_may_take_and_no_less_than_three_rounds():
    def rounds(seconds: float) -> tuple[int, float]:
        clock, messages = Clock(), []
        measure_step_cost(
            TimedTarget(clock),
            TimedDrafter(clock),
            max_concurrency=2,
            seconds=seconds,
            progress=messages.append,
            clock=clock,
        )
        return sum(message.startswith("timing, round") for message in messages), clock.now

    few, least = rounds(0.0)
    many, taken = rounds(2.0 * least)
    assert few == 3
    assert 3 < many < 15
    assert least < taken <= 2.0 * least
    assert rounds(1e9)[0] == 15


def test_requests_that_do_not_fit_into_memory_are_an_error():
    clock = Clock()
    load = MadeUpLoad(
        TimedTarget(clock),
        TimedDrafter(clock),
        max_requests=8,
        max_context=64,
        room=32,
        max_chunk=64,
        kv_memory_bytes=20 * 2 * (2 * 16 * 4),  # 20 blocks of both models: a request has five
        clock=clock,
    )
    load.fill(2, 64)
    with pytest.raises(ValueError, match=r"8 requests do not fit into memory together: .*kv_memory_bytes"):
        load.fill(8, 64)
