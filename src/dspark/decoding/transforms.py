"""From logits to the distribution a request samples from.

The order is that of transformers (and, but for the place of min-p, of vLLM):

1. logit bias                z_i += bias_i
2. repetition penalty r      z_i := z_i / r if z_i > 0 else z_i * r, for every i in prompt or output
3. frequency and presence    z_i -= frequency * n_i + presence * [n_i > 0], n_i = occurrences in the output
4. temperature T             z_i /= T; T = 0 stops here with all mass on the argmax (ties: lowest id)
5. top-k                     keep z_i >= the k-th largest (ties with it are kept, so there may be more than k)
6. top-p                     of softmax over what is left: keep token i if the mass before it, in the order
                             (larger z first, then lower id), is less than top_p
7. min-p                     keep i if its probability is at least min_p times the largest

The vocabulary is never sorted, and a row's result does not depend on the other rows.

Shapes: N rows, V columns (target ids, or the columns of a reduced draft vocabulary).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dspark.decoding.compiled import softmax_rows
from dspark.decoding.history import TokenHistory
from dspark.decoding.settings import SamplingSettings

_NO_MAXIMUM = "logits have no finite maximum in some row: they contain NaN or +inf, or logit_bias forbids every token"
_NEAR_NATS = (8.0, 12.0, math.inf)
_BUCKETS_PER_NAT = 64
_NUM_BUCKETS = 32 * _BUCKETS_PER_NAT  # whatever is more than 32 nats (a factor 1e14) below the best shares the last one


def token_probs(
    logits: Tensor,
    settings: SamplingSettings,
    history: TokenHistory | Sequence[TokenHistory] | None = None,
    token_ids_of_columns: Tensor | None = None,
) -> Tensor:
    """The distribution that ``settings`` makes of ``logits``: softmax of ``warp_logits``, same arguments and errors.

    Returns:
        Probabilities of the same shape; float64 for float64 logits, float32 otherwise. Excluded tokens have exactly 0.
    """
    if not logits.is_cpu or logits.dtype != torch.float32:
        return warp_logits(logits, settings, history, token_ids_of_columns).softmax(dim=-1)
    scores, temperature = logits, settings.temperature
    _check_columns(logits, token_ids_of_columns)
    if not settings.is_temperature_alone:
        scores, temperature = warp_logits(logits, settings, history, token_ids_of_columns), 1.0
    scores_NV = scores.detach().reshape(-1, scores.shape[-1]).contiguous().numpy()
    probs_NV, bad_row = softmax_rows(scores_NV, temperature)
    if bad_row >= 0:
        raise ValueError(_NO_MAXIMUM)
    return torch.from_numpy(probs_NV).view(logits.shape)


def warp_logits(
    logits: Tensor,
    settings: SamplingSettings,
    history: TokenHistory | Sequence[TokenHistory] | None = None,
    token_ids_of_columns: Tensor | None = None,
) -> Tensor:
    """Apply bias, penalties, temperature and truncation, in the order the module describes.

    Args:
        logits: [V] or [N, V], never changed in place.
        settings: the request's.
        history: one history for all rows, or one for each; needed if ``settings.needs_history``, else unused.
        token_ids_of_columns: int64 [V], the target id of each column, for a reduced draft vocabulary. Bias and
            penalties speak of target ids; those without a column have no effect. None: column i is target id i.

    Returns:
        Logits of the same shape; float64 for float64 logits, float32 otherwise; ``-inf`` where a token is excluded.
        They share the memory of ``logits`` if there was nothing to do.

    Raises:
        ValueError: wrong shapes, a missing history, a biased id outside the vocabulary, or a row without any finite
            largest logit (NaN, +inf, or every token forbidden).
    """
    _check_columns(logits, token_ids_of_columns)
    scores_NV = logits if logits.dtype == torch.float64 else logits.float()
    scores_NV = scores_NV.reshape(-1, logits.shape[-1])
    scores_NV = _with_bias(scores_NV, settings, token_ids_of_columns)
    scores_NV = _with_penalties(scores_NV, settings, history, token_ids_of_columns)
    best_N1 = scores_NV.amax(dim=-1, keepdim=True)  # NaN in a row reaches its maximum
    if not bool(best_N1.isfinite().all()):
        raise ValueError(_NO_MAXIMUM)
    if settings.is_greedy:
        warped_NV = torch.full_like(scores_NV, -math.inf)
        warped_NV.scatter_(-1, scores_NV.argmax(dim=-1, keepdim=True), 0.0)
    else:
        if settings.temperature != 1:
            scores_NV, best_N1 = scores_NV / settings.temperature, best_N1 / settings.temperature
        if settings.top_k is not None:
            scores_NV = _only_top_k(scores_NV, settings.top_k)
        if settings.top_p < 1:
            scores_NV = _only_nucleus(scores_NV, best_N1, settings.top_p)
        if settings.min_p > 0:
            scores_NV = _only_min_p(scores_NV, best_N1, settings.min_p)
        warped_NV = scores_NV
    return warped_NV.reshape(logits.shape)


def _check_columns(logits: Tensor, token_ids_of_columns: Tensor | None) -> None:
    if logits.dim() not in (1, 2) or logits.shape[-1] == 0:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; they must be [V] or [N, V] with V > 0")
    if token_ids_of_columns is not None and token_ids_of_columns.shape != logits.shape[-1:]:
        raise ValueError(
            f"token_ids_of_columns has shape {tuple(token_ids_of_columns.shape)}, "
            f"not [{logits.shape[-1]}]: one target id for each column of the logits"
        )


def _with_bias(scores_NV: Tensor, settings: SamplingSettings, token_ids_of_columns: Tensor | None) -> Tensor:
    if not settings.logit_bias:
        return scores_NV
    num_columns = scores_NV.shape[-1]
    if token_ids_of_columns is None and max(settings.logit_bias) >= num_columns:
        raise ValueError(
            f"logit_bias names token {max(settings.logit_bias)}; the vocabulary has ids 0..{num_columns - 1}"
        )
    ids = torch.tensor(list(settings.logit_bias), dtype=torch.long, device=scores_NV.device)
    bias = torch.tensor(list(settings.logit_bias.values()), dtype=scores_NV.dtype, device=scores_NV.device)
    columns, has_column = columns_of(ids, num_columns, token_ids_of_columns)
    bias_V = scores_NV.new_zeros(num_columns)
    bias_V[columns[has_column]] = bias[has_column]
    return scores_NV + bias_V


def _with_penalties(
    scores_NV: Tensor,
    settings: SamplingSettings,
    history: TokenHistory | Sequence[TokenHistory] | None,
    token_ids_of_columns: Tensor | None,
) -> Tensor:
    if not settings.needs_history:
        return scores_NV
    if history is None:
        raise ValueError("history is missing; repetition, presence and frequency penalties need a TokenHistory")
    num_rows, num_columns = scores_NV.shape
    histories = [history] * num_rows if isinstance(history, TokenHistory) else list(history)
    if len(histories) != num_rows:
        raise ValueError(f"history has {len(histories)} entries; give one, or one for each of the {num_rows} rows")
    scores_NV = scores_NV.clone()
    device = scores_NV.device
    if settings.repetition_penalty != 1:
        seen = [row.seen_ids() for row in histories]
        rows, ids = _flattened(seen, device)
        columns, has_column = columns_of(ids, num_columns, token_ids_of_columns)
        at = (rows[has_column], columns[has_column])
        values = scores_NV[at]
        penalty = settings.repetition_penalty
        scores_NV[at] = torch.where(values > 0, values / penalty, values * penalty)  # a doubled index writes one value
    if settings.frequency_penalty != 0 or settings.presence_penalty != 0:
        rows, ids = _flattened([row.generated_ids() for row in histories], device)
        counts = torch.cat([row.generated_counts() for row in histories]).to(device)
        columns, has_column = columns_of(ids, num_columns, token_ids_of_columns)
        amounts = settings.frequency_penalty * counts.to(scores_NV.dtype) + settings.presence_penalty
        scores_NV[rows[has_column], columns[has_column]] -= amounts[has_column]
    return scores_NV


def _flattened(ids_of_rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row index and id of every entry of a ragged list."""
    lengths = torch.tensor([len(ids) for ids in ids_of_rows])
    rows = torch.arange(len(ids_of_rows)).repeat_interleave(lengths)
    return rows.to(device), torch.cat(list(ids_of_rows)).to(device)


def columns_of(ids: Tensor, num_columns: int, token_ids_of_columns: Tensor | None) -> tuple[Tensor, Tensor]:
    """The column of each target id, and whether it has one."""
    if token_ids_of_columns is None:
        return ids, ids < num_columns
    column_of_id = _column_of_id(token_ids_of_columns).to(ids.device)
    num_ids = len(column_of_id)
    columns = torch.where(ids < num_ids, column_of_id[ids.clamp(max=num_ids - 1)], -1)
    return columns, columns >= 0


@lru_cache(maxsize=8)
def _column_of_id(token_ids_of_columns: Tensor) -> Tensor:
    """For each id up to the largest its column, or -1: of a draft vocabulary, which every round asks for.

    A drafter's requests share one tensor of ids, which nobody changes.
    """
    column_of_id = token_ids_of_columns.new_full((int(token_ids_of_columns.max()) + 1,), -1)
    column_of_id[token_ids_of_columns] = torch.arange(len(token_ids_of_columns), device=token_ids_of_columns.device)
    return column_of_id


def _only_top_k(scores_NV: Tensor, top_k: int) -> Tensor:
    if top_k >= scores_NV.shape[-1]:
        return scores_NV
    smallest_kept_N1 = scores_NV.topk(top_k, dim=-1).values[:, -1:]
    return torch.where(scores_NV < smallest_kept_N1, -math.inf, scores_NV)


def _only_min_p(scores_NV: Tensor, best_N1: Tensor, min_p: float) -> Tensor:
    return torch.where(scores_NV < best_N1 + math.log(min_p), -math.inf, scores_NV)


def _only_nucleus(scores_NV: Tensor, best_N1: Tensor, top_p: float) -> Tensor:
    kept_NV = torch.full_like(scores_NV, -math.inf)
    for scores_V, best_1, kept_V in zip(
        scores_NV, best_N1, kept_NV, strict=True
    ):  # temporaries stay in the CPU's cache
        tokens = _nucleus(scores_V, best_1, top_p)
        kept_V[tokens] = scores_V[tokens]
    return kept_NV


def _nucleus(scores_V: Tensor, best_1: Tensor, top_p: float) -> Tensor:
    """The ids of the top-p nucleus, without sorting the vocabulary. Masses are added in float64.

    Nearly always it lies within a few nats of the best token, so the other tokens only count as mass.
    """
    mass_V = (scores_V - best_1).exp_()
    wanted_mass = top_p * mass_V.sum(dtype=torch.float64)
    for nats in _NEAR_NATS:
        tokens = _ids_above(scores_V, float(best_1) - nats)
        mass = mass_V[tokens].double()
        if bool(mass.sum() >= wanted_mass):
            break
    return tokens[_is_in_nucleus(best_1 - scores_V[tokens], mass, wanted_mass)]


def _ids_above(scores_V: Tensor, lowest: float) -> Tensor:
    if scores_V.is_cpu:  # here numpy is several times faster
        return torch.from_numpy(np.flatnonzero(scores_V.detach().numpy() > lowest))
    return (scores_V > lowest).nonzero().squeeze(-1)


def _is_in_nucleus(nats_below_best: Tensor, mass: Tensor, wanted_mass: Tensor) -> Tensor:
    """Which of the given tokens, in the order of their ids, make up the wanted mass.

    Tokens fall into buckets of 1/64 nat. The cumulative mass of the buckets says in which of them the nucleus ends;
    only that bucket's tokens are sorted.
    """
    bucket = (nats_below_best * _BUCKETS_PER_NAT).clamp(max=_NUM_BUCKETS - 1).long()
    mass_B = mass.new_zeros(_NUM_BUCKETS).scatter_add_(0, bucket, mass)
    mass_up_to_B = mass_B.cumsum(dim=0)
    last_bucket = torch.searchsorted(mass_up_to_B, wanted_mass).clamp_(max=bucket.max())
    ends = (bucket == last_bucket).nonzero().squeeze(-1)
    ends = ends[nats_below_best[ends].argsort(stable=True)]  # ties: lowest id first
    masses = mass[ends]
    mass_before = mass_up_to_B[last_bucket] - mass_B[last_bucket] + masses.cumsum(dim=0) - masses
    is_kept = mass_before < wanted_mass
    is_kept[0] = True  # its bucket was chosen because mass is still wanted
    is_in_nucleus: Tensor = bucket < last_bucket
    is_in_nucleus[ends] = is_kept
    return is_in_nucleus
