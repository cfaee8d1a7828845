"""Seconds over a size (tokens, requests), from measured points: monotone, with its jumps where they were measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dspark.scheduling import compiled
from dspark.scheduling.batch import FloatArray, frozen_floats

__all__ = ["MeasuredCurve", "isotonic", "measure_curve"]


@dataclass(frozen=True, kw_only=True)
class MeasuredCurve:
    """A non-decreasing curve through points.

    Between two points it is a straight line: a jump that was measured on both its sides (sizes n and n + 1) stays
    exactly what it is, and ``measure_curve`` sees to it that jumps are. Below the first point it is the first value.
    Above the last it goes on with the slope of the upper half of what was measured (a single point: in proportion to
    the size).

    Attributes:
        sizes: measured sizes, increasing, from 1.
        seconds: at each size, finite, above 0 and not decreasing.

    Raises:
        ValueError: they are not so.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.seconds) or not self.sizes:
            raise ValueError(f"sizes has {len(self.sizes)} numbers, seconds {len(self.seconds)}: give one for each")
        if self.sizes[0] < 1 or any(low >= high for low, high in itertools.pairwise(self.sizes)):
            raise ValueError(f"sizes must increase from 1 or more, got {list(self.sizes)}")
        if not all(math.isfinite(value) and value > 0.0 for value in self.seconds):
            raise ValueError(f"seconds must be finite and above 0, got {list(self.seconds)}")
        if any(low > high for low, high in itertools.pairwise(self.seconds)):
            raise ValueError("seconds must not decrease: make the curve with MeasuredCurve.through")

    @classmethod
    def through(cls, points: Iterable[tuple[int, float]]) -> MeasuredCurve:
        """The curve nearest to measured (size, seconds) points: the median of each size, then ``isotonic``."""
        values_of: dict[int, list[float]] = {}
        for size, value in points:
            values_of.setdefault(int(size), []).append(float(value))
        sizes = sorted(values_of)
        medians = [float(np.median(values_of[size])) for size in sizes]
        seconds = isotonic(medians, [len(values_of[size]) for size in sizes])
        return cls(sizes=tuple(sizes), seconds=tuple(seconds))

    def __call__(self, sizes: npt.ArrayLike) -> FloatArray:
        """Seconds at each of ``sizes``."""
        asked = frozen_floats(np.ravel(sizes))
        seconds = np.empty(asked.shape)
        compiled.curve_at(asked, *self.table, seconds)
        return seconds.reshape(np.shape(sizes))

    def at(self, size: int) -> float:
        """Seconds at one size; it is looked up when asked for again."""
        if size not in self._seconds_at:
            self._seconds_at[size] = float(self(size))
        return self._seconds_at[size]

    @cached_property
    def _seconds_at(self) -> dict[int, float]:
        return {}

    @cached_property
    def table(self) -> tuple[FloatArray, FloatArray, float]:
        """Sizes, seconds, slope above the last: what compiled code knows of it."""
        sizes, seconds = frozen_floats(self.sizes), frozen_floats(self.seconds)
        if sizes.size == 1:
            return sizes, seconds, float(seconds[0] / sizes[0])
        half = min(int(np.searchsorted(sizes, sizes[-1] / 2)), sizes.size - 2)
        return sizes, seconds, float((seconds[-1] - seconds[half]) / (sizes[-1] - sizes[half]))


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` in weighted squares: pools adjacent violators, nothing else.

    A sequence that does not decrease comes back as it is, so no jump is smoothed.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, count
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, mass, count = pools.pop()
            total = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / total, total, count + pool[2])
        pools.append(pool)
    return [mean for mean, _, count in pools for _ in range(count)]


def measure_curve(
    measure: Callable[[int], float], sizes: Sequence[int], *, tolerance: float = 0.05, most_points: int = 200
) -> MeasuredCurve:
    """Measure at ``sizes``, and between neighbours until they differ by no more than ``tolerance`` or are 1 apart.

    So every jump ends up between two neighbouring sizes, and as the curve is monotone it is nowhere further than
    ``tolerance`` from the truth, whatever its shape (looking for straight pieces instead would save points, and take a
    staircase for a slope where its steps fall in with the sizes).

    Args:
        measure: size -> seconds (the median of some repeats).
        sizes: where to begin; the smallest and the largest are the ends of the curve.
        tolerance: as a part of the smaller value.
        most_points: measurements at most; the largest differences are looked into first.
    """
    seconds_at = {size: measure(size) for size in sorted(set(sizes))}
    while len(seconds_at) < most_points:
        ends = sorted(seconds_at)
        gaps = {
            (low, high): abs(seconds_at[high] - seconds_at[low]) / min(seconds_at[low], seconds_at[high])
            for low, high in itertools.pairwise(ends)
            if high - low > 1
        }
        widest = max(gaps, key=gaps.__getitem__, default=None)
        if widest is None or gaps[widest] <= tolerance:
            break
        middle = sum(widest) // 2
        seconds_at[middle] = measure(middle)
    return MeasuredCurve.through(seconds_at.items())
