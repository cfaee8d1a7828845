"""The offset that temperatures cannot make."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.calibration.calibration import Calibration
from dspark.calibration.judged_rounds import sigmoid
from dspark.calibration.offset import fit_offset
from dspark.calibration.regimes import study_calibration
from tests.calibration.synthetic import rounds_of


@pytest.mark.parametrize("true", [-1.2, 0.0, 0.7])
def test_a_known_offset_is_recovered(true: float) -> None:
    logits_NG = np.random.default_rng(0).normal(0.5, 1.5, (20_000, 4))
    rounds = rounds_of(logits_NG, sigmoid(logits_NG + true))
    assert fit_offset(rounds) == pytest.approx(true, abs=0.05)
    assert fit_offset(rounds.shifted(true)) == pytest.approx(0.0, abs=0.05)


def test_unjudged_tokens_and_those_behind_a_rejection_have_no_say() -> None:
    logits_NG = np.zeros((4000, 3))
    probabilities_NG = np.tile([0.5, 0.5, 0.5], (4000, 1))
    rounds = rounds_of(logits_NG, probabilities_NG)
    changed_NG = logits_NG.copy()
    behind_NG = np.arange(3) > rounds.accepted_N[:, None]
    changed_NG[behind_NG] = 5.0
    changed = rounds_of(changed_NG, probabilities_NG)
    assert np.array_equal(changed.accepted_N, rounds.accepted_N)
    assert fit_offset(changed) == pytest.approx(fit_offset(rounds), abs=1e-6)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_no_offset_is_best_where_all_fates_are_one(probability: float) -> None:
    rounds = rounds_of(np.zeros((50, 2)), np.full((50, 2), probability))
    with pytest.raises(ValueError, match="give more rounds"):
        fit_offset(rounds)


def test_an_offset_mends_what_temperatures_cannot() -> None:
    logits_NG = np.random.default_rng(1).normal(0.0, 0.6, (16_000, 3))
    fit, check = (rounds_of(logits_NG, sigmoid(logits_NG - 0.8), seed=seed) for seed in (1, 2))
    offset = fit_offset(fit)
    without = study_calibration({1.0: fit}, {1.0: check}, seed=0, resamples=20).regimes[0]
    shifted = study_calibration({1.0: fit}, {1.0: check}, seed=0, resamples=20, offset=offset).regimes[0]
    assert shifted.before.ece == without.before.ece
    assert shifted.after.mean_ece.value < 0.4 * without.after.mean_ece.value
    assert shifted.saved.value > without.saved.value
    assert isinstance(study_calibration({1.0: fit}, {1.0: check}, seed=0, resamples=20).calibration, Calibration)
