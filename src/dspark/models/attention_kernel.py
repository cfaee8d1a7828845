"""Attention over paged keys and values on a CPU, compiled when first used.

It computes in float32. Keys and values are float32, or float16: keys then lie as the columns of their blocks, so that
no query has to transpose them, and half as many bytes are read (see :class:`~dspark.models.kv_cache.KVCache`).

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
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import config
from numba.np.numpy_support import carray

from dspark.compiling import remembered
from dspark.models.block_tables import BLOCK_SIZE
from dspark.models.compiling import SOURCE
from dspark.models.instructions import INSTRUCTIONS
from dspark.models.kv_cache import columns_shape
from dspark.models.row_kernels import exp2
from dspark.models.threads import run_parts
from dspark.models.vector_intrinsics import largest_of, multiply_add, pointer, prefetch, transpose

HEAD_MULTIPLE = 8
"""Of the dimensions of a head: vectors have so many, or twice as many."""
_TILE_BLOCKS = 4
_TILE = _TILE_BLOCKS * BLOCK_SIZE
_QUERIES = 16  # neighbouring queries of a slot that share a tile's transposed keys
_PART_WORK = 2**20  # pairs of query and key, times dimensions: some 75 microseconds, worth being handed to a thread


def is_available(memory: torch.Tensor) -> bool:
    """Whether :func:`attend_rows` reads keys and values that lie as rows ``[..., D]`` in such memory."""
    is_rows = memory.is_cpu and memory.dtype == torch.float32 and memory.shape[-1] % HEAD_MULTIPLE == 0
    return is_rows and not config.DISABLE_JIT


def attend_rows(
    q_NhD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
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
        keys, values: one layer's pool, contiguous: float32 ``[g, P, D]`` both, or in float16 keys as columns
            ``[g, P / BLOCK_SIZE, D, BLOCK_SIZE]`` and values ``[g, P, D]``. D is a multiple of 8.
        tables_SB: int32; position p of slot s is row ``tables[s, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE``.
        slots_N: int64, the slot of each query. Put the queries of one slot side by side: they are computed together.
        visible_N: int64; query n sees positions ``max(first, visible_n - window) .. visible_n - 1``, one at least.

    Raises:
        ValueError: for a query that sees nothing, for a slot, position or block that does not exist, for other types
            or layouts of tensors.
    """
    num_queries, num_heads, head_dim = q_NhD.shape
    num_kv_heads, num_rows, _ = values.shape
    if head_dim % HEAD_MULTIPLE:
        raise ValueError(
            f"q_NhD has {head_dim} dimensions a head: the compiled attention needs a multiple of {HEAD_MULTIPLE}"
        )
    is_half = keys.dtype == torch.float16
    number = torch.float16 if is_half else torch.float32
    q_NhD = q_NhD.contiguous()
    out_NhD = torch.empty_like(q_NhD)
    tensors = (q_NhD, keys, values, tables_SB, slots_N, visible_N)
    dtypes = (torch.float32, number, number, torch.int32, torch.int64, torch.int64)
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        if tensor.dtype != dtype or not tensor.is_cpu or not tensor.is_contiguous():
            raise ValueError(f"the compiled attention needs contiguous CPU tensors of types {dtypes}, in this order")
    if (
        values.shape[-1] != head_dim
        or keys.shape != (columns_shape(values.shape) if is_half else values.shape)
        or num_heads % num_kv_heads
        or not num_queries == len(slots_N) == len(visible_N)
    ):
        raise ValueError(f"the shapes {[tuple(tensor.shape) for tensor in tensors]} do not go together")
    kernel = attention_kernel(head_dim, num_heads // num_kv_heads, is_half).ctypes
    addresses = [tensor.data_ptr() for tensor in (*tensors, out_NhD)]
    shape = (num_queries, num_kv_heads, num_rows, *tables_SB.shape)
    exponent_scale = scale * math.log2(math.e)
    threads = torch.get_num_threads()
    together = queries_together(num_queries * num_kv_heads, threads)
    arguments = (*addresses, *shape, exponent_scale, 2**62 if window is None else window, first, together)
    work = int(visible_N.sum()) * num_heads * head_dim if threads > 1 else 0
    parts = max(1, min(4 * threads, work // _PART_WORK))
    if not run_parts(lambda part: bool(kernel(*arguments, part, parts)), parts, threads, (tensors, out_NhD)):
        raise ValueError(
            "visible_N, slots_N or tables_SB name a position, slot or block outside the tables or the pool"
        )
    return out_NhD


def queries_together(work: int, threads: int) -> int:
    """Neighbouring queries of a slot that one thread computes together at most, so that all have something to do.

    Args:
        work: pairs of a query and a key head.
    """
    return max(1, min(_QUERIES, work // (2 * threads))) if threads > 1 else _QUERIES


@lru_cache
def attention_kernel(D: int, group: int, is_half: bool, source: str = SOURCE) -> Any:
    """The kernel for heads of D dimensions and ``group`` query heads a key head, as a C function.

    Args:
        is_half: whether keys, as columns, and values are float16.
    """
    heads = max(n for n in range(1, 8) if group % n == 0)  # query heads that are computed side by side
    # Vectors of 16 sums side by side, at most: float16 is for int8's processors.
    sums = INSTRUCTIONS.attention_sums if is_half and INSTRUCTIONS is not None else 14
    side = max(n for n in (1, 2, 4) if n * heads <= sums)  # blocks
    width = max(n for n in (8, 16, 32, 64) if D % n == 0 and n * heads <= 16 * sums)  # dimensions of values
    number = 2 if is_half else 4  # bytes of one in memory
    row, block_bytes, vector, column = number * D, number * D * BLOCK_SIZE, 4 * D, 4 * _TILE
    key_column = number * BLOCK_SIZE if is_half else column  # bytes from a dimension of the keys to the next
    key_part = D // side  # dimensions between two loads and stores of scores
    key_lines, value_lines = (side * number * BLOCK_SIZE // 64, -(-number * width // 64)) if is_half else (0, 0)

    def attend(  # type: ignore[no-untyped-def]
        q_at, keys_at, values_at, tables_at, slots_at, visible_at, out_at,
        num_queries, num_kv_heads, num_rows, num_slots, num_blocks, scale, window, earliest, together, part, parts,
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
        key_blocks, value_blocks = np.empty(_TILE_BLOCKS, np.int64), np.empty(_TILE_BLOCKS, np.int64)  # addresses
        next_blocks = np.empty(_TILE_BLOCKS, np.int64)  # bytes from the beginning of keys, and of values
        places = np.empty(_TILE_BLOCKS, np.int64)
        weights = np.empty((heads, _TILE), np.float32)
        scaled = np.empty((_QUERIES, group, D), np.float32)
        mixed = np.empty((_QUERIES, group, D), np.float32)
        largest = np.empty((_QUERIES, group), np.float32)
        weight_sums = np.empty((_QUERIES, group, BLOCK_SIZE), np.float32)
        weights_at = weights.ctypes.data
        begin, done = 0, 0
        while begin < num_queries:
            # Neighbours of one slot, in parts of one size, and the positions that any of them sees.
            slot, end, work, low, high = slots[begin], begin, 0, visible[begin], 0
            while end < num_queries and end < begin + _QUERIES and slots[end] == slot:
                end += 1
            pieces = (end - begin + together - 1) // together
            stop, end = begin + (end - begin + pieces - 1) // pieces, begin
            while end < stop:
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
                head_at = kv_head * num_rows * row
                for base in range(low // _TILE * _TILE, high, _TILE):
                    # What is needed next comes into the caches meanwhile.
                    next_head, next_slot, next_position = kv_head, slot, base
                    if base + _TILE < high:
                        next_position = base + _TILE
                    elif kv_head + 1 < num_kv_heads:
                        next_head, next_position = kv_head + 1, low
                    elif end < num_queries:
                        next_head, next_slot, next_position = 0, slots[end], max(earliest, visible[end] - window)
                    next_block = next_position // _TILE * _TILE_BLOCKS
                    is_whole = low <= base and base + _TILE <= high
                    for i in range(_TILE_BLOCKS):
                        position = base + i * BLOCK_SIZE
                        ahead = tables[next_slot, min(next_block + i, num_blocks - 1)] * block_bytes
                        ahead += next_head * num_rows * row
                        next_blocks[i] = ahead
                        if is_half and not is_whole:  # else it is asked for between the products
                            for _ in range(0, block_bytes, 64):
                                prefetch(keys_at + ahead)
                                prefetch(values_at + ahead)
                                ahead += 64
                        if position >= high or position + BLOCK_SIZE <= low:
                            continue
                        block_at = tables[slot, position // BLOCK_SIZE] * block_bytes + head_at
                        value_blocks[i] = values_at + block_at
                        if is_half:
                            key_blocks[i] = keys_at + block_at
                            continue
                        key_blocks[i] = key_columns.ctypes.data + i * BLOCK_SIZE * 4  # for all these queries
                        for t in range(0, BLOCK_SIZE, 8):
                            for d in range(0, D, 8):
                                for _ in range(0, 8 * 8 * 4, 64):
                                    prefetch(keys_at + ahead)
                                    prefetch(values_at + ahead)
                                    ahead += 64
                                target = key_blocks[i] + d * column + t * 4
                                transpose(keys_at + block_at + t * row + d * 4, row, target, column)
                    for n in range(end - begin):
                        first = max(earliest - base, visible[begin + n] - window - base, 0)
                        last = min(visible[begin + n] - base, _TILE)
                        stride = 1 if is_whole and n == 0 else 0  # 0: prefetches one line again and again
                        for h0 in range(0, group if first < last else 0, heads):
                            scaled_at = scaled.ctypes.data + (n * group + h0) * vector
                            mixed_at = mixed.ctypes.data + (n * group + h0) * vector
                            weights[:] = 0.0  # scores first
                            i, seen_blocks = first // BLOCK_SIZE, (last + BLOCK_SIZE - 1) // BLOCK_SIZE
                            while i < seen_blocks:
                                scores_at = weights_at + i * BLOCK_SIZE * 4
                                if i + side <= seen_blocks:
                                    for j in range(side):
                                        for k in range(side):
                                            places[k] = key_blocks[i + k] + j * key_part * key_column
                                        multiply_add(
                                            heads, side, BLOCK_SIZE, is_half, scores_at, column,
                                            scaled_at + j * key_part * 4, vector, places.ctypes.data, key_column,
                                            key_part, keys_at + stride * next_blocks[i + j],
                                            stride * side * number * BLOCK_SIZE, key_lines,
                                        )  # fmt: skip
                                    i += side
                                else:
                                    places[0] = key_blocks[i]
                                    multiply_add(
                                        heads, 1, BLOCK_SIZE, is_half, scores_at, column, scaled_at, vector,
                                        places.ctypes.data, key_column, D, 0, 0, 0,
                                    )  # fmt: skip
                                    i += 1
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
                                i = t // BLOCK_SIZE
                                stop = min(last, (i + 1) * BLOCK_SIZE)
                                for d in range(0, D, width):
                                    places[0] = value_blocks[i] + t % BLOCK_SIZE * row + d * number
                                    multiply_add(
                                        heads, 1, width, is_half, mixed_at + d * 4, vector, weights_at + t * 4, column,
                                        places.ctypes.data, row, stop - t,
                                        values_at + stride * (next_blocks[i] + d * number), stride * row, value_lines,
                                    )  # fmt: skip
                                t = stop
                for n in range(end - begin):
                    for h in range(group):
                        weight_sum = np.float32(0.0)
                        for j in range(BLOCK_SIZE):
                            weight_sum += weight_sums[n, h, j]
                        for d in range(D):
                            out[begin + n, kv_head * group + h, d] = mixed[n, h, d] / weight_sum
            begin = end
        return True

    numbers = [types.int64] * 12 + [types.float32] + [types.int64] * 5
    return remembered(attend, types.boolean(*numbers))
