"""Ranking and the two rules for how many: against brute force, and as properties."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dspark.scheduling import MeasuredCurve, compiled, survival
from dspark.scheduling.admission import (
    best_draft,
    first_stop,
    global_maximum,
    ranked_survivals,
    throughput,
    verify_lengths,
)
from tests.scheduling.tiny import batch_of, cost_over_tokens

CONFIDENCES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0]))
ROWS = st.lists(st.lists(CONFIDENCES, max_size=4), min_size=1, max_size=4)
INCREMENTS = st.lists(st.one_of(st.just(0.0), st.floats(0, 2)), min_size=20, max_size=20)


def survivals_of(rows) -> tuple[np.ndarray, np.ndarray]:
    lengths_R = np.array([len(row) for row in rows])
    padded = np.full((len(rows), max(lengths_R, default=0)), np.nan)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return survival(padded, lengths_R), lengths_R


def theta_of(rows, increments) -> np.ndarray:
    survivals_RG, lengths_R = survivals_of(rows)
    cost = cost_over_tokens(0.5 + np.cumsum(increments))
    return throughput(ranked_survivals(survivals_RG, lengths_R), batch_of(lengths_R), lengths_R, cost)


def best_by_brute_force(rows, increments) -> float:
    """The largest Theta of all legal lengths."""
    survivals_RG, lengths_R = survivals_of(rows)
    cost = cost_over_tokens(0.5 + np.cumsum(increments))
    drafting = cost.drafting_seconds(lengths_R)
    best = 0.0
    for lengths in itertools.product(*(range(length + 1) for length in lengths_R)):
        committed = len(rows) + sum(survivals_RG[r, :length].sum() for r, length in enumerate(lengths))
        seconds = float(cost.verify_seconds(sum(lengths), requests=len(rows), context_tokens=0))
        best = max(best, committed / (seconds + drafting))
    return best


def by_sorting(survivals_RG: np.ndarray, lengths_R: np.ndarray, count: int) -> list[int]:
    """The ranking as SPEC words it: largest survival first, ties by (position, request slot)."""
    order = sorted(
        (-survivals_RG[r, k], k, r) for r, length in enumerate(lengths_R) for k in range(length)
    )[:count]  # fmt: skip
    return [sum(r == row for _, _, r in order) for row in range(len(lengths_R))]


@given(ROWS, st.integers(0, 17))
def test_the_ranking_is_by_survival_then_position_then_slot(rows, count: int) -> None:
    survivals_RG, lengths_R = survivals_of(rows)
    assert verify_lengths(survivals_RG, lengths_R, count).tolist() == by_sorting(survivals_RG, lengths_R, count)


@given(ROWS, st.integers(0, 17))
def test_lengths_are_legal_prefixes_of_the_asked_number(rows, count: int) -> None:
    survivals_RG, lengths_R = survivals_of(rows)
    chosen_R = verify_lengths(survivals_RG, lengths_R, count)
    assert ((chosen_R >= 0) & (chosen_R <= lengths_R)).all()
    assert chosen_R.sum() == min(count, lengths_R.sum())
    inside = [survivals_RG[r, length - 1] for r, length in enumerate(chosen_R) if length > 0]
    outside = [survivals_RG[r, length] for r, length in enumerate(chosen_R) if length < lengths_R[r]]
    assert min(inside, default=1.0) >= max(outside, default=0.0)


@given(ROWS, st.integers(0, 17), st.randoms())
def test_the_order_of_requests_matters_to_ties_only(rows, count: int, random) -> None:
    survivals_RG, lengths_R = survivals_of(rows)
    order = list(range(len(rows)))
    random.shuffle(order)
    chosen_R = verify_lengths(survivals_RG, lengths_R, count)
    shuffled_R = verify_lengths(survivals_RG[order], lengths_R[order], count)
    ranked = ranked_survivals(survivals_RG, lengths_R)
    if count >= ranked.size or count == 0 or ranked[count - 1] > ranked[count]:
        assert shuffled_R.tolist() == chosen_R[order].tolist()
    values = sorted(survivals_RG[r, k] for r, length in enumerate(chosen_R) for k in range(length))
    assert values == sorted(survivals_RG[order[r], k] for r, length in enumerate(shuffled_R) for k in range(length))


@given(ROWS, INCREMENTS)
@settings(max_examples=200)
def test_the_global_maximum_equals_brute_force_on_any_cost(rows, increments) -> None:
    theta_K = theta_of(rows, increments)
    assert theta_K[global_maximum(theta_K)] == pytest.approx(best_by_brute_force(rows, increments), rel=1e-12)


@given(ROWS, st.lists(st.floats(1e-3, 2), min_size=20, max_size=20))
@settings(max_examples=200)
def test_algorithm_1_equals_brute_force_on_a_convex_cost(rows, increments) -> None:
    """tau_hat(K) is concave; over a convex cost Theta has no local maximum but the global one."""
    theta_K = theta_of(rows, sorted(increments))
    assert theta_K[first_stop(theta_K)] == pytest.approx(best_by_brute_force(rows, sorted(increments)), rel=1e-9)


@given(ROWS, INCREMENTS)
def test_algorithm_1_admits_while_theta_rises(rows, increments) -> None:
    theta_K = theta_of(rows, increments)
    stop = first_stop(theta_K)
    assert all(theta_K[k + 1] > theta_K[k] for k in range(stop))
    assert stop == len(theta_K) - 1 or theta_K[stop + 1] <= theta_K[stop]
    assert stop <= global_maximum(theta_K) or theta_K[stop] == theta_K.max()


def test_a_staircase_stops_algorithm_1_and_not_the_global_maximum() -> None:
    theta_K = theta_of([[0.9, 0.9, 0.9]], [0.5, 1.0, 0.0, 0.0, *[1.0] * 16])
    assert (first_stop(theta_K), global_maximum(theta_K)) == (0, 3)


def test_theta_by_hand() -> None:
    """Two requests, draft 0.5 s + schedule 0.1 s: (2 + 0.8 + 0.5 + 0.4) / seconds."""
    cost = cost_over_tokens([1.0, 1.0, 2.0, 3.0, 4.0], draft=0.5 * 32, schedule_seconds=0.1)
    survivals_RG, lengths_R = survivals_of([[0.8, 0.5], [0.5]])
    ranked_N = ranked_survivals(survivals_RG, lengths_R)
    assert ranked_N.tolist() == [0.8, 0.5, 0.4]
    theta_K = throughput(ranked_N, batch_of([2, 1]), np.array([1, 1]), cost)
    np.testing.assert_allclose(theta_K, [2 / 1.6, 2.8 / 2.6, 3.3 / 3.6, 3.7 / 4.6])
    assert throughput(np.empty(0), batch_of([2, 1]), np.array([0, 0]), cost).tolist() == [2.0]


def test_prompt_tokens_shift_the_place_on_the_curve_and_cost_nothing_by_themselves() -> None:
    cost = cost_over_tokens([1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0])
    alone = throughput(np.array([0.5, 0.5]), batch_of([2]), np.array([2]), cost)
    shared = throughput(np.array([0.5, 0.5]), batch_of([2], prefill_tokens=3), np.array([2]), cost)
    np.testing.assert_allclose(alone, [1.0, 1.5, 2.0])
    np.testing.assert_allclose(shared, [1.0, 1.5 / 5.0, 2.0 / 5.0])


@pytest.mark.parametrize("stop", [first_stop, global_maximum])
@given(ROWS, INCREMENTS, st.integers(0, 6))
@example([[], [1.0], [4.5e-16]], [0.0] * 20, 2)  # a tie but for the order of the sum
def test_the_best_draft_is_that_of_all_drafts_cut_to_a_length(stop, rows, increments, spare: int) -> None:
    survivals_RG, lengths_R = survivals_of(rows)
    assume(survivals_RG.shape[1] > 0)
    batch = batch_of(lengths_R, token_limit=len(rows) + spare)
    draft = {length: MeasuredCurve(sizes=(1, 9), seconds=(0.1 * length, 0.2 * length)) for length in (1, 4)}
    cost = dataclasses.replace(cost_over_tokens(0.5 + np.cumsum(increments)), draft=draft, schedule_seconds=0.01)
    expected = []
    for length in range(1, survivals_RG.shape[1] + 1):
        cut_R = np.minimum(lengths_R, length)
        theta_K = throughput(ranked_survivals(survivals_RG, cut_R)[:spare], batch, cut_R, cost)
        expected.append((theta_K[stop(theta_K)], length, stop(theta_K)))
    theta, length, budget, plain_theta = best_draft(survivals_RG, batch, cost, stop)
    assert (theta, budget) == (pytest.approx(expected[length - 1][0], rel=1e-12), expected[length - 1][2])
    assert theta == pytest.approx(max(best[0] for best in expected), rel=1e-12)
    assert plain_theta == pytest.approx(throughput(np.empty(0), batch, 0 * lengths_R, cost)[0], rel=1e-12)


def test_nothing_to_draft_has_no_best_draft() -> None:
    with pytest.raises(ValueError, match="survivals_RG"):
        best_draft(np.zeros((2, 0)), batch_of([0, 0]), cost_over_tokens([1.0]), global_maximum)


def test_lengths_of_other_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        verify_lengths(np.ones((1, 2)), np.array([1, 1, 2]), 3)
    with pytest.raises(ValueError, match="survivals_RG has 1 rows, the batch 2 requests"):
        best_draft(np.ones((1, 2)), batch_of([2, 2]), cost_over_tokens([1.0]), first_stop)


@given(st.lists(st.floats(0.0, 1.0), max_size=40))
def test_values_are_ordered_from_the_largest_on(values: list[float]) -> None:
    order_N = compiled._descending(np.array(values))
    assert sorted(order_N.tolist()) == list(range(len(values)))
    assert [values[n] for n in order_N] == sorted(values, reverse=True)
