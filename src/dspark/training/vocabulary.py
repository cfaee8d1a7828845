"""The reduced draft vocabulary: the tokens that responses are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspark.training.data.rows import DataRow

__all__ = ["DraftVocabulary", "choose_draft_vocabulary", "count_response_tokens"]


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """Target ids of the draft columns.

    Attributes:
        token_ids: ascending target ids, one a column.
        coverage: share of the counted response tokens that are in the vocabulary, in [0, 1].
    """

    token_ids: tuple[int, ...]
    coverage: float

    def columns_of_target_ids(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """For every target id its draft column, or -1: shape [V]."""
        columns = np.full(vocab_size, -1, dtype=np.int64)
        columns[list(self.token_ids)] = np.arange(len(self.token_ids))
        return columns


def count_response_tokens(rows: Iterable[DataRow], vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each token occurs in the responses of ``rows``: shape [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        token_ids = np.asarray(row.token_ids, dtype=np.int64)
        for start, end in row.response_spans:
            np.add.at(counts, token_ids[start:end], 1)
    return counts


def choose_draft_vocabulary(
    counts_V: npt.NDArray[np.int64], size: int, *, always_include: Iterable[int] = ()
) -> DraftVocabulary:
    """The ``size`` most frequent tokens, ties to the lower id; ``always_include`` (end-of-turn tokens) are always in.

    Raises:
        ValueError: the size does not fit the target's vocabulary or the tokens that must be in.
    """
    vocab_size = len(counts_V)
    required = sorted(set(always_include))
    if not 0 < size <= vocab_size:
        raise ValueError(f"draft_vocab_size is {size}: it must lie between 1 and the target's vocabulary, {vocab_size}")
    if len(required) > size:
        raise ValueError(f"draft_vocab_size is {size}, fewer than the {len(required)} tokens that must be in it")
    if required and not 0 <= required[0] <= required[-1] < vocab_size:
        raise ValueError(
            f"tokens that must be in the draft vocabulary, {required}, exceed the target's {vocab_size} ids"
        )
    priority = counts_V.astype(np.float64)
    priority[required] = np.inf
    chosen = np.sort(np.argsort(-priority, kind="stable")[:size])
    total = int(counts_V.sum())
    coverage = float(counts_V[chosen].sum()) / total if total else 1.0
    return DraftVocabulary(token_ids=tuple(chosen.tolist()), coverage=coverage)
