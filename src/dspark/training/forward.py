"""From a batch to draft logits, target logits and the loss: what training and held-out evaluation share.

Shapes: N supervised slots, D draft columns, V target vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.sequential import embed_previous
from dspark.training.batches import TrainingBatch

__all__ = ["SlotPredictions", "predict_slots", "target_column_of_id"]


@dataclass(frozen=True, kw_only=True)
class SlotPredictions:
    """What drafter and target predict at the supervised slots of a batch, in row-major order of ``supervised_BAG``.

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


def target_column_of_id(drafter: DSparkDrafter) -> Tensor:
    """For every target id its draft column, or −1: int64 [V]."""
    ids_D = drafter.draft_token_ids_D
    if ids_D is None:
        return torch.arange(drafter.config.vocab_size, device=drafter.device)
    columns_V = torch.full((drafter.config.vocab_size,), -1, dtype=torch.int64, device=drafter.device)
    columns_V[ids_D] = torch.arange(len(ids_D), device=drafter.device)
    return columns_V


def predict_slots(
    drafter: DSparkDrafter,
    batch: TrainingBatch,
    column_of_id_V: Tensor,
    *,
    final_softcap: float | None,
    autocast: bool,
    confidence_reaches_backbone: bool,
) -> SlotPredictions:
    """Teacher-forced predictions at the supervised slots.

    Args:
        drafter: the drafter.
        batch: the batch.
        column_of_id_V: ``target_column_of_id(drafter)``.
        final_softcap: of the target's LM head.
        autocast: run the drafter's products in bfloat16.
        confidence_reaches_backbone: whether the confidence logits carry a gradient to anything but their own head.
    """
    keep_BA = batch.supervised_BAG[..., 0]
    precision: AbstractContextManager[object] = nullcontext()
    if autocast:
        precision = torch.autocast(drafter.device.type, dtype=torch.bfloat16)
    with precision:
        hidden_BAGH = drafter.training_hidden(
            batch.taps_BST if autocast else batch.taps_BST.to(drafter.dtype),
            batch.anchors_BA,
            batch.block_tokens_BAG[..., 0],
            anchor_keep_BA=keep_BA,
        )
        if drafter.config.markov_head_type == "rnn":
            # The recurrence needs whole blocks.
            supervised = batch.supervised_BAG[keep_BA]
            block_hidden, block_previous = hidden_BAGH[keep_BA], batch.block_tokens_BAG[keep_BA]
            logits, confidence = drafter.teacher_forced(block_hidden, block_previous)
            logits_ND = logits[supervised]
            confidence_N = None if confidence is None else confidence[supervised]
            hidden_NH, previous_N = block_hidden[supervised], block_previous[supervised]
        else:
            hidden_NH, previous_N = hidden_BAGH[batch.supervised_BAG], batch.block_tokens_BAG[batch.supervised_BAG]
            logits_ND, confidence_N = drafter.teacher_forced(hidden_NH, previous_N)
        if confidence_N is not None and not confidence_reaches_backbone:
            confidence_N = _separate_confidence(drafter, hidden_NH.detach(), previous_N)
    target_logits_ND, target_log_normaliser_N = _target_logits(drafter, batch, final_softcap, autocast)
    return SlotPredictions(
        slot_N=batch.supervised_BAG.nonzero()[:, 2],
        logits_ND=logits_ND,
        confidence_logits_N=confidence_N,
        target_logits_ND=target_logits_ND,
        target_log_normaliser_N=target_log_normaliser_N,
        label_columns_N=column_of_id_V[batch.labels_BAG[batch.supervised_BAG]],
    )


def _separate_confidence(drafter: DSparkDrafter, hidden_NH: Tensor, previous_N: Tensor) -> Tensor:
    embedding_Nr = None
    if drafter.confidence_head.uses_markov:
        with torch.no_grad():
            embedding_Nr = embed_previous(drafter.markov_head, previous_N)
    confidence_N: Tensor = drafter.confidence_head(hidden_NH, embedding_Nr)
    return confidence_N


@torch.no_grad()
def _target_logits(
    drafter: DSparkDrafter, batch: TrainingBatch, final_softcap: float | None, autocast: bool
) -> tuple[Tensor, Tensor]:
    """The target's logits on the draft columns and their log-normaliser.

    In bfloat16 the log-normaliser is taken off inside the product, as three more columns that add up to it: the
    rounding of the result is then relative to the log-probability, so likely tokens keep theirs, instead of relative to
    the logit.
    """
    weight_DH, normaliser_N = drafter.lm_head.weight, batch.target_log_normaliser_N
    if autocast and final_softcap is None:
        parts, rest_N = [], -normaliser_N
        for _ in range(3):
            parts.append(rest_N.to(torch.bfloat16))
            rest_N = rest_N - parts[-1].float()
        columns_NK = torch.cat((batch.target_hidden_NH, torch.stack(parts, dim=1)), dim=1)
        weight_DK = torch.cat(
            (weight_DH.to(torch.bfloat16), weight_DH.new_ones(len(weight_DH), 3).to(torch.bfloat16)), dim=1
        )
        return columns_NK @ weight_DK.T, torch.zeros_like(normaliser_N)
    logits_ND = batch.target_hidden_NH.float() @ weight_DH.float().T
    if final_softcap is not None:
        logits_ND.div_(final_softcap).tanh_().mul_(final_softcap)
    return logits_ND, normaliser_N
