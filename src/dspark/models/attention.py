"""Attention over slots: padding exists only here, laid out once per pass and shared by all layers.

Two ways to compute it. The general one pads the batch and calls PyTorch's fused kernel. The *invariant* one is for a
single request's few new tokens in the int8 path: the shapes of its products depend on a token's own position alone,
never on how many tokens are computed with it, so that a token gets the same bits alone (plain decoding) and in a block
(verification).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from dspark.types import Segment

# The invariant way: queries in blocks of this many, keys up to a multiple of that many. Any fixed numbers would do,
# as long as the cache holds whole blocks of keys.
_QUERY_BLOCK = 8
KEY_BLOCK = 256
_MAX_INVARIANT_QUERIES = 4 * _QUERY_BLOCK


@dataclass(frozen=True, slots=True)
class _QueryBlock:
    """Queries ``begin .. end - 1`` of the pass, all of which look at the first ``num_keys`` positions of the slot."""

    begin: int
    end: int
    num_keys: int
    mask_QK: torch.Tensor
    sliding_mask_QK: torch.Tensor


class AttentionPlan:
    """Where each flattened token sits: its position, its slot, its row in the padded query block, what it may see.

    Query heads that share a key head are folded into the query rows (``group`` of them), so keys are never repeated.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        dtype: torch.dtype,
        sliding_window: int | None,
        group: int,
        *,
        invariant: bool = False,
    ) -> None:
        self.segments = segments
        self.group = group
        self.num_rows = len(segments)
        self.max_query = max(segment.length for segment in segments)
        self.num_keys = max(segment.end for segment in segments)
        self.max_position = self.num_keys - 1
        lengths = torch.tensor([segment.length for segment in segments])
        starts = torch.tensor([segment.start for segment in segments])
        slots = torch.tensor([segment.slot for segment in segments])
        rows_N = torch.repeat_interleave(torch.arange(self.num_rows), lengths)
        offsets_N = torch.arange(len(rows_N)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        self.positions_N = (starts[rows_N] + offsets_N).to(device)
        self.slots_N = slots[rows_N].to(device)
        first = segments[0].slot
        contiguous = all(segment.slot == first + row for row, segment in enumerate(segments))
        self.slot_range = slice(first, first + self.num_rows) if contiguous else None
        self.slots_R = slots.to(device)
        # Rows of the padded [R, max_query] block that hold a real token; None when no padding is needed.
        self.padded_N: torch.Tensor | None = None
        if int(lengths.min()) != self.max_query:
            self.padded_N = (rows_N * self.max_query + offsets_N).to(device)

        self.query_blocks: list[_QueryBlock] = []
        if invariant and self.num_rows == 1 and self.max_query <= _MAX_INVARIANT_QUERIES:
            self.query_blocks = _query_blocks(segments[0], sliding_window, device, dtype)
            return

        positions_RQ = starts.unsqueeze(1) + torch.arange(self.max_query)
        keys_K = torch.arange(self.num_keys)
        visible_RQK = keys_K <= positions_RQ.unsqueeze(-1)
        self._mask = self._additive(visible_RQK, device, dtype)
        self._sliding_mask = self._mask
        if sliding_window is not None:
            near_RQK = keys_K > positions_RQ.unsqueeze(-1) - sliding_window
            self._sliding_mask = self._additive(visible_RQK & near_RQK, device, dtype)

    def mask(self, sliding: bool) -> torch.Tensor | None:
        """Additive mask ``[R, 1, group * Q, K]``, or None when every query sees every key."""
        return self._sliding_mask if sliding else self._mask

    def _additive(self, visible_RQK: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
        if bool(visible_RQK.all()):
            return None
        mask_RQK = torch.zeros(visible_RQK.shape, dtype=dtype).masked_fill_(~visible_RQK, float("-inf"))
        return mask_RQK.to(device).unsqueeze(1).repeat(1, 1, self.group, 1)


def attend(
    q_NhD: torch.Tensor,
    k_NhD: torch.Tensor,
    v_NhD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding: bool,
) -> torch.Tensor:
    """Write the new keys and values into their slots, then attend: ``[N, heads, D]``.

    Args:
        keys, values: this layer's cache ``[slots, kv_heads, positions, D]``.
    """
    num_kv_heads, head_dim = k_NhD.shape[1:]
    rows, queries, group = plan.num_rows, plan.max_query, plan.group
    if rows == 1:
        segment = plan.segments[0]
        keys[segment.slot, :, segment.start : segment.end] = k_NhD.transpose(0, 1)
        values[segment.slot, :, segment.start : segment.end] = v_NhD.transpose(0, 1)
    else:
        keys[plan.slots_N, :, plan.positions_N] = k_NhD
        values[plan.slots_N, :, plan.positions_N] = v_NhD
    if plan.query_blocks:
        slot = plan.segments[0].slot
        return _attend_invariant(q_NhD, keys[slot], values[slot], plan, scale=scale, sliding=sliding)
    if plan.slot_range is not None:
        k_RhKD = keys[plan.slot_range, :, : plan.num_keys]
        v_RhKD = values[plan.slot_range, :, : plan.num_keys]
    else:
        k_RhKD = keys[plan.slots_R, :, : plan.num_keys]
        v_RhKD = values[plan.slots_R, :, : plan.num_keys]

    if plan.padded_N is not None:
        padded = q_NhD.new_zeros(rows * queries, *q_NhD.shape[1:])
        padded[plan.padded_N] = q_NhD
        q_NhD = padded
    # [R, Q, kv_heads, group, D] -> [R, kv_heads, group * Q, D]
    q_RhGD = q_NhD.view(rows, queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    q_RhGD = q_RhGD.reshape(rows, num_kv_heads, group * queries, head_dim)
    out_RhGD = functional.scaled_dot_product_attention(q_RhGD, k_RhKD, v_RhKD, plan.mask(sliding), scale=scale)
    out = out_RhGD.view(rows, num_kv_heads, group, queries, head_dim).permute(0, 3, 1, 2, 4)
    out_NhD = out.reshape(rows * queries, num_kv_heads * group, head_dim)
    return out_NhD if plan.padded_N is None else out_NhD[plan.padded_N]


def _query_blocks(
    segment: Segment, sliding_window: int | None, device: torch.device, dtype: torch.dtype
) -> list[_QueryBlock]:
    blocks = []
    begin = segment.start
    while begin < segment.end:
        num_keys = (begin // KEY_BLOCK + 1) * KEY_BLOCK
        end = min(segment.end, begin + _QUERY_BLOCK, num_keys)
        # Padding queries repeat the last position: they must see something, or softmax would divide zero by zero.
        positions_Q1 = (begin + torch.arange(_QUERY_BLOCK)).clamp(max=end - 1).unsqueeze(1)
        keys_K = torch.arange(num_keys)
        hidden_QK = keys_K > positions_Q1
        mask_QK = torch.zeros(hidden_QK.shape, dtype=dtype).masked_fill_(hidden_QK, float("-inf"))
        sliding_mask_QK = mask_QK
        if sliding_window is not None:
            sliding_mask_QK = mask_QK.masked_fill(keys_K <= positions_Q1 - sliding_window, float("-inf"))
        blocks.append(
            _QueryBlock(
                begin=begin - segment.start,
                end=end - segment.start,
                num_keys=num_keys,
                mask_QK=mask_QK.to(device),
                sliding_mask_QK=sliding_mask_QK.to(device),
            )
        )
        begin = end
    return blocks


def _attend_invariant(
    q_NhD: torch.Tensor,
    keys_hLD: torch.Tensor,
    values_hLD: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding: bool,
) -> torch.Tensor:
    num_kv_heads, _, head_dim = keys_hLD.shape
    group = plan.group
    q_NhgD = q_NhD.view(-1, num_kv_heads, group, head_dim)
    out_NhgD = torch.empty_like(q_NhgD)
    for block in plan.query_blocks:
        count, num_keys = block.end - block.begin, block.num_keys
        q_QhgD = q_NhgD[block.begin : block.end]
        if count < _QUERY_BLOCK:
            q_QhgD = functional.pad(q_QhgD, (0, 0, 0, 0, 0, 0, 0, _QUERY_BLOCK - count))
        q_hGD = q_QhgD.permute(1, 2, 0, 3).reshape(num_kv_heads, group * _QUERY_BLOCK, head_dim)
        scores_hGK = torch.bmm(q_hGD, keys_hLD[:, :num_keys].transpose(1, 2)).mul_(scale)
        mask_QK = block.sliding_mask_QK if sliding else block.mask_QK
        scores_hGK.view(num_kv_heads, group, _QUERY_BLOCK, num_keys).add_(mask_QK)
        mixed_hGD = torch.bmm(scores_hGK.softmax(-1), values_hLD[:, :num_keys])
        mixed_QhgD = mixed_hGD.view(num_kv_heads, group, _QUERY_BLOCK, head_dim).permute(2, 0, 1, 3)
        out_NhgD[block.begin : block.end] = mixed_QhgD[:count]
    return out_NhgD.view(-1, num_kv_heads * group, head_dim)
