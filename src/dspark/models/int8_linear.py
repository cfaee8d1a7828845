"""int8 products with scales for groups of inputs, compiled: weights packed for it, and the work of one linear layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray

from dspark.compiling import remembered
from dspark.models.compiling import SOURCE
from dspark.models.int8_intrinsics import (
    COLUMNS,
    GROUP,
    GROUP_BYTES,
    HAS_SIGNED_WEIGHTS,
    ROW_GROUP_BYTES,
    ROWS,
    dot_products,
)
from dspark.models.large_pages import weight_room
from dspark.models.phases import LINE, add_atomically, meet, new_counters, take
from dspark.models.row_kernels import quantise_row
from dspark.models.threads import run_parts, run_together
from dspark.models.vector_intrinsics import pointer

_LEAST_SCALE = np.float32(1e-12)
_NAN_BITS = 0x7FC00000
_PACKING_PARTS = 4
"""Of the weights of a layer, for each thread that packs them."""
_LEAST_SHARED_WEIGHTS = 2**18
"""Weights from which on packing them is worth waking other threads."""
_LEAST_SHARED_WORK = 2**23
"""Bytes of weights, times rows, from which on a layer alone is worth waking other threads."""


class GroupedInt8Linear:
    """int8 weights and activations with one scale for every ``GROUP`` inputs, of each output and of each row.

    Products within a group are exact, and groups are added in their order, so a row's result depends on that row
    alone. float32 rows in, float32 rows out.

    Attributes:
        size_in, size_out: of the layer.
        padded_out: columns that :func:`multiply` writes.
        packed: bytes ``[padded_out / COLUMNS, groups, GROUP_BYTES]`` (see :func:`dot_products`).
        bias: float32 ``[padded_out]``.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        if weight_OI.ndim != 2 or weight_OI.numel() == 0:
            raise ValueError(f"an int8 layer has at least one input and one output, not weights {weight_OI.shape}")
        self.size_out, self.size_in = weight_OI.shape
        if bias_O is not None and bias_O.shape != (self.size_out,):
            raise ValueError(f"an int8 layer of {self.size_out} outputs has a bias of so many, not {bias_O.shape}")
        blocks, groups = -(-self.size_out // COLUMNS), -(-self.size_in // GROUP)
        self.padded_out = blocks * COLUMNS
        self.bias = torch.zeros(self.padded_out)
        if bias_O is not None:
            self.bias[: self.size_out] = bias_O.detach()
        self.packed = _packed_room((blocks, groups, GROUP_BYTES))
        weight_OI = weight_OI.detach().to("cpu", torch.float32).contiguous()
        flip = 0 if HAS_SIGNED_WEIGHTS else 0x80808080
        arguments = weight_OI.data_ptr(), self.size_out, self.size_in, self.packed.data_ptr(), flip
        threads = torch.get_num_threads() if weight_OI.numel() >= _LEAST_SHARED_WEIGHTS else 1
        parts, pack = min(blocks, _PACKING_PARTS * threads), _packer()
        run_parts(lambda part: pack(*arguments, part, parts), parts, threads, (self, weight_OI))

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the weights, and not of all that lies beside them.
        return {**self.__dict__, "packed": self.packed.clone(), "has_signed_weights": HAS_SIGNED_WEIGHTS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = _packed_room(state["packed"].shape).copy_(state["packed"])
        if state.pop("has_signed_weights") != HAS_SIGNED_WEIGHTS:  # made by a process with other instructions
            packed[..., : COLUMNS * GROUP] ^= 0x80
        self.__dict__.update(state, packed=packed)

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        if x_NI.ndim != 2 or x_NI.shape[1] != self.size_in or x_NI.dtype != torch.float32 or not x_NI.is_cpu:
            raise ValueError(
                f"an int8 layer of {self.size_in} inputs takes float32 rows of so many on the CPU, not {x_NI.dtype} "
                f"{tuple(x_NI.shape)} on {x_NI.device}"
            )
        x_NI = x_NI.contiguous()
        rows, groups = len(x_NI), self.packed.shape[1]
        y_NO = torch.empty(rows, self.padded_out)
        scratch = torch.empty(quantised_bytes(rows, groups), dtype=torch.uint8)
        threads = torch.get_num_threads() if rows * self.packed.numel() >= _LEAST_SHARED_WORK else 1
        counters, counters_at = new_counters(2, threads)
        arguments = (
            x_NI.data_ptr(), rows, self.size_in, scratch.data_ptr(), self.packed.data_ptr(), self.bias.data_ptr(),
            y_NO.data_ptr(), self.padded_out, counters_at, threads,
        )  # fmt: skip
        kernel = _kernel()
        run_together(lambda: kernel(*arguments), threads, (self, x_NI, scratch, counters, y_NO))
        return self.without_padding(y_NO)

    def without_padding(self, y_NO: torch.Tensor) -> torch.Tensor:
        """The layer's results of what :func:`multiply` wrote, contiguous."""
        return y_NO if self.padded_out == self.size_out else y_NO[:, : self.size_out].contiguous()


def _packed_room(shape: Sequence[int]) -> torch.Tensor:
    return weight_room(math.prod(shape)).view(*shape)


def quantised_bytes(rows: int, groups: int) -> int:
    """Bytes of so many rows as :func:`multiply` reads them; whole float32 numbers."""
    return rows * groups * ROW_GROUP_BYTES


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def multiply(
    q_at: int, rows: int, groups: int, weights_at: int, bias_at: int, y_at: int, width: int, counters_at: int,
    threads: int, thread: int,
) -> Any:  # fmt: skip
    """One phase: products of quantised rows with all weights, ``width`` columns of float32.

    Args:
        q_at: rows as :func:`quantise_row` gives them, side by side.
    """
    x_step = groups * ROW_GROUP_BYTES
    blocks, calls = width // COLUMNS, max((rows + ROWS - 1) // ROWS, 1)
    together = max((rows + calls - 1) // calls, 1)  # in calls of about one size
    done, turn = 0, 0
    while True:  # numba has no assignments in conditions
        block, turn = take(blocks, turn, counters_at, threads, thread)
        if block >= blocks:
            break
        block_at = weights_at + block * groups * GROUP_BYTES
        for row in range(0, rows, together):
            dot_products(
                min(rows - row, together), q_at + row * x_step, x_step, groups, block_at, groups * GROUP_BYTES,
                bias_at + block * COLUMNS * 4, y_at + (row * width + block * COLUMNS) * 4, width * 4,
            )  # fmt: skip
        done += 1
    return meet(counters_at, done, blocks, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def quantise(x_at: int, row: int, size: int, q_at: int) -> None:
    """Quantise the row at ``x_at`` into ``row`` of what :func:`multiply` reads."""
    groups = (size + GROUP - 1) // GROUP
    quantise_row(x_at, size, q_at + row * groups * ROW_GROUP_BYTES)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def quantise_rows(x_at: int, rows: int, size: int, q_at: int, counters_at: int, threads: int, thread: int) -> Any:
    """One phase: quantise every row."""
    done, turn = 0, 0
    while True:
        row, turn = take(rows, turn, counters_at, threads, thread)
        if row >= rows:
            break
        quantise(x_at + row * size * 4, row, size, q_at)
        done += 1
    return meet(counters_at, done, rows, threads)


@lru_cache
def _kernel(source: str = SOURCE) -> Callable[..., bool]:
    def linear(  # type: ignore[no-untyped-def]
        x_at, rows, size, q_at, weights_at, bias_at, y_at, width, counters_at, threads
    ):  # fmt: skip
        _ = source
        thread = add_atomically(counters_at, 1)
        counters_at += LINE
        counters_at = quantise_rows(x_at, rows, size, q_at, counters_at, threads, thread)
        groups = (size + GROUP - 1) // GROUP
        multiply(q_at, rows, groups, weights_at, bias_at, y_at, width, counters_at, threads, thread)
        return True

    kernel: Callable[..., bool] = remembered(linear)
    return kernel


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _scale_bits(weights: Any) -> Any:
    """Bits of the smallest bfloat16 number that is not below what a group's largest weight needs.

    Args:
        weights: the bits of float32 numbers. Magnitudes are in the order of their bits, and NaN is above all.
    """
    largest = np.int32(0)
    for i in range(GROUP):
        largest = max(largest, np.int32(weights[i] & np.int32(0x7FFFFFFF)))
    needed = np.float32(np.int32(largest).view(np.float32) / np.float32(127.0))
    if not needed < np.inf:
        return np.uint32(_NAN_BITS)
    if needed < _LEAST_SCALE:
        needed = _LEAST_SCALE
    return np.uint32((np.float32(needed).view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000))


@lru_cache
def _packer(source: str = SOURCE) -> Callable[..., bool]:
    def pack(weight_at, size_out, size_in, packed_at, flip, part, parts):  # type: ignore[no-untyped-def]
        """Blocks ``part``, ``part + parts``, ... of all outputs: numbers ``[GROUP / 4, COLUMNS, 4]``, then scales.

        Args:
            flip: bits of four numbers that are to be the other way round.
        """
        _ = source
        blocks, groups = (size_out + COLUMNS - 1) // COLUMNS, (size_in + GROUP - 1) // GROUP
        weight = carray(pointer(weight_at), (size_out, size_in), np.float32)
        words = carray(pointer(packed_at), (blocks, groups, GROUP_BYTES // 4), np.uint32)
        scales = carray(pointer(packed_at), (blocks, groups, GROUP_BYTES // 2), np.uint16)
        weights, numbers = np.zeros(GROUP, np.float32), np.zeros(GROUP, np.uint32)
        for block in range(part, blocks, parts):
            for column in range(COLUMNS):
                output = block * COLUMNS + column
                for group in range(groups):
                    first = group * GROUP
                    size = min(size_in - first, GROUP) if output < size_out else 0
                    for i in range(size):
                        weights[i] = weight[output, first + i]
                    weights[size:] = np.float32(0.0)
                    bits = _scale_bits(weights.view(np.int32))
                    scale = np.uint32(bits).view(np.float32)
                    if not scale < np.inf:  # all products will be NaN
                        weights[:] = np.float32(0.0)
                    for i in range(GROUP):
                        numbers[i] = np.uint32(np.int32(np.rint(weights[i] / scale))) & np.uint32(0xFF)
                    for i in range(GROUP // 4):
                        low = numbers[4 * i] | (numbers[4 * i + 1] << np.uint32(8))
                        high = numbers[4 * i + 2] | (numbers[4 * i + 3] << np.uint32(8))
                        words[block, group, i * COLUMNS + column] = (low | (high << np.uint32(16))) ^ np.uint32(flip)
                    scales[block, group, COLUMNS * GROUP // 2 + column] = np.uint32(bits) >> np.uint32(16)
        return True

    kernel: Callable[..., bool] = remembered(pack)
    return kernel
