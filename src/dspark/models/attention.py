"""Attention over slots: padding exists only here, laid out once per pass and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from dspark.types import Segment


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
        keys, values: this layer's cache ``[slots, kv_heads, max_length, D]``.
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
