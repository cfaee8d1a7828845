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
from torch import Tensor

from dspark.models.compiling import SOURCE, remembered
from dspark.models.row_kernels import draw, softmax_of, sum_of
from dspark.models.threads import run_parts

__all__ = ["readable", "residual", "row_masses", "sample_row", "softmax_rows"]

Floats = npt.NDArray[Any]
_ROWS = 8  # at a time; with fewer no other thread is woken


def readable(probs: Tensor) -> Floats | None:
    """The numbers of probabilities that compiled code reads: on a CPU, in float32 or float64; None elsewhere."""
    if not probs.is_cpu or probs.dtype not in (torch.float32, torch.float64):
        return None
    return probs.detach().contiguous().numpy()


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
    """``norm(max(p - q, 0))`` of p and q normalised, in float64 ``[V]``; p where nothing is left.

    Raises:
        ValueError: q has other columns than p, or than there are ids, or an id is outside p.
    """
    size, ids_D = len(target_probs_V), np.empty(0, np.int64)
    if draft_token_ids_D is not None:
        ids_D = np.ascontiguousarray(draft_token_ids_D, np.int64)
        if len(ids_D) and not (0 <= ids_D.min() <= ids_D.max() < size):
            raise ValueError(f"draft_token_ids_D has an id outside the vocabulary 0..{size - 1}")
    if len(draft_probs_D) != (size if draft_token_ids_D is None else len(ids_D)):
        raise ValueError(
            f"draft_probs_D has {len(draft_probs_D)} columns: give as many as target_probs_V, or one for each of "
            "draft_token_ids_D"
        )
    residual_V = np.empty(size)
    _residual_kernel()(target_probs_V, draft_probs_D, ids_D, residual_V)
    return residual_V


def _share(compute: Callable[[slice], None], num_rows: int) -> None:
    """Compute all rows, with other threads where it is worth waking them."""

    def compute_part(part: int) -> bool:
        compute(slice(part * _ROWS, (part + 1) * _ROWS))
        return True

    run_parts(compute_part, -(-num_rows // _ROWS), min(torch.get_num_threads(), num_rows // _ROWS), compute)


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
            sums_N[n] = sum_of(probs_NV[n])

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

    kernel: Callable[..., None] = remembered(residual)
    return kernel
