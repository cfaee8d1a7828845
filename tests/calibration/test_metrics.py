"""Metrics against their definitions, counted out."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from dspark.calibration.metrics import (
    area_under_roc,
    brier_score,
    expected_calibration_error,
    perfect_calibration_error,
    reliability_bins,
)

RANDOM = np.random.default_rng(5)
CONFIDENCES = np.round(RANDOM.random(400), 2)  # with ties
OUTCOMES = RANDOM.random(400) < CONFIDENCES**2


def test_ece_is_the_weighted_gap_of_twenty_bins() -> None:
    total = 0.0
    for index in range(20):
        inside = [
            (confidence, outcome)
            for confidence, outcome in zip(CONFIDENCES, OUTCOMES, strict=True)
            if int(confidence * 20) == index or (index == 19 and confidence == 1.0)
        ]
        if inside:
            claimed = sum(confidence for confidence, _ in inside) / len(inside)
            share = sum(bool(outcome) for _, outcome in inside) / len(inside)
            total += len(inside) / 400 * abs(claimed - share)
    assert expected_calibration_error(CONFIDENCES, OUTCOMES) == pytest.approx(total, abs=1e-12)


def test_a_hand_made_diagram() -> None:
    bins = reliability_bins(np.array([0.0, 0.1, 0.6, 1.0]), np.array([False, True, True, True]), 2)
    assert bins.counts_K.tolist() == [2, 2]
    assert bins.mean_confidence_K.tolist() == [0.05, 0.8]
    assert bins.accepted_share_K.tolist() == [0.5, 1.0]
    assert bins.calibration_error == pytest.approx(0.5 * 0.45 + 0.5 * 0.2)
    empty = reliability_bins(np.array([0.9]), np.array([True]), 2)
    assert empty.to_json()["accepted_share"] == [None, 1.0]


def test_brier() -> None:
    assert brier_score(np.array([0.25, 1.0]), np.array([True, False])) == pytest.approx((0.75**2 + 1.0) / 2)


def test_area_counts_pairs_with_ties_as_half() -> None:
    pairs = [
        1.0 if yes > no else 0.5 if yes == no else 0.0 for yes in CONFIDENCES[OUTCOMES] for no in CONFIDENCES[~OUTCOMES]
    ]
    area = area_under_roc(CONFIDENCES, OUTCOMES)
    assert area == pytest.approx(np.mean(pairs), abs=1e-12)
    statistic = mannwhitneyu(CONFIDENCES[OUTCOMES], CONFIDENCES[~OUTCOMES]).statistic
    assert area == pytest.approx(statistic / (OUTCOMES.sum() * (~OUTCOMES).sum()), abs=1e-12)
    assert np.isnan(area_under_roc(CONFIDENCES, np.ones(400, dtype=bool)))


def test_true_confidences_show_the_error_of_perfect_ones() -> None:
    confidences = np.random.default_rng(0).random(2000)
    expected = perfect_calibration_error(confidences, seed=1)
    measured = [
        expected_calibration_error(confidences, np.random.default_rng(100 + seed).random(2000) < confidences)
        for seed in range(30)
    ]
    assert expected == pytest.approx(np.mean(measured), rel=0.1)
    assert perfect_calibration_error(np.tile(confidences, 16), seed=1) == pytest.approx(expected / 4, rel=0.15)


@pytest.mark.parametrize(
    ("confidences", "outcomes", "message"),
    [([], [], "no pair"), ([1.5], [True], "probabilities"), ([0.5, 0.5], [True], "one length")],
)
def test_what_cannot_be_measured(confidences: list[float], outcomes: list[bool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        brier_score(np.array(confidences), np.array(outcomes, dtype=bool))
