"""Accepted length under teacher forcing, from acceptance probabilities slot by slot.

Shapes: N blocks, G slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AcceptedLength", "accepted_length"]


@dataclass(frozen=True, kw_only=True)
class AcceptedLength:
    """Accepted length of a drafter on given blocks.

    Attributes:
        value: ``τ = 1 + Σ_k survival_k``: draft tokens accepted in a round plus the one the target adds.
        survival: for k = 1..γ, the mean over blocks that supervise slot k of ``∏_{i≤k} acceptance_i``.
        acceptance: for k = 1..γ, the mean of ``acceptance_k`` alone over the same blocks.
    """

    value: float
    survival: tuple[float, ...]
    acceptance: tuple[float, ...]


def accepted_length(acceptance_NG: Tensor, supervised_NG: Tensor) -> AcceptedLength:
    """Expected accepted length of blocks whose slots are accepted with the given probabilities.

    At temperature 1 ``acceptance = 1 − ½‖q − p‖₁``, which makes the expectation exact given the data's prefix; for
    greedy decoding it is 1 where the two argmaxes agree, else 0. Every slot is averaged over the blocks that supervise
    it, so a response's end does not count as a rejection.

    Args:
        acceptance_NG: probabilities.
        supervised_NG: bool, a prefix of each row.
    """
    mask = supervised_NG.to(torch.float64)
    probabilities = torch.where(supervised_NG, acceptance_NG.to(torch.float64).clamp(0.0, 1.0), 0.0)
    counts = mask.sum(dim=0).clamp(min=1.0)
    survival = probabilities.cumprod(dim=1).sum(dim=0) / counts
    acceptance = probabilities.sum(dim=0) / counts
    return AcceptedLength(
        value=1.0 + float(survival.sum()),
        survival=tuple(survival.tolist()),
        acceptance=tuple(acceptance.tolist()),
    )
