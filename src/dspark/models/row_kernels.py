"""Compiled work on single rows of activations or probabilities, with sums in a fixed order.

The bits of a row's result depend on that row alone. Rows of activations are given by the address of their first number,
those that tokens are drawn from as arrays; of logits that only their largest is asked of the address is enough.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numba.np.numpy_support import carray

from dspark.models.int8_intrinsics import GROUP, ROW_GROUP_BYTES
from dspark.models.vector_intrinsics import fused_multiply_add, pointer, store_half

_EXP2 = tuple(math.log(2.0) ** k / math.factorial(k) for k in range(8))
_CHUNK = 256  # of what is drawn from: nine tenths of the cumulative sums are never needed
_ROUND = 1.5 * 2**23  # added to a small float32, it leaves the nearest whole number in the lowest bits


@njit(inline="always")  # type: ignore[untyped-decorator]
def exp2(x: Any) -> Any:
    """2 to the power of x <= 0, to about 1e-7 of its value; 0 where that is below 2**-126."""
    shifted = np.float32(x + np.float32(_ROUND))
    r = x - (shifted - np.float32(_ROUND))
    y = np.float32(_EXP2[7])
    y = fused_multiply_add(y, r, np.float32(_EXP2[6]))
    y = fused_multiply_add(y, r, np.float32(_EXP2[5]))
    y = fused_multiply_add(y, r, np.float32(_EXP2[4]))
    y = fused_multiply_add(y, r, np.float32(_EXP2[3]))
    y = fused_multiply_add(y, r, np.float32(_EXP2[2]))
    y = fused_multiply_add(y, r, np.float32(_EXP2[1]))
    y = fused_multiply_add(y, r, np.float32(_EXP2[0]))
    power = np.int32((shifted.view(np.int32) + 127) << 23).view(np.float32)
    return np.float32(0.0) if x < np.float32(-126.0) else y * power


@njit(inline="always")  # type: ignore[untyped-decorator]
def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``."""
    small = exp2(-abs(x) * np.float32(math.log2(math.e)))
    return (np.float32(1.0) if x >= np.float32(0.0) else small) / (np.float32(1.0) + small)


@njit(fastmath={"reassoc", "contract"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _square_sum(x: Any) -> Any:
    """In as many parts as vectors have lanes: an order that the compiler sets once, whatever the row."""
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return total


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def norm_row(x_at: int, out_at: int, weight_at: int, size: int, eps: Any) -> None:
    """RMS norm of ``size`` numbers; ``x`` and ``out`` may be the same."""
    x, out = carray(pointer(x_at), size, np.float32), carray(pointer(out_at), size, np.float32)
    weight = carray(pointer(weight_at), size, np.float32)
    factor = np.float32(1.0) / np.sqrt(_square_sum(x) / np.float32(size) + eps)
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def add_row(x_at: int, y_at: int, size: int) -> None:
    """``x += y``."""
    x, y = carray(pointer(x_at), size, np.float32), carray(pointer(y_at), size, np.float32)
    for i in range(size):
        x[i] += y[i]


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def activate_row(gate_at: int, up_at: int, size: int, is_gelu: bool) -> None:
    """``gate = activation(gate) * up``, with SiLU or the tanh form of GELU."""
    gate, up = carray(pointer(gate_at), size, np.float32), carray(pointer(up_at), size, np.float32)
    if is_gelu:  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        for i in range(size):
            x = gate[i]
            z = np.float32(math.sqrt(8.0 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
            gate[i] = x * sigmoid(z) * up[i]
    else:
        for i in range(size):
            gate[i] = gate[i] * sigmoid(gate[i]) * up[i]


@njit(inline="always")  # type: ignore[untyped-decorator]
def _rotated(x: Any, cos: Any, sin: Any, i: int, partner: int) -> Any:
    return x[i] * cos[i] + x[partner] * sin[i]


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def rotate_head(x_at: int, out_at: int, cos_at: int, sin_at: int, size: int) -> None:
    """Rotary embedding of one head (see :func:`dspark.models.rope.rotate`)."""
    x, out = carray(pointer(x_at), size, np.float32), carray(pointer(out_at), size, np.float32)
    cos, sin = carray(pointer(cos_at), size, np.float32), carray(pointer(sin_at), size, np.float32)
    half = size // 2
    for i in range(half):
        out[i] = _rotated(x, cos, sin, i, i + half)
    for i in range(half, size):
        out[i] = _rotated(x, cos, sin, i, i - half)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def rotate_head_to_halves(x_at: int, out_at: int, step: int, cos_at: int, sin_at: int, size: int) -> None:
    """:func:`rotate_head` with the result as :func:`store_halves` stores it."""
    x, half = carray(pointer(x_at), size, np.float32), size // 2
    cos, sin = carray(pointer(cos_at), size, np.float32), carray(pointer(sin_at), size, np.float32)
    for i in range(half):
        store_half(_rotated(x, cos, sin, i, i + half), out_at + i * step)
    for i in range(half, size):
        store_half(_rotated(x, cos, sin, i, i - half), out_at + i * step)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def copy_row(x_at: int, out_at: int, size: int) -> None:
    """``out = x``."""
    x, out = carray(pointer(x_at), size, np.float32), carray(pointer(out_at), size, np.float32)
    for i in range(size):
        out[i] = x[i]


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def store_halves(x_at: int, out_at: int, step: int, size: int) -> None:
    """``out = x`` in float16, within ±65504, each number ``step`` bytes after the one before it."""
    x = carray(pointer(x_at), size, np.float32)
    for i in range(size):
        store_half(x[i], out_at + i * step)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _quantise_group(x: Any, bits: Any, q: Any, count: int) -> Any:
    """Numbers in ``q``; their scale and sum."""
    largest = np.int32(0)  # absolute values are ordered as their bits are
    for i in range(count):
        largest = max(largest, np.int32(bits[i] & 0x7FFFFFFF))
    scale = max(np.int32(largest).view(np.float32), np.float32(1e-12)) * np.float32(1.0 / 127.0)
    inverse = np.float32(1.0) / scale
    total = np.int32(0)
    for i in range(count):
        rounded = np.float32(x[i] * inverse + np.float32(_ROUND)).view(np.int32) - np.int32(0x4B400000)
        q[i] = np.int8(rounded)
        total += np.int32(q[i])
    return scale, total


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def quantise_row(x_at: int, size: int, q_at: int) -> None:
    """int8 numbers with a scale for each ``GROUP`` of them; ``ROW_GROUP_BYTES`` a group.

    The last group is filled with zeros.
    """
    groups = (size + GROUP - 1) // GROUP
    for g in range(groups):
        x_group_at, q_group_at = pointer(x_at + 4 * GROUP * g), q_at + ROW_GROUP_BYTES * g
        x, bits = carray(x_group_at, GROUP, np.float32), carray(x_group_at, GROUP, np.int32)
        q = carray(pointer(q_group_at), GROUP, np.int8)
        count = size - GROUP * g
        if count >= GROUP:
            scale, total = _quantise_group(x, bits, q, GROUP)
        else:
            scale, total = _quantise_group(x, bits, q, count)
            for i in range(count, GROUP):
                q[i] = 0
        carray(pointer(q_group_at + GROUP), 1, np.float32)[0] = scale
        carray(pointer(q_group_at + GROUP + 4), 1, np.int32)[0] = np.int32(-128) * total


@njit(fastmath={"reassoc", "contract"}, error_model="numpy")  # type: ignore[untyped-decorator]
def sum_of(values: Any) -> Any:
    """In float64 and as many parts as vectors have lanes: an order that the compiler sets once, whatever the row."""
    total = 0.0
    for i in range(len(values)):
        total += np.float64(values[i])
    return total


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def largest_number(values: Any) -> Any:
    """The largest of float32 numbers, not finite if there is +inf or nothing but -inf. NaN comes first or last."""
    bits = values.view(np.int32)
    largest = np.int32(-(2**31))
    for i in range(len(values)):  # as whole numbers in the same order, which takes a fifth of the time
        largest = max(largest, np.int32(bits[i] ^ ((bits[i] >> 31) & 0x7FFFFFFF)))
    return np.int32(largest ^ ((largest >> 31) & 0x7FFFFFFF)).view(np.float32)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def softmax_of(logits_V: Any, largest: Any, scale: Any, probs_V: Any) -> bool:
    """Softmax of a row with scale ``log2(e) / temperature``; False if it has NaN or no finite largest logit."""
    if not np.isfinite(largest):
        return False
    for i in range(len(logits_V)):
        probs_V[i] = exp2((logits_V[i] - largest) * scale)
    total = sum_of(probs_V)  # of NaN is NaN
    if not np.isfinite(total):
        return False
    factor = np.float32(1.0 / total)
    for i in range(len(probs_V)):
        probs_V[i] *= factor
    return True


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def draw(probs_V: Any, uniform: Any) -> Any:
    """The first id i with p_0 + ... + p_i > u * (p_0 + ... + p_{V-1}), in float64; -1 without positive finite mass.

    An id of probability 0 is never returned.
    """
    size = len(probs_V)
    num_chunks = (size + _CHUNK - 1) // _CHUNK
    mass = np.empty(num_chunks)
    total = 0.0
    for c in range(num_chunks):
        mass[c] = sum_of(probs_V[c * _CHUNK : min((c + 1) * _CHUNK, size)])
        total += mass[c]
    if not (np.isfinite(total) and total > 0.0):
        return -1
    wanted, inside, chunk = uniform * total, 0.0, 0
    for c in range(num_chunks):
        if mass[c] > 0.0:
            inside += mass[c]
            chunk = c
            if inside > wanted:
                break
    if not inside > wanted:  # rounded up to the total: the last of all
        wanted = np.inf
    inside -= mass[chunk]
    last = -1  # with mass: sums in another order may end a little below what is wanted
    for i in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, size)):
        if probs_V[i] > 0.0:
            last = i
            inside += np.float64(probs_V[i])
            if inside > wanted:
                break
    return last


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def residual_of(p_V: Any, q_D: Any, ids_D: Any, residual_V: Any) -> None:
    """``norm(max(p - q, 0))`` of p and q normalised, in float64; p where nothing is left. No ids: column i is id i."""
    p_factor, q_factor = 1.0 / sum_of(p_V), 1.0 / sum_of(q_D)
    for i in range(len(p_V)):
        residual_V[i] = np.float64(p_V[i]) * p_factor
    if len(ids_D) == 0:
        for i in range(len(q_D)):
            residual_V[i] = max(residual_V[i] - np.float64(q_D[i]) * q_factor, 0.0)
    else:
        for i in range(len(q_D)):
            column = ids_D[i]
            residual_V[column] = max(residual_V[column] - np.float64(q_D[i]) * q_factor, 0.0)
    total = sum_of(residual_V)
    if total > 0.0:
        factor = 1.0 / total
        for i in range(len(residual_V)):
            residual_V[i] *= factor
    else:
        for i in range(len(p_V)):
            residual_V[i] = np.float64(p_V[i]) * p_factor


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def most_likely(logits_at: int, size: int) -> int:
    """The column of the largest of ``size`` numbers, of equal ones the first."""
    logits = carray(pointer(logits_at), size, np.float32)
    value = largest_number(logits)
    for i in range(size):
        if logits[i] == value:
            return i
    return 0
