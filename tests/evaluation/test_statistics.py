from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from dspark.evaluation.statistics import Ratio, Resampling


def test_the_interval_is_that_of_all_draws_with_replacement():
    numerators, denominators = [9.0, 2.0, 5.0, 7.0], [3.0, 2.0, 4.0, 2.0]
    values = sorted(
        sum(numerators[i] for i in draw) / sum(denominators[i] for i in draw) for draw in product(range(4), repeat=4)
    )
    resampling = Resampling(4, seed=1, resamples=200_000)
    estimate = resampling.ratio(Ratio(numerators_P=numerators, denominators_P=denominators))
    assert estimate is not None
    assert estimate.value == pytest.approx(23 / 11)
    assert estimate.interval is not None
    # The exact distribution has atoms: the sampled quantiles must lie between its neighbouring ones.
    for found, tail in zip(estimate.interval, (0.025, 0.975), strict=True):
        assert np.quantile(values, tail - 0.005) <= found <= np.quantile(values, tail + 0.005)


def test_a_seed_gives_the_same_interval_and_another_one_another():
    ratio = Ratio(numerators_P=np.arange(1.0, 30.0), denominators_P=np.full(29, 2.0))
    estimates = [Resampling(29, seed=seed, resamples=300).ratio(ratio) for seed in (5, 5, 6)]
    assert estimates[0] == estimates[1]
    assert estimates[0] != estimates[2]


def test_a_known_difference_is_found_and_pairing_makes_it_sharp():
    random = np.random.default_rng(0)
    rounds_P = random.integers(20, 60, size=80).astype(float)
    level_P = random.uniform(1.2, 3.5, size=80)  # prompts differ far more than the two drafters do
    better = Ratio(numerators_P=rounds_P * (level_P + 0.1) + random.normal(0, 1, 80), denominators_P=rounds_P)
    worse = Ratio(numerators_P=rounds_P * level_P + random.normal(0, 1, 80), denominators_P=rounds_P)
    resampling = Resampling(80, seed=2)
    difference = resampling.difference(better, worse)
    assert difference is not None
    assert difference.interval is not None
    low, high = difference.interval
    assert low <= 0.1 <= high
    assert low > 0.05
    alone = resampling.ratio(better)
    assert alone is not None
    assert alone.interval is not None
    assert (alone.interval[1] - alone.interval[0]) > 5 * (high - low)


def test_intervals_cover_as_often_as_they_say():
    random = np.random.default_rng(3)
    covered = 0
    for trial in range(300):
        rounds_P = random.integers(5, 80, size=60).astype(float)
        level_P = random.gamma(20.0, 0.1, size=60)  # mean 2, independent of the number of rounds
        estimate = Resampling(60, seed=trial, resamples=400).ratio(
            Ratio(numerators_P=rounds_P * level_P, denominators_P=rounds_P)
        )
        assert estimate is not None
        assert estimate.interval is not None
        covered += estimate.interval[0] <= 2.0 <= estimate.interval[1]
    assert 0.89 <= covered / 300 <= 0.985


def test_a_quotient_of_speeds():
    resampling = Resampling(2, seed=0)
    fast = Ratio(numerators_P=[10.0, 20.0], denominators_P=[1.0, 2.0])
    slow = Ratio(numerators_P=[10.0, 20.0], denominators_P=[2.0, 4.0])
    estimate = resampling.quotient(fast, slow)
    assert estimate is not None
    assert estimate.value == pytest.approx(2.0)
    assert estimate.interval == pytest.approx((2.0, 2.0))


def test_what_cannot_be_known_is_not_made_up():
    nothing = Ratio(numerators_P=[0.0, 0.0], denominators_P=[0.0, 0.0])
    assert Resampling(2, seed=0).ratio(nothing) is None
    one = Resampling(1, seed=0).ratio(Ratio(numerators_P=[3.0], denominators_P=[2.0]))
    assert one is not None
    assert (one.value, one.interval) == (1.5, None)
    # One prompt of two has all the rounds: its spread is unknown.
    lonely = Resampling(2, seed=0).ratio(Ratio(numerators_P=[3.0, 0.0], denominators_P=[2.0, 0.0]))
    assert lonely is not None
    assert lonely.interval is None
    with pytest.raises(ValueError, match="each of 2"):
        Resampling(2, seed=0).ratio(Ratio(numerators_P=[3.0], denominators_P=[2.0]))
