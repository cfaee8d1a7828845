"""Fitting and checking a calibration over sampling temperatures: does one set of temperatures serve them all?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dspark.calibration.calibration import Calibration
from dspark.calibration.judged_rounds import JudgedRounds, Labelled, joined
from dspark.calibration.metrics import ReliabilityBins, reliability_bins
from dspark.calibration.quality import (
    RESAMPLES,
    Estimate,
    Quality,
    Resampling,
    measure_quality,
    quality_difference,
)
from dspark.calibration.temperature_scaling import fit_temperatures

__all__ = ["LEAST_GAIN", "CalibrationStudy", "RegimeStudy", "study_calibration"]

LEAST_GAIN = 0.002
"""Mean ECE that a regime's own temperatures must save over shared ones to be worth keeping: 0.2 percentage points."""


_PLAIN = (
    "sampling_temperature", "shared", "own", "keeps_own", "fit_rounds", "check_rounds", "fit_prompts", "check_prompts"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RegimeStudy:
    """One sampling temperature.

    Attributes:
        sampling_temperature: of its rounds.
        shared, own: temperatures fitted on the rounds of all regimes, and on its own.
        own_gain: mean ECE that its own temperatures save over the shared ones, on rounds of the fit half that neither
            saw (two folds of prompts).
        keeps_own: whether they are kept: the gain is at least ``LEAST_GAIN`` and its interval above 0.
        before, after: raw confidences and those of the temperatures that are kept, on the check half.
        saved: mean ECE before minus after, paired.
        reliability_before, reliability_after: survival of all positions together, on the check half.
        check_own_gain: as ``own_gain``, on the check half; told, not used.
        fit_rounds, check_rounds, fit_prompts, check_prompts: how many.
    """

    sampling_temperature: float
    shared: tuple[float, ...]
    own: tuple[float, ...]
    own_gain: Estimate
    keeps_own: bool
    before: Quality
    after: Quality
    saved: Estimate
    reliability_before: ReliabilityBins
    reliability_after: ReliabilityBins
    check_own_gain: Estimate
    fit_rounds: int
    check_rounds: int
    fit_prompts: int
    check_prompts: int

    @property
    def temperatures(self) -> tuple[float, ...]:
        """What is kept."""
        return self.own if self.keeps_own else self.shared

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        content = {name: getattr(self, name) for name in _PLAIN} | {"temperatures": self.temperatures}
        content |= {name: asdict(getattr(self, name)) for name in ("own_gain", "saved", "check_own_gain")}
        parts = ("before", "after", "reliability_before", "reliability_after")
        return content | {name: getattr(self, name).to_json() for name in parts}


@dataclass(frozen=True, kw_only=True)
class CalibrationStudy:
    """A fitted calibration and how good it is, by regime."""

    shared: tuple[float, ...]
    regimes: tuple[RegimeStudy, ...]

    @property
    def calibration(self) -> Calibration:
        """Shared temperatures; by regime too where one of them has to keep its own."""
        by_regime = {regime.sampling_temperature: regime.temperatures for regime in self.regimes}
        separate = any(regime.keeps_own for regime in self.regimes)
        return Calibration(temperatures=self.shared, by_sampling_temperature=by_regime if separate else {})


def study_calibration(
    fit: Mapping[float, JudgedRounds],
    check: Mapping[float, JudgedRounds],
    *,
    seed: int,
    resamples: int = RESAMPLES,
    offset: float = 0.0,
) -> CalibrationStudy:
    """Fit on one half of the prompts, measure on the other.

    What is kept is decided within the fit half, so that the check half has had no say in what it measures.

    Args:
        fit, check: rounds by sampling temperature; no prompt may be in both.
        seed: of folds and resamples.
        offset: added to every logit before temperatures are fitted (``fit_offset``); "before" is without it.

    Raises:
        ValueError: a half is too small, or a prompt in both.
    """
    if not fit or fit.keys() != check.keys():
        raise ValueError("fit and check must have rounds of the same sampling temperatures, at least one")
    for sampling_temperature, rounds in fit.items():
        in_check = np.isin(rounds.prompts_N, np.concatenate([part.prompts_N for part in check.values()]))
        if in_check.any():
            raise ValueError("a prompt of the fit half is in the check half too")
        if len(np.unique(rounds.prompts_N)) < 2 or len(check[sampling_temperature]) == 0:
            raise ValueError(
                f"at sampling temperature {sampling_temperature:g} there are rounds of"
                f" {len(np.unique(rounds.prompts_N))} prompts to fit and of"
                f" {len(np.unique(check[sampling_temperature].prompts_N))} to check; it takes 2 and 1 at least: give"
                " more prompts or rounds"
            )
    raw_check = check
    fit = {sampling_temperature: rounds.shifted(offset) for sampling_temperature, rounds in fit.items()}
    check = {sampling_temperature: rounds.shifted(offset) for sampling_temperature, rounds in check.items()}
    everything = joined(list(fit.values()))
    shared = fit_temperatures(everything)
    prompts = np.random.default_rng(seed).permutation(np.unique(everything.prompts_N))
    folds = (prompts[::2], prompts[1::2])
    regimes = []
    for sampling_temperature in sorted(fit):
        rounds, held_out, raw = fit[sampling_temperature], check[sampling_temperature], raw_check[sampling_temperature]
        alone = len(fit) == 1
        own = shared if alone else fit_temperatures(rounds)
        own_gain = Estimate(value=0.0, low=0.0, high=0.0) if alone else _own_gain(
            everything, rounds, folds, seed=seed, resamples=resamples
        )  # fmt: skip
        keeps_own = own_gain.value >= LEAST_GAIN and own_gain.low > 0.0
        kept = own if keeps_own else shared
        resampling = Resampling(held_out.prompts_N, seed=seed, resamples=resamples)
        regimes.append(
            RegimeStudy(
                sampling_temperature=sampling_temperature,
                shared=shared,
                own=own,
                own_gain=own_gain,
                keeps_own=keeps_own,
                before=measure_quality(raw, (), resampling, seed=seed),
                after=measure_quality(held_out, kept, resampling, seed=seed),
                saved=quality_difference(_survivals(raw, ()), _survivals(held_out, kept), resampling),
                reliability_before=_reliability(raw, ()),
                reliability_after=_reliability(held_out, kept),
                check_own_gain=quality_difference(_survivals(held_out, shared), _survivals(held_out, own), resampling),
                fit_rounds=len(rounds),
                check_rounds=len(held_out),
                fit_prompts=len(np.unique(rounds.prompts_N)),
                check_prompts=len(np.unique(held_out.prompts_N)),
            )
        )
    return CalibrationStudy(shared=shared, regimes=tuple(regimes))


def _own_gain(
    everything: JudgedRounds, own: JudgedRounds, folds: Sequence[Any], *, seed: int, resamples: int
) -> Estimate:
    """Mean ECE of shared minus that of own temperatures, each fitted on the other fold's prompts."""
    shared_parts, own_parts = [], []
    for fold in folds:
        held_out = own.select(np.isin(own.prompts_N, fold))
        seen, own_seen = (part.select(~np.isin(part.prompts_N, fold)) for part in (everything, own))
        shared_parts.append(_survivals(held_out, fit_temperatures(seen)))
        own_parts.append(_survivals(held_out, fit_temperatures(own_seen)))
    resampling = Resampling(own.prompts_N, seed=seed, resamples=resamples)
    return quality_difference(_by_position(shared_parts), _by_position(own_parts), resampling)


def _survivals(rounds: JudgedRounds, temperatures: Sequence[float]) -> list[Labelled]:
    return [rounds.survival(position, temperatures) for position in range(1, rounds.block_size + 1)]


def _reliability(rounds: JudgedRounds, temperatures: Sequence[float]) -> ReliabilityBins:
    together = Labelled.joined(_survivals(rounds, temperatures))
    return reliability_bins(together.confidences_M, together.outcomes_M)


def _by_position(parts: Sequence[Sequence[Labelled]]) -> list[Labelled]:
    """One set of pairs a position out of those of several folds."""
    return [Labelled.joined(of_position) for of_position in zip(*parts, strict=True)]
