"""Attention over slots, the same for the target and all drafters: each query sees a run of its slot's positions.

On a CPU in float32 a compiled kernel computes it, in which a query's bits depend on nothing but what it sees: not on
the queries beside it, nor on which blocks its slot has. Elsewhere, and for heads of odd sizes, the batch is padded for
PyTorch's fused attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from dspark.models.attention_kernel import attend_rows, is_available
from dspark.models.block_tables import BlockTables
from dspark.models.kv_cache import KVCache
from dspark.types import Segment


class AttentionPlan:
    """Where the tokens of a pass sit and what they see; one plan serves all layers.

    Args:
        segments: the tokens of the pass.
        cache: the memory of their slots.
        window: a query of a sliding layer sees at most this many positions.
        causal: True: a token sees what is before it in its slot, and itself. False: it sees all of its segment.
        first: the first position of a slot that is ever seen.

    Attributes:
        places: where the new keys and values go.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        cache: KVCache,
        *,
        window: int | None = None,
        causal: bool = True,
        first: int = 0,
    ) -> None:
        memory = cache.keys
        self.tables = cache.tables
        self.places = cache.tables.places(segments)
        self.window = window
        self.is_causal = causal
        self.first = first
        self.padded: _PaddedBatch | None = None
        if not (cache.has_key_columns or is_available(memory)):
            self.padded = _PaddedBatch(segments, self.tables, memory.dtype, window=window, causal=causal, first=first)

    @property
    def visible_N(self) -> torch.Tensor:
        """Positions of its slot that each token sees, the first ones."""
        return self.places.visible_N if self.is_causal else self.places.ends_N


def attend(
    q_NhD: torch.Tensor,
    k_NgD: torch.Tensor,
    v_NgD: torch.Tensor,
    keys_gPD: torch.Tensor,
    values_gPD: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding: bool = False,
) -> torch.Tensor:
    """Write the new keys and values into their rows, then attend: ``[N, heads, D]``.

    Query head ``i`` reads key head ``i // (heads / kv_heads)``. Computed in the memory's type; the result has the
    queries'.

    Args:
        keys_gPD, values_gPD: one layer's memory, ``P`` rows.
        sliding: whether this layer goes by the plan's window.
    """
    dtype = keys_gPD.dtype
    keys_gPD[:, plan.places.rows] = k_NgD.transpose(0, 1).to(dtype)
    values_gPD[:, plan.places.rows] = v_NgD.transpose(0, 1).to(dtype)
    if plan.padded is not None:
        mixed_NhD = plan.padded.attend(q_NhD.to(dtype), keys_gPD, values_gPD, scale=scale, sliding=sliding)
        return mixed_NhD.to(q_NhD.dtype)
    mixed_NhD = attend_rows(
        q_NhD.to(dtype),
        keys_gPD,
        values_gPD,
        plan.tables.tables_SB,
        plan.places.slots_N,
        plan.visible_N,
        scale=scale,
        window=plan.window if sliding else None,
        first=plan.first,
    )
    return mixed_NhD.to(q_NhD.dtype)


class _PaddedBatch:
    """The queries of a pass in rows of equal length, one row a segment, and the keys of each row's slot."""

    def __init__(
        self,
        segments: Sequence[Segment],
        tables: BlockTables,
        dtype: torch.dtype,
        *,
        window: int | None,
        causal: bool,
        first: int,
    ) -> None:
        lengths = torch.tensor([segment.length for segment in segments])
        starts = torch.tensor([segment.start for segment in segments])
        ends = starts + lengths
        self._num_rows, self._num_queries, self._num_keys = len(segments), int(lengths.max()), int(ends.max())
        queries_Q = torch.arange(self._num_queries)
        # Places of the tokens among the padded queries; None when no padding is needed.
        self._queries_N: torch.Tensor | None = None
        if int(lengths.min()) != self._num_queries:
            is_token_RQ = queries_Q < lengths.unsqueeze(1)
            self._queries_N = is_token_RQ.flatten().nonzero().squeeze(1).to(tables.device)

        # Keys are read in place where every slot's rows lie side by side, and the slots at equal distances.
        slots = [segment.slot for segment in segments]
        self._steps = _equal_steps([tables.first_row(slot) for slot in slots], self._num_keys, tables.num_rows)
        self._keys_RK = None if self._steps is not None else tables.slot_rows(slots, self._num_keys)

        visible_RQ1 = (starts.unsqueeze(1) + queries_Q + 1 if causal else ends.unsqueeze(1)).unsqueeze(-1)
        keys_K = torch.arange(self._num_keys)
        seen_RQK = (keys_K >= first) & (keys_K < visible_RQ1)
        self._mask = self._sliding_mask = _additive(seen_RQK, dtype, tables.device)
        if window is not None:
            self._sliding_mask = _additive(seen_RQK & (keys_K >= visible_RQ1 - window), dtype, tables.device)

    def attend(
        self, q_NhD: torch.Tensor, keys_gPD: torch.Tensor, values_gPD: torch.Tensor, *, scale: float, sliding: bool
    ) -> torch.Tensor:
        rows, queries, kv_heads = self._num_rows, self._num_queries, len(keys_gPD)
        heads, head_dim = q_NhD.shape[1:]
        if self._queries_N is not None:
            padded = q_NhD.new_zeros(rows * queries, heads, head_dim)
            padded[self._queries_N] = q_NhD
            q_NhD = padded
        # Query heads that share a key head are just more queries, so keys are never repeated.
        q_RgGQD = q_NhD.view(rows, queries, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        mask = self._sliding_mask if sliding else self._mask
        if mask is not None:
            mask = mask.expand(rows, heads // kv_heads, queries, -1).reshape(rows, 1, -1, self._num_keys)
        out_RgSD = functional.scaled_dot_product_attention(
            q_RgGQD.flatten(2, 3), self._read(keys_gPD), self._read(values_gPD), mask, scale=scale
        )
        out_NhD = out_RgSD.view(rows, kv_heads, -1, queries, head_dim).permute(0, 3, 1, 2, 4)
        out_NhD = out_NhD.reshape(rows * queries, heads, head_dim)
        return out_NhD if self._queries_N is None else out_NhD[self._queries_N]

    def _read(self, memory_gPD: torch.Tensor) -> torch.Tensor:
        """Keys or values ``[R, kv_heads, K, D]`` of all rows."""
        if self._steps is None:
            return memory_gPD[:, self._keys_RK].transpose(0, 1)
        start, step = self._steps
        head_stride, row_stride, _ = memory_gPD.stride()
        shape = (self._num_rows, len(memory_gPD), self._num_keys, memory_gPD.shape[-1])
        offset = memory_gPD.storage_offset() + start * row_stride
        return memory_gPD.as_strided(shape, (step * row_stride, head_stride, row_stride, 1), offset)


def _equal_steps(first_rows: Sequence[int | None], length: int, num_rows: int) -> tuple[int, int] | None:
    """``(start, step)`` if runs of ``length`` rows start at ``start + i * step`` and fit in the memory."""
    known = [row for row in first_rows if row is not None]
    if len(known) < len(first_rows):
        return None
    step = known[1] - known[0] if len(known) > 1 else 0
    equal = all(row == known[0] + index * step for index, row in enumerate(known))
    return (known[0], step) if equal and step >= 0 and known[-1] + length <= num_rows else None


def _additive(seen_RQK: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Mask ``[R, 1, Q, K]`` to be added to the scores, or None when every query sees every key."""
    if bool(seen_RQK.all()):
        return None
    return torch.zeros(seen_RQK.shape, dtype=dtype).masked_fill_(~seen_RQK, float("-inf")).to(device).unsqueeze(1)
