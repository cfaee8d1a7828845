"""Drawing and judging the tokens of many requests at once.

Requests of one rule and the same settings are computed together. A row's tokens do not depend on the rows beside it.

Shapes: R rows (requests), D draft columns, L draft tokens of a request, N = sum of L + 1 target rows, V target ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from dspark.decoding import (
    Acceptance,
    TokenHistory,
    accept_coupled,
    accept_greedy,
    accept_speculative_rows,
    accept_tempered_rows,
    argmax_rows,
    coupled_sample_bits,
    sample_rows,
    token_probs,
    warp_logits,
)
from dspark.drafters.protocol import DraftSampler, PlainSampler
from dspark.engine.sampling import RequestSampling, Rule

_PIECE = 2**21


@dataclass(frozen=True, kw_only=True)
class VerifyRow:
    """A request whose draft tokens are to be judged.

    Attributes:
        sampling: the request's.
        draft_tokens: L target ids; none for a plain next token.
        draft_probs_LD: the distributions that they were drawn from. Only the p/q rule needs them, and only if L > 0.
    """

    sampling: RequestSampling
    draft_tokens: Sequence[int]
    draft_probs_LD: Tensor | None


def draft_sampler(rows: Sequence[RequestSampling], lengths: Sequence[int]) -> DraftSampler:
    """A sampler that draws row r as ``rows[r]`` says; all rows have the same drafter.

    A row uses no randomness for tokens behind its own length: the block is as long as the longest row wants.

    Distributions are those of the rows of the p/q rule, zero elsewhere; None if there is no such row.
    """
    if all(row.draws_plainly for row in rows):
        uniforms_RG = np.zeros((len(rows), max(lengths, default=0)))
        for row, length, uniforms_G in zip(rows, lengths, uniforms_RG, strict=True):
            if row.rule == "speculative":
                uniforms_G[:length] = [row.random() for _ in range(length)]
        temperatures_R = tuple(0.0 if row.rule == "greedy" else row.draft_settings.temperature for row in rows)
        return PlainSampler(temperatures_R=temperatures_R, uniforms_RG=uniforms_RG)
    groups = _together(rows)

    def sample(index: int, logits_RD: Tensor, tokens_Rk: Tensor) -> tuple[Tensor, Tensor | None]:
        if len(groups) == 1:
            return _DRAFT[rows[0].rule](rows, lengths, index, logits_RD, tokens_Rk)
        columns_R = tokens_Rk.new_empty(len(rows))
        probs_RD: Tensor | None = None
        for places in groups:
            members = [rows[place] for place in places]
            wanted = [lengths[place] for place in places]
            drawn, probs = _DRAFT[members[0].rule](members, wanted, index, logits_RD[places], tokens_Rk[places])
            columns_R[places] = drawn
            if probs is not None:
                if probs_RD is None:
                    probs_RD = torch.zeros_like(logits_RD, dtype=probs.dtype)
                probs_RD[places] = probs
        return columns_R, probs_RD

    return sample


def verify_rows(rows: Sequence[VerifyRow], logits_NV: Tensor, best_N: Tensor | None = None) -> list[Acceptance]:
    """Which draft tokens of each row the target confirms, and the token it adds.

    Args:
        rows: the requests; all have the same drafter.
        logits_NV: the target's logits, row after row: after the anchor and after each draft token.
        best_N: the id of the largest of each, of equal ones the first, if that is known.

    Raises:
        ValueError: if ``logits_NV`` has another number of rows, or draft tokens of the p/q rule come without the
            distributions that they were drawn from.
    """
    starts = list(accumulate((len(row.draft_tokens) + 1 for row in rows), initial=0))
    if logits_NV.dim() != 2 or logits_NV.shape[0] != starts[-1]:
        raise ValueError(
            f"logits_NV has shape {tuple(logits_NV.shape)}; give one row more than draft tokens for each of "
            f"{len(rows)} requests, {starts[-1]} in all"
        )
    results: dict[int, Acceptance] = {}
    if best_N is not None:
        best = best_N.tolist()
        for place, row in enumerate(rows):
            if row.sampling.rule == "greedy" and row.sampling.is_plain:
                results[place] = accept_greedy(row.draft_tokens, best[starts[place] : starts[place + 1]])
        if len(results) == len(rows):
            return list(results.values())
    left = [place for place in range(len(rows)) if place not in results]
    groups = _together([rows[place].sampling for place in left])
    for places in chain(*(_pieces([left[i] for i in group], starts, logits_NV.shape[1]) for group in groups)):
        members = [rows[place] for place in places]
        if places[-1] - places[0] == len(places) - 1:
            logits = logits_NV[starts[places[0]] : starts[places[-1] + 1]]
        else:
            logits = torch.cat([logits_NV[starts[place] : starts[place + 1]] for place in places])
        results.update(zip(places, _VERIFY[members[0].sampling.rule](members, logits), strict=True))
    return [results[place] for place in range(len(rows))]


def token_logprobs(logits_NV: Tensor, token_ids_N: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log-probabilities of the target itself, before temperature, penalties and truncation.

    Args:
        token_ids_N: a token of each row.
        top: how many of the most likely tokens to list as well, K; at most V are.

    Returns:
        float32 ``[N]`` of the given tokens; int64 ids ``[N, K]`` and float32 values ``[N, K]`` of the most likely,
        best first and of equal ones the lowest id first.

    Raises:
        ValueError: if ``top`` is negative.
    """
    if top < 0:
        raise ValueError(f"top is {top}; it must not be negative")
    logprobs_NV = logits_NV.float().log_softmax(dim=-1)
    chosen_N = logprobs_NV.gather(-1, token_ids_N.to(logprobs_NV.device).unsqueeze(-1)).squeeze(-1)
    values_NK, ids_NK = logprobs_NV.topk(min(top, logprobs_NV.shape[-1]), dim=-1)
    by_id_NK = ids_NK.argsort(dim=-1)
    ids_NK, values_NK = ids_NK.gather(-1, by_id_NK), values_NK.gather(-1, by_id_NK)
    best_NK = values_NK.argsort(dim=-1, descending=True, stable=True)
    return chosen_N, ids_NK.gather(-1, best_NK), values_NK.gather(-1, best_NK)


def _together(rows: Sequence[RequestSampling]) -> list[list[int]]:
    """The rows' indices, those that can be computed together in one list."""
    groups: dict[object, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row.together, []).append(place)
    return list(groups.values())


def _pieces(places: Sequence[int], starts: Sequence[int], vocab_size: int) -> list[list[int]]:
    """``places`` cut so that the logits of a piece are not much more than ``_PIECE`` numbers.

    Much larger temporaries would come from the operating system and go back to it each time, page by page.
    """
    pieces: list[list[int]] = []
    size = _PIECE
    for place in places:
        if size >= _PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(place)
        size += (starts[place + 1] - starts[place]) * vocab_size
    return pieces


# What follows gets rows that can be computed together.


def _draft_greedy(
    rows: Sequence[RequestSampling], lengths: Sequence[int], index: int, logits_RD: Tensor, tokens_Rk: Tensor
) -> tuple[Tensor, Tensor | None]:
    return argmax_rows(logits_RD if rows[0].is_plain else _warped_draft(rows, logits_RD, tokens_Rk)), None


def _draft_coupled(
    rows: Sequence[RequestSampling], lengths: Sequence[int], index: int, logits_RD: Tensor, tokens_Rk: Tensor
) -> tuple[Tensor, Tensor | None]:
    probs_RD = _draft_probs(rows, logits_RD, tokens_Rk).cpu()
    columns = [
        coupled_sample_bits(probs_D, row.noise.of_draft(row.next_position + index, len(probs_D)))
        for row, probs_D in zip(rows, probs_RD, strict=True)
    ]
    return torch.tensor(columns, device=logits_RD.device), None


def _draft_speculative(
    rows: Sequence[RequestSampling], lengths: Sequence[int], index: int, logits_RD: Tensor, tokens_Rk: Tensor
) -> tuple[Tensor, Tensor | None]:
    probs_RD = _draft_probs(rows, logits_RD, tokens_Rk)
    uniforms = [row.random() if index < length else 0.0 for row, length in zip(rows, lengths, strict=True)]
    uniforms_R = torch.tensor(uniforms, dtype=torch.float64)
    return sample_rows(probs_RD, uniforms_R), probs_RD


def _verify_greedy(rows: Sequence[VerifyRow], logits_NV: Tensor) -> list[Acceptance]:
    best_N = argmax_rows(logits_NV if rows[0].sampling.is_plain else _warped_target(rows, logits_NV))
    best = iter(best_N.tolist())  # the one wait for the device
    return [accept_greedy(row.draft_tokens, [next(best) for _ in range(len(row.draft_tokens) + 1)]) for row in rows]


def _verify_coupled(rows: Sequence[VerifyRow], logits_NV: Tensor) -> list[Acceptance]:
    probs_NV = _target_probs(rows, logits_NV).cpu()
    acceptances, probs = [], iter(probs_NV)
    for row in rows:
        position, noise = row.sampling.next_position, row.sampling.noise
        samples = [
            coupled_sample_bits(next(probs), noise.of_target(position + k, probs_NV.shape[-1]))
            for k in range(len(row.draft_tokens) + 1)
        ]
        acceptances.append(accept_coupled(row.draft_tokens, samples))
    return acceptances


def _verify_speculative(rows: Sequence[VerifyRow], logits_NV: Tensor) -> list[Acceptance]:
    drafted = [row.draft_probs_LD for row in rows if row.draft_tokens and row.draft_probs_LD is not None]
    accept_uniforms, final_uniforms = [], []
    for row in rows:
        if row.draft_tokens and row.draft_probs_LD is None:
            raise ValueError("draft_probs_LD is None; the p/q rule needs the distributions of the draft tokens")
        accept_uniforms += [row.sampling.random() for _ in row.draft_tokens]
        final_uniforms.append(row.sampling.random())
    lengths = [len(row.draft_tokens) for row in rows]
    tokens = list(chain.from_iterable(row.draft_tokens for row in rows))
    draft_probs_LD = torch.cat(drafted) if drafted else logits_NV.new_empty(0, 0)
    sampling = rows[0].sampling
    given = (draft_probs_LD, accept_uniforms, final_uniforms, sampling.draft_token_ids_D)
    if sampling.settings.is_temperature_alone:
        return accept_tempered_rows(lengths, tokens, logits_NV, sampling.settings.temperature, *given)
    return accept_speculative_rows(lengths, tokens, _target_probs(rows, logits_NV), *given)


def _draft_probs(rows: Sequence[RequestSampling], logits_RD: Tensor, tokens_Rk: Tensor) -> Tensor:
    histories = _draft_histories(rows, tokens_Rk)
    return token_probs(logits_RD, rows[0].draft_settings, histories, rows[0].draft_token_ids_D)


def _warped_draft(rows: Sequence[RequestSampling], logits_RD: Tensor, tokens_Rk: Tensor) -> Tensor:
    histories = _draft_histories(rows, tokens_Rk)
    return warp_logits(logits_RD, rows[0].draft_settings, histories, rows[0].draft_token_ids_D)


def _draft_histories(rows: Sequence[RequestSampling], tokens_Rk: Tensor) -> list[TokenHistory] | None:
    if not rows[0].draft_settings.needs_history:
        return None
    return [row.history.after(tokens) for row, tokens in zip(rows, tokens_Rk.tolist(), strict=True)]


def _target_probs(rows: Sequence[VerifyRow], logits_NV: Tensor) -> Tensor:
    return token_probs(logits_NV, rows[0].sampling.settings, _target_histories(rows))


def _warped_target(rows: Sequence[VerifyRow], logits_NV: Tensor) -> Tensor:
    return warp_logits(logits_NV, rows[0].sampling.settings, _target_histories(rows))


def _target_histories(rows: Sequence[VerifyRow]) -> list[TokenHistory] | None:
    if not rows[0].sampling.settings.needs_history:
        return None
    return list(chain.from_iterable(row.sampling.history.after_each(row.draft_tokens) for row in rows))


_DraftRule = Callable[[Sequence[RequestSampling], Sequence[int], int, Tensor, Tensor], tuple[Tensor, Tensor | None]]
_VerifyRule = Callable[[Sequence[VerifyRow], Tensor], list[Acceptance]]

_DRAFT: dict[Rule, _DraftRule] = {
    "greedy": _draft_greedy,
    "coupled": _draft_coupled,
    "speculative": _draft_speculative,
}
_VERIFY: dict[Rule, _VerifyRule] = {
    "greedy": _verify_greedy,
    "coupled": _verify_coupled,
    "speculative": _verify_speculative,
}
