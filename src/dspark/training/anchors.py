"""Anchors inside responses, and the labels of their blocks (section 3.3).

An anchor is a response token with at least one more response token after it in the same span. Its block's labels are
the next γ tokens while they stay inside that span: a contiguous prefix of the block is supervised, the rest is not.

Shapes: S tokens of a sequence, A anchors, G slots of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "BlockLabels",
    "Int64Array",
    "Span",
    "anchor_positions",
    "block_labels",
    "sample_anchors",
    "supervised_lengths",
    "target_rows",
]

Span = tuple[int, int]
"""Half-open range of token positions."""

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class BlockLabels:
    """Teacher-forced tokens and labels of A blocks.

    Attributes:
        block_tokens_AG: x_0..x_{γ−1}: the token before each predicted token (the anchor first).
        labels_AG: x_1..x_γ. Unsupervised slots repeat the last supervised token, so that every entry is a valid id.
        supervised_AG: whether slot k's label lies in the anchor's own span; a prefix of each row.
    """

    block_tokens_AG: Int64Array
    labels_AG: Int64Array
    supervised_AG: BoolArray


def anchor_positions(response_spans: Sequence[Span]) -> Int64Array:
    """All positions that can be an anchor, ascending: every response token but the last of its span."""
    ranges = [np.arange(start, end - 1, dtype=np.int64) for start, end in response_spans if end - start >= 2]
    positions: Int64Array = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
    return positions


def sample_anchors(response_spans: Sequence[Span], num_anchors: int, generator: np.random.Generator) -> Int64Array:
    """Draw distinct anchors, ascending, one from each of ``num_anchors`` equal strata of the eligible positions.

    Strata spread the blocks of one sequence, so that one visit covers its response evenly; over visits every eligible
    position is equally likely up to the rounding of the strata. Fewer come back when fewer positions are eligible.
    """
    eligible = anchor_positions(response_spans)
    count = min(num_anchors, len(eligible))
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    edges = (np.arange(count + 1, dtype=np.int64) * len(eligible)) // count
    anchors: Int64Array = eligible[edges[:-1] + generator.integers(0, edges[1:] - edges[:-1])]
    return anchors


def supervised_lengths(response_spans: Sequence[Span], anchors_A: Int64Array, block_size: int) -> Int64Array:
    """``[A]``: how many slots of the block at each anchor are supervised, 1 to ``block_size``.

    Raises:
        ValueError: an anchor does not lie in a response span with a token after it.
    """
    lengths_A: Int64Array = np.minimum(_span_ends(response_spans, anchors_A) - 1 - anchors_A, block_size)
    return lengths_A


def block_labels(
    token_ids_S: npt.ArrayLike, response_spans: Sequence[Span], anchors_A: Int64Array, block_size: int
) -> BlockLabels:
    """Teacher-forced tokens, labels and supervision of the blocks at ``anchors_A``.

    Raises:
        ValueError: an anchor does not lie in a response span with a token after it.
    """
    token_ids = np.asarray(token_ids_S, dtype=np.int64)
    last_A1 = _span_ends(response_spans, anchors_A)[:, None] - 1
    positions_AG = anchors_A[:, None] + 1 + np.arange(block_size, dtype=np.int64)[None, :]
    return BlockLabels(
        block_tokens_AG=token_ids[np.minimum(positions_AG - 1, last_A1)],
        labels_AG=token_ids[np.minimum(positions_AG, last_A1)],
        supervised_AG=positions_AG <= last_A1,
    )


def target_rows(response_spans: Sequence[Span], positions: Int64Array) -> Int64Array:
    """Index of each position among ``anchor_positions(response_spans)``, clipped to the positions of its own span.

    The target's distribution for the token at ``t + 1`` is stored under position ``t``; this finds the stored row.
    """
    spans = np.asarray([span for span in sorted(response_spans) if span[1] - span[0] >= 2], dtype=np.int64).reshape(
        -1, 2
    )
    lengths = spans[:, 1] - spans[:, 0] - 1
    offsets = np.cumsum(lengths) - lengths
    span = np.searchsorted(spans[:, 0], positions, side="right") - 1
    within: Int64Array = np.minimum(positions - spans[span, 0], lengths[span] - 1)
    rows: Int64Array = offsets[span] + within
    return rows


def _span_ends(response_spans: Sequence[Span], anchors_A: Int64Array) -> Int64Array:
    """``[A]``: end of the span that each anchor lies in, checked."""
    spans = np.asarray(sorted(response_spans), dtype=np.int64).reshape(-1, 2)
    if len(anchors_A) == 0:
        return np.empty(0, dtype=np.int64)
    span_of_anchor = np.searchsorted(spans[:, 0], anchors_A, side="right") - 1
    if len(spans) == 0 or np.any(span_of_anchor < 0) or np.any(anchors_A >= spans[span_of_anchor, 1] - 1):
        raise ValueError(f"anchors {anchors_A.tolist()} do not all lie in the response spans {spans.tolist()}")
    ends_A: Int64Array = spans[span_of_anchor, 1]
    return ends_A
