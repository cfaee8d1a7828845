"""How true confidences are at every draft position, with bootstrap intervals over prompts.

Rounds of one prompt resemble each other, so prompts are what is resampled: an interval over rounds would be too narrow.
Letters in names: M pairs, P prompts, K bins, U ranks, B resamples, G positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.calibration.judged_rounds import Floats, Integers, JudgedRounds, Labelled
from dspark.calibration.metrics import (
    NUM_BINS,
    area_under_roc,
    areas_of_counts,
    bin_indices,
    brier_score,
    expected_calibration_error,
    perfect_calibration_error,
)

__all__ = ["RESAMPLES", "Estimate", "Quality", "Resampling", "measure_quality", "quality_difference"]

RESAMPLES = 500
_COVERED = 0.95
_RANKS = 256


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its 95 % interval; NaN where there is nothing to estimate."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What one set of temperatures makes of confidences; a tuple has a number for each position 1..G.

    Attributes:
        ece, brier, auc: of estimated survival a_k against "prefix k accepted".
        conditional_ece, conditional_brier, conditional_auc: of c_k against "token k accepted", where all before were.
        mean_ece, mean_auc: averages over the positions (of areas, over those that have one).
        pooled_ece, pooled_auc: of the survivals of all positions together, which is what a scheduler sorts.
        token_ece, token_auc: of c_k of all positions together.
        perfect_ece: ECE of survival that exactly true confidences would show with as few rounds.
        counts: rounds that serve each position.
    """

    ece: tuple[Estimate, ...]
    brier: tuple[Estimate, ...]
    auc: tuple[Estimate, ...]
    conditional_ece: tuple[Estimate, ...]
    conditional_brier: tuple[Estimate, ...]
    conditional_auc: tuple[Estimate, ...]
    mean_ece: Estimate
    mean_auc: Estimate
    pooled_ece: Estimate
    pooled_auc: Estimate
    token_ece: Estimate
    token_auc: Estimate
    perfect_ece: tuple[float, ...]
    counts: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data; null where there is nothing to estimate."""
        return {name: _plain(value) for name, value in asdict(self).items()}


class Resampling:
    """Weightings of prompts: how often each was drawn, with replacement, in each resample.

    One object for all that is to be compared: differences are then paired.
    """

    def __init__(self, prompts_N: Integers, *, seed: int, resamples: int = RESAMPLES) -> None:
        """Draw ``resamples`` weightings of the prompts that occur in ``prompts_N``."""
        self.prompts_P = np.unique(prompts_N)
        count = len(self.prompts_P)
        if count == 0:
            raise ValueError("there is no round to measure: collect more rounds")
        random = np.random.default_rng(seed)
        self.weights_BP: Floats = random.multinomial(count, np.full(count, 1.0 / count), resamples).astype(np.float64)

    def index(self, prompts_M: Integers) -> NDArray[np.intp]:
        """Column of each prompt."""
        return np.searchsorted(self.prompts_P, prompts_M)

    def sums(self, values_M: Floats, prompts_M: Integers) -> Floats:
        """Sum ``[B]`` of values, each as often as its prompt was drawn."""
        return self.weights_BP @ np.bincount(self.index(prompts_M), values_M, len(self.prompts_P))


@dataclass(frozen=True, kw_only=True)
class _Replicated:
    """A number, and the same number of every resample ``[B]``."""

    value: float
    resampled_B: Floats

    def estimate(self, low: float = -math.inf, high: float = math.inf) -> Estimate:
        """With an interval: the spread of the resamples around their mean, moved to the value.

        Moved, because resampling adds noise that raises an ECE; left where it is, the interval would lie too high.
        """
        usable = self.resampled_B[~np.isnan(self.resampled_B)]
        if math.isnan(self.value) or len(usable) == 0:
            return Estimate(value=math.nan, low=math.nan, high=math.nan)
        tail = (1.0 - _COVERED) / 2.0
        ends = self.value + np.quantile(usable - usable.mean(), [tail, 1.0 - tail])
        lower, upper = np.clip(ends, low, high)
        return Estimate(value=self.value, low=float(lower), high=float(upper))


def measure_quality(
    rounds: JudgedRounds, temperatures: Sequence[float], resampling: Resampling, *, seed: int
) -> Quality:
    """Measure one set of temperatures (empty: raw confidences) on rounds.

    Args:
        resampling: of these rounds' prompts.
        seed: of the draws behind ``perfect_ece``.

    Raises:
        ValueError: no round serves some position.
    """
    positions = range(1, rounds.block_size + 1)
    survival = [rounds.survival(position, temperatures) for position in positions]
    conditional = [rounds.conditional(position, temperatures) for position in positions]
    together = Labelled.joined(survival)
    tokens = Labelled.joined(conditional)
    ece, auc = _all(_ece, survival, resampling), _all(_auc, survival, resampling)
    return Quality(
        ece=_estimates(ece),
        brier=_estimates(_all(_brier, survival, resampling)),
        auc=_estimates(auc),
        conditional_ece=_estimates(_all(_ece, conditional, resampling)),
        conditional_brier=_estimates(_all(_brier, conditional, resampling)),
        conditional_auc=_estimates(_all(_auc, conditional, resampling)),
        mean_ece=_mean(ece).estimate(0.0, 1.0),
        mean_auc=_mean(auc).estimate(0.0, 1.0),
        pooled_ece=_ece(together, resampling).estimate(0.0, 1.0),
        pooled_auc=_auc(together, resampling).estimate(0.0, 1.0),
        token_ece=_ece(tokens, resampling).estimate(0.0, 1.0),
        token_auc=_auc(tokens, resampling).estimate(0.0, 1.0),
        perfect_ece=tuple(perfect_calibration_error(part.confidences_M, seed=seed) for part in survival),
        counts=tuple(len(part.outcomes_M) for part in survival),
    )


def quality_difference(one: Sequence[Labelled], other: Sequence[Labelled], resampling: Resampling) -> Estimate:
    """Mean ECE over positions of ``one`` minus that of ``other``, paired: above 0 where ``other`` is truer."""
    first, second = _mean(_all(_ece, one, resampling)), _mean(_all(_ece, other, resampling))
    difference = _Replicated(value=first.value - second.value, resampled_B=first.resampled_B - second.resampled_B)
    return difference.estimate()


def _ece(labelled: Labelled, resampling: Resampling) -> _Replicated:
    num_prompts = len(resampling.prompts_P)
    cells_M = resampling.index(labelled.prompts_M) * NUM_BINS + bin_indices(labelled.confidences_M)
    gaps_PK = np.bincount(cells_M, labelled.outcomes_M - labelled.confidences_M, num_prompts * NUM_BINS)
    gaps_BK = resampling.weights_BP @ gaps_PK.reshape(num_prompts, NUM_BINS)
    return _Replicated(
        value=expected_calibration_error(labelled.confidences_M, labelled.outcomes_M),
        resampled_B=_ratio(np.abs(gaps_BK).sum(axis=1), _counts(labelled, resampling)),
    )


def _brier(labelled: Labelled, resampling: Resampling) -> _Replicated:
    squares_M = np.square(labelled.outcomes_M - labelled.confidences_M)
    return _Replicated(
        value=brier_score(labelled.confidences_M, labelled.outcomes_M),
        resampled_B=_ratio(resampling.sums(squares_M, labelled.prompts_M), _counts(labelled, resampling)),
    )


def _auc(labelled: Labelled, resampling: Resampling) -> _Replicated:
    # For the interval, confidences of about the same rank count as equal: sorting every resample would take minutes.
    edges = np.quantile(labelled.confidences_M, np.linspace(0.0, 1.0, _RANKS + 1)[1:-1])
    ranks_M = np.searchsorted(edges, labelled.confidences_M)
    num_prompts = len(resampling.prompts_P)
    cells_M = resampling.index(labelled.prompts_M) * _RANKS + ranks_M
    positive_BU, negative_BU = (
        resampling.weights_BP
        @ np.bincount(cells_M, which_M.astype(np.float64), num_prompts * _RANKS).reshape(num_prompts, _RANKS)
        for which_M in (labelled.outcomes_M, ~labelled.outcomes_M)
    )
    return _Replicated(
        value=area_under_roc(labelled.confidences_M, labelled.outcomes_M),
        resampled_B=areas_of_counts(positive_BU, negative_BU),
    )


def _counts(labelled: Labelled, resampling: Resampling) -> Floats:
    return resampling.sums(np.ones(len(labelled.prompts_M)), labelled.prompts_M)


def _ratio(sums_B: Floats, counts_B: Floats) -> Floats:
    return np.where(counts_B > 0, sums_B / np.where(counts_B > 0, counts_B, 1.0), np.nan)


def _all(
    metric: Callable[[Labelled, Resampling], _Replicated], parts: Sequence[Labelled], resampling: Resampling
) -> list[_Replicated]:
    """The metric of every position; NaN at a position that no round reached."""
    nothing = _Replicated(value=math.nan, resampled_B=np.full(len(resampling.weights_BP), np.nan))
    return [metric(part, resampling) if len(part.outcomes_M) else nothing for part in parts]


def _mean(parts: Sequence[_Replicated]) -> _Replicated:
    usable = [part for part in parts if not math.isnan(part.value)]
    if not usable:
        return _Replicated(value=math.nan, resampled_B=np.full(1, np.nan))
    stacked_GB = np.stack([part.resampled_B for part in usable])
    return _Replicated(
        value=float(np.mean([part.value for part in usable])),
        resampled_B=np.asarray(stacked_GB.mean(axis=0), dtype=np.float64),
    )


def _estimates(parts: Sequence[_Replicated]) -> tuple[Estimate, ...]:
    return tuple(part.estimate(0.0, 1.0) for part in parts)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
