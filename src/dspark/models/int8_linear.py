"""int8 products with scales for groups of inputs, compiled: weights packed for it, and the work of one linear layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from numba import njit

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
    weight_bytes,
)
from dspark.models.large_pages import weight_room
from dspark.models.phases import LINE, add_atomically, meet, new_counters, take
from dspark.models.row_kernels import quantise_row
from dspark.models.threads import run_together

_SHARED_WORK = 2**23
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
        self.size_out, self.size_in = weight_OI.shape
        blocks, groups = -(-self.size_out // COLUMNS), -(-self.size_in // GROUP)
        self.padded_out = blocks * COLUMNS
        self.bias = torch.zeros(self.padded_out)
        if bias_O is not None:
            self.bias[: self.size_out] = bias_O
        padded = torch.zeros(self.padded_out, groups * GROUP)
        padded[: self.size_out, : self.size_in] = weight_OI
        weight_bcgi = padded.view(blocks, COLUMNS, groups, GROUP)
        # A scale is a bfloat16 number, not below what the largest weight needs.
        needed = (weight_bcgi.abs().amax(-1) / 127.0).clamp_min(1e-12)
        scales_bcg = ((needed.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
        numbers = weight_bytes((weight_bcgi / scales_bcg.unsqueeze(-1)).round_().to(torch.int8))
        numbers = numbers.view(blocks, COLUMNS, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
        scales = scales_bcg.to(torch.bfloat16).transpose(1, 2).contiguous().view(torch.uint8)
        self.packed = _packed_room((blocks, groups, GROUP_BYTES))
        self.packed[..., : COLUMNS * GROUP] = numbers.flatten(2)
        self.packed[..., COLUMNS * GROUP :] = scales

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
        threads = torch.get_num_threads() if rows * self.packed.numel() >= _SHARED_WORK else 1
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
