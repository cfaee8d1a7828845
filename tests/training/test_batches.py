"""A step's blocks, its parts, and what a batch of them holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.models.loading import LoadedTarget
from dspark.training.anchors import anchor_positions
from dspark.training.batches import BatchOrder, StepBlocks, draw_step, held_out_split, load_batch
from dspark.training.states import OnlineStates, StoreSpec, store_spec
from tests.training.tiny import HIDDEN, greedy_rows, tiny_target

BLOCK = 4


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def spec(target: LoadedTarget) -> StoreSpec:
    return store_spec(target.model, tap_layers=(0, 2), max_length=100, target_dtype="float32")


@pytest.fixture(scope="module")
def source(target: LoadedTarget, spec: StoreSpec) -> OnlineStates:
    return OnlineStates(target.model, greedy_rows(target, rows=7), spec)


@pytest.fixture(scope="module")
def step(source: OnlineStates) -> StepBlocks:
    order = BatchOrder(source.rows, blocks_per_step=30, anchor_every_tokens=3, seed=5)
    return draw_step(order.batch(0), seed=5, step=0)


def test_a_batch_holds_the_rows_up_to_their_last_anchor_and_the_labels_after_it(
    source: OnlineStates, step: StepBlocks, target: LoadedTarget
) -> None:
    batch = load_batch(source, step, block_size=BLOCK)
    blocks = batch.blocks
    assert blocks.blocks_per_sequence == tuple(len(anchors) for anchors in step.anchors)
    assert blocks.context_lengths == tuple(int(anchors[-1]) for anchors in step.anchors)
    assert blocks.taps_NT.shape == (sum(blocks.context_lengths), 2 * HIDDEN)
    states = source.read(step.rows)
    context, block, slot = 0, 0, 0
    for row, anchors, whole in zip(step.rows, step.anchors, states, strict=True):
        tokens = whole.token_ids_S.tolist()
        length = int(anchors[-1])
        assert blocks.token_ids_N[context : context + length].tolist() == tokens[:length]
        torch.testing.assert_close(
            blocks.taps_NT[context : context + length].float(), whole.taps_ST[:length].float(), rtol=2e-2, atol=2e-2
        )
        context += length
        stored_at = {int(position): index for index, position in enumerate(anchor_positions(row.response_spans))}
        for anchor in anchors.tolist():
            end = next(stop for start, stop in row.response_spans if start <= anchor < stop)
            count = min(BLOCK, end - 1 - anchor)
            assert batch.supervised_MG[block].tolist() == [k < count for k in range(BLOCK)]
            assert blocks.anchors_M[block] == anchor
            assert blocks.block_tokens_MG[block, :count].tolist() == tokens[anchor : anchor + count]
            assert batch.labels_MG[block, :count].tolist() == tokens[anchor + 1 : anchor + 1 + count]
            for k in range(count):
                stored = stored_at[anchor + k]
                torch.testing.assert_close(
                    batch.target_hidden_NH[slot].float(), whole.hidden_PH[stored].float(), rtol=2e-2, atol=2e-2
                )
                torch.testing.assert_close(
                    batch.target_log_normaliser_N[slot], whole.log_normaliser_P[stored], rtol=1e-2, atol=1e-2
                )
                slot += 1
            block += 1
    assert slot == len(batch.target_hidden_NH) == int(batch.supervised_MG.sum())


def test_parts_have_every_block_once_and_their_counts_add_up(step: StepBlocks) -> None:
    for count in (1, 2, 3, len(step.rows) + 2):
        parts = [step.part(index, count) for index in range(count)]
        assert sorted(row.id for part in parts for row in part.rows) == sorted(row.id for row in step.rows)
        assert sum(part.num_blocks for part in parts) == step.num_blocks
        counts = np.sum([part.supervised_blocks(BLOCK) for part in parts], axis=0)
        assert counts.tolist() == step.supervised_blocks(BLOCK).tolist()


def test_supervised_blocks_are_those_of_the_batch(source: OnlineStates, step: StepBlocks) -> None:
    batch = load_batch(source, step, block_size=BLOCK)
    assert step.supervised_blocks(BLOCK).tolist() == batch.supervised_MG.sum(dim=0).tolist()


def test_the_same_step_draws_the_same_anchors_and_another_one_others(source: OnlineStates) -> None:
    order = BatchOrder(source.rows, blocks_per_step=30, anchor_every_tokens=3, seed=5)
    first, again = (draw_step(order.batch(0), seed=5, step=0) for _ in range(2))
    other = draw_step(order.batch(0), seed=5, step=1)
    assert [anchors.tolist() for anchors in first.anchors] == [anchors.tolist() for anchors in again.anchors]
    assert [anchors.tolist() for anchors in first.anchors] != [anchors.tolist() for anchors in other.anchors]


def test_an_empty_part_is_refused(source: OnlineStates, step: StepBlocks) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        load_batch(source, StepBlocks(rows=(), anchors=()), block_size=BLOCK)
    assert StepBlocks(rows=(), anchors=()).supervised_blocks(BLOCK).tolist() == [0] * BLOCK


def test_held_out_rows_stay_held_out_when_the_data_grows(source: OnlineStates) -> None:
    rows = source.rows
    _, few = held_out_split(rows[:5], 0.4)
    training, more = held_out_split(rows, 0.4)
    assert {row.id for row in few} <= {row.id for row in more}
    assert not {row.id for row in training} & {row.id for row in more}
    with pytest.raises(ValueError, match=r"held_out\.fraction 1e-06 leaves 7 rows to train on and 0 held out"):
        held_out_split(rows, 1e-6)
