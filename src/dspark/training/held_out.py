"""Held-out evaluation: accepted length under teacher forcing, exact for the distributions, nothing sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch

from dspark.drafters.registry import TrainableDrafter
from dspark.training.accepted_length import AcceptanceSums, AcceptedLength
from dspark.training.batches import BatchOrder, StepBlocks, draw_step, load_batch
from dspark.training.distributed import World
from dspark.training.forward import TargetHead, predict_slots
from dspark.training.objective import ObjectiveSettings, objective, slot_weights
from dspark.training.states import StateSource, StoredRow
from dspark.training.step import spread

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


@dataclass(frozen=True, kw_only=True)
class _BatchSums:
    """One batch's part in the result; ``loss`` and ``confidence_bce`` are sums weighted by slot, ``weight`` theirs."""

    sampled: AcceptanceSums
    greedy: AcceptanceSums
    loss: float
    confidence_bce: float | None
    weight: float


@torch.no_grad()
def evaluate_held_out(
    drafter: TrainableDrafter,
    head: TargetHead,
    source: StateSource,
    rows: Sequence[StoredRow],
    *,
    blocks: int,
    anchor_every_tokens: int,
    settings: ObjectiveSettings,
    world: World | None = None,
) -> HeldOutResult:
    """Evaluate in the drafter's own precision, at the same anchors every time: ``blocks`` blocks or all there are.

    The processes of ``world`` share the batches, and all get the result, which does not depend on their number. The
    drafter must be whole in each.
    """
    world = world or World.single(drafter.device)
    batches = _batches(rows, blocks, anchor_every_tokens)
    own = range(world.rank, len(batches), world.world_size)
    sums = {index: _evaluate(drafter, head, source, batches[index], settings) for index in own}
    of_all = {index: part for parts in world.gather(sums) for index, part in parts.items()}
    ordered = [of_all[index] for index in range(len(batches))]  # so that sums are rounded the same way
    weight = sum(part.weight for part in ordered)
    confidence = [part.confidence_bce for part in ordered if part.confidence_bce is not None]
    return HeldOutResult(
        sampled=reduce(add, (part.sampled for part in ordered)).accepted_length(),
        greedy=reduce(add, (part.greedy for part in ordered)).accepted_length(),
        loss=sum(part.loss for part in ordered) / weight,
        confidence_bce=sum(confidence) / weight if confidence else None,
        blocks=sum(batch.num_blocks for batch in batches),
    )


def _batches(rows: Sequence[StoredRow], blocks: int, anchor_every_tokens: int) -> list[StepBlocks]:
    order = BatchOrder(rows, blocks_per_step=_BLOCKS_PER_PASS, anchor_every_tokens=anchor_every_tokens, seed=_SEED)
    batches: list[StepBlocks] = []
    while sum(batch.num_blocks for batch in batches) < blocks and order.epoch(len(batches)) == 0:
        step = len(batches)
        batches.append(draw_step(order.batch(step), seed=_SEED, step=step))
    return batches


def _evaluate(
    drafter: TrainableDrafter, head: TargetHead, source: StateSource, blocks: StepBlocks, settings: ObjectiveSettings
) -> _BatchSums:
    batch = load_batch(source, blocks, block_size=drafter.block_size, device=drafter.device)
    slots = predict_slots(drafter, batch, head, autocast=False, confidence_reaches_backbone=True)
    weights_G = slot_weights(drafter.block_size, settings.decay).to(drafter.device, torch.float32)
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
    agrees_N = slots.logits_ND.argmax(dim=1) == head.column_of_id_V[batch.target_argmax_N]
    weight = float(weights_N.sum())
    return _BatchSums(
        sampled=AcceptanceSums.of(spread(terms.draft.acceptance_N, batch.supervised_MG), batch.supervised_MG),
        greedy=AcceptanceSums.of(spread(agrees_N.float(), batch.supervised_MG), batch.supervised_MG),
        loss=weight * float(terms.loss),
        confidence_bce=None if terms.confidence_bce_N is None else float(weights_N @ terms.confidence_bce_N),
        weight=weight,
    )
