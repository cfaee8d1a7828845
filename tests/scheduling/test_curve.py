"""Measured curves: monotone, staircases kept, between and beyond the points."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.scheduling import MeasuredCurve, measure_curve
from dspark.scheduling.curve import isotonic


def staircase(size: int, *, width: int, rise: float = 0.3, slope: float = 0.001) -> float:
    return 1.0 + rise * ((size - 1) // width) + slope * size


@given(st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 5)), min_size=1, max_size=12))
def test_isotonic_is_the_nearest_monotone_sequence(points) -> None:
    values, weights = [value for value, _ in points], [weight for _, weight in points]
    fitted = isotonic(values, weights)
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(fitted))
    scipy_optimize = pytest.importorskip("scipy.optimize")
    np.testing.assert_allclose(fitted, scipy_optimize.isotonic_regression(values, weights=weights).x, rtol=1e-9)


def test_what_is_monotone_is_kept_exactly() -> None:
    values = [1.0, 1.0, 5.0, 5.0, 5.1, 9.0]
    assert isotonic(values, [1] * 6) == values


def test_medians_of_repeats() -> None:
    curve = MeasuredCurve.through([(4, 2.0), (1, 1.0), (4, 90.0), (4, 2.2), (1, 1.2)])
    assert (curve.sizes, curve.seconds) == ((1, 4), (1.1, 2.2))


def test_between_below_and_beyond() -> None:
    curve = MeasuredCurve(sizes=(2, 3, 4, 8), seconds=(1.0, 3.0, 3.0, 5.0))
    np.testing.assert_allclose(curve([1, 2, 3, 4, 6, 8]), [1.0, 1.0, 3.0, 3.0, 4.0, 5.0])
    np.testing.assert_allclose(curve([10, 16]), [6.0, 9.0])  # slope of 4..8
    np.testing.assert_allclose(MeasuredCurve(sizes=(4,), seconds=(2.0,))([1, 4, 8]), [2.0, 2.0, 4.0])


@pytest.mark.parametrize("width", [3, 4, 8, 16])
def test_a_staircase_is_found_with_its_edges(width: int) -> None:
    """From coarse sizes, powers of two, which all lie on the same side of its steps."""
    asked: list[int] = []

    def measure(size: int) -> float:
        asked.append(size)
        return staircase(size, width=width)

    curve = measure_curve(measure, [1, 2, 4, 8, 16, 32, 64], tolerance=0.02)
    edges = list(range(width, 64, width))
    np.testing.assert_allclose(curve(edges), [measure(edge) for edge in edges])
    np.testing.assert_allclose(curve([edge + 1 for edge in edges]), [measure(edge + 1) for edge in edges])


@given(st.lists(st.one_of(st.just(0.0), st.floats(0, 1)), min_size=100, max_size=100))
def test_any_monotone_curve_is_found_to_the_tolerance(increments: list[float]) -> None:
    truth = 1.0 + np.cumsum(increments)
    asked: list[int] = []
    curve = measure_curve(lambda size: asked.append(size) or float(truth[size - 1]), [1, 100], tolerance=0.05)
    assert np.abs(curve(np.arange(1, 101)) / truth - 1).max() <= 0.05
    assert len(asked) == len(set(asked))


def test_flat_curves_need_few_points_and_measuring_ends() -> None:
    asked: list[int] = []
    measure_curve(lambda size: asked.append(size) or 1.0 + 1e-4 * size, [1, 64, 256])
    assert asked == [1, 64, 256]
    measure_curve(lambda size: asked.append(size) or staircase(size, width=2), [1, 500], most_points=30)
    assert len(asked) == 3 + 30


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ((), (), "sizes"),
        ((1, 2), (1.0,), "one for each"),
        ((0, 2), (1.0, 2.0), "sizes must increase"),
        ((2, 2), (1.0, 2.0), "sizes must increase"),
        ((1, 2), (1.0, float("nan")), "finite"),
        ((1, 2), (0.0, 1.0), "above 0"),
        ((1, 2), (2.0, 1.0), "must not decrease"),
    ],
)
def test_curves_that_are_refused(sizes, seconds, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeasuredCurve(sizes=sizes, seconds=seconds)
