"""Which draft tokens of one request's block are kept, and the token the target adds (SPEC "One round", step 4).

Three rules, one for each way of sampling:

=================== ============================ ============================================ =====================
rule                a draft token is kept        the emitted token is                         lossless under
=================== ============================ ============================================ =====================
accept_greedy       while it is the argmax       the target's argmax                          any scheduler
accept_coupled      while it is the target's     the target's own sample for (prefix, seed)   any scheduler
                    own sample
accept_speculative  with min(1, p/q)             distributed as the target's                  non-anticipating ones
=================== ============================ ============================================ =====================

Non-anticipating: whether x_k is verified may depend on x_1..x_{k-1}, never on x_k or what follows.

Shapes: L draft tokens to verify (0 is allowed), R = L + 1 rows of the target, V target ids, D draft columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.decoding.compiled import (
    NO_DISTRIBUTION,
    NO_MAXIMUM,
    NOT_DRAWN,
    RIGHT,
    SUM_TOLERANCE,
    judge_block,
    readable,
    residual,
    row_masses,
)
from dspark.decoding.sampling import sample_from
from dspark.decoding.settings import SamplingSettings
from dspark.decoding.transforms import columns_of, token_probs
from dspark.models.threads import run_parts

_SUM_PRECISION = 1e-5


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The outcome of one block: draft tokens x_1..x_{num_accepted} are committed, then ``next_token``.

    ``next_token`` is the correction after a rejection, the bonus token after none.
    """

    num_accepted: int
    next_token: int


def accept_speculative(
    draft_tokens_L: Sequence[int] | Tensor,
    target_probs_RV: Tensor,
    draft_probs_LD: Tensor,
    accept_uniforms_L: Sequence[float] | Tensor,
    final_uniform: float,
    draft_token_ids_D: Tensor | None = None,
) -> Acceptance:
    """Speculative sampling (arXiv 2211.17192, Algorithm 1; 2302.01318).

    x_k is accepted if u_k q_k(x_k) < p_k(x_k), that is with probability min(1, p_k(x_k) / q_k(x_k)). At the first
    rejection the next token is drawn from norm(max(p_k - q_k, 0)), after none from p_{L+1}.

    Exact as long as x_k was drawn from q_k as passed, the uniforms are fresh, and L is non-anticipating. Rows are
    normalised in float64 before they are compared, as ``sample_rows`` does, so float32 rounding of their sums makes no
    bias (where it cannot matter, their sums may be in float32).

    Args:
        draft_tokens_L: target ids x_1..x_L.
        target_probs_RV: [L + 1, V], row k the target's distribution after x_1..x_k (row 0: after the anchor).
        draft_probs_LD: [L, D], row k the distribution that x_{k+1} was drawn from.
        accept_uniforms_L: L numbers in [0, 1), for the tests.
        final_uniform: in [0, 1), for the next token.
        draft_token_ids_D: int64 [D], the target id of each draft column; None if D = V. Other ids have q = 0.

    Raises:
        ValueError: shapes do not fit, a row is not a distribution (NaN included), a uniform is outside [0, 1), or a
            draft token has q = 0 (it cannot have been drawn from that row).
    """
    draft_tokens = _as_token_list(draft_tokens_L)
    return accept_speculative_rows(
        [len(draft_tokens)],
        draft_tokens,
        target_probs_RV,
        draft_probs_LD,
        accept_uniforms_L,
        [final_uniform],
        draft_token_ids_D,
    )[0]


def accept_speculative_rows(
    draft_lengths: Sequence[int],
    draft_tokens_L: Sequence[int] | Tensor,
    target_probs_RV: Tensor,
    draft_probs_LD: Tensor,
    accept_uniforms_L: Sequence[float] | Tensor,
    final_uniforms: Sequence[float],
    draft_token_ids_D: Tensor | None = None,
) -> list[Acceptance]:
    """``accept_speculative`` for the blocks of many requests, which stand one after the other in every argument.

    What a block gets does not depend on the others.

    Args:
        draft_lengths: draft tokens of each block, L together. A block has one target row more than draft tokens.
        draft_tokens_L, target_probs_RV, draft_probs_LD, accept_uniforms_L, draft_token_ids_D: as there.
        final_uniforms: one for each block.

    Raises:
        ValueError: as there; rows are counted through all blocks.
    """
    draft_tokens = _as_token_list(draft_tokens_L)
    accept_uniforms = [float(value) for value in accept_uniforms_L]
    _check_shapes(draft_lengths, len(draft_tokens), target_probs_RV, draft_probs_LD, draft_token_ids_D)
    _check_uniforms(draft_lengths, accept_uniforms, final_uniforms)
    target_sums = _checked_sums(target_probs_RV, "target_probs_RV")
    draft_sums = _checked_sums(draft_probs_LD, "draft_probs_LD")
    blocks = list(_blocks(draft_lengths))
    row_of_draft = [row + k for _, row, length in blocks for k in range(length)]
    p_L = _at_tokens(target_probs_RV, row_of_draft, draft_tokens)
    q_L = _at_draft_tokens(draft_probs_LD, draft_tokens, draft_token_ids_D)

    def is_kept(draft: int) -> bool:
        if not q_L[draft] > 0:
            raise ValueError(_not_drawn(draft, draft_tokens[draft]))
        row, uniform = row_of_draft[draft], accept_uniforms[draft]
        needed, p = uniform * (q_L[draft] / draft_sums[draft]), p_L[draft] / target_sums[row]
        if abs(needed - p) <= _SUM_PRECISION * p:  # too near, if the sums are in float32
            q = q_L[draft] / float(draft_probs_LD[draft].sum(dtype=torch.float64))
            needed, p = uniform * q, p_L[draft] / float(target_probs_RV[row].sum(dtype=torch.float64))
        return needed < p

    acceptances = []
    for block, (draft, row, length) in enumerate(blocks):  # one by one: a row's temporaries stay in the CPU's cache
        k = next((k for k in range(length) if not is_kept(draft + k)), length)
        next_probs_V = target_probs_RV[row + k]
        if k < length:
            next_probs_V = residual_probs(next_probs_V, draft_probs_LD[draft + k], draft_token_ids_D)
        acceptances.append(Acceptance(k, sample_from(next_probs_V, final_uniforms[block])))
    return acceptances


def accept_tempered_rows(
    draft_lengths: Sequence[int],
    draft_tokens_L: Sequence[int] | Tensor,
    target_logits_RV: Tensor,
    temperature: float,
    draft_probs_LD: Tensor,
    accept_uniforms_L: Sequence[float] | Tensor,
    final_uniforms: Sequence[float],
    draft_token_ids_D: Tensor | None = None,
) -> list[Acceptance]:
    """``accept_speculative_rows`` with the target's distributions ``softmax(logits / temperature)``.

    On a CPU in float32, a row costs nothing (and is not checked) if a draft token before it is rejected.

    Args:
        target_logits_RV: as ``target_probs_RV`` there.
        temperature: above 0.

    Raises:
        ValueError: as there, or a row of logits has no finite maximum.
    """
    settings = SamplingSettings(temperature=temperature)
    if settings.is_greedy:
        raise ValueError("temperature is 0: there is no softmax to divide by it (accept_greedy)")
    logits, draft_probs = readable(target_logits_RV), readable(draft_probs_LD)
    if logits is None or logits.dtype != np.float32 or draft_probs is None:
        probs_RV = token_probs(target_logits_RV, settings)
        return accept_speculative_rows(
            draft_lengths, draft_tokens_L, probs_RV, draft_probs_LD, accept_uniforms_L, final_uniforms,
            draft_token_ids_D,
        )  # fmt: skip
    tokens_L = np.array(_as_token_list(draft_tokens_L), np.int64)
    uniforms_L = np.array([float(value) for value in accept_uniforms_L])
    _check_shapes(
        draft_lengths, len(tokens_L), target_logits_RV, draft_probs_LD, draft_token_ids_D, name="target_logits_RV"
    )
    _check_uniforms(draft_lengths, uniforms_L.tolist(), final_uniforms)
    _check_tokens(tokens_L.tolist(), logits.shape[1])
    columns, has_column = columns_of(torch.from_numpy(tokens_L), logits.shape[1], draft_token_ids_D)
    columns_L, ids_D = torch.where(has_column, columns, -1).numpy(), _checked_ids(draft_token_ids_D, logits.shape[1])
    blocks = list(_blocks(draft_lengths))
    judged = [(0, 0, RIGHT)] * len(blocks)

    def judge(index: int) -> bool:
        draft, row, length = blocks[index]
        drafts = slice(draft, draft + length)
        judged[index] = judge_block(
            logits[row : row + length + 1], temperature, tokens_L[drafts], columns_L[drafts], draft_probs[drafts],
            uniforms_L[drafts], final_uniforms[index], ids_D,
        )  # fmt: skip
        return True

    run_parts(judge, len(blocks), min(torch.get_num_threads(), len(blocks) // 2), judged)
    for (draft, row, _), (k, token, problem) in zip(blocks, judged, strict=True):
        if problem == NO_MAXIMUM:
            raise ValueError(f"target_logits_RV[{row + k}] has no finite maximum: it has NaN or +inf, or is all -inf")
        if problem == NO_DISTRIBUTION:
            q_D = draft_probs[draft + k]
            raise ValueError(_no_distribution("draft_probs_LD", draft + k, float(q_D.sum()), float(q_D.min())))
        if problem == NOT_DRAWN:
            raise ValueError(_not_drawn(draft + k, int(tokens_L[draft + k])))
        assert token >= 0, "a softmax and a residual have mass"
    return [Acceptance(k, token) for k, token, _ in judged]


def _blocks(draft_lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first draft token, first target row, draft tokens) of each block."""
    draft = row = 0
    for length in draft_lengths:
        yield draft, row, length
        draft, row = draft + length, row + length + 1


def residual_probs(target_probs_V: Tensor, draft_probs_D: Tensor, draft_token_ids_D: Tensor | None = None) -> Tensor:
    """What the target still owes after a rejection: norm(max(p - q, 0)) (arXiv 2211.17192, section 2.3), float64 [V].

    p and q are first normalised in float64. After a true rejection the mass of max(p - q, 0) equals that of
    max(q - p, 0) and is positive. If rounding leaves none (p and q equal but for last bits), p itself is returned: such
    a rejection has a probability of the order of 1e-16, and what is emitted then is still a sample of the target.
    """
    p, q = readable(target_probs_V), readable(draft_probs_D)
    if p is not None and q is not None:
        ids_D = None if draft_token_ids_D is None else draft_token_ids_D.cpu().numpy()
        return torch.from_numpy(residual(p, q, ids_D))
    p_V = target_probs_V.to(torch.float64)
    q_D = draft_probs_D.to(torch.float64)
    p_V = p_V / p_V.sum()
    q_D = q_D / q_D.sum()
    if draft_token_ids_D is None:
        residual_V = p_V - q_D
    else:
        residual_V = p_V.index_add(0, draft_token_ids_D.to(p_V.device), q_D, alpha=-1)
    residual_V = residual_V.clamp_(min=0)
    mass = residual_V.sum()
    return residual_V / mass if bool(mass > 0) else p_V


def accept_greedy(draft_tokens_L: Sequence[int] | Tensor, target_tokens_R: Sequence[int] | Tensor) -> Acceptance:
    """Temperature 0: accept while the draft token is the target's argmax; the next token is the argmax there.

    This is ``accept_speculative`` for one-hot p, without the distributions: u q(x) < 1 always, u q(x) < 0 never, and
    the residual of a one-hot p is p.

    Args:
        draft_tokens_L: target ids x_1..x_L.
        target_tokens_R: [L + 1], entry k the target's argmax after x_1..x_k, penalties and bias applied.

    Raises:
        ValueError: there is not exactly one target token more than draft tokens.
    """
    return _accept_while_equal(draft_tokens_L, target_tokens_R)


def accept_coupled(draft_tokens_L: Sequence[int] | Tensor, target_samples_R: Sequence[int] | Tensor) -> Acceptance:
    """Seeded coupling: accept while the draft token is the target's own sample; the next token is the sample there.

    Everything emitted is the target's own sample for (prefix, seed), whatever was drafted and however much of it was
    verified.

    Args:
        draft_tokens_L: target ids x_1..x_L, best drawn with the same noise as the target's samples.
        target_samples_R: [L + 1], entry k is ``coupled_sample`` of p(. | x_1..x_k) with ``gumbel_noise`` of the
            request's seed and the absolute position of x_{k+1}.

    Raises:
        ValueError: there is not exactly one target sample more than draft tokens.
    """
    return _accept_while_equal(draft_tokens_L, target_samples_R)


def _accept_while_equal(draft_tokens_L: Sequence[int] | Tensor, target_tokens_R: Sequence[int] | Tensor) -> Acceptance:
    draft_tokens = _as_token_list(draft_tokens_L)
    target_tokens = _as_token_list(target_tokens_R)
    if len(target_tokens) != len(draft_tokens) + 1:
        raise ValueError(
            f"{len(target_tokens)} target tokens for {len(draft_tokens)} draft tokens; give one more than draft tokens"
        )
    num_accepted = 0
    while num_accepted < len(draft_tokens) and draft_tokens[num_accepted] == target_tokens[num_accepted]:
        num_accepted += 1
    return Acceptance(num_accepted, target_tokens[num_accepted])


def _as_token_list(tokens: Sequence[int] | Tensor) -> list[int]:
    return [int(token) for token in (tokens.tolist() if isinstance(tokens, Tensor) else tokens)]


def _check_shapes(
    draft_lengths: Sequence[int],
    num_drafted: int,
    target_probs_RV: Tensor,
    draft_probs_LD: Tensor,
    draft_token_ids_D: Tensor | None,
    name: str = "target_probs_RV",
) -> None:
    if num_drafted != sum(draft_lengths):
        raise ValueError(f"draft_tokens_L has {num_drafted} tokens; draft_lengths asks for {sum(draft_lengths)}")
    num_rows = num_drafted + len(draft_lengths)
    if target_probs_RV.dim() != 2 or target_probs_RV.shape[0] != num_rows:
        raise ValueError(
            f"{name} has shape {tuple(target_probs_RV.shape)}; {num_drafted} draft tokens need {num_rows} rows"
        )
    if draft_probs_LD.dim() != 2 or draft_probs_LD.shape[0] != num_drafted:
        raise ValueError(
            f"draft_probs_LD has shape {tuple(draft_probs_LD.shape)}; "
            f"{num_drafted} draft tokens need {num_drafted} rows"
        )
    num_columns = target_probs_RV.shape[1] if draft_token_ids_D is None else draft_token_ids_D.shape[0]
    if num_drafted > 0 and draft_probs_LD.shape[1] != num_columns:
        raise ValueError(
            f"draft_probs_LD has {draft_probs_LD.shape[1]} columns, not {num_columns}; "
            "with a reduced draft vocabulary pass draft_token_ids_D, one id for each column"
        )


def _check_tokens(draft_tokens: Sequence[int], num_tokens: int) -> None:
    if not all(0 <= token < num_tokens for token in draft_tokens):
        raise ValueError(f"draft_tokens_L has an id outside the vocabulary 0..{num_tokens - 1}: {list(draft_tokens)}")


def _no_distribution(name: str, row: int, total: float, smallest: float) -> str:
    return (
        f"{name}[{row}] is not a distribution: it sums to {total:.6g}, its smallest entry is {smallest:.6g}; pass "
        "probabilities (token_probs), not logits"
    )


def _not_drawn(draft: int, token: int) -> str:
    return (
        f"draft_tokens_L[{draft}] is {token}, which draft_probs_LD[{draft}] gives probability 0; pass the distribution "
        "the token was drawn from"
    )


def _check_uniforms(
    draft_lengths: Sequence[int], accept_uniforms: Sequence[float], final_uniforms: Sequence[float]
) -> None:
    if len(accept_uniforms) != sum(draft_lengths):
        raise ValueError(f"accept_uniforms_L has {len(accept_uniforms)} numbers for {sum(draft_lengths)} draft tokens")
    if len(final_uniforms) != len(draft_lengths):
        raise ValueError(f"final_uniforms has {len(final_uniforms)} numbers for {len(draft_lengths)} blocks")
    if not all(0 <= value < 1 for value in (*accept_uniforms, *final_uniforms)):
        raise ValueError("accept_uniforms_L or final_uniform has a number outside [0, 1)")


def _checked_sums(probs_NV: Tensor, name: str) -> list[float]:
    """Sums of the rows, off by less than ``_SUM_PRECISION`` of themselves; an error where a row is no distribution."""
    if len(probs_NV) == 0:
        return []
    if (rows := readable(probs_NV)) is not None:
        sums_N, smallest_N = row_masses(rows)
    else:
        sums_N = probs_NV.sum(dim=-1, dtype=torch.promote_types(probs_NV.dtype, torch.float32)).cpu().numpy()
        smallest_N = probs_NV.amin(dim=-1).float().cpu().numpy()
    is_distribution = (abs(sums_N - 1) <= SUM_TOLERANCE) & (smallest_N >= 0)  # NaN fails both
    if not is_distribution.all():
        row = int((~is_distribution).nonzero()[0][0])
        raise ValueError(_no_distribution(name, row, float(sums_N[row]), float(smallest_N[row])))
    sums: list[float] = sums_N.tolist()
    return sums


def _at_tokens(probs_RV: Tensor, rows_L: Sequence[int], tokens_L: Sequence[int]) -> list[float]:
    """Probability of a token in a row, L times."""
    _check_tokens(tokens_L, probs_RV.shape[-1])
    values: list[float] = probs_RV[list(rows_L), list(tokens_L)].tolist()
    return values


def _at_draft_tokens(probs_LD: Tensor, tokens_L: Sequence[int], token_ids_D: Tensor | None) -> list[float]:
    """Probability of each row's own token; 0 where a reduced vocabulary has no column for it."""
    if len(tokens_L) == 0:
        return []
    tokens = torch.tensor(tokens_L, dtype=torch.long, device=probs_LD.device)
    columns_L, has_column_L = columns_of(tokens, probs_LD.shape[-1], token_ids_D)
    columns_L1 = torch.where(has_column_L, columns_L, 0).unsqueeze(-1)
    values: list[float] = torch.where(has_column_L, probs_LD.gather(-1, columns_L1).squeeze(-1), 0).tolist()
    return values


def _checked_ids(token_ids_D: Tensor | None, num_tokens: int) -> npt.NDArray[np.int64] | None:
    if token_ids_D is None:
        return None
    ids_D: npt.NDArray[np.int64] = token_ids_D.numpy()
    if len(ids_D) and not 0 <= ids_D.min() <= ids_D.max() < num_tokens:
        raise ValueError(f"draft_token_ids_D has an id outside the vocabulary 0..{num_tokens - 1}")
    return ids_D
