from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dspark.training.anchors import anchor_positions, block_labels, sample_anchors, target_rows

GOLDEN = Path(__file__).parents[1] / "golden" / "dspark-vanilla" / "expected_training.safetensors"

Spans = list[tuple[int, int]]


@st.composite
def spans(draw: st.DrawFn) -> Spans:
    position, result = 0, []
    for _ in range(draw(st.integers(1, 4))):
        start = position + draw(st.integers(0, 5))
        end = start + draw(st.integers(1, 20))
        result.append((start, end))
        position = end
    return result


@given(spans(), st.integers(1, 30), st.integers(1, 8), st.integers(0, 1000))
def test_blocks_never_leave_the_span_of_their_anchor(spans: Spans, count: int, block_size: int, seed: int) -> None:
    token_ids = np.arange(1000, 1000 + spans[-1][1])
    anchors = sample_anchors(spans, count, np.random.default_rng(seed))
    assert len(anchors) == min(count, len(anchor_positions(spans)))
    assert np.all(np.diff(anchors) > 0)
    blocks = block_labels(token_ids, spans, anchors, block_size)
    for anchor, labels, previous, supervised in zip(
        anchors, blocks.labels_AG, blocks.block_tokens_AG, blocks.supervised_AG, strict=True
    ):
        (span,) = [span for span in spans if span[0] <= anchor < span[1]]
        expected = min(block_size, span[1] - 1 - anchor)
        assert expected >= 1
        assert supervised.tolist() == [True] * expected + [False] * (block_size - expected)
        assert labels[:expected].tolist() == token_ids[anchor + 1 : anchor + 1 + expected].tolist()
        assert previous[:expected].tolist() == token_ids[anchor : anchor + expected].tolist()
        assert set(labels.tolist()) <= set(token_ids.tolist())


@given(spans())
def test_target_rows_find_every_predicting_position(spans: Spans) -> None:
    positions = anchor_positions(spans)
    if len(positions):
        assert target_rows(spans, positions).tolist() == list(range(len(positions)))


def test_every_anchor_is_drawn_about_equally_often() -> None:
    spans = [(3, 10), (12, 27)]
    generator = np.random.default_rng(0)
    drawn = np.concatenate([sample_anchors(spans, 4, generator) for _ in range(5000)])
    counts = np.bincount(drawn, minlength=27)
    eligible = anchor_positions(spans)
    assert counts.sum() == counts[eligible].sum()
    assert np.all(np.abs(counts[eligible] / 1000 - 1) < 0.15)  # 20 eligible positions, 4 strata of 5


def test_labels_and_supervision_are_those_of_the_reference() -> None:
    golden = load_file(GOLDEN)
    for row in range(len(golden["input_ids"])):
        mask = golden["loss_mask"][row].astype(int)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        keep = golden["anchor_keep"][row].astype(bool)
        blocks = block_labels(golden["input_ids"][row], spans, golden["anchors"][row][keep], 5)
        supervised = golden["supervised"][row][keep].astype(bool)
        assert np.array_equal(blocks.supervised_AG, supervised)
        assert np.array_equal(blocks.labels_AG[supervised], golden["target_ids"][row][keep][supervised])


@pytest.mark.parametrize("anchor", [2, 9, 10, 11])
def test_an_anchor_outside_the_responses_is_refused(anchor: int) -> None:
    with pytest.raises(ValueError, match="do not all lie in the response spans"):
        block_labels(np.arange(20), [(3, 10), (12, 15)], np.array([anchor]), 4)


def test_spans_without_room_for_a_label_have_no_anchor() -> None:
    assert len(sample_anchors([(3, 4), (7, 8)], 5, np.random.default_rng(0))) == 0
    assert block_labels(np.arange(9), [(3, 4)], np.empty(0, np.int64), 4).labels_AG.shape == (0, 4)
