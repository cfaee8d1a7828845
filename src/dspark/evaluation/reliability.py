"""How true a drafter's confidences were in the rounds of an evaluation, before and after calibration (Fig. 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dspark.calibration.judged_rounds import JudgedRounds, Labelled
from dspark.calibration.metrics import area_under_roc, brier_score, reliability_bins
from dspark.evaluation.plan import DrafterFacts
from dspark.evaluation.rounds import RoundRecord, judged_rounds

__all__ = ["reliability"]


def reliability(drafter: DrafterFacts, records: Sequence[RoundRecord]) -> dict[str, Any] | None:
    """Calibration error, Brier score, ranking and reliability bins of the survival of every prefix, as plain data.

    Args:
        records: rounds at full verification.

    Returns:
        ``raw`` and, where the drafter has a calibration, ``calibrated``: the positions, and the mean of their
        calibration errors. None for a drafter without confidence head, or without a round that drafted.
    """
    if not drafter.has_confidence_head or not any(record.drafted for record in records):
        return None
    rounds = judged_rounds(records, drafter.block_size)
    numbers: dict[str, Any] = {"raw": _numbers(rounds, ()), "calibrated": None}
    if drafter.temperatures is not None:
        numbers["calibrated"] = _numbers(rounds, drafter.temperatures)
    return numbers


def _numbers(rounds: JudgedRounds, temperatures: Sequence[float]) -> dict[str, Any]:
    positions = [
        {"position": position, **_judge(rounds.survival(position, temperatures))}
        for position in range(1, rounds.block_size + 1)
        if (rounds.judged_N >= position).any()
    ]
    conditional = [rounds.conditional(position, temperatures) for position in range(1, rounds.block_size + 1)]
    return {
        "positions": positions,
        "mean_calibration_error": sum(row["calibration_error"] for row in positions) / len(positions),
        "tokens": _judge(Labelled.joined(conditional)),
    }


def _judge(labelled: Labelled) -> dict[str, Any]:
    bins = reliability_bins(labelled.confidences_M, labelled.outcomes_M)
    area = area_under_roc(labelled.confidences_M, labelled.outcomes_M)
    filled = [
        {"confidence": float(mean), "accepted": float(share), "count": int(count)}
        for mean, share, count in zip(bins.mean_confidence_K, bins.accepted_share_K, bins.counts_K, strict=True)
        if count > 0
    ]
    return {
        "count": len(labelled.outcomes_M),
        "calibration_error": bins.calibration_error,
        "brier_score": brier_score(labelled.confidences_M, labelled.outcomes_M),
        "area_under_roc": None if math.isnan(area) else area,
        "bins": filled,
    }
