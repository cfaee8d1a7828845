"""How true confidences are: calibration error, Brier score, ranking, reliability.

Letters in names: M pairs of a confidence and its outcome, K bins, U different confidences, B weightings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.calibration.judged_rounds import Booleans, Floats, Integers

__all__ = [
    "NUM_BINS",
    "ReliabilityBins",
    "area_under_roc",
    "areas_of_counts",
    "bin_indices",
    "brier_score",
    "expected_calibration_error",
    "perfect_calibration_error",
    "reliability_bins",
]

NUM_BINS = 20
"""Equal bins of [0, 1] that SPEC prescribes for the expected calibration error."""


@dataclass(frozen=True, kw_only=True)
class ReliabilityBins:
    """The reliability diagram: what was claimed and what happened, by equal bins ``[i/K, (i+1)/K)`` of confidence.

    Attributes:
        counts_K: pairs in each bin; 1.0 belongs to the last.
        mean_confidence_K, accepted_share_K: their mean confidence and the share whose outcome was true; NaN in an
            empty bin.
    """

    counts_K: Integers
    mean_confidence_K: Floats
    accepted_share_K: Floats

    @property
    def calibration_error(self) -> float:
        """``Σ_i (n_i / M) |share_i - confidence_i|``."""
        filled_K = self.counts_K > 0
        gaps_K = np.abs(self.accepted_share_K - self.mean_confidence_K)[filled_K]
        return float((self.counts_K[filled_K] * gaps_K).sum() / self.counts_K.sum())

    def to_json(self) -> dict[str, list[float | None]]:
        """Plain data; null in an empty bin."""
        return {
            "counts": self.counts_K.tolist(),
            "mean_confidence": [None if np.isnan(value) else float(value) for value in self.mean_confidence_K],
            "accepted_share": [None if np.isnan(value) else float(value) for value in self.accepted_share_K],
        }


def bin_indices(confidences_M: Floats, num_bins: int = NUM_BINS) -> NDArray[np.intp]:
    """Bin of each confidence, ``floor(K c)``; 1.0 belongs to the last."""
    return np.minimum((confidences_M * num_bins).astype(np.intp), num_bins - 1)


def reliability_bins(confidences_M: Floats, outcomes_M: Booleans, num_bins: int = NUM_BINS) -> ReliabilityBins:
    """Reliability by equal bins. Raises ValueError without a pair, or when a confidence is no probability."""
    _check(confidences_M, outcomes_M)
    bins_M = bin_indices(confidences_M, num_bins)
    counts_K = np.bincount(bins_M, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        mean_K = np.bincount(bins_M, confidences_M, num_bins) / counts_K
        share_K = np.bincount(bins_M, outcomes_M.astype(np.float64), num_bins) / counts_K
    return ReliabilityBins(counts_K=counts_K, mean_confidence_K=mean_K, accepted_share_K=share_K)


def expected_calibration_error(confidences_M: Floats, outcomes_M: Booleans, num_bins: int = NUM_BINS) -> float:
    """ECE: mean gap between claimed and true share over equal bins of confidence, weighted by their counts.

    Its expectation is above 0 even for true probabilities, the more so the fewer pairs: see
    :func:`perfect_calibration_error`.
    """
    return reliability_bins(confidences_M, outcomes_M, num_bins).calibration_error


def perfect_calibration_error(confidences_M: Floats, *, seed: int, draws: int = 64, num_bins: int = NUM_BINS) -> float:
    """Mean ECE that these confidences would show if each were exactly true, by drawing outcomes from them.

    A measured ECE near this number cannot be told from perfect calibration with so few pairs.
    """
    _check(confidences_M, np.zeros(len(confidences_M), dtype=np.bool_))
    random = np.random.default_rng(seed)
    errors = [
        expected_calibration_error(confidences_M, random.random(len(confidences_M)) < confidences_M, num_bins)
        for _ in range(draws)
    ]
    return float(np.mean(errors))


def brier_score(confidences_M: Floats, outcomes_M: Booleans) -> float:
    """Mean squared difference between confidence and outcome (0 is perfect)."""
    _check(confidences_M, outcomes_M)
    return float(np.square(confidences_M - outcomes_M).mean())


def area_under_roc(confidences_M: Floats, outcomes_M: Booleans) -> float:
    """Probability that a true outcome had the higher confidence than a false one, ties counting one half.

    Returns:
        NaN when all outcomes are the same: there is nothing to rank.
    """
    _check(confidences_M, outcomes_M)
    ranks_M = np.unique(confidences_M, return_inverse=True)[1]
    positive = np.bincount(ranks_M, outcomes_M).astype(np.float64)
    negative = np.bincount(ranks_M, ~outcomes_M).astype(np.float64)
    return float(areas_of_counts(positive, negative))


def areas_of_counts(positive_BU: Floats, negative_BU: Floats) -> Floats:
    """Area under the curve ``[B]`` from how many true and false outcomes have each of U rising confidences."""
    total_B = positive_BU.sum(axis=-1) * negative_BU.sum(axis=-1)
    below_BU = np.cumsum(negative_BU, axis=-1) - negative_BU
    pairs_B = (positive_BU * (below_BU + 0.5 * negative_BU)).sum(axis=-1)
    return np.where(total_B > 0, pairs_B / np.where(total_B > 0, total_B, 1.0), np.nan)


def _check(confidences_M: Floats, outcomes_M: Booleans) -> None:
    if confidences_M.ndim != 1 or confidences_M.shape != outcomes_M.shape:
        raise ValueError(
            f"confidences and outcomes must be two lists of one length, got {confidences_M.shape} and"
            f" {outcomes_M.shape}"
        )
    if len(confidences_M) == 0:
        raise ValueError("there is no pair of a confidence and an outcome: collect more rounds")
    if not ((confidences_M >= 0.0) & (confidences_M <= 1.0)).all():
        raise ValueError("confidences must be probabilities, 0 to 1")
