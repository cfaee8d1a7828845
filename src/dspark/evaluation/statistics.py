"""Pooled ratios and what resampling the prompts says of them. Pure.

Letters in names: P prompts, B resamples. Rounds of a prompt are alike, so prompts, not rounds, are what is resampled: a
quotient of sums (accepted length = committed tokens / rounds) is pooled over all rounds of all prompts, and its
interval is that of the same quotient over prompts drawn with replacement (the percentile interval of a ratio
estimator).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CONFIDENCE_LEVEL", "RESAMPLES", "Estimate", "Ratio", "Resampling"]

Floats = NDArray[np.float64]

RESAMPLES = 2000
CONFIDENCE_LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its interval; the interval is None where one prompt, or none, had something to count."""

    value: float
    interval: tuple[float, float] | None

    def to_json(self) -> dict[str, Any]:
        """``{"value", "interval": [low, high] or null}``."""
        return {"value": self.value, "interval": None if self.interval is None else list(self.interval)}


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """What a pooled quotient is made of, prompt by prompt.

    Attributes:
        numerators_P, denominators_P: numbers of at least 0.
    """

    numerators_P: Sequence[float] | Floats
    denominators_P: Sequence[float] | Floats


class Resampling:
    """Draws of prompts with replacement; every estimate made with one object uses the same draws, which pairs them."""

    def __init__(self, num_prompts: int, *, seed: int, resamples: int = RESAMPLES) -> None:
        """Draw ``resamples`` times ``num_prompts`` of ``num_prompts`` prompts."""
        self.num_prompts = num_prompts
        generator = np.random.default_rng([abs(seed), int(seed < 0), num_prompts])
        chances_P = np.full(num_prompts, 1.0 / max(num_prompts, 1))
        self._weights_BP: Floats | None = None
        if num_prompts > 1:
            self._weights_BP = generator.multinomial(num_prompts, chances_P, size=resamples).astype(np.float64)

    def ratio(self, ratio: Ratio) -> Estimate | None:
        """Σ numerators / Σ denominators; None where nothing was counted."""
        return self._estimate([ratio], lambda values: values[0])

    def difference(self, ratio: Ratio, reference: Ratio) -> Estimate | None:
        """``ratio`` − ``reference``, both over the same draws of prompts."""
        return self._estimate([ratio, reference], lambda values: values[0] - values[1])

    def quotient(self, ratio: Ratio, reference: Ratio) -> Estimate | None:
        """``ratio`` / ``reference``, both over the same draws of prompts; None where the reference is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self._estimate([ratio, reference], lambda values: values[0] / values[1])

    def _estimate(self, ratios: Sequence[Ratio], combine: Any) -> Estimate | None:
        pairs = [(np.asarray(r.numerators_P, np.float64), np.asarray(r.denominators_P, np.float64)) for r in ratios]
        for numerators_P, denominators_P in pairs:
            if not numerators_P.shape == denominators_P.shape == (self.num_prompts,):
                raise ValueError(f"a ratio needs one numerator and one denominator for each of {self.num_prompts}")
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(combine([np.divide(n.sum(), d.sum()) for n, d in pairs]))
            if not np.isfinite(value):
                return None
            contributing = min(int((d > 0).sum()) for _, d in pairs)
            if self._weights_BP is None or contributing < 2:
                return Estimate(value=value, interval=None)
            values_B = combine([(self._weights_BP @ n) / (self._weights_BP @ d) for n, d in pairs])
        values_B = values_B[np.isfinite(values_B)]  # draws without a single prompt that counts say nothing
        tail = (1.0 - CONFIDENCE_LEVEL) / 2.0
        low, high = np.quantile(values_B, [tail, 1.0 - tail])
        return Estimate(value=value, interval=(float(low), float(high)))
