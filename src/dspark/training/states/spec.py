"""What teacher states are of, what they are, and who gives them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from dspark.models.target import Target
from dspark.training.anchors import Span
from dspark.training.data.rows import DataRow

__all__ = ["RowStates", "StateSource", "StoreSpec", "StoredRow", "cut_spans", "store_spec", "stored_row"]


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """What the states of a source depend on, apart from the rows.

    Attributes:
        target_fingerprint: the checkpoint that the states are of (``Target.fingerprint``).
        target_dtype: the type the target computed in.
        tap_layers: decoder layers whose outputs stand side by side.
        max_length: rows are cut after this many tokens.
        final_softcap: ``cap * tanh(logits / cap)`` of the target's LM head; None for none.
    """

    target_fingerprint: str
    target_dtype: str
    tap_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    max_length: int
    final_softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """A row as training sees it: its length and response spans, both cut at ``max_length``.

    Attributes:
        digest: hash of the tokens and spans.
    """

    id: str
    length: int
    response_spans: tuple[Span, ...]
    digest: str

    @property
    def predictions(self) -> int:
        """P: number of positions that predict a label, which are the positions that can be an anchor."""
        return sum(max(0, end - start - 1) for start, end in self.response_spans)

    def predictions_before(self, end: int) -> int:
        """How many of the predicting positions are smaller than ``end``."""
        return sum(max(0, min(end, stop - 1) - start) for start, stop in self.response_spans)


@dataclass(frozen=True, kw_only=True)
class RowStates:
    """Teacher states of one row, or of its first ``end`` tokens where only those were asked for.

    Row i of the P-sized tensors belongs to position ``anchor_positions(response_spans)[i]`` and predicts the token
    after it.

    Attributes:
        token_ids_S: int32, all tokens of the row.
        taps_ST: bfloat16, tap states of the first ``end`` tokens.
        hidden_PH: bfloat16, states after the final norm at the predicting positions before ``end``.
        log_normaliser_P: float32, logsumexp of the target's logits there.
        argmax_P: int32, the most likely next token there.
        response_spans: of the whole row.
    """

    token_ids_S: Tensor
    taps_ST: Tensor
    hidden_PH: Tensor
    log_normaliser_P: Tensor
    argmax_P: Tensor
    response_spans: tuple[Span, ...]


class StateSource(Protocol):
    """Gives the teacher states of rows."""

    @property
    def spec(self) -> StoreSpec:
        """What the states are of; ``taps_ST`` has the layers of ``spec.tap_layers`` in that order."""
        ...

    @property
    def rows(self) -> tuple[StoredRow, ...]:
        """All rows there are."""
        ...

    def read(self, rows: Sequence[StoredRow], ends: Sequence[int] | None = None) -> list[RowStates]:
        """States of ``rows``, in their order, on the CPU.

        Args:
            rows: some of :attr:`rows`.
            ends: of each row only the first ``ends[i] >= 1`` tokens are needed; beyond its length it counts as that.
                None for all of them.
        """
        ...


def store_spec(
    target: Target, *, tap_layers: Sequence[int], max_length: int, target_dtype: str, allow_final: bool = False
) -> StoreSpec:
    """Spec of ``target``'s states.

    Args:
        target: gives the states.
        tap_layers: decoder layers to tap.
        max_length: rows are cut after this many tokens.
        target_dtype: the type the target computes in.
        allow_final: whether the output of the last decoder layer may be tapped. Only a drafter that continues from
            it (MTP) may ask for it.

    Raises:
        ValueError: a tap layer does not exist, occurs twice or is the final one without ``allow_final``, or
            ``max_length`` exceeds the target's context.
    """
    config = target.config
    layers = f"the target has layers 0..{config.num_layers - 1}"
    for layer in tap_layers:
        if allow_final and not 0 <= layer < config.num_layers:
            raise ValueError(f"tap_layers has {layer}: {layers}")
        if not allow_final and not 0 <= layer < config.num_layers - 1:
            raise ValueError(f"tap_layers has {layer}: {layers}, and the final one is not allowed")
        if list(tap_layers).count(layer) > 1:
            raise ValueError(f"tap_layers has {layer} more than once: name each layer once")
    if not 2 <= max_length <= config.max_position_embeddings:
        raise ValueError(f"max_length is {max_length}: it must lie between 2 and {config.max_position_embeddings}")
    return StoreSpec(
        target_fingerprint=target.fingerprint,
        target_dtype=target_dtype,
        tap_layers=tuple(tap_layers),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_length=max_length,
        final_softcap=config.final_softcap,
    )


def cut_spans(row: DataRow, max_length: int) -> tuple[Span, ...]:
    """Response spans of ``row`` cut at ``max_length``."""
    return tuple((start, min(end, max_length)) for start, end in row.response_spans if start < max_length)


def stored_row(row: DataRow, spec: StoreSpec) -> StoredRow:
    """``row`` cut at ``spec.max_length``."""
    length = min(len(row.token_ids), spec.max_length)
    spans = cut_spans(row, spec.max_length)
    digest = hashlib.sha256(np.asarray(row.token_ids[:length], dtype=np.int32).tobytes() + repr(spans).encode())
    return StoredRow(id=row.id, length=length, response_spans=spans, digest=digest.hexdigest()[:16])
