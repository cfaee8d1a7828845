"""Held-out evaluation: accepted length under teacher forcing, exact for the distributions, nothing sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.drafters.dspark import DSparkDrafter
from dspark.training.accepted_length import AcceptedLength, accepted_length
from dspark.training.batches import BatchOrder, load_batch
from dspark.training.forward import predict_slots, target_column_of_id
from dspark.training.objective import ObjectiveSettings, objective, slot_weights
from dspark.training.states import StateStore, StoredRow

__all__ = ["HeldOutResult", "evaluate_held_out"]

_SEED = 0x5EED
_BLOCKS_PER_PASS = 64


@dataclass(frozen=True, kw_only=True)
class HeldOutResult:
    """A drafter on held-out sequences.

    Attributes:
        sampled: accepted length at temperature 1, from ``1 − ½‖q − p‖₁`` of every slot.
        greedy: accepted length when drafter and target both take their most likely token (agreement of the argmaxes).
        loss: the training objective.
        confidence_bce: the confidence head's binary cross-entropy, nats; None without the head.
        blocks: blocks evaluated.
    """

    sampled: AcceptedLength
    greedy: AcceptedLength
    loss: float
    confidence_bce: float | None
    blocks: int


@torch.no_grad()
def evaluate_held_out(
    drafter: DSparkDrafter,
    store: StateStore,
    rows: Sequence[StoredRow],
    *,
    blocks: int,
    anchor_every_tokens: int,
    settings: ObjectiveSettings,
) -> HeldOutResult:
    """Evaluate in the drafter's own precision, at the same anchors every time: ``blocks`` blocks or all there are."""
    order = BatchOrder(rows, blocks_per_step=_BLOCKS_PER_PASS, anchor_every_tokens=anchor_every_tokens, seed=_SEED)
    column_of_id_V = target_column_of_id(drafter)
    weights_G = slot_weights(drafter.block_size, settings.decay).to(drafter.device, torch.float32)
    acceptance: list[Tensor] = []
    agreement: list[Tensor] = []
    supervision: list[Tensor] = []
    loss = confidence = total = 0.0
    done = step = 0
    while done < blocks and order.epoch(step) == 0:
        batch = load_batch(
            store, order.batch(step), block_size=drafter.block_size, seed=_SEED, step=step, device=drafter.device
        )
        slots = predict_slots(
            drafter,
            batch,
            column_of_id_V,
            final_softcap=store.spec.final_softcap,
            autocast=False,
            confidence_reaches_backbone=True,
        )
        weights_N = weights_G[slots.slot_N]
        terms = objective(
            logits_ND=slots.logits_ND,
            target_logits_ND=slots.target_logits_ND,
            target_log_normaliser_N=slots.target_log_normaliser_N,
            label_columns_N=slots.label_columns_N,
            slot_weights_N=weights_N,
            settings=settings,
            confidence_logits_N=slots.confidence_logits_N,
        )
        weight = float(weights_N.sum())
        loss, total = loss + weight * float(terms.loss), total + weight
        if terms.confidence_bce_N is not None:
            confidence += float(weights_N @ terms.confidence_bce_N)
        keep_BA = batch.supervised_BAG[..., 0]
        agrees_N = slots.logits_ND.argmax(dim=1) == column_of_id_V[batch.target_argmax_N]
        for parts, values in ((acceptance, terms.draft.acceptance_N), (agreement, agrees_N.to(torch.float32))):
            spread_BAG = torch.zeros(batch.supervised_BAG.shape, dtype=values.dtype, device=values.device)
            spread_BAG[batch.supervised_BAG] = values
            parts.append(spread_BAG[keep_BA])
        supervision.append(batch.supervised_BAG[keep_BA])
        done += batch.num_blocks
        step += 1
    supervised_NG = torch.cat(supervision)
    return HeldOutResult(
        sampled=accepted_length(torch.cat(acceptance), supervised_NG),
        greedy=accepted_length(torch.cat(agreement), supervised_NG),
        loss=loss / total,
        confidence_bce=confidence / total if drafter.config.enable_confidence_head else None,
        blocks=done,
    )
