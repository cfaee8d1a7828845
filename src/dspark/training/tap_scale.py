"""The usual size of each tap feature, which differs by orders of magnitude between layers and channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.training.states import StateSource, StoredRow

__all__ = ["tap_scale"]

_ROWS = 32
_MEDIAN_OF_NORMAL = 0.6745


def tap_scale(source: StateSource, rows: Sequence[StoredRow]) -> Tensor:
    """Standard deviation of each tap feature, float32 [T], from the median of its absolute value.

    The median leaves out the few positions with massive activations (the first token of a sequence above all), which
    are thousands of times larger than the rest and say nothing about it. Taken over the first rows given.
    """
    taps_NT = torch.cat([states.taps_ST for states in source.read(rows[:_ROWS])]).abs()
    scale_T = taps_NT.median(dim=0).values.float() / _MEDIAN_OF_NORMAL
    return scale_T.clamp(min=float(scale_T.mean()) * 1e-3 + 1e-12)
