"""One number added to every confidence logit: what temperatures cannot do, which stretch around 50 %."""

from __future__ import annotations

import numpy as np

from dspark.calibration.judged_rounds import JudgedRounds, sigmoid

__all__ = ["fit_offset"]

_STEPS = 50
_MOST = 10.0


def fit_offset(rounds: JudgedRounds) -> float:
    """The offset b that makes ``σ(z_k + b)`` most likely, over all tokens whose predecessors were accepted.

    A confidence head learns from anchors anywhere in the data; in decoding a round begins where the one before it
    failed, which is a harder place. That lowers acceptance at all positions alike, so one number, which the head's bias
    can take in, puts most of it right.

    Raises:
        ValueError: no token was accepted, or none rejected: there is no best offset then.
    """
    reached_NG = np.arange(rounds.block_size) <= np.minimum(rounds.accepted_N, rounds.judged_N - 1)[:, None]
    logits_M = rounds.logits_NG[reached_NG]
    accepted_M = (np.arange(rounds.block_size) < rounds.accepted_N[:, None])[reached_NG]
    if accepted_M.all() or not accepted_M.any():
        raise ValueError(
            f"of {len(accepted_M)} draft tokens {'all' if accepted_M.all() else 'none'} were accepted, so no offset is"
            " best: give more rounds"
        )
    offset = 0.0
    for _ in range(_STEPS):  # Newton's method on a convex function of one number
        confidences_M = sigmoid(logits_M + offset)
        step = float((accepted_M - confidences_M).sum() / np.maximum((confidences_M * (1 - confidences_M)).sum(), 1e-9))
        offset = float(np.clip(offset + np.clip(step, -1.0, 1.0), -_MOST, _MOST))
        if abs(step) < 1e-9:
            break
    return offset
