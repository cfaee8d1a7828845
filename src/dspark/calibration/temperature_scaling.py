"""Sequential temperature scaling: temperatures that make the product of confidences true (section 3.2.1)."""

from __future__ import annotations

import numpy as np

from dspark.calibration.judged_rounds import Booleans, Floats, JudgedRounds, sigmoid
from dspark.calibration.metrics import NUM_BINS, bin_indices

__all__ = ["HIGHEST_TEMPERATURE", "LOWEST_TEMPERATURE", "fit_temperatures"]

LOWEST_TEMPERATURE = 0.1
HIGHEST_TEMPERATURE = 10.0
_COARSE_POINTS = 121
_FINE_POINTS = 41

# Two temperatures whose calibration errors differ by less than this part of 1/sqrt(rounds) are told apart by their
# likelihood: the error counts rounds in bins, and its smallest steps are noise.
_NOISE = 0.2

# Log-likelihood, of all rounds together, that a temperature may cost to be nearer to 1: about half a standard error of
# it. Deep positions are seldom reached, and a handful of fates would drive theirs to a bound.
_LIKELY = 0.1


def fit_temperatures(rounds: JudgedRounds) -> tuple[float, ...]:
    """Temperatures T_1..T_G, one position after the other.

    For k = 1..G, with T_1..T_{k-1} kept, T_k is the point of a logarithmic grid (then of a finer one around it) with
    the lowest expected calibration error, over 20 equal bins, of ``∏_{i≤k} σ(z_i / T_i)`` against "prefix k accepted".
    Of points whose errors cannot be told apart, those with the highest likelihood are taken, and of points whose
    likelihoods cannot be told apart the one nearest to 1. The result depends on nothing but the rounds, and always lies
    within 0.1 and 10, also when all rounds were accepted or all rejected.

    Which rounds serve which position is told by :class:`~dspark.calibration.judged_rounds.JudgedRounds`.

    Raises:
        ValueError: no round serves some position, naming it.
    """
    temperatures: list[float] = []
    survival_N = np.ones(len(rounds))  # a_{k-1} with the temperatures found so far
    for column in range(rounds.block_size):
        serves_N = rounds.judged_N > column
        if not serves_N.any():
            raise ValueError(
                f"no round tells the fate of draft position {column + 1} of {rounds.block_size}: collect more rounds,"
                " of longer answers"
            )
        logits_M = rounds.logits_NG[serves_N, column]
        accepted_M = rounds.accepted_N[serves_N] > column
        temperature = _fit_position(logits_M, survival_N[serves_N], accepted_M)
        temperatures.append(temperature)
        survival_N = survival_N * sigmoid(rounds.logits_NG[:, column] / temperature)
    return tuple(temperatures)


def _fit_position(logits_M: Floats, survival_M: Floats, accepted_M: Booleans) -> float:
    """The temperature of one position, given the survival of the prefix before it."""
    coarse = np.geomspace(LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE, _COARSE_POINTS)
    best = _best_of(coarse, logits_M, survival_M, accepted_M)
    step = coarse[1] / coarse[0]
    fine = np.clip(best * np.geomspace(1.0 / step, step, _FINE_POINTS), LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE)
    return _best_of(fine, logits_M, survival_M, accepted_M)


def _best_of(grid: Floats, logits_M: Floats, survival_M: Floats, accepted_M: Booleans) -> float:
    errors = np.empty(len(grid))
    losses = np.empty(len(grid))
    for index, temperature in enumerate(grid):
        confidences_M = survival_M * sigmoid(logits_M / temperature)
        errors[index] = _calibration_error(confidences_M, accepted_M)
        losses[index] = _log_loss(confidences_M, accepted_M)
    close = errors <= errors.min() + _NOISE / np.sqrt(len(logits_M))
    likely = close & (losses <= losses[close].min() + _LIKELY / len(logits_M))
    candidates = grid[likely]
    return float(candidates[np.argmin(np.abs(np.log(candidates)))])


def _calibration_error(confidences_M: Floats, accepted_M: Booleans) -> float:
    # Σ_i (n_i/M) |share_i - confidence_i| = Σ_i |Σ_{m in bin i} (outcome_m - confidence_m)| / M
    gaps = np.bincount(bin_indices(confidences_M), accepted_M - confidences_M, NUM_BINS)
    return float(np.abs(gaps).sum() / len(confidences_M))


def _log_loss(confidences_M: Floats, accepted_M: Booleans) -> float:
    probabilities_M = np.where(accepted_M, confidences_M, 1.0 - confidences_M)
    return float(-np.log(np.maximum(probabilities_M, 1e-12)).mean())
