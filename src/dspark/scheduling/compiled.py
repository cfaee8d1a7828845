"""The loops of scheduling, compiled.

A step has a few requests and some ten numbers for each. Between two passes of a model, which leave nothing else in the
processor's caches, an operation of numpy on so few numbers takes a hundred times as long as its arithmetic: what it
reads of numpy itself comes from memory each time. These functions read little but the numbers.

Arguments are contiguous arrays, int64 or float64, whose shapes the caller has checked: nothing is checked here. They
are read-only, as `dspark.scheduling.batch.frozen_ints` makes them, so that each function is compiled once; results are
written into other arrays.

Shapes: R requests, O requests of an earlier step, G positions, N = sum of lengths, K = 0..N draft tokens verified.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from dspark.compiling import remembered

__all__ = [
    "best_draft",
    "confidences",
    "corrected",
    "curve_at",
    "draft_seconds",
    "expected",
    "learned",
    "log_odds",
    "moved_average",
    "survivals",
    "verified",
    "verify_seconds",
]


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _row_of(known_ids_O: Any, request_id: int, guess: int) -> int:
    """The row of a request, which is mostly where it was; -1 if it is not there."""
    if guess < len(known_ids_O) and known_ids_O[guess] == request_id:
        return guess
    for row in range(len(known_ids_O)):
        if known_ids_O[row] == request_id:
            return row
    return -1


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _entry(values_XG: Any, row: int, column: int) -> Any:
    """0 behind the last column."""
    return values_XG[row, column] if column < values_XG.shape[1] else 0.0


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _bounded(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _shifted(confidence: float, factor: float) -> Any:
    """A confidence whose odds are ``factor`` times what they were; 0 and 1 stay what they are."""
    more = confidence * factor
    return more / (1.0 - confidence + more)


# ---- confidences -----------------------------------------------------------------------------------------------------


@remembered
def confidences(logits_XG, temperatures_XG, rows_X, confidences_RG):  # type: ignore[no-untyped-def]
    """The logistic function of ``logits / temperatures``, in the given rows of the result."""
    for x in range(len(rows_X)):
        for g in range(logits_XG.shape[1]):
            logit = logits_XG[x, g] / temperatures_XG[x, g]
            small = math.exp(-abs(logit))
            confidences_RG[rows_X[x], g] = (1.0 if logit >= 0.0 else small) / (1.0 + small)


# ---- survivals -------------------------------------------------------------------------------------------------------


@remembered
def survivals(confidences_RG, lengths_R, survivals_RG):  # type: ignore[no-untyped-def]
    """Products of the confidences before and at each position, 0 behind a length.

    Returns:
        -1; or the first confidence that is none, ``r * G + g``; or -2 if a length is none.
    """
    requests, width = confidences_RG.shape
    for r in range(requests):
        if not 0 <= lengths_R[r] <= width:
            return -2
        product = 1.0
        for g in range(width):
            if g < lengths_R[r]:
                confidence = confidences_RG[r, g]
                if not 0.0 <= confidence <= 1.0:
                    return r * width + g
                product *= confidence
                survivals_RG[r, g] = product
            else:
                survivals_RG[r, g] = 0.0
    return -1


@remembered
def corrected(survivals_RG, log_odds_R, corrected_RG):  # type: ignore[no-untyped-def]
    """Survivals of confidences (each the ratio of a survival to the one before) with their log-odds shifted."""
    for r in range(len(log_odds_R)):
        factor, before, product = math.exp(log_odds_R[r]), 1.0, 1.0
        for g in range(survivals_RG.shape[1]):
            product *= _shifted(survivals_RG[r, g] / before, factor) if before > 0.0 else 0.0
            before = survivals_RG[r, g]
            corrected_RG[r, g] = product


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _expect(
    known_ids_O: Any, known_lengths_O: Any, known_OG: Any, request_ids_R: Any, lengths_R: Any, expected_RG: Any,
    is_known_G: Any,
) -> None:  # fmt: skip
    """`expected`, and which positions any request had drafted."""
    width = expected_RG.shape[1]
    mean_G = np.zeros(width)
    for g in range(width):
        count = 0
        for o in range(len(known_ids_O)):
            if g < known_lengths_O[o]:
                count += 1
                mean_G[g] += _entry(known_OG, o, g)
        is_known_G[g] = count > 0
        mean_G[g] /= max(count, 1)
    for r in range(len(request_ids_R)):
        row, least = _row_of(known_ids_O, request_ids_R[r], r), np.inf
        for g in range(width):
            is_own = row >= 0 and g < known_lengths_O[row]
            least = min(least, _entry(known_OG, row, g) if is_own else mean_G[g])
            expected_RG[r, g] = least if g < lengths_R[r] else 0.0


@remembered
def expected(known_ids_O, known_lengths_O, known_OG, request_ids_R, lengths_R, expected_RG):  # type: ignore[no-untyped-def]
    """See ``PastSurvivals.expected_for``."""
    is_known_G = np.empty(expected_RG.shape[1], np.bool_)
    _expect(known_ids_O, known_lengths_O, known_OG, request_ids_R, lengths_R, expected_RG, is_known_G)


@remembered
def moved_average(  # type: ignore[no-untyped-def]
    known_ids_O, known_lengths_O, known_OG, request_ids_R, lengths_R, survivals_RG, newest, averaged_RG,
    averaged_lengths_R,
):  # fmt: skip
    """See ``PastSurvivals.averaged_with``."""
    width = averaged_RG.shape[1]
    is_known_G = np.empty(width, np.bool_)
    _expect(known_ids_O, known_lengths_O, known_OG, request_ids_R, lengths_R, averaged_RG, is_known_G)
    for r in range(len(request_ids_R)):
        row = _row_of(known_ids_O, request_ids_R[r], r) if lengths_R[r] == 0 else -1
        if row >= 0:
            averaged_lengths_R[r] = known_lengths_O[row]
            for g in range(width):
                averaged_RG[r, g] = _entry(known_OG, row, g)
            continue
        least = np.inf
        for g in range(width):
            value = _entry(survivals_RG, r, g)
            if is_known_G[g]:
                value = newest * value + (1.0 - newest) * averaged_RG[r, g]
            least = min(least, value)
            averaged_RG[r, g] = least


# ---- what outcomes teach ---------------------------------------------------------------------------------------------


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _own_of(known_ids_O: Any, own_O: Any, information_O: Any, request_id: int, guess: int) -> Any:
    """A request's own shift and its information; 0 if it is not known."""
    row = _row_of(known_ids_O, request_id, guess)
    return (own_O[row], information_O[row]) if row >= 0 else (0.0, 0.0)


@remembered
def log_odds(  # type: ignore[no-untyped-def]
    known_ids_O, own_O, information_O, shared, request_ids_R, optimism, optimism_information, bound, log_odds_R
):
    """See ``Correction.log_odds_of``."""
    for r in range(len(request_ids_R)):
        own, information = _own_of(known_ids_O, own_O, information_O, request_ids_R[r], r)
        hope = optimism * optimism_information / (optimism_information + information)
        log_odds_R[r] = _bounded(shared + own + hope, bound)


@remembered
def learned(  # type: ignore[no-untyped-def]
    known_ids_O, own_O, information_O, shared, shared_information, request_ids_R, confidences_RG, verified_R,
    accepted_R, own_kept, own_prior, shared_kept, shared_prior, bound, own_R, information_R,
):  # fmt: skip
    """See ``Correction.after``; the new shared shift and its information."""
    surplus_of_all, gained_of_all = 0.0, 0.0
    for r in range(len(request_ids_R)):
        own, information = _own_of(known_ids_O, own_O, information_O, request_ids_R[r], r)
        factor, surplus, gained = math.exp(_bounded(shared + own, bound)), float(accepted_R[r]), 0.0
        for g in range(min(accepted_R[r] + 1, verified_R[r], confidences_RG.shape[1])):
            chance = _shifted(confidences_RG[r, g], factor)
            surplus -= chance
            gained += chance * (1.0 - chance)
        information_R[r] = own_kept * information + gained
        # What is forgotten leaves its weight to the prior, which pulls towards 0.
        pull = (1.0 - own_kept) * own_prior * own
        own_R[r] = _bounded(own + (surplus - pull) / (information_R[r] + own_prior), bound)
        surplus_of_all += surplus
        gained_of_all += gained
    shared_information = shared_kept * shared_information + gained_of_all
    pull = (1.0 - shared_kept) * shared_prior * shared
    shared += (surplus_of_all - pull) / (shared_information + shared_prior)
    return _bounded(shared, bound), shared_information


# ---- seconds ---------------------------------------------------------------------------------------------------------


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _at(size: float, sizes: Any, seconds: Any, slope: float) -> Any:
    """A measured curve at one size: a line between its points, level below them, with a slope above."""
    last = len(sizes) - 1
    if not size > sizes[0]:
        return seconds[0]
    if size >= sizes[last]:
        return seconds[last] + slope * (size - sizes[last])
    high = np.searchsorted(sizes, size)  # sizes[high - 1] < size <= sizes[high]
    if sizes[high] == size:
        return seconds[high]
    part = (size - sizes[high - 1]) / (sizes[high] - sizes[high - 1])
    return seconds[high - 1] + part * (seconds[high] - seconds[high - 1])


@remembered
def curve_at(asked_N, sizes, seconds, slope, out_N):  # type: ignore[no-untyped-def]
    """``MeasuredCurve`` at many sizes."""
    for n in range(len(asked_N)):
        out_N[n] = _at(asked_N[n], sizes, seconds, slope)


@remembered
def verify_seconds(load, rates, curve, seconds_K):  # type: ignore[no-untyped-def]
    """``StepCost.verify_seconds`` for K = 0, 1, ... draft tokens.

    Args:
        load: requests, their context tokens, prompt tokens.
        rates: seconds per request, context token and attended token, the factor on everything, and that on what draft
            tokens add.
        curve: ``MeasuredCurve.table``.
    """
    requests, context_tokens, prefill_tokens = load
    per_request, per_context, per_attended, ratio, added_ratio = rates
    before, mean_context = requests + prefill_tokens, context_tokens / max(requests, 1)
    alone = 0.0
    if prefill_tokens > 0:
        alone = _at(before, *curve) - _at(max(requests, 1), *curve)
    extra = per_request * requests + per_context * context_tokens
    plain, attended = _at(before, *curve), per_attended * requests * mean_context
    for k in range(len(seconds_K)):
        added = _at(before + k, *curve) - plain + per_attended * k * mean_context
        seconds_K[k] = ratio * (plain - alone + extra + attended + added_ratio * added)


@remembered
def draft_seconds(length, known_lengths, seconds):  # type: ignore[no-untyped-def]
    """``StepCost.draft_seconds`` before its factor, from seconds of known lengths, the first of which is 0."""
    return max(length / known_lengths[-1], 1.0) * _at(length, known_lengths, seconds, 0.0)


# ---- admission -------------------------------------------------------------------------------------------------------


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _sift(values_N: Any, order_N: Any, root: int, end: int) -> None:
    """Let the heap's root sink below smaller values."""
    while 2 * root + 1 < end:
        child = 2 * root + 1
        if child + 1 < end and values_N[order_N[child + 1]] < values_N[order_N[child]]:
            child += 1
        if not values_N[order_N[child]] < values_N[order_N[root]]:
            return
        order_N[root], order_N[child] = order_N[child], order_N[root]
        root = child


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _descending(values_N: Any) -> Any:
    """The order of the values from the largest on: a heap sort, which compiles in a fraction of numpy's time."""
    size = len(values_N)
    order_N = np.empty(size, np.int64)
    for n in range(size):
        order_N[n] = n
    for root in range(size // 2 - 1, -1, -1):
        _sift(values_N, order_N, root, size)
    for end in range(size - 1, 0, -1):
        order_N[0], order_N[end] = order_N[end], order_N[0]
        _sift(values_N, order_N, 0, end)
    return order_N


@remembered
def best_draft(  # type: ignore[no-untyped-def]
    survivals_RG, draftable_R, load, rates, curve, draft_table, draft_ratio, schedule_seconds, most_verified,
    stops_first,
):  # fmt: skip
    """See ``best_draft`` of `dspark.scheduling.admission`; and the throughput of a step that does not draft."""
    requests, width = survivals_RG.shape
    survival_N, position_N = np.empty(requests * width), np.empty(requests * width, np.int64)
    count = 0
    for r in range(requests):
        for g in range(min(draftable_R[r], width)):
            survival_N[count], position_N[count] = survivals_RG[r, g], g
            count += 1
    survival_N, position_N = survival_N[:count], position_N[:count]
    verify_K, draft_G = np.empty(count + 1), np.empty(width)
    verify_seconds(load, rates, curve, verify_K)
    for g in range(width):
        draft_G[g] = draft_ratio * draft_seconds(g + 1, *draft_table) + schedule_seconds
    order_N = _descending(survival_N)
    best, best_length, best_budget = -np.inf, 0, 0
    for length in range(1, width + 1):
        committed, admitted = float(requests), 0
        theta = committed / (verify_K[0] + draft_G[length - 1])
        top, budget = theta, 0
        for n in order_N:
            if 0 <= most_verified <= admitted:
                break
            if position_N[n] >= length:
                continue
            committed += survival_N[n]
            admitted += 1
            before, theta = theta, committed / (verify_K[admitted] + draft_G[length - 1])
            if stops_first and not theta > before:
                break
            if stops_first or theta > top:
                top, budget = theta, admitted
        if top > best:
            best, best_length, best_budget = top, length, budget
    return best, best_length, best_budget, requests / verify_K[0]


@remembered
def verified(survivals_RG, lengths_R, count, verified_R):  # type: ignore[no-untyped-def]
    """See ``verify_lengths`` of `dspark.scheduling.admission`."""
    requests, width = survivals_RG.shape
    ranked_N = np.empty(requests * width)
    n = 0
    for r in range(requests):
        for g in range(min(lengths_R[r], width)):
            ranked_N[n] = survivals_RG[r, g]
            n += 1
    if count >= n:
        verified_R[:] = lengths_R
        return
    verified_R[:] = 0
    if count <= 0:
        return
    last = ranked_N[_descending(ranked_N[:n])[count - 1]]
    left = count
    for r in range(requests):
        for g in range(min(lengths_R[r], width)):
            if survivals_RG[r, g] > last:
                verified_R[r] += 1
                left -= 1
    for g in range(width):  # of equal ones the earlier position, then the earlier row
        for r in range(requests):
            if left > 0 and g < lengths_R[r] and survivals_RG[r, g] == last:
                verified_R[r] += 1
                left -= 1
