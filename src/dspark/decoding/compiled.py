"""Distributions over a vocabulary on a CPU, each row in a few passes of compiled code.

With PyTorch each step is an operation of its own, and the larger ones wake other threads for a row or two. A row's
result does not depend on the rows beside it.

Shapes: N rows, V columns (target ids, or the columns of a reduced draft vocabulary), D draft columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from dspark.models.compiling import SOURCE, remembered
from dspark.models.row_kernels import exp2
from dspark.models.threads import run_together

__all__ = ["draw", "residual", "row_masses", "sample_row", "softmax_of", "softmax_rows"]

Floats = npt.NDArray[Any]
_CHUNK = 256
_ROWS = 8  # at a time; with fewer no other thread is woken


def softmax_rows(logits_NV: Floats, temperature: float) -> tuple[Floats, int]:
    """Softmax of ``logits / temperature``, float32 both; ``-inf`` gives exactly 0.

    Returns:
        Probabilities ``[N, V]``, and the first row without a finite largest logit (NaN, +inf, all ``-inf``), or -1.
    """
    probs_NV = np.empty_like(logits_NV)
    largest_N = logits_NV.max(axis=-1)  # NaN where a row has one
    scale = np.float32(math.log2(math.e) / temperature)
    kernel = _softmax_kernel()
    bad_rows: list[int] = []

    def compute(rows: slice) -> None:
        bad_row = kernel(logits_NV[rows], largest_N[rows], scale, probs_NV[rows])
        if bad_row >= 0:
            bad_rows.append(rows.start + bad_row)

    _share(compute, len(logits_NV))
    return probs_NV, min(bad_rows, default=-1)


def row_masses(probs_NV: Floats) -> tuple[Floats, Floats]:
    """Sum in float64 and smallest entry of each row, NaN where the row has one; float32 or float64."""
    sums_N = np.empty(len(probs_NV))
    kernel = _mass_kernel()
    _share(lambda rows: kernel(probs_NV[rows], sums_N[rows]), len(probs_NV))
    return sums_N, probs_NV.min(axis=-1)


def sample_row(probs_V: Floats, uniform: float) -> int:
    """The first id i with p_0 + ... + p_i > u * (p_0 + ... + p_{V-1}), in float64; -1 without positive finite mass.

    An id of probability 0 is never returned.
    """
    token: int = _sample_kernel()(probs_V, uniform)
    return token


def residual(target_probs_V: Floats, draft_probs_D: Floats, draft_token_ids_D: npt.NDArray[np.int64] | None) -> Floats:
    """``norm(max(p - q, 0))`` of p and q normalised, in float64 ``[V]``; p where nothing is left."""
    residual_V = np.empty(len(target_probs_V))
    ids_D = np.empty(0, np.int64) if draft_token_ids_D is None else draft_token_ids_D
    _residual_kernel()(target_probs_V, draft_probs_D, ids_D, residual_V)
    return residual_V


def _share(compute: Callable[[slice], None], num_rows: int) -> None:
    """Compute all rows, with other threads where it is worth waking them."""
    parts = iter([slice(first, first + _ROWS) for first in range(0, num_rows, _ROWS)])

    def take() -> bool:
        for rows in parts:
            compute(rows)
        return True

    run_together(take, min(torch.get_num_threads(), num_rows // _ROWS), compute)


@njit(fastmath={"reassoc", "contract"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _sum(values: Any) -> Any:
    """In float64 and as many parts as vectors have lanes: an order that the compiler sets once, whatever the row."""
    total = 0.0
    for i in range(len(values)):
        total += np.float64(values[i])
    return total


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def softmax_of(logits_V: Any, largest: Any, scale: Any, probs_V: Any) -> bool:
    """Softmax of a row with scale ``log2(e) / temperature``; False if it has NaN or no finite largest logit."""
    if not np.isfinite(largest):
        return False
    for i in range(len(logits_V)):
        probs_V[i] = exp2((logits_V[i] - largest) * scale)
    total = _sum(probs_V)  # of NaN is NaN
    if not np.isfinite(total):
        return False
    factor = np.float32(1.0 / total)
    for i in range(len(probs_V)):
        probs_V[i] *= factor
    return True


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def draw(probs_V: Any, uniform: Any) -> Any:
    """What :func:`sample_row` gives."""
    size = len(probs_V)
    num_chunks = (size + _CHUNK - 1) // _CHUNK
    mass = np.empty(num_chunks)
    total = 0.0
    for c in range(num_chunks):
        mass[c] = _sum(probs_V[c * _CHUNK : min((c + 1) * _CHUNK, size)])
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


@lru_cache
def _softmax_kernel(source: str = SOURCE) -> Callable[..., int]:
    def softmax(logits_NV, largest_N, scale, probs_NV):  # type: ignore[no-untyped-def]
        _ = source
        for n in range(len(logits_NV)):
            if not softmax_of(logits_NV[n], largest_N[n], scale, probs_NV[n]):
                return n
        return -1

    kernel: Callable[..., int] = remembered(softmax)
    return kernel


@lru_cache
def _mass_kernel(source: str = SOURCE) -> Callable[..., None]:
    def masses(probs_NV, sums_N):  # type: ignore[no-untyped-def]
        _ = source
        for n in range(len(probs_NV)):
            sums_N[n] = _sum(probs_NV[n])

    kernel: Callable[..., None] = remembered(masses)
    return kernel


@lru_cache
def _sample_kernel(source: str = SOURCE) -> Callable[..., int]:
    def sample(probs_V, uniform):  # type: ignore[no-untyped-def]
        _ = source
        return draw(probs_V, uniform)

    kernel: Callable[..., int] = remembered(sample)
    return kernel


@lru_cache
def _residual_kernel(source: str = SOURCE) -> Callable[..., None]:
    def residual(p_V, q_D, ids_D, residual_V):  # type: ignore[no-untyped-def]
        _ = source
        p_factor, q_factor = 1.0 / _sum(p_V), 1.0 / _sum(q_D)
        for i in range(len(p_V)):
            residual_V[i] = np.float64(p_V[i]) * p_factor
        if len(ids_D) == 0:
            for i in range(len(q_D)):
                residual_V[i] = max(residual_V[i] - np.float64(q_D[i]) * q_factor, 0.0)
        else:
            for i in range(len(q_D)):
                column = ids_D[i]
                residual_V[column] = max(residual_V[column] - np.float64(q_D[i]) * q_factor, 0.0)
        total = _sum(residual_V)
        if total > 0.0:
            factor = 1.0 / total
            for i in range(len(residual_V)):
                residual_V[i] *= factor
        else:
            for i in range(len(p_V)):
                residual_V[i] = np.float64(p_V[i]) * p_factor

    kernel: Callable[..., None] = remembered(residual)
    return kernel
