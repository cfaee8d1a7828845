"""One set of temperatures for all regimes, or one for each: as the rounds say."""

from __future__ import annotations

import json

import pytest

from dspark.calibration.regimes import study_calibration
from tests.calibration.synthetic import miscalibrated


def test_regimes_that_differ_keep_their_own() -> None:
    cold, hot = (3.0, 2.0), (1.0, 0.5)
    study = study_calibration(
        {0.0: miscalibrated(cold, count=6000, seed=1), 1.0: miscalibrated(hot, count=6000, seed=2)},
        {0.0: miscalibrated(cold, count=6000, seed=3), 1.0: miscalibrated(hot, count=6000, seed=4)},
        seed=0,
        resamples=100,
    )
    assert all(regime.keeps_own and regime.own_gain.low > 0.0 for regime in study.regimes)
    assert study.calibration.at(0.0) == pytest.approx(cold, rel=0.25)
    assert study.calibration.at(1.0) == pytest.approx(hot, rel=0.25)
    first = study.regimes[0]
    assert first.after.mean_ece.value < 0.02 < first.before.mean_ece.value
    assert first.saved.low > 0.0
    assert first.saved.value == pytest.approx(first.before.mean_ece.value - first.after.mean_ece.value)


def test_regimes_that_agree_share() -> None:
    true = (2.0, 0.7)
    study = study_calibration(
        {one: miscalibrated(true, count=3000, seed=1 + number) for number, one in enumerate((0.0, 0.7))},
        {one: miscalibrated(true, count=3000, seed=5 + number) for number, one in enumerate((0.0, 0.7))},
        seed=0,
        resamples=100,
    )
    assert not any(regime.keeps_own for regime in study.regimes)
    assert not study.calibration.by_sampling_temperature
    assert study.calibration.at(0.7) == study.shared
    content = json.loads(json.dumps([regime.to_json() for regime in study.regimes], allow_nan=False))
    assert content[1]["temperatures"] == list(study.shared)
    assert sum(content[0]["reliability_after"]["counts"]) == 6000


def test_halves_must_not_share_a_prompt() -> None:
    rounds = {0.0: miscalibrated((1.0,), count=200, seed=1)}
    with pytest.raises(ValueError, match="in the check half too"):
        study_calibration(rounds, rounds, seed=0)
    with pytest.raises(ValueError, match="same sampling temperatures"):
        study_calibration(rounds, {}, seed=0)
