"""The cost of a step: fitted points come back, corrections are slow and bounded, dicts keep everything."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dspark.scheduling import (
    DraftPoint,
    MeasuredCurve,
    PrefillPoint,
    StepBatch,
    StepCost,
    StepPlan,
    StepSeconds,
    VerifyPoint,
    predicted_seconds,
)
from tests.scheduling.tiny import cost_over_tokens

PER_REQUEST, PER_CONTEXT_TOKEN, PER_ATTENDED_TOKEN = 0.01, 0.0002, 0.00003


def stairs(tokens: int) -> float:
    return 0.5 + 0.25 * ((tokens - 1) // 4)


def verify_points(noise: float = 0.0) -> list[VerifyPoint]:
    generator = np.random.default_rng(0)
    return [
        VerifyPoint(
            tokens=tokens,
            requests=requests,
            context_tokens=context * requests,
            seconds=(
                stairs(tokens)
                + PER_REQUEST * requests
                + PER_CONTEXT_TOKEN * context * requests
                + PER_ATTENDED_TOKEN * context * tokens
            )
            * float(np.exp(noise * generator.standard_normal())),
        )
        for tokens in range(1, 25)
        for requests in {1, max(tokens // 4, 1), tokens}
        for context in (16, 512)
    ]


DRAFT_POINTS = [
    DraftPoint(requests=requests, block_length=length, seconds=0.1 * length + 0.01 * requests)
    for requests in (1, 4)
    for length in (2, 4)
]
PREFILL_POINTS = [PrefillPoint(tokens=tokens, seconds=0.002 * tokens) for tokens in (16, 256)]


def fitted(noise: float = 0.0) -> StepCost:
    return StepCost.fitted(verify_points(noise), DRAFT_POINTS, PREFILL_POINTS, schedule_seconds=0.001)


def test_points_come_back_with_their_jumps() -> None:
    cost = fitted()
    assert cost.seconds_per_request == pytest.approx(PER_REQUEST)
    assert cost.seconds_per_context_token == pytest.approx(PER_CONTEXT_TOKEN)
    assert cost.seconds_per_attended_token == pytest.approx(PER_ATTENDED_TOKEN)
    for point in verify_points():
        seconds = cost.verify_seconds(
            point.tokens - point.requests, requests=point.requests, context_tokens=point.context_tokens
        )
        assert seconds == pytest.approx(point.seconds)


def test_noise_neither_makes_a_curve_fall_nor_takes_its_jumps() -> None:
    cost = fitted(noise=0.02)
    curve = cost.verify(np.arange(1, 25))
    assert (np.diff(curve) >= 0).all()
    np.testing.assert_allclose(curve, [stairs(tokens) for tokens in range(1, 25)], rtol=0.04)
    assert cost.seconds_per_context_token == pytest.approx(PER_CONTEXT_TOKEN, rel=0.3)
    assert cost.seconds_per_attended_token == pytest.approx(PER_ATTENDED_TOKEN, rel=0.3)


def test_slopes_are_never_negative() -> None:
    points = [
        VerifyPoint(tokens=4, requests=requests, context_tokens=context, seconds=1.0 - 0.1 * requests + 0.001 * context)
        for requests in (1, 4)
        for context in (10, 100)
    ]
    cost = StepCost.fitted(points, DRAFT_POINTS, PREFILL_POINTS)
    assert cost.seconds_per_request == 0.0
    assert min(cost.seconds_per_context_token, cost.seconds_per_attended_token) >= 0.0
    assert max(cost.seconds_per_context_token, cost.seconds_per_attended_token) > 0.0
    alone = StepCost.fitted(points[:1], DRAFT_POINTS, PREFILL_POINTS)
    assert (alone.seconds_per_request, alone.seconds_per_context_token) == (0.0, 0.0)


def test_requests_and_context_never_take_a_whole_step() -> None:
    """One point of many requests and long contexts was disturbed, and the fit takes it at its word."""
    points = [
        VerifyPoint(tokens=1, requests=1, context_tokens=16, seconds=0.01),
        VerifyPoint(tokens=8, requests=1, context_tokens=16, seconds=0.012),
        VerifyPoint(tokens=8, requests=8, context_tokens=16 * 8, seconds=0.5),
        VerifyPoint(tokens=64, requests=64, context_tokens=16 * 64, seconds=0.05),
    ]
    cost = StepCost.fitted(points, DRAFT_POINTS, PREFILL_POINTS)
    assert min(cost.verify.seconds) > 0.0
    assert cost.verify_seconds(0, requests=64, context_tokens=16 * 64) >= 0.05


def test_draft_seconds_between_and_beyond_measured_blocks() -> None:
    cost = fitted()
    assert cost.draft_seconds(1, 2) == pytest.approx(0.21)
    assert cost.draft_seconds(4, 4) == pytest.approx(0.44)
    assert cost.draft_seconds(1, 3) == pytest.approx(0.31)
    assert cost.draft_seconds(1, 1) == pytest.approx(0.105)
    assert cost.draft_seconds(1, 8) == pytest.approx(0.82)
    assert cost.draft_seconds(0, 4) == cost.draft_seconds(4, 0) == 0.0
    assert cost.drafting_seconds(np.array([0, 3, 2])) == pytest.approx(cost.draft_seconds(2, 3) + 0.001)
    assert cost.drafting_seconds(np.array([0, 0])) == cost.drafting_seconds(np.array([], int)) == 0.0


def test_a_longer_block_never_costs_less() -> None:
    curves = {2: MeasuredCurve(sizes=(1,), seconds=(3.0,)), 4: MeasuredCurve(sizes=(1,), seconds=(2.0,))}
    cost = StepCost(verify=curves[2], draft=curves, prefill=curves[2])
    assert cost.draft_seconds(1, 4) == 3.0


def test_prefill() -> None:
    cost = fitted()
    assert cost.prefill_seconds(0) == 0.0
    assert cost.prefill_seconds(136) == pytest.approx(0.272)


def run(cost: StepCost, steps: int, *, verify: float, draft: float) -> StepCost:
    """Measured steps that take ``verify`` and ``draft`` times what was profiled."""
    for _ in range(steps):
        predicted = StepSeconds(draft=cost.draft_ratio, schedule=0.0, verify=cost.verify_ratio)
        cost = cost.corrected(predicted, StepSeconds(draft=draft, schedule=0.0, verify=verify))
    return cost


def test_correction_converges_to_what_is_measured() -> None:
    cost = run(fitted(), 400, verify=1.3, draft=0.8)
    assert cost.verify_ratio == pytest.approx(1.3, rel=0.01)
    assert cost.draft_ratio == pytest.approx(0.8, rel=0.01)
    before = fitted()
    assert cost.verify_seconds(3, requests=1, context_tokens=9) == pytest.approx(
        cost.verify_ratio * before.verify_seconds(3, requests=1, context_tokens=9)
    )
    assert cost.draft_seconds(1, 2) == pytest.approx(0.21 * cost.draft_ratio)
    assert cost.prefill_seconds(16) == pytest.approx(0.032 * cost.verify_ratio)


@pytest.mark.parametrize(("whole", "added"), [(1.0, 1.4), (1.25, 0.7), (0.8, 1.0)])
def test_passes_of_different_sizes_tell_what_draft_tokens_add(whole: float, added: float) -> None:
    random, cost = np.random.default_rng(3), fitted()
    true = replace(cost, verify_ratio=whole, added_ratio=added)
    for _ in range(3000):
        batch = StepBatch(step=0, request_ids_R=[0, 1], draftable_R=[4, 4], context_tokens=200)
        count = int(random.integers(0, 9))
        plan = StepPlan(batch=batch, draft_lengths_R=[4, 4], why="pays")
        measured = predicted_seconds(plan, count, true)
        noisy = replace(measured, verify=measured.verify * random.lognormal(0.0, 0.05))
        cost = cost.corrected(predicted_seconds(plan, count, cost), noisy)
    assert cost.verify_ratio == pytest.approx(whole, rel=0.05)
    assert cost.added_ratio == pytest.approx(added, rel=0.1)


def test_what_draft_tokens_add_is_not_learned_where_nothing_is_drafted() -> None:
    assert run(fitted(), 100, verify=1.4, draft=1.0).added_ratio == 1.0


def test_the_correction_of_what_draft_tokens_add_leaves_the_rest() -> None:
    cost = replace(fitted(), added_ratio=1.5)
    before, after = (
        each.verify_seconds_up_to(6, requests=2, context_tokens=90, prefill_tokens=3) for each in (fitted(), cost)
    )
    assert after[0] == before[0]
    assert after - after[0] == pytest.approx(1.5 * (before - before[0]))


def test_correction_is_slow_and_bounded() -> None:
    pause = run(fitted(), 1, verify=1000.0, draft=1e-9)
    assert 1.0 < pause.verify_ratio < 1.02
    assert 0.98 < pause.draft_ratio < 1.0
    forever = run(fitted(), 1000, verify=1000.0, draft=1e-9)
    assert (forever.verify_ratio, forever.draft_ratio) == (2.0, 0.5)


@pytest.mark.parametrize("measured", [0.0, float("nan"), float("inf"), -1.0])
def test_what_was_not_measured_corrects_nothing(measured: float) -> None:
    seconds = StepSeconds(draft=0.0, schedule=0.0, verify=1.0)
    cost = fitted().corrected(seconds, StepSeconds(draft=0.1, schedule=0.0, verify=measured))
    assert (cost.verify_ratio, cost.added_ratio, cost.draft_ratio) == (1.0, 1.0, 1.0)


def test_a_dict_keeps_everything() -> None:
    cost = run(fitted(), 3, verify=1.5, draft=0.9)
    assert StepCost.from_dict(json.loads(json.dumps(cost.as_dict()))) == cost


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 0}, "format is 0"),
        ({"verify": {"sizes": [2, 1], "seconds": [1, 2]}}, "verify is no measured curve"),
        ({"prefill": {}}, "prefill is no measured curve"),
        ({"draft": {}}, "draft"),
        ({"verify_ratio": 3.0}, "verify_ratio"),
        ({"added_ratio": 0.1}, "added_ratio"),
        ({"seconds_per_request": -1.0}, "seconds_per_request"),
        ({"schedule_seconds": float("nan")}, "schedule_seconds"),
    ],
)
def test_dicts_that_are_refused(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepCost.from_dict(fitted().as_dict() | change)


def test_a_missing_field_is_named() -> None:
    values = fitted().as_dict()
    del values["prefill"], values["draft_ratio"]
    with pytest.raises(ValueError, match="lacks draft_ratio, prefill"):
        StepCost.from_dict(values)


def test_block_lengths_in_disorder_are_refused() -> None:
    curve = MeasuredCurve(sizes=(1,), seconds=(1.0,))
    with pytest.raises(ValueError, match="draft has block lengths"):
        StepCost(verify=curve, draft={4: curve, 2: curve}, prefill=curve)


def test_prompt_tokens_cost_what_they_add() -> None:
    """3 requests, 2 draft tokens, 4 prompt tokens: 7 -> 9 tokens on top of 3."""
    seconds = [float(n * n) for n in range(1, 20)]
    cost = cost_over_tokens(seconds)
    got = cost.verify_seconds(2, requests=3, context_tokens=0, prefill_tokens=4)
    assert got == pytest.approx(81 - 49 + 9)


def test_other_draft_curves_are_not_looked_up_in_the_old_ones() -> None:
    cost = fitted()
    before = cost.draft_seconds(1, 2)
    twice = {n: MeasuredCurve(sizes=c.sizes, seconds=tuple(2 * s for s in c.seconds)) for n, c in cost.draft.items()}
    assert replace(cost, draft=twice).draft_seconds(1, 2) == pytest.approx(2 * before)
    assert replace(cost, schedule_seconds=0.0).draft_table(1) is cost.draft_table(1)
