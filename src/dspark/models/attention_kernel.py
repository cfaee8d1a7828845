"""Attention over paged keys and values on a CPU in float32, compiled when first used.

The bits of a query's result depend on the query, on the keys and values it sees in the order of their positions, and on
the scale: never on what else is computed with it, on where its blocks lie, or on threads. This is why:

- Softmax runs online, in the order of positions, over tiles of ``_TILE`` positions that begin at multiples of ``_TILE``
  whatever a query sees of them.
- Each sum is a chain of fused multiply-adds in a fixed order (over the dimensions for a score, over the positions for
  the result). Vectors lie across the chains, along the keys of a tile or along the dimensions, so their width and the
  number of chains that run side by side change nothing. The compiler has no leave to reorder or fuse anything itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import types
from numba.np.numpy_support import carray

from dspark.models.block_tables import BLOCK_SIZE
from dspark.models.compiling import SOURCE, remembered
from dspark.models.row_kernels import exp2
from dspark.models.threads import run_together
from dspark.models.vector_intrinsics import largest_of, multiply_add, pointer, prefetch, transpose

_TILE = 4 * BLOCK_SIZE
_QUERIES = 16  # neighbouring queries of a slot that share a tile's transposed keys
_STEPS = 8  # links of a chain between a load and a store of its sum
_WIDTH = 32  # chains side by side: two registers of 512 bits, four of 256
_PART_WORK = 2**20  # pairs of query and key, times dimensions: some 75 microseconds, worth being handed to a thread
_DTYPES = (torch.float32, torch.float32, torch.float32, torch.int32, torch.int64, torch.int64)


def is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether :func:`attend_rows` computes on this device in this type."""
    return device.type == "cpu" and dtype == torch.float32


def attend_rows(
    q_NhD: torch.Tensor,
    keys_gPD: torch.Tensor,
    values_gPD: torch.Tensor,
    tables_SB: torch.Tensor,
    slots_N: torch.Tensor,
    visible_N: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    first: int = 0,
) -> torch.Tensor:
    """Attend from flat queries to what each sees of its slot's positions: ``[N, h, D]``. For inference only.

    Args:
        q_NhD: float32 queries; query head i reads key head ``i // (h / g)``.
        keys_gPD, values_gPD: one layer's pool, contiguous float32; D is a multiple of 8.
        tables_SB: int32; position p of slot s is row ``tables[s, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE``.
        slots_N: int64, the slot of each query. Put the queries of one slot side by side: they are computed together.
        visible_N: int64; query n sees positions ``max(first, visible_n - window) .. visible_n - 1``, one at least.

    Raises:
        ValueError: for a query that sees nothing, for a slot, position or block that does not exist, for other types
            or layouts of tensors.
    """
    num_queries, num_heads, head_dim = q_NhD.shape
    num_kv_heads, num_rows, _ = keys_gPD.shape
    if head_dim % 8:
        raise ValueError(f"q_NhD has {head_dim} dimensions a head: the compiled attention needs a multiple of 8")
    q_NhD = q_NhD.contiguous()
    out_NhD = torch.empty_like(q_NhD)
    tensors = (q_NhD, keys_gPD, values_gPD, tables_SB, slots_N, visible_N)
    for tensor, dtype in zip(tensors, _DTYPES, strict=True):
        if tensor.dtype != dtype or not tensor.is_cpu or not tensor.is_contiguous():
            raise ValueError(f"the compiled attention needs contiguous CPU tensors of types {_DTYPES}, in this order")
    if (
        values_gPD.shape != keys_gPD.shape
        or keys_gPD.shape[-1] != head_dim
        or num_heads % num_kv_heads
        or not num_queries == len(slots_N) == len(visible_N)
    ):
        raise ValueError(f"the shapes {[tuple(tensor.shape) for tensor in tensors]} do not go together")
    kernel = attention_kernel(head_dim, num_heads // num_kv_heads).ctypes
    addresses = [tensor.data_ptr() for tensor in (*tensors, out_NhD)]
    shape = (num_queries, num_kv_heads, num_rows, *tables_SB.shape)
    exponent_scale = scale * math.log2(math.e)
    arguments = (*addresses, *shape, exponent_scale, 2**62 if window is None else window, first)
    threads = torch.get_num_threads()
    work = int(visible_N.sum()) * num_heads * head_dim if threads > 1 else 0
    if not _in_parts(kernel, arguments, threads, min(4 * threads, work // _PART_WORK), (tensors, out_NhD)):
        raise ValueError(
            "visible_N, slots_N or tables_SB name a position, slot or block outside the tables or the pool"
        )
    return out_NhD


def _in_parts(
    kernel: Callable[..., bool], arguments: Sequence[Any], threads: int, parts: int, memory: Sequence[Any]
) -> bool:
    if parts <= 1:
        return kernel(*arguments, 0, 1)
    left = iter(range(parts))  # to be taken by whoever is free: nothing waits for a thread that does not get a core

    def take() -> bool:
        return all(kernel(*arguments, part, parts) for part in left)

    return run_together(take, threads, memory)


@lru_cache
def attention_kernel(D: int, group: int, source: str = SOURCE) -> Any:
    """The kernel for heads of D dimensions and ``group`` query heads a key head, as a C function."""
    heads = max(n for n in range(1, 8) if group % n == 0)  # query heads that are computed side by side
    width = max(n for n in (8, 16, _WIDTH) if D % n == 0)
    number = 4  # bytes
    vector, column, block_bytes = number * D, number * _TILE, number * D * BLOCK_SIZE

    def attend(  # type: ignore[no-untyped-def]
        q_at, keys_at, values_at, tables_at, slots_at, visible_at, out_at,
        num_queries, num_kv_heads, num_rows, num_slots, num_blocks, scale, window, earliest, part, parts,
    ):  # fmt: skip
        _ = source
        q = carray(pointer(q_at), (num_queries, num_kv_heads * group, D), np.float32)
        out = carray(pointer(out_at), (num_queries, num_kv_heads * group, D), np.float32)
        tables = carray(pointer(tables_at), (num_slots, num_blocks), np.int32)
        slots = carray(pointer(slots_at), num_queries, np.int64)
        visible = carray(pointer(visible_at), num_queries, np.int64)
        total = 0
        for n in range(num_queries):
            first = max(earliest, visible[n] - window)
            if not (0 <= slots[n] < num_slots and 0 <= first < visible[n] <= num_blocks * BLOCK_SIZE):
                return False
            for block in range(first // BLOCK_SIZE, (visible[n] - 1) // BLOCK_SIZE + 1):
                if not 0 <= tables[slots[n], block] < num_rows // BLOCK_SIZE:
                    return False
            total += (visible[n] - first) * num_kv_heads

        key_columns = np.empty((D, _TILE), np.float32)
        weights = np.empty((heads, _TILE), np.float32)
        scaled = np.empty((_QUERIES, group, D), np.float32)
        mixed = np.empty((_QUERIES, group, D), np.float32)
        largest = np.empty((_QUERIES, group), np.float32)
        weight_sums = np.empty((_QUERIES, group, BLOCK_SIZE), np.float32)
        weights_at = weights.ctypes.data
        begin, done = 0, 0
        while begin < num_queries:
            # Neighbours of one slot, and the positions that any of them sees.
            slot, end, work, low, high = slots[begin], begin, 0, visible[begin], 0
            while end < num_queries and end < begin + _QUERIES and slots[end] == slot:
                first = max(earliest, visible[end] - window)
                low, high = min(low, first), max(high, visible[end])
                work += visible[end] - first
                end += 1
            for kv_head in range(num_kv_heads):
                mine = done * parts // total == part
                done += work
                if not mine:
                    continue
                for n in range(end - begin):
                    for h in range(group):
                        for d in range(D):
                            scaled[n, h, d] = q[begin + n, kv_head * group + h, d] * scale
                    mixed[n], weight_sums[n], largest[n] = 0.0, 0.0, -np.inf
                head_at = kv_head * num_rows * vector
                for base in range(low // _TILE * _TILE, high, _TILE):
                    columns_at = key_columns.ctypes.data  # asked for here: an array lives as long as its name is read
                    # What is needed next comes into the caches meanwhile.
                    next_head, next_slot, next_position = kv_head, slot, base
                    if base + _TILE < high:
                        next_position = base + _TILE
                    elif kv_head + 1 < num_kv_heads:
                        next_head, next_position = kv_head + 1, low
                    elif end < num_queries:
                        next_head, next_slot, next_position = 0, slots[end], max(earliest, visible[end] - window)
                    next_block = next_position // _TILE * (_TILE // BLOCK_SIZE)
                    for i in range(_TILE // BLOCK_SIZE):  # keys as columns, for all these queries
                        position = base + i * BLOCK_SIZE
                        if position >= high or position + BLOCK_SIZE <= low:
                            continue
                        block_at = keys_at + head_at + tables[slot, position // BLOCK_SIZE] * block_bytes
                        ahead = tables[next_slot, min(next_block + i, num_blocks - 1)] * block_bytes
                        ahead += next_head * num_rows * vector
                        for t in range(0, BLOCK_SIZE, 8):
                            for d in range(0, D, 8):
                                for _ in range(0, 8 * 8 * number, 64):
                                    prefetch(keys_at + ahead)
                                    prefetch(values_at + ahead)
                                    ahead += 64
                                target = columns_at + d * column + (i * BLOCK_SIZE + t) * number
                                transpose(block_at + t * vector + d * number, vector, target, column)
                    for n in range(end - begin):
                        first = max(earliest - base, visible[begin + n] - window - base, 0)
                        last = min(visible[begin + n] - base, _TILE)
                        for h0 in range(0, group if first < last else 0, heads):
                            scaled_at = scaled.ctypes.data + (n * group + h0) * vector
                            mixed_at = mixed.ctypes.data + (n * group + h0) * vector
                            weights[:] = 0.0  # scores first
                            for j in range(first // _WIDTH * _WIDTH, last, _WIDTH):
                                for d in range(0, D, _STEPS):
                                    multiply_add(
                                        heads, _WIDTH, _STEPS, weights_at + j * number, column, scaled_at + d * number,
                                        vector, columns_at + d * column + j * number, column,
                                    )  # fmt: skip
                            for i in range(heads):
                                h = h0 + i
                                if last - first < _TILE:
                                    for j in range(_TILE):
                                        weights[i, j] = weights[i, j] if first <= j < last else -np.inf
                                highest = max(largest[n, h], largest_of(_TILE, weights_at + i * column))
                                if highest > largest[n, h]:
                                    shrink = exp2(largest[n, h] - highest)
                                    for d in range(D):
                                        mixed[n, h, d] *= shrink
                                    for j in range(BLOCK_SIZE):
                                        weight_sums[n, h, j] *= shrink
                                    largest[n, h] = highest
                                for j in range(_TILE):
                                    weights[i, j] = exp2(weights[i, j] - highest)
                                for j0 in range(0, _TILE, BLOCK_SIZE):
                                    for j in range(BLOCK_SIZE):
                                        weight_sums[n, h, j] += weights[i, j0 + j]
                            t = first
                            while t < last:
                                row = tables[slot, (base + t) // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE
                                row_at = values_at + head_at + row * vector
                                if t % _STEPS == 0 and t + _STEPS <= last:
                                    for d in range(0, vector, width * number):
                                        multiply_add(
                                            heads, width, _STEPS, mixed_at + d, vector, weights_at + t * number, column,
                                            row_at + d, vector,
                                        )  # fmt: skip
                                    t += _STEPS
                                else:
                                    for d in range(0, vector, width * number):
                                        multiply_add(
                                            heads, width, 1, mixed_at + d, vector, weights_at + t * number, column,
                                            row_at + d, vector,
                                        )  # fmt: skip
                                    t += 1
                for n in range(end - begin):
                    for h in range(group):
                        weight_sum = np.float32(0.0)
                        for j in range(BLOCK_SIZE):
                            weight_sum += weight_sums[n, h, j]
                        for d in range(D):
                            out[begin + n, kv_head * group + h, d] = mixed[n, h, d] / weight_sum
            begin = end
        return True

    numbers = [types.int64] * 12 + [types.float32] + [types.int64] * 4
    return remembered(attend, types.boolean(*numbers))
