"""Intervals cover prompts, not rounds."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dspark.calibration.judged_rounds import JudgedRounds
from dspark.calibration.quality import Resampling, measure_quality, quality_difference
from tests.calibration.synthetic import miscalibrated, rounds_of


def survivals(rounds: JudgedRounds, temperatures: tuple[float, ...]) -> list:
    return [rounds.survival(position, temperatures) for position in range(1, rounds.block_size + 1)]


def test_values_are_those_of_the_metrics_and_lie_in_their_intervals() -> None:
    rounds = miscalibrated((2.0, 0.5), count=3000)
    quality = measure_quality(rounds, (), Resampling(rounds.prompts_N, seed=0), seed=0)
    assert quality.counts == (3000, 3000)
    for estimates in (quality.ece, quality.brier, quality.auc, quality.conditional_ece, quality.conditional_auc):
        assert all(0.0 <= one.low < one.value < one.high <= 1.0 for one in estimates)
    assert quality.mean_ece.value == pytest.approx((quality.ece[0].value + quality.ece[1].value) / 2)
    assert measure_quality(rounds, (), Resampling(rounds.prompts_N, seed=0), seed=0) == quality


def test_rounds_of_a_prompt_that_share_a_fate_widen_the_interval() -> None:
    # 20 prompts, each accepted always or never: 2,000 rounds tell no more than 20.
    random = np.random.default_rng(1)
    prompts_N = np.repeat(np.arange(20), 100)
    fates_P = (random.random(20) < 0.5).astype(float)
    logits_NG = np.zeros((2000, 1))
    clustered = replace(rounds_of(logits_NG, fates_P[prompts_N][:, None]), prompts_N=prompts_N)
    independent = replace(rounds_of(logits_NG, np.full((2000, 1), 0.5)), prompts_N=prompts_N)

    def width(rounds: JudgedRounds) -> float:
        resampling = Resampling(rounds.prompts_N, seed=0, resamples=400)
        estimate = quality_brier(rounds, resampling)
        return estimate.high - estimate.low

    def quality_brier(rounds: JudgedRounds, resampling: Resampling):
        return measure_quality(rounds, (0.5,), resampling, seed=0).conditional_ece[0]

    assert width(clustered) > 4 * width(independent)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Brier score of constant confidences on prompts with their own acceptance rates."""
    hits = 0
    logits_NG = np.full((900, 1), 0.4)
    rate = 1.0 / (1.0 + np.exp(-0.4))
    truth = 0.5 * (1.0 - rate) ** 2 + 0.5 * rate**2  # rates are uniform: half of all tokens are accepted
    for seed in range(40):
        random = np.random.default_rng(seed)
        prompts_N = np.repeat(np.arange(30), 30)
        rounds = replace(rounds_of(logits_NG, random.random(30)[prompts_N][:, None], seed=seed), prompts_N=prompts_N)
        brier = measure_quality(rounds, (), Resampling(prompts_N, seed=seed, resamples=200), seed=0).brier[0]
        hits += brier.low <= truth <= brier.high
    assert hits >= 33


def test_differences_are_paired() -> None:
    rounds = miscalibrated((2.0, 2.0), count=3000)
    resampling = Resampling(rounds.prompts_N, seed=0)
    gain = quality_difference(survivals(rounds, (1.0, 1.0)), survivals(rounds, (2.0, 2.0)), resampling)
    assert gain.low > 0.02
    nothing = quality_difference(survivals(rounds, (1.0, 1.0)), survivals(rounds, (1.0, 1.0)), resampling)
    assert (nothing.value, nothing.low, nothing.high) == (0.0, 0.0, 0.0)


def test_what_has_no_value_is_null() -> None:
    # Nothing is accepted: no area under the curve, and no round gets to position 2.
    rounds = rounds_of(np.zeros((50, 2)), np.zeros((50, 2)))
    quality = measure_quality(rounds, (), Resampling(rounds.prompts_N, seed=0, resamples=20), seed=0)
    content = json.loads(json.dumps(quality.to_json(), allow_nan=False))
    assert content["auc"][0]["value"] is None
    assert content["conditional_ece"][1] == {"value": None, "low": None, "high": None}
    assert content["mean_auc"]["value"] is None
    assert content["ece"][0]["value"] == pytest.approx(0.5)
