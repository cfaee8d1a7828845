"""Drawing token ids from distributions, with the randomness given."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dspark.decoding.compiled import readable, sample_row
from dspark.decoding.noise import NOISE_BITS, gumbel_of_bits

_CHUNK = 256
_NO_MASS = "probs_RV has a row without positive finite mass (all zero, or NaN)"


def argmax_rows(values_NV: Tensor) -> Tensor:
    """The largest entry of each row, ties to the lowest id: int64 [N]; on a CPU far sooner than by ``argmax``."""
    if values_NV.is_cpu and values_NV.dtype == torch.float32:
        return torch.from_numpy(values_NV.detach().numpy().argmax(axis=-1))
    return values_NV.argmax(dim=-1)


def sample_rows(probs_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """One token for each row by inverse CDF: the first id i with p_0 + ... + p_i > u * (p_0 + ... + p_{V-1}).

    Sums are in float64, so rows need not sum to exactly 1, and an id of probability 0 is never returned.

    Args:
        probs_RV: [R, V], not negative, each row with some mass.
        uniforms_R: [R], in [0, 1).

    Returns:
        int64 [R], on the device of ``probs_RV``.

    Raises:
        ValueError: wrong shapes, a uniform outside [0, 1), or a row without positive finite mass.
    """
    if probs_RV.dim() != 2 or uniforms_R.shape != probs_RV.shape[:1]:
        raise ValueError(
            f"probs_RV has shape {tuple(probs_RV.shape)} and uniforms_R {tuple(uniforms_R.shape)}; give [R, V] and [R]"
        )
    uniforms_R1 = uniforms_R.to(probs_RV.device, torch.float64).unsqueeze(-1)
    if not bool(((uniforms_R1 >= 0) & (uniforms_R1 < 1)).all()):
        raise ValueError("uniforms_R has a number outside [0, 1)")
    if (rows := readable(probs_RV)) is not None:
        tokens = [sample_row(probs_V, uniform) for probs_V, uniform in zip(rows, uniforms_R.tolist(), strict=True)]
        if min(tokens, default=0) < 0:
            raise ValueError(_NO_MASS)
        return torch.tensor(tokens, dtype=torch.int64)
    # First which chunk of the row, then where in it: nine tenths of the cumulative sums are never needed.
    num_rows, num_columns = probs_RV.shape
    chunk = _CHUNK if num_columns % _CHUNK == 0 else num_columns
    probs_RCc = probs_RV.unflatten(-1, (-1, chunk))
    mass_RC = probs_RCc.sum(dim=-1, dtype=torch.float64)
    cumulative_RC = mass_RC.cumsum(dim=-1)
    total_R1 = cumulative_RC[:, -1:].contiguous()
    if not bool((total_R1.isfinite() & (total_R1 > 0)).all()):
        raise ValueError(_NO_MASS)
    wanted_R1 = uniforms_R1 * total_R1
    chunk_R1 = torch.searchsorted(cumulative_RC, wanted_R1, right=True).clamp_(max=mass_RC.shape[-1] - 1)
    rows_R = torch.arange(num_rows, device=probs_RV.device)
    wanted_R1 = wanted_R1 - (cumulative_RC - mass_RC).gather(-1, chunk_R1)
    within_Rc = probs_RCc[rows_R, chunk_R1.squeeze(-1)].cumsum(dim=-1, dtype=torch.float64)
    token_R1 = torch.searchsorted(within_Rc, wanted_R1, right=True).clamp_(max=chunk - 1) + chunk_R1 * chunk
    for row in (probs_RV.gather(-1, token_R1) <= 0).squeeze(-1).nonzero().squeeze(-1).tolist():
        token_R1[row] = _nearest_possible(probs_RV[row], int(token_R1[row]))
    return token_R1.squeeze(-1)


def _nearest_possible(probs_V: Tensor, token: int) -> int:
    """The last id up to ``token`` with mass, or the first: for devices whose cumulative sum rounds out of order."""
    possible = (probs_V > 0).nonzero().squeeze(-1)
    before = possible[possible <= token]
    return int(before[-1] if len(before) > 0 else possible[0])


def sample_from(probs_V: Tensor, uniform: float) -> int:
    """One token from one distribution [V] with one uniform number in [0, 1); see ``sample_rows``."""
    if probs_V.dim() == 1 and 0 <= uniform < 1 and (row := readable(probs_V)) is not None:
        token = sample_row(row, uniform)
        if token < 0:
            raise ValueError(_NO_MASS)
        return token
    return int(sample_rows(probs_V.unsqueeze(0), torch.tensor([uniform], dtype=torch.float64))[0])


def coupled_sample_rows(probs_RV: Tensor, gumbel_RV: Tensor) -> Tensor:
    """Gumbel-max for each row: argmax_i (log p_i + g_i), ties to the lowest id, never an id of probability 0.

    With g standard Gumbel, P(i) = p_i exactly. Two distributions drawn with the same g agree with probability
    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) >= (1 - TV) / (1 + TV).

    Args:
        probs_RV: [R, V], not negative; need not be normalised, but the largest of a row is 1e-30 at least.
        gumbel_RV: [R, V], finite. For the columns of a reduced draft vocabulary take the noise of their target ids.

    Returns:
        int64 [R], columns, on the device of ``probs_RV``.

    Raises:
        ValueError: shapes differ, or a row without positive finite mass.
    """
    if probs_RV.dim() != 2 or gumbel_RV.shape != probs_RV.shape:
        raise ValueError(
            f"probs_RV has shape {tuple(probs_RV.shape)} and gumbel_RV {tuple(gumbel_RV.shape)}; both must be [R, V]"
        )
    scores_RV = probs_RV * gumbel_RV.to(probs_RV.device, torch.float64).exp()  # the same order as log p + g
    token_R1 = scores_RV.argmax(dim=-1, keepdim=True)
    best_R1 = scores_RV.gather(-1, token_R1)
    if not bool((best_R1.isfinite() & (best_R1 > 0)).all()):
        raise ValueError(_NO_MASS)
    return token_R1.squeeze(-1)


def coupled_sample(probs_V: Tensor, gumbel_V: Tensor) -> int:
    """Gumbel-max sample of one distribution [V]; see ``coupled_sample_rows``."""
    return int(coupled_sample_rows(probs_V.unsqueeze(0), gumbel_V.unsqueeze(0))[0])


def coupled_sample_bits(probs_V: Tensor, bits_V: Tensor) -> int:
    """``coupled_sample(probs_V, gumbel_of_bits(bits_V))``, with the noise made only of tokens that can win.

    With E = -log u the token of the largest p / E wins, and E >= 1 - u. So only a token with p / (1 - u) >= p' / E' can
    win, p' and E' those of the most probable token: about E' / p' tokens, whatever the size of the vocabulary.

    Args:
        probs_V: not negative; need not be normalised, but the largest is 1e-30 at least.
        bits_V: int64 [V] (CPU), ``noise_bits`` of the tokens.

    Raises:
        ValueError: shapes differ, or no positive finite mass.
    """
    if probs_V.dim() != 1 or bits_V.shape != probs_V.shape:
        raise ValueError(f"probs_V has shape {tuple(probs_V.shape)} and bits_V {tuple(bits_V.shape)}; both must be [V]")
    probs, bits = probs_V.detach().cpu().numpy(), bits_V.numpy()
    best = int(probs.argmax())
    score = float(probs[best]) * math.exp(float(gumbel_of_bits(bits_V[best : best + 1])[0]))
    if not (math.isfinite(score) and score > 0):
        raise ValueError("probs_V has no positive finite mass (all zero, or NaN)")
    distances = (2**NOISE_BITS - bits).astype(probs.dtype)  # (1 - u) 2^52, up to twice that
    can_win = probs >= distances * (score / 4 * 2.0**-NOISE_BITS)  # 4: for the 2 above, and more than all rounding
    tokens = np.flatnonzero(can_win)
    scores = probs[tokens] * np.exp(gumbel_of_bits(torch.from_numpy(bits[tokens])).numpy())
    return int(tokens[scores.argmax()])
