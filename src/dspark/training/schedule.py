"""Learning-rate schedule: linear warm-up, then a cosine to a final fraction."""

from __future__ import annotations

import math

__all__ = ["learning_rate_factor"]


def learning_rate_factor(step: int, *, warmup_steps: int, total_steps: int, final_fraction: float) -> float:
    """Factor of the peak learning rate at ``step`` (0-based).

    Rises linearly over ``warmup_steps`` (the first step already moves), then follows half a cosine from 1 down to
    ``final_fraction`` at the last step.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
