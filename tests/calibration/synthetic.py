"""Rounds whose true acceptance probabilities are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark.calibration.judged_rounds import Floats, JudgedRounds, sigmoid


def rounds_of(logits_NG: Floats, probabilities_NG: Floats, *, seed: int = 0, prompts: int = 50) -> JudgedRounds:
    """Draw fates: token k is accepted with its probability, given that all before it were."""
    random = np.random.default_rng(seed)
    count, width = logits_NG.shape
    rejected_NG = random.random((count, width)) >= probabilities_NG
    accepted_N = np.where(rejected_NG.any(axis=1), rejected_NG.argmax(axis=1), width)
    whole_N = np.full(count, width)
    return JudgedRounds(
        logits_NG=logits_NG,
        accepted_N=accepted_N,
        judged_N=whole_N,
        verified_N=whole_N,
        prompts_N=random.integers(0, prompts, count) + 1000 * seed,
    )


def miscalibrated(temperatures: Sequence[float], *, count: int = 20_000, seed: int = 0) -> JudgedRounds:
    """Rounds whose confidences are true once divided by ``temperatures``."""
    true_NG = np.random.default_rng(100 + seed).normal(1.0, 1.5, (count, len(temperatures)))
    return rounds_of(true_NG * np.asarray(temperatures), sigmoid(true_NG), seed=seed)
