"""Exact output distributions of speculative decoding over a tiny vocabulary.

This is the proof machinery: it runs the real acceptance functions over every block that can be drafted, integrates
their uniforms exactly, and returns the distribution of what is emitted. An acceptance rule and a scheduler are lossless
if that equals ``autoregressive_law`` to rounding. Cost grows as V^(block size + horizon): V up to 4, a few tokens.

A *law* is a mapping from outcome to probability. A prefix is the tuple of all tokens so far, the anchor last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dspark.decoding.acceptance import Acceptance, accept_coupled, accept_greedy, accept_speculative

Tokens = tuple[int, ...]
TokenModel = Callable[[Tokens], Tensor]
"""prefix -> probabilities float64, over the target vocabulary or a drafter's columns."""

DraftedRound = tuple[Tokens, Tokens]
"""(prefix, whole drafted block) of a round."""

VerifyLength = Callable[[Tokens, Tokens, tuple[DraftedRound, ...]], int]
"""(prefix, whole drafted block, earlier rounds) -> how many draft tokens are verified."""

Admission = Callable[[Tokens, Tokens, tuple[DraftedRound, ...]], bool]
"""(prefix, x_1..x_{k-1}, earlier rounds) -> whether x_k is verified. It cannot see x_k."""

AcceptFunction = Callable[[list[int], Tensor, Tensor, list[float], float, Tensor | None], Acceptance]
"""The signature of ``accept_speculative``, so that wrong rules can be put in its place."""

Outcome = TypeVar("Outcome", bound=Hashable)

_PROBE_DISTANCE = 1e-13


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """A drafter as a table.

    Attributes:
        probs: prefix with the drafted tokens at its end -> the distribution [D] that is handed to the acceptance rule.
        num_tokens: block size.
        token_ids: target id of each column; None if the draft vocabulary is the target's.
        drawn_from: the distribution that tokens are really drawn from, if a wrong rule is to be shown; None: ``probs``.
    """

    probs: TokenModel
    num_tokens: int
    token_ids: Tokens | None = None
    drawn_from: TokenModel | None = None


@dataclass(frozen=True, kw_only=True)
class VerifiedBlock:
    """What an acceptance rule sees of one round: L verified draft tokens, target rows [L+1, V], draft rows [L, D]."""

    draft_tokens: Tokens
    target_probs_RV: Tensor
    draft_probs_LD: Tensor
    draft_token_ids_D: Tensor | None


Rule = Callable[[VerifiedBlock], Mapping[Acceptance, float]]
"""An acceptance rule with its randomness integrated out."""


def autoregressive_law(target: TokenModel, prefix: Tokens, horizon: int) -> dict[Tokens, float]:
    """Law of the next ``horizon`` tokens of the target alone: the product of its own conditionals."""
    law: dict[Tokens, float] = {(): 1.0}
    for _ in range(horizon):
        law = {
            (*tokens, token): mass * float(probability)
            for tokens, mass in law.items()
            for token, probability in enumerate(target(prefix + tokens))
            if probability > 0
        }
    return law


def output_law(
    target: TokenModel,
    drafting: Drafting,
    verify_length: VerifyLength,
    rule: Rule,
    prefix: Tokens,
    horizon: int,
    num_rounds: int | None = None,
) -> dict[Tokens, float]:
    """Law of the first ``horizon`` tokens emitted by rounds of draft, schedule, verify, commit.

    Args:
        num_rounds: how many speculative rounds, after which the target goes on alone; None: no end.
    """
    outcomes_of: dict[tuple[Tokens, Tokens], Mapping[Acceptance, float]] = {}

    def outcomes(prefix: Tokens, draft_tokens: Tokens) -> Mapping[Acceptance, float]:
        key = (prefix, draft_tokens)
        if key not in outcomes_of:
            outcomes_of[key] = rule(verified_block(target, drafting, prefix, draft_tokens))
        return outcomes_of[key]

    def continued(prefix: Tokens, wanted: int, past: tuple[DraftedRound, ...]) -> Iterable[tuple[Tokens, float]]:
        if wanted <= 0:
            return [((), 1.0)]
        if num_rounds is not None and len(past) >= num_rounds:
            return autoregressive_law(target, prefix, wanted).items()
        law: dict[Tokens, float] = {}
        for block, block_mass in block_law(drafting, prefix).items():
            length = verify_length(prefix, block, past)
            for acceptance, mass in outcomes(prefix, block[:length]).items():
                emitted = (*block[: acceptance.num_accepted], acceptance.next_token)
                rest = continued(prefix + emitted, wanted - len(emitted), (*past, (prefix, block)))
                for tokens, rest_mass in rest:
                    _add(law, (emitted + tokens)[:wanted], block_mass * mass * rest_mass)
        return law.items()

    return dict(continued(prefix, horizon, ()))


def largest_deviation(law: Mapping[Outcome, float], other: Mapping[Outcome, float]) -> float:
    """Largest absolute difference of the probability of an outcome."""
    return max(abs(law.get(outcome, 0.0) - other.get(outcome, 0.0)) for outcome in {*law, *other})


def fixed_length(length: int) -> VerifyLength:
    """Verify the same number of draft tokens in every round."""
    return lambda prefix, block, past: length


def non_anticipating(admits: Admission) -> VerifyLength:
    """Admit draft tokens one by one while ``admits`` says so; by its type it never sees the token it admits."""

    def verify_length(prefix: Tokens, block: Tokens, past: tuple[DraftedRound, ...]) -> int:
        length = 0
        while length < len(block) and admits(prefix, block[:length], past):
            length += 1
        return length

    return verify_length


def speculative_rule(accept: AcceptFunction = accept_speculative) -> Rule:
    """p/q with its uniforms integrated out: each is cut into the intervals on which the outcome is constant."""

    def rule(block: VerifiedBlock) -> dict[Acceptance, float]:
        num_drafted = len(block.draft_tokens)
        p_RV = [[float(p) for p in row] for row in block.target_probs_RV.tolist()]
        q_LV = _on_target_ids(block)

        def outcome(accept_uniforms: list[float], final_uniform: float) -> Acceptance:
            return accept(
                list(block.draft_tokens),
                block.target_probs_RV,
                block.draft_probs_LD,
                accept_uniforms,
                final_uniform,
                block.draft_token_ids_D,
            )

        law: dict[Acceptance, float] = {}

        def add_next_token(accept_uniforms: list[float], cuts: list[float], mass: float) -> None:
            cells = intervals_of_constancy(lambda uniform: outcome(accept_uniforms, uniform), cuts)
            for start, end, acceptance in cells:
                _add(law, acceptance, mass * (end - start))

        mass_so_far = 1.0
        accepting: list[float] = []  # uniforms with which every earlier draft token is accepted
        for k, token in enumerate(block.draft_tokens):
            passing, failing = _accepting_interval(outcome, accepting, num_drafted, p_RV[k][token] / q_LV[k][token])
            if failing is not None:
                later = [0.5] * (num_drafted - k - 1)
                uniforms = [*accepting, (failing[0] + failing[1]) / 2, *later]
                mass = mass_so_far * (failing[1] - failing[0])
                add_next_token(uniforms, _cuts_of_final_uniform(p_RV[k], q_LV[k]), mass)
            if passing is None:
                return law
            mass_so_far *= passing[1] - passing[0]
            accepting.append((passing[0] + passing[1]) / 2)
        add_next_token(accepting, _cuts_of_final_uniform(p_RV[num_drafted], None), mass_so_far)
        return law

    return rule


def _accepting_interval(
    outcome: Callable[[list[float], float], Acceptance], accepting: list[float], num_drafted: int, expected_cut: float
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """Where the next uniform makes its draft token accepted, and where rejected."""
    k = len(accepting)
    later = [0.5] * (num_drafted - k - 1)
    cells = intervals_of_constancy(
        lambda uniform: outcome([*accepting, uniform, *later], 0.5).num_accepted > k, [expected_cut]
    )
    intervals = []
    for wanted in (True, False):
        ends = [(start, end) for start, end, is_accepted in cells if is_accepted is wanted]
        intervals.append((ends[0][0], ends[-1][1]) if ends else None)
    return intervals[0], intervals[1]


def greedy_rule(block: VerifiedBlock) -> dict[Acceptance, float]:
    """Temperature 0: no randomness; target rows must be one-hot for the law to be the target's."""
    return {accept_greedy(block.draft_tokens, block.target_probs_RV.argmax(dim=-1)): 1.0}


def coupled_rule(block: VerifiedBlock) -> dict[Acceptance, float]:
    """Seeded coupling with the Gumbel noise integrated out: target samples given the drafts, by ``coupling_law``.

    The bonus token is taken as independent of drafted tokens that were not verified, which is so for non-anticipating
    lengths. (For other schedulers losslessness is shown path by path: the emitted tokens are the target's own samples.)
    """
    samples_of_row: list[dict[int, float]] = []
    q_LV = _on_target_ids(block)
    for k, token in enumerate(block.draft_tokens):
        p_V = block.target_probs_RV[k].tolist()
        joint = coupling_law(p_V, q_LV[k])
        samples_of_row.append({s: joint[token, s] / q_LV[k][token] for s in range(len(p_V)) if (token, s) in joint})
    samples_of_row.append({s: p for s, p in enumerate(block.target_probs_RV[-1].tolist()) if p > 0})
    law: dict[Acceptance, float] = {}
    for samples in itertools.product(*samples_of_row):
        mass = math.prod(row[sample] for row, sample in zip(samples_of_row, samples, strict=True))
        _add(law, accept_coupled(block.draft_tokens, samples), mass)
    return law


def coupling_law(p_V: Sequence[float], q_V: Sequence[float]) -> dict[tuple[int, int], float]:
    """Joint law of (X, S), X = argmax(log q + g) and S = argmax(log p + g) with one and the same Gumbel noise g.

    With E_i = exp(-g_i) standard exponential, X minimises E_i / q_i and S minimises E_i / p_i. Integrating them out:

        P(X = S = i)    = 1 / sum_j max(p_j / p_i, q_j / q_i)
        P(X = x, S = s) = integral from p_x/q_x to p_s/q_s of q_x p_s / A(r)^2 dr,   A(r) = sum_j max(p_j, q_j r)

    and A is linear between the ratios p_j / q_j, where the integral over [a, b] is (b - a) / (A(a) A(b)).
    """
    ratios = [p / q if q > 0 else math.inf for p, q in zip(p_V, q_V, strict=True)]
    law: dict[tuple[int, int], float] = {}

    def total(ratio: float) -> float:
        return sum(max(p, q * ratio) for p, q in zip(p_V, q_V, strict=True))

    for x, s in itertools.product(range(len(p_V)), repeat=2):
        if q_V[x] <= 0 or p_V[s] <= 0:
            continue
        if x == s:
            law[x, s] = p_V[x] / total(ratios[x])
        elif ratios[x] < ratios[s]:
            inside = (ratio for ratio in ratios if ratios[x] < ratio < ratios[s])
            points = sorted({ratios[x], ratios[s], *inside})
            integral = 0.0
            for low, high in itertools.pairwise(points):
                if math.isinf(high):
                    integral += 1 / (total(low) * sum(q for q, ratio in zip(q_V, ratios, strict=True) if ratio <= low))
                else:
                    integral += (high - low) / (total(low) * total(high))
            law[x, s] = q_V[x] * p_V[s] * integral
    return law


def intervals_of_constancy(
    function: Callable[[float], Outcome], expected_cuts: Iterable[float]
) -> list[tuple[float, float, Outcome]]:
    """Cut [0, 1) into intervals (start, end, value) on which ``function`` is constant.

    Every value must be taken on one interval, as by an inverse CDF or a threshold. ``expected_cuts`` only save time:
    the function is probed just inside both ends of every interval they make, and where it differs the cut is found by
    bisection. Neighbours may have the same value.
    """
    points = [0.0, *sorted({cut for cut in expected_cuts if 0 < cut < 1}), 1.0]
    cells: list[tuple[float, float, Outcome]] = []
    for start, end in itertools.pairwise(points):
        margin = min(_PROBE_DISTANCE, (end - start) / 4)
        low, high = start + margin, end - margin
        inner_cuts, values = _bisected(function, low, function(low), high, function(high))
        cells += zip([start, *inner_cuts], [*inner_cuts, end], values, strict=True)
    return cells


def _bisected(
    function: Callable[[float], Outcome], low: float, first: Outcome, high: float, last: Outcome
) -> tuple[list[float], list[Outcome]]:
    """Where ``function`` changes between ``low`` and ``high``, and its values between the changes."""
    if first == last:
        return [], [first]
    middle = (low + high) / 2
    if high - low < 4e-16 or not low < middle < high:
        return [middle], [first, last]
    value = function(middle)
    left_cuts, left_values = _bisected(function, low, first, middle, value)
    right_cuts, right_values = _bisected(function, middle, value, high, last)
    return left_cuts + right_cuts, left_values[:-1] + right_values


def verified_block(target: TokenModel, drafting: Drafting, prefix: Tokens, draft_tokens: Tokens) -> VerifiedBlock:
    """What the acceptance rule sees when ``draft_tokens`` are verified after ``prefix``."""
    prefixes = [prefix + draft_tokens[:k] for k in range(len(draft_tokens) + 1)]
    num_columns = len(drafting.probs(prefix))
    draft_rows = [drafting.probs(row_prefix) for row_prefix in prefixes[:-1]]
    return VerifiedBlock(
        draft_tokens=draft_tokens,
        target_probs_RV=torch.stack([target(row_prefix) for row_prefix in prefixes]),
        draft_probs_LD=torch.stack(draft_rows) if draft_rows else torch.empty(0, num_columns, dtype=torch.float64),
        draft_token_ids_D=None if drafting.token_ids is None else torch.tensor(drafting.token_ids),
    )


def block_law(drafting: Drafting, prefix: Tokens) -> dict[Tokens, float]:
    """Law of the whole drafted block."""
    draw = drafting.drawn_from or drafting.probs
    law: dict[Tokens, float] = {(): 1.0}
    for _ in range(drafting.num_tokens):
        law = {
            (*tokens, column if drafting.token_ids is None else drafting.token_ids[column]): mass * float(probability)
            for tokens, mass in law.items()
            for column, probability in enumerate(draw(prefix + tokens))
            if probability > 0
        }
    return law


def _on_target_ids(block: VerifiedBlock) -> list[list[float]]:
    """Draft rows [L, V] over target ids."""
    if block.draft_token_ids_D is None:
        return [[float(q) for q in row] for row in block.draft_probs_LD.tolist()]
    num_tokens = block.target_probs_RV.shape[-1]
    rows_LV = block.draft_probs_LD.new_zeros(len(block.draft_tokens), num_tokens)
    rows_LV[:, block.draft_token_ids_D] = block.draft_probs_LD
    return [[float(q) for q in row] for row in rows_LV.tolist()]


def _cuts_of_final_uniform(p_V: Sequence[float], q_V: Sequence[float] | None) -> list[float]:
    """Where inverse-CDF sampling from p, or from norm(max(p - q, 0)), goes from one token to the next."""
    weights = list(p_V) if q_V is None else [max(p - q, 0.0) for p, q in zip(p_V, q_V, strict=True)]
    total = math.fsum(weights)
    return [math.fsum(weights[: i + 1]) / total for i in range(len(weights) - 1)] if total > 0 else []


def _add(law: dict[Outcome, float], outcome: Outcome, mass: float) -> None:
    law[outcome] = law.get(outcome, 0.0) + mass
