"""A fitted calibration: one temperature for each draft position, by sampling regime."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["NO_CALIBRATION", "Calibration"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Temperatures of sequential temperature scaling (section 3.2.1).

    Attributes:
        temperatures: T_1..T_γ for every sampling temperature, where it makes no difference (and for other software,
            which knows nothing else); empty leaves logits as they are.
        by_sampling_temperature: T_1..T_γ for requests nearest to that sampling temperature; empty where it makes no
            difference.
    """

    temperatures: tuple[float, ...] = ()
    by_sampling_temperature: Mapping[float, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for temperatures in (self.temperatures, *self.by_sampling_temperature.values()):
            if not all(math.isfinite(value) and value > 0.0 for value in temperatures):
                raise ValueError(f"temperatures {list(temperatures)} must be finite and above 0")

    def at(self, sampling_temperature: float) -> tuple[float, ...]:
        """T_1..T_γ for a request: those of the nearest sampling temperature that was fitted."""
        if not self.by_sampling_temperature:
            return self.temperatures
        nearest = min(self.by_sampling_temperature, key=lambda fitted: (abs(fitted - sampling_temperature), fitted))
        return self.by_sampling_temperature[nearest]

    def confidences(self, logits: Sequence[float], sampling_temperature: float) -> tuple[float, ...]:
        """``c_k = σ(z_k / T_k)``: probabilities that draft tokens 1, 2, ... are accepted, given all before are."""
        temperatures = self.at(sampling_temperature)
        if temperatures and len(logits) > len(temperatures):
            raise ValueError(
                f"the calibration has {len(temperatures)} positions, the draft {len(logits)}: fit it for this drafter"
            )
        scaled = [z / t for z, t in zip(logits, temperatures, strict=False)] if temperatures else logits
        return tuple(_sigmoid(z) for z in scaled)


def _sigmoid(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-z)) if z >= 0.0 else math.exp(z) / (1.0 + math.exp(z))


NO_CALIBRATION = Calibration()
"""Confidences as the drafter gives them."""
