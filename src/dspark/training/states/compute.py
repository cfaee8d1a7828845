"""The teacher pass: the target over a few rows, and its log-normalisers in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.models.target import Target
from dspark.training.anchors import anchor_positions
from dspark.training.states.spec import RowStates, StoredRow, StoreSpec
from dspark.types import Segment

__all__ = ["RowTokens", "compute_states", "length_batches"]

_LOGIT_COLUMNS = 4096


@dataclass(frozen=True, kw_only=True)
class RowTokens:
    """A row whose states are to be computed for its first ``end`` tokens.

    Attributes:
        token_ids: the row's tokens, possibly more than ``row.length``.
    """

    row: StoredRow
    token_ids: Sequence[int]
    end: int


def length_batches(rows: Sequence[RowTokens], tokens_per_batch: int) -> Iterator[list[RowTokens]]:
    """``rows`` in batches of similar length and at most ``tokens_per_batch`` tokens (or one row), shortest first."""
    batch: list[RowTokens] = []
    tokens = 0
    for row in sorted(rows, key=lambda row: row.end):
        if batch and tokens + row.end > tokens_per_batch:
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += row.end
    if batch:
        yield batch


@torch.no_grad()
def compute_states(target: Target, batch: Sequence[RowTokens], spec: StoreSpec) -> list[RowStates]:
    """States of the rows of one target pass, in their order, on the CPU.

    Raises:
        ValueError: a token id is outside the target's vocabulary, or the target gives NaN or infinity.
    """
    lengths = [item.end for item in batch]
    token_ids = [torch.tensor(item.token_ids[: item.row.length], dtype=torch.int32) for item in batch]
    largest = max(int(ids_S.max()) for ids_S in token_ids)
    if largest >= spec.vocab_size:
        raise ValueError(
            f"the data has token id {largest}, the target's vocabulary {spec.vocab_size} ids: "
            "was it made with another target?"
        )
    token_ids_N = torch.cat([ids_S[:length] for ids_S, length in zip(token_ids, lengths, strict=True)]).long()
    segments = [Segment(slot=slot, start=0, length=length) for slot, length in enumerate(lengths)]
    cache = target.new_cache(len(batch), max(lengths))
    output = target.forward(token_ids_N.to(target.device), segments, cache, tap_layers=spec.tap_layers)
    assert output.taps_NT is not None
    predictions = [item.row.predictions_before(item.end) for item in batch]
    starts = np.cumsum(lengths) - lengths
    positions = np.concatenate(
        [
            start + anchor_positions(item.row.response_spans)[:count]
            for start, item, count in zip(starts, batch, predictions, strict=True)
        ]
    )
    hidden_PH = output.hidden_NH[torch.from_numpy(positions).to(target.device)].to(torch.bfloat16)
    log_normaliser_P, argmax_P = _normalisers(target, hidden_PH)
    # Copied, so that nothing of the target's own tensors (which autograd refuses) is handed on.
    taps_NT = output.taps_NT.to("cpu", torch.bfloat16, copy=True)
    if not bool(torch.isfinite(log_normaliser_P).all()) or not bool(torch.isfinite(taps_NT).all()):
        raise ValueError(
            f"the target gives NaN or infinite states for rows {batch[0].row.id} … {batch[-1].row.id} in "
            f"{spec.target_dtype}: compute it in another type (states.dtype), or check its weights"
        )
    columns = (
        taps_NT.split(lengths),
        hidden_PH.cpu().split(predictions),
        log_normaliser_P.cpu().split(predictions),
        argmax_P.cpu().split(predictions),
    )
    return [
        RowStates(
            token_ids_S=token_ids_S,
            taps_ST=taps_ST,
            hidden_PH=row_hidden_PH,
            log_normaliser_P=row_log_normaliser_P,
            argmax_P=row_argmax_P,
            response_spans=item.row.response_spans,
        )
        for item, token_ids_S, taps_ST, row_hidden_PH, row_log_normaliser_P, row_argmax_P in zip(
            batch, token_ids, *columns, strict=True
        )
    ]


def _normalisers(target: Target, hidden_PH: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp [P] and argmax [P] of the logits, in float32 and a part of the vocabulary at a time.

    So no float32 copy of the LM head and no [P, V] logits are needed, and each part is one large product.
    """
    weight_VH, bias_V = target.lm_head_weight_VH.detach(), target.lm_head_bias_V
    softcap = target.config.final_softcap
    float_hidden_PH = hidden_PH.float()
    maximum_P = torch.full((len(hidden_PH),), float("-inf"), device=hidden_PH.device)
    total_P = torch.zeros_like(maximum_P)
    argmax_P = torch.zeros_like(maximum_P, dtype=torch.int32)
    for first in range(0, len(weight_VH), _LOGIT_COLUMNS):
        part = slice(first, first + _LOGIT_COLUMNS)
        logits_PC = float_hidden_PH @ weight_VH[part].float().T
        if bias_V is not None:
            logits_PC += bias_V[part].float()
        if softcap is not None:
            logits_PC = softcap * torch.tanh(logits_PC / softcap)
        part_maximum_P, part_argmax_P = logits_PC.max(dim=1)
        argmax_P = torch.where(part_maximum_P > maximum_P, (first + part_argmax_P).to(torch.int32), argmax_P)
        new_maximum_P = torch.maximum(maximum_P, part_maximum_P)
        part_total_P = logits_PC.sub_(new_maximum_P[:, None]).exp_().sum(dim=1)
        total_P = total_P * (maximum_P - new_maximum_P).exp() + part_total_P
        maximum_P = new_maximum_P
    return maximum_P + total_P.log(), argmax_P
