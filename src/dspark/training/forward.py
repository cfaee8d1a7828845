"""From a batch to draft logits, target logits and the loss: what training and held-out evaluation share.

Shapes: N supervised slots, M blocks, G slots of a block, D draft columns, V target vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.drafters.registry import TrainableDrafter
from dspark.models.target import Target
from dspark.training.batches import TrainingBatch

__all__ = ["SlotPredictions", "TargetHead", "predict_slots"]


@dataclass(frozen=True, kw_only=True)
class SlotPredictions:
    """What drafter and target predict at the supervised slots of a batch, in row-major order of ``supervised_MG``.

    Attributes:
        slot_N: k − 1, the slot's place in its block.
        logits_ND: draft logits, sequential head included.
        confidence_logits_N: logits of ``c_k``; None without the head.
        target_logits_ND: the target's logits on the draft columns, up to a constant of each row.
        target_log_normaliser_N: logsumexp over the full vocabulary, up to the same constant.
        label_columns_N: draft column of the data's token, −1 where it is outside the draft vocabulary.
    """

    slot_N: Tensor
    logits_ND: Tensor
    confidence_logits_N: Tensor | None
    target_logits_ND: Tensor
    target_log_normaliser_N: Tensor
    label_columns_N: Tensor


@dataclass(frozen=True, kw_only=True)
class TargetHead:
    """The target's LM head on the draft columns: ``softcap(hidden W^T + bias)``.

    Attributes:
        weight_DH: the drafter's frozen copy of the target's rows.
        bias_D: None where the target's head has none.
        final_softcap: ``cap * tanh(logits / cap)``; None for none.
        column_of_id_V: for every target id its draft column, or −1.
    """

    weight_DH: Tensor
    bias_D: Tensor | None
    final_softcap: float | None
    column_of_id_V: Tensor

    @staticmethod
    def of(drafter: TrainableDrafter, target: Target) -> TargetHead:
        """The head of ``target`` on the draft vocabulary of ``drafter``."""
        ids_D, device = drafter.draft_token_ids_D, drafter.device
        columns_V = torch.arange(drafter.config.vocab_size, device=device)
        bias = target.lm_head_bias_V
        if ids_D is not None:
            columns_V = torch.full_like(columns_V, -1)
            columns_V[ids_D] = torch.arange(len(ids_D), device=device)
        if bias is not None:
            bias = bias.detach().to(device, torch.float32)
            bias = bias if ids_D is None else bias[ids_D]
        return TargetHead(
            weight_DH=drafter.lm_head.weight.detach(),
            bias_D=bias,
            final_softcap=target.config.final_softcap,
            column_of_id_V=columns_V,
        )

    @torch.no_grad()
    def logits(self, hidden_NH: Tensor, log_normaliser_N: Tensor, *, autocast: bool) -> tuple[Tensor, Tensor]:
        """The target's logits on the draft columns and their log-normaliser, both up to one constant of each row.

        In bfloat16 the log-normaliser is taken off inside the product, as three more columns that add up to it: the
        rounding of the result is then relative to the log-probability, so likely tokens keep theirs, instead of
        relative to the logit. The bias goes the same way.
        """
        if autocast and self.final_softcap is None:
            ones_D1 = self.weight_DH.new_ones(len(self.weight_DH), 1).to(torch.bfloat16)
            columns = [hidden_NH, *_bfloat16_parts(-log_normaliser_N)]
            weights = [self.weight_DH.to(torch.bfloat16), *[ones_D1] * 3]
            if self.bias_D is not None:
                columns += [torch.ones_like(columns[-1])] * 3
                weights += _bfloat16_parts(self.bias_D)
            return torch.cat(columns, dim=1) @ torch.cat(weights, dim=1).T, torch.zeros_like(log_normaliser_N)
        logits_ND = hidden_NH.float() @ self.weight_DH.float().T
        if self.bias_D is not None:
            logits_ND += self.bias_D
        if self.final_softcap is not None:
            logits_ND.div_(self.final_softcap).tanh_().mul_(self.final_softcap)
        return logits_ND, log_normaliser_N


def predict_slots(
    drafter: TrainableDrafter,
    batch: TrainingBatch,
    head: TargetHead,
    *,
    autocast: bool,
    confidence_reaches_backbone: bool,
) -> SlotPredictions:
    """Teacher-forced predictions at the supervised slots.

    Args:
        drafter: the drafter.
        batch: the batch.
        head: ``TargetHead.of(drafter, target)``.
        autocast: run the drafter's products in bfloat16.
        confidence_reaches_backbone: whether the confidence logits carry a gradient to anything but their own head.
    """
    blocks, supervised_MG = batch.blocks, batch.supervised_MG
    precision: AbstractContextManager[object] = nullcontext()
    if autocast:
        precision = torch.autocast(drafter.device.type, dtype=torch.bfloat16)
    else:
        blocks = replace(blocks, taps_NT=blocks.taps_NT.to(drafter.dtype))
    with precision:
        hidden_MGH = drafter.training_hidden(blocks)
        logits_ND, confidence_N = drafter.teacher_forced(
            hidden_MGH,
            blocks.block_tokens_MG,
            supervised_MG,
            detach_confidence=not confidence_reaches_backbone,
        )
    target_logits_ND, target_log_normaliser_N = head.logits(
        batch.target_hidden_NH, batch.target_log_normaliser_N, autocast=autocast
    )
    return SlotPredictions(
        slot_N=supervised_MG.nonzero()[:, 1],
        logits_ND=logits_ND,
        confidence_logits_N=confidence_N,
        target_logits_ND=target_logits_ND,
        target_log_normaliser_N=target_log_normaliser_N,
        label_columns_N=head.column_of_id_V[batch.labels_MG[supervised_MG]],
    )


def _bfloat16_parts(values_X: Tensor) -> list[Tensor]:
    """Three bfloat16 columns ``[X, 1]`` that add up to float32 ``values``."""
    parts = []
    rest_X = values_X
    for _ in range(3):
        part_X = rest_X.to(torch.bfloat16)
        parts.append(part_X[:, None])
        rest_X = rest_X - part_X.float()
    return parts
