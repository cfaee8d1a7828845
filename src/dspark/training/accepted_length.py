"""Accepted length under teacher forcing, from acceptance probabilities slot by slot.

Shapes: M blocks, G slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AcceptanceSums", "AcceptedLength"]


@dataclass(frozen=True, kw_only=True)
class AcceptedLength:
    """Accepted length of a drafter on given blocks.

    Attributes:
        value: ``τ = 1 + Σ_k survival_k``: draft tokens accepted in a round plus the one the target adds.
        survival: for k = 1..γ, the mean over blocks that supervise slot k of ``∏_{i≤k} acceptance_i``.
        acceptance: for k = 1..γ, the mean of ``acceptance_k`` alone over the same blocks.
        conditional_acceptance: for k = 1..γ, how often slot k is accepted given that all before it are: sums over the
            same blocks of ``survival_k`` and of ``survival_{k−1}``, divided; 0 where no block ever gets there.
    """

    value: float
    survival: tuple[float, ...]
    acceptance: tuple[float, ...]
    conditional_acceptance: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class AcceptanceSums:
    """What the accepted length of several batches is made of: sums over their blocks, float64.

    Attributes:
        blocks_G: blocks that supervise slot k.
        reached_G: sum over them of ``∏_{i<k} acceptance_i``.
        survival_G: sum over them of ``∏_{i≤k} acceptance_i``.
        acceptance_G: sum over them of ``acceptance_k``.
    """

    blocks_G: Tensor
    reached_G: Tensor
    survival_G: Tensor
    acceptance_G: Tensor

    @staticmethod
    def of(acceptance_MG: Tensor, supervised_MG: Tensor) -> AcceptanceSums:
        """Of one batch of blocks whose slots are accepted with the given probabilities; on the CPU.

        At temperature 1 ``acceptance = 1 − ½‖q − p‖₁``, which makes the expectation exact given the data's prefix; for
        greedy decoding it is 1 where the two argmaxes agree, else 0. Every slot counts in the blocks that supervise it
        only, so a response's end does not count as a rejection.

        Args:
            acceptance_MG: probabilities.
            supervised_MG: bool, a prefix of each row.
        """
        acceptance_MG, supervised_MG = acceptance_MG.cpu(), supervised_MG.cpu()
        probabilities_MG = torch.where(supervised_MG, acceptance_MG.to(torch.float64).clamp(0.0, 1.0), 0.0)
        survival_MG = probabilities_MG.cumprod(dim=1)
        before_MG = torch.cat((torch.ones_like(survival_MG[:, :1]), survival_MG[:, :-1]), dim=1)
        return AcceptanceSums(
            blocks_G=supervised_MG.sum(dim=0).to(torch.float64),
            reached_G=torch.where(supervised_MG, before_MG, 0.0).sum(dim=0),
            survival_G=survival_MG.sum(dim=0),
            acceptance_G=probabilities_MG.sum(dim=0),
        )

    def __add__(self, other: AcceptanceSums) -> AcceptanceSums:
        return AcceptanceSums(
            blocks_G=self.blocks_G + other.blocks_G,
            reached_G=self.reached_G + other.reached_G,
            survival_G=self.survival_G + other.survival_G,
            acceptance_G=self.acceptance_G + other.acceptance_G,
        )

    def accepted_length(self) -> AcceptedLength:
        """The means; a slot that no block supervises counts 0."""
        blocks_G = self.blocks_G.clamp(min=1.0)
        survival_G = self.survival_G / blocks_G
        return AcceptedLength(
            value=1.0 + float(survival_G.sum()),
            survival=tuple(survival_G.tolist()),
            acceptance=tuple((self.acceptance_G / blocks_G).tolist()),
            conditional_acceptance=tuple(
                torch.where(self.reached_G > 0.0, self.survival_G / self.reached_G, 0.0).tolist()
            ),
        )
