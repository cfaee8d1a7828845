"""Training blocks given as padded arrays, computed in the packed form."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dspark.drafters import PackedBlocks


class Trained(Protocol):
    """What a drafter offers to training."""

    def training_hidden(self, blocks: PackedBlocks) -> Tensor: ...

    def teacher_forced(self, hidden_MGH: Tensor, previous_MG: Tensor) -> tuple[Tensor, Tensor | None]: ...


class Padded(NamedTuple):
    """Results of all blocks, zero where a block is padding."""

    hidden_BAGH: Tensor
    logits_BAGD: Tensor
    confidence_logits_BAG: Tensor | None


def pack(
    taps_BST: Tensor,
    anchors_BA: Tensor,
    block_tokens_BAG: Tensor,
    *,
    token_ids_BS: Tensor | None = None,
    context_lengths_B: Tensor | None = None,
    anchor_keep_BA: Tensor | None = None,
) -> PackedBlocks:
    """Drop all padding. Without `context_lengths_B` every sequence is as long as the padded array."""
    batch, span = taps_BST.shape[:2]
    lengths = [span] * batch if context_lengths_B is None else context_lengths_B.tolist()
    keep_BA = torch.ones_like(anchors_BA, dtype=torch.bool) if anchor_keep_BA is None else anchor_keep_BA
    if token_ids_BS is None:
        token_ids_BS = torch.zeros(batch, span, dtype=torch.int64)
    return PackedBlocks(
        taps_NT=torch.cat([taps[:length] for taps, length in zip(taps_BST, lengths, strict=True)]),
        token_ids_N=torch.cat([ids[:length] for ids, length in zip(token_ids_BS, lengths, strict=True)]),
        context_lengths=tuple(lengths),
        anchors_M=anchors_BA[keep_BA],
        blocks_per_sequence=tuple(keep_BA.sum(1).tolist()),
        block_tokens_MG=block_tokens_BAG[keep_BA],
    )


def train(
    drafter: Trained,
    taps_BST: Tensor,
    anchors_BA: Tensor,
    block_tokens_BAG: Tensor,
    *,
    token_ids_BS: Tensor | None = None,
    context_lengths_B: Tensor | None = None,
    anchor_keep_BA: Tensor | None = None,
) -> Padded:
    """Teacher-forced results of every block, back in the padded form."""
    blocks = pack(
        taps_BST,
        anchors_BA,
        block_tokens_BAG,
        token_ids_BS=token_ids_BS,
        context_lengths_B=context_lengths_B,
        anchor_keep_BA=anchor_keep_BA,
    )
    hidden_MGH = drafter.training_hidden(blocks)
    logits_MGD, confidence_MG = drafter.teacher_forced(hidden_MGH, blocks.block_tokens_MG)
    keep_BA = torch.ones_like(anchors_BA, dtype=torch.bool) if anchor_keep_BA is None else anchor_keep_BA

    def scatter(rows_M: Tensor) -> Tensor:
        padded = rows_M.new_zeros(*keep_BA.shape, *rows_M.shape[1:])
        padded[keep_BA] = rows_M
        return padded

    return Padded(scatter(hidden_MGH), scatter(logits_MGD), None if confidence_MG is None else scatter(confidence_MG))
