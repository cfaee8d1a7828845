"""Distributions over a vocabulary, and the p/q rule on them, on a CPU: each row in a few passes of compiled code.

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

from dspark.compiling import remembered
from dspark.models.compiling import SOURCE
from dspark.models.row_kernels import draw, largest_number, residual_of, softmax_of, sum_of
from dspark.models.threads import run_parts

__all__ = [
    "NOT_DRAWN",
    "NO_DISTRIBUTION",
    "NO_MAXIMUM",
    "RIGHT",
    "SUM_TOLERANCE",
    "judge_block",
    "readable",
    "residual",
    "row_masses",
    "sample_row",
    "softmax_rows",
]

Floats = npt.NDArray[Any]
SUM_TOLERANCE = 1e-3
"""A row whose sum is further from 1 is not a distribution."""
RIGHT, NO_MAXIMUM, NO_DISTRIBUTION, NOT_DRAWN = range(4)
"""What may be wrong with the row at which :func:`judge_block` ended."""
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


def judge_block(
    logits_RV: Floats,
    temperature: float,
    tokens_L: npt.NDArray[np.int64],
    columns_L: npt.NDArray[np.int64],
    draft_probs_LD: Floats,
    accept_uniforms_L: Floats,
    final_uniform: float,
    draft_token_ids_D: npt.NDArray[np.int64] | None,
) -> tuple[int, int, int]:
    """The p/q rule for one block, of whose rows only those are computed that are reached.

    Args:
        logits_RV: the target's, float32, a row more than draft tokens.
        columns_L: of the draft tokens, which are in the vocabulary; -1 for one without.
        draft_probs_LD: float32 or float64, of as many columns as V or ``draft_token_ids_D`` has, whose ids are in the
            vocabulary.

    Returns:
        How many draft tokens are kept, the token that follows, and `RIGHT`; or a row that is wrong, and what about it.
    """
    ids_D = np.empty(0, np.int64) if draft_token_ids_D is None else draft_token_ids_D
    scale = np.float32(math.log2(math.e) / temperature)
    return _judge_kernel()(
        logits_RV, scale, tokens_L, columns_L, draft_probs_LD, accept_uniforms_L, final_uniform, ids_D
    )


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
        residual_of(p_V, q_D, ids_D, residual_V)

    kernel: Callable[..., None] = remembered(residual)
    return kernel


@lru_cache
def _judge_kernel(source: str = SOURCE) -> Callable[..., tuple[int, int, int]]:
    def judge(logits_RV, scale, tokens_L, columns_L, draft_probs_LD, accept_uniforms_L, final_uniform, ids_D):  # type: ignore[no-untyped-def]
        _ = source
        probs_V = np.empty(logits_RV.shape[1], np.float32)
        for k in range(len(tokens_L) + 1):
            if not softmax_of(logits_RV[k], largest_number(logits_RV[k]), scale, probs_V):
                return k, -1, NO_MAXIMUM
            if k == len(tokens_L):
                break
            q_D = draft_probs_LD[k]
            mass = sum_of(q_D)
            if not (abs(mass - 1.0) <= SUM_TOLERANCE and q_D.min() >= 0.0):
                return k, -1, NO_DISTRIBUTION
            q = np.float64(q_D[columns_L[k]]) if columns_L[k] >= 0 else 0.0
            if not q > 0.0:
                return k, -1, NOT_DRAWN
            p = np.float64(probs_V[tokens_L[k]]) / sum_of(probs_V)
            if not accept_uniforms_L[k] * (q / mass) < p:
                residual_V = np.empty(len(probs_V))
                residual_of(probs_V, q_D, ids_D, residual_V)
                return k, draw(residual_V, final_uniform), RIGHT
        return len(tokens_L), draw(probs_V, final_uniform), RIGHT

    kernel: Callable[..., tuple[int, int, int]] = remembered(judge)
    return kernel
