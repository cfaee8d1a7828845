"""Axes of the charts."""

from __future__ import annotations

import itertools
import re

import pytest

from dspark.evaluation.charts import Chart, Point, Series, svg


def drawn(xs: tuple[float, ...], *, doubling: bool) -> list[float]:
    """Places across of points at ``xs``."""
    series = Series(label="made up", points=tuple(Point(x=x, y=1.0 + x) for x in xs))
    chart = Chart(title="t", x_label="x", y_label="y", series=(series,), doubling=doubling)
    return [float(place) for place in re.findall(r'cx="([\d.]+)"', svg(chart))]


def test_each_doubling_takes_the_same_room() -> None:
    places = drawn((1, 2, 4, 8, 64), doubling=True)
    step = places[1] - places[0]
    assert [b - a for a, b in itertools.pairwise(places)] == pytest.approx([step, step, step, 3 * step], abs=0.2)
    even = drawn((1, 2, 4, 8, 64), doubling=False)
    assert even[4] - even[3] == pytest.approx(56 * (even[1] - even[0]), abs=4)


@pytest.mark.parametrize("xs", [(), (4.0,)])
def test_few_points_are_drawn_too(xs: tuple[float, ...]) -> None:
    assert len(drawn(xs, doubling=True)) == len(xs)


def test_a_doubling_axis_names_every_place() -> None:
    xs = tuple(2.0**power for power in range(12))
    series = Series(label="made up", points=tuple(Point(x=x, y=1.0) for x in xs))
    text = svg(Chart(title="t", x_label="x", y_label="y", series=(series,), doubling=True))
    for x in xs:
        assert f'text-anchor="middle">{x:g}</text>' in text
