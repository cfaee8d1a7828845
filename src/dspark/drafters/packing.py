"""Training blocks of many sequences in one dense batch: flat tokens, padding only inside attention.

A training step needs the context of a sequence only up to its last anchor, and a block at every anchor. All context
positions of all sequences stand in one flat axis N, all blocks in one flat axis M, so that every linear layer costs
what the anchors ask for. Attention alone works on padded views, made by `BlockLayout`.

Letters: N context positions, M blocks, B sequences, S padded context positions and A padded blocks of a sequence,
I query slots and J key slots of a block, G draft tokens, T taps, h heads, g key/value heads, d head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.drafters.cache import position_range


@dataclass(frozen=True, kw_only=True)
class PackedBlocks:
    """What a drafter sees of a training step.

    Attributes:
        taps_NT: Target features of the context: positions ``0 .. context_lengths[b] - 1`` of every sequence, in turn.
        token_ids_N: Tokens at these positions.
        context_lengths: Context positions of each sequence; no anchor of it lies beyond (an anchor's context is
            strictly before it).
        anchors_M: Position of each block's anchor, sequence after sequence.
        blocks_per_sequence: Blocks of each sequence.
        block_tokens_MG: x_0 .. x_{G-1} of each block: the anchor, then the data's tokens (teacher forcing).
    """

    taps_NT: Tensor
    token_ids_N: Tensor
    context_lengths: tuple[int, ...]
    anchors_M: Tensor
    blocks_per_sequence: tuple[int, ...]
    block_tokens_MG: Tensor

    def __post_init__(self) -> None:
        positions, blocks = sum(self.context_lengths), sum(self.blocks_per_sequence)
        if len(self.context_lengths) != len(self.blocks_per_sequence):
            raise ValueError(
                f"context_lengths names {len(self.context_lengths)} sequences, blocks_per_sequence "
                f"{len(self.blocks_per_sequence)}"
            )
        if len(self.taps_NT) != positions or len(self.token_ids_N) != positions:
            raise ValueError(
                f"context_lengths add up to {positions}, but there are {len(self.taps_NT)} taps and "
                f"{len(self.token_ids_N)} tokens"
            )
        if len(self.anchors_M) != blocks or len(self.block_tokens_MG) != blocks:
            raise ValueError(
                f"blocks_per_sequence add up to {blocks}, but there are {len(self.anchors_M)} anchors and "
                f"{len(self.block_tokens_MG)} rows of block_tokens"
            )


class BlockLayout:
    """Where flat context positions and blocks go in the padded views that attention works on.

    Attributes:
        positions_N: Position of every flat context entry in its sequence.
        span: Context positions of the longest sequence.
        last_position: Largest position that a block of `block_inputs` slots reaches, for the rotary table.
        hidden_B1A1S: Minus infinity where a block must not see a context position, 0 elsewhere.
    """

    def __init__(self, blocks: PackedBlocks, visible_M: Tensor, block_inputs: int) -> None:
        """See the class.

        Args:
            blocks: The batch.
            visible_M: A block sees the context positions before this one.
            block_inputs: Slots of a block.
        """
        device = blocks.anchors_M.device
        lengths, counts = blocks.context_lengths, blocks.blocks_per_sequence
        self.span = max(lengths, default=0)
        self.last_position = self.span + block_inputs
        self._context_BS, context_rows = _padded_indices(lengths, device)
        self._blocks_BA, self._block_rows_M = _padded_indices(counts, device)
        self.positions_N = context_rows % max(self.span, 1)
        lengths_B = torch.tensor(lengths, dtype=torch.int64, device=device)
        counts_B = torch.tensor(counts, dtype=torch.int64, device=device)
        self._starts_M = (lengths_B.cumsum(0) - lengths_B).repeat_interleave(counts_B, output_size=sum(counts))
        # An additive mask keeps one small tensor for the backward pass instead of one as large as the scores.
        visible_BA1 = visible_M[self._blocks_BA][..., None]
        hidden_BAS = position_range(0, self.span, device) >= visible_BA1
        bias = torch.zeros((), device=device).masked_fill(hidden_BAS, -math.inf)
        self.hidden_B1A1S = bias[:, None, :, None]

    def context_rows(self, positions_M: Tensor) -> Tensor:
        """Flat context row of one position of each block's sequence."""
        return self._starts_M + positions_M

    def context(self, flat_NX: Tensor) -> Tensor:
        """``[B, S, ...]`` view of flat context rows; padding repeats rows that `hidden_B1A1S` hides."""
        return _pad(flat_NX, self._context_BS)

    def blocks(self, flat_MX: Tensor) -> Tensor:
        """``[B, A, ...]`` view of flat block rows; padding repeats a block of the sequence."""
        return _pad(flat_MX, self._blocks_BA)

    def flat(self, padded_BAX: Tensor) -> Tensor:
        """Flat block rows of a padded view, padding left out."""
        rows = padded_BAX.flatten(0, 1)
        return rows if len(rows) == len(self._block_rows_M) else rows.index_select(0, self._block_rows_M)


def attend_blocks(
    layout: BlockLayout,
    queries_MIhd: Tensor,
    keys_MJgd: Tensor,
    values_MJgd: Tensor,
    context_keys_Ngd: Tensor,
    context_values_Ngd: Tensor,
) -> Tensor:
    """Attention of training blocks: one softmax over (visible context, own block); blocks never meet.

    Every query slot sees all J key slots of its own block; a causal drafter passes the keys that a step may see.

    Returns:
        ``[M, I, h * d]``.
    """
    # Every size is named: none can be inferred in a part without blocks.
    slots, heads, head_dim = queries_MIhd.shape[1:]
    kv_heads = keys_MJgd.shape[2]
    group = heads // kv_heads
    queries = layout.blocks(queries_MIhd * head_dim**-0.5)
    keys, values = layout.blocks(keys_MJgd), layout.blocks(values_MJgd)
    context_keys, context_values = layout.context(context_keys_Ngd), layout.context(context_values_Ngd)
    batch, num_blocks = queries.shape[:2]
    # Queries as [B, g, A, Q, d], Q = (query heads of one key head) x (block slots): every product below is one
    # batched matmul.
    queries = queries.view(batch, num_blocks, slots, kv_heads, group, head_dim).permute(0, 3, 1, 4, 2, 5)
    queries_BgAQd = queries.reshape(batch, kv_heads, num_blocks, group * slots, head_dim)
    context_scores = torch.matmul(queries_BgAQd.flatten(2, 3), context_keys.permute(0, 2, 3, 1))
    block_scores = torch.matmul(queries_BgAQd, keys.permute(0, 3, 1, 4, 2))
    context_scores = context_scores.view(*block_scores.shape[:-1], layout.span).add_(layout.hidden_B1A1S)
    scores = torch.cat((context_scores, block_scores), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    span = layout.span
    mixed = torch.matmul(weights[..., :span].flatten(2, 3), context_values.transpose(1, 2)).view(queries_BgAQd.shape)
    mixed = mixed + torch.matmul(weights[..., span:], values.permute(0, 3, 1, 2, 4))
    mixed = mixed.view(batch, kv_heads, num_blocks, group, slots, head_dim).permute(0, 2, 4, 1, 3, 5)
    return layout.flat(mixed.reshape(batch, num_blocks, slots, heads * head_dim))


def _padded_indices(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """``([B, max] flat index of every padded place, [total] padded place of every flat row)``.

    Padding points at the sequence's first row (at any row where it has none).
    """
    lengths_B = torch.tensor(lengths, dtype=torch.int64, device=device)
    total, width = sum(lengths), max(lengths, default=0)
    starts_B = lengths_B.cumsum(0) - lengths_B
    places = position_range(0, width, device)
    inside = places < lengths_B[:, None]
    indices = torch.where(inside, starts_B[:, None] + places, starts_B[:, None].clamp(max=max(total - 1, 0)))
    return indices, inside.flatten().nonzero().squeeze(1)


def _pad(flat: Tensor, indices: Tensor) -> Tensor:
    if indices.numel() == len(flat):  # no padding: rows are in order already
        return flat.view(*indices.shape, *flat.shape[1:])
    return flat.index_select(0, indices.flatten()).view(*indices.shape, *flat.shape[1:])
