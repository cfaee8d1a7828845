"""Which sequences and anchors a step trains on, and their tensors.

Everything random is a function of (seed, epoch) or (seed, step): a resumed run needs no generator state, only its step.

A step is one list of rows and anchors, decided before anything is read. It may be cut into parts (processes times
accumulation steps); what the loss is divided by is known from the whole step.

Shapes: M blocks, G slots of a block, N supervised slots, H hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.packing import PackedBlocks
from dspark.training.anchors import (
    Int64Array,
    block_labels,
    sample_anchors,
    supervised_lengths,
    target_rows,
)
from dspark.training.states import StateSource, StoredRow

__all__ = ["BatchOrder", "StepBlocks", "TrainingBatch", "draw_step", "held_out_split", "load_batch"]

_EPOCH_STREAM, _STEP_STREAM = 1, 2
_WINDOW_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class StepBlocks:
    """Rows of a step (or of a part of one) and the anchors in each, ascending."""

    rows: tuple[StoredRow, ...]
    anchors: tuple[Int64Array, ...]

    @property
    def num_blocks(self) -> int:
        """Anchors of all rows."""
        return sum(len(anchors) for anchors in self.anchors)

    def part(self, index: int, count: int) -> StepBlocks:
        """Part ``index`` of ``count``: every ``count``-th row. Empty where there are fewer rows than parts."""
        return StepBlocks(rows=self.rows[index::count], anchors=self.anchors[index::count])

    def supervised_blocks(self, block_size: int) -> Int64Array:
        """``[G]``: for each slot, how many blocks supervise it."""
        lengths = [
            supervised_lengths(row.response_spans, anchors, block_size)
            for row, anchors in zip(self.rows, self.anchors, strict=True)
        ]
        lengths_M = np.concatenate(lengths) if lengths else np.empty(0, dtype=np.int64)
        counts_G: Int64Array = (lengths_M[:, None] > np.arange(block_size)).sum(axis=0, dtype=np.int64)
        return counts_G


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Tensors of a step, or of a part of one.

    Attributes:
        blocks: what the drafter sees.
        labels_MG: x_1..x_γ, target ids.
        supervised_MG: whether a slot counts; a prefix of each block.
        target_hidden_NH: the target's final hidden state for each supervised slot, in row-major order of
            ``supervised_MG``.
        target_log_normaliser_N: logsumexp of its logits over the full vocabulary.
        target_argmax_N: its most likely token.
    """

    blocks: PackedBlocks
    labels_MG: Tensor
    supervised_MG: Tensor
    target_hidden_NH: Tensor
    target_log_normaliser_N: Tensor
    target_argmax_N: Tensor


class _Named(Protocol):
    @property
    def id(self) -> str: ...


Row = TypeVar("Row", bound=_Named)


def held_out_split(rows: Sequence[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """Split rows in (training, held out) by a hash of their ids.

    Raises:
        ValueError: one of the two would be empty.
    """
    training: list[Row] = []
    held_out: list[Row] = []
    for row in rows:
        draw = int.from_bytes(hashlib.sha256(f"held-out {row.id}".encode()).digest()[:8], "big") / 2.0**64
        (held_out if draw < fraction else training).append(row)
    if not training or not held_out:
        raise ValueError(
            f"held_out.fraction {fraction} leaves {len(training)} rows to train on and {len(held_out)} held out: "
            "make more data or change the fraction"
        )
    return training, held_out


class BatchOrder:
    """The order of a run's batches: rows shuffled every epoch, similar ones together to save padding."""

    def __init__(self, rows: Sequence[StoredRow], *, blocks_per_step: int, anchor_every_tokens: int, seed: int) -> None:
        """See ``BatchRecipe`` for the arguments.

        Raises:
            ValueError: there are no rows.
        """
        if not rows:
            raise ValueError("there is no row to train on")
        self._rows = rows
        self._num_anchors = [-(-row.predictions // anchor_every_tokens) for row in rows]
        self._blocks_per_step = blocks_per_step
        self._seed = seed
        self._epoch = -1
        self._first_step = 0
        self._batches: list[list[int]] = []

    def batch(self, step: int) -> list[tuple[StoredRow, int]]:
        """Rows of a step (0-based), each with its number of anchors."""
        if step < self._first_step:
            self._epoch, self._first_step, self._batches = -1, 0, []
        while step >= self._first_step + len(self._batches):
            self._first_step += len(self._batches)
            self._epoch += 1
            self._batches = self._epoch_batches(self._epoch)
        return [(self._rows[i], self._num_anchors[i]) for i in self._batches[step - self._first_step]]

    def epoch(self, step: int) -> int:
        """Epoch (0-based) that a step belongs to."""
        self.batch(step)
        return self._epoch

    def _epoch_batches(self, epoch: int) -> list[list[int]]:
        generator = _generator(self._seed, _EPOCH_STREAM, epoch)
        order = generator.permutation(len(self._rows)).tolist()
        batches: list[list[int]] = []
        window: list[int] = []
        blocks = 0
        for position, index in enumerate(order):
            window.append(index)
            blocks += self._num_anchors[index]
            if blocks >= self._blocks_per_step * _WINDOW_STEPS or position == len(order) - 1:
                batches += self._window_batches(window)
                window, blocks = [], 0
        generator.shuffle(batches)
        return batches

    def _window_batches(self, window: Sequence[int]) -> list[list[int]]:
        """Fill batches to the asked number of blocks; a remainder below half of it joins the last one."""
        batches: list[list[int]] = []
        batch: list[int] = []
        blocks = 0
        for index in sorted(window, key=lambda i: (self._num_anchors[i], self._rows[i].length)):
            batch.append(index)
            blocks += self._num_anchors[index]
            if blocks >= self._blocks_per_step:
                batches.append(batch)
                batch, blocks = [], 0
        if batch and (2 * blocks >= self._blocks_per_step or not batches):
            batches.append(batch)
        elif batch:
            batches[-1] += batch
        return batches


def draw_step(rows: Sequence[tuple[StoredRow, int]], *, seed: int, step: int) -> StepBlocks:
    """Draw the anchors of a step.

    Args:
        rows: rows, each with its number of anchors (``BatchOrder.batch``).
        seed: of the run.
        step: with the seed decides the anchors.
    """
    generator = _generator(seed, _STEP_STREAM, step)
    return StepBlocks(
        rows=tuple(row for row, _ in rows),
        anchors=tuple(sample_anchors(row.response_spans, count, generator) for row, count in rows),
    )


def load_batch(
    source: StateSource, step: StepBlocks, *, block_size: int, device: torch.device | str = "cpu"
) -> TrainingBatch:
    """Read the tensors of a step: of each row the context up to its last anchor, and what its labels need.

    Raises:
        ValueError: there are no rows.
    """
    if not step.rows:
        raise ValueError("a batch needs at least one row")
    ends = [
        int((anchors + supervised_lengths(row.response_spans, anchors, block_size)).max()) + 1
        for row, anchors in zip(step.rows, step.anchors, strict=True)
    ]
    states = source.read(step.rows, ends)
    labels, hidden, normalisers, argmaxes = [], [], [], []
    for state, anchors, end in zip(states, step.anchors, ends, strict=True):
        spans = [(start, min(stop, end)) for start, stop in state.response_spans if start < end]
        block = block_labels(state.token_ids_S[:end].numpy(), spans, anchors, block_size)
        labels.append(block)
        positions_AG = anchors[:, None] + np.arange(block_size, dtype=np.int64)
        predicting = torch.from_numpy(target_rows(spans, positions_AG[block.supervised_AG]))
        hidden.append(state.hidden_PH[predicting])
        normalisers.append(state.log_normaliser_P[predicting])
        argmaxes.append(state.argmax_P[predicting].long())
    lengths = tuple(int(anchors[-1]) for anchors in step.anchors)
    contexts = list(zip(states, lengths, strict=True))
    return TrainingBatch(
        blocks=PackedBlocks(
            taps_NT=torch.cat([state.taps_ST[:length] for state, length in contexts]).to(device),
            token_ids_N=torch.cat([state.token_ids_S[:length].long() for state, length in contexts]).to(device),
            context_lengths=lengths,
            anchors_M=torch.from_numpy(np.concatenate(step.anchors)).to(device),
            blocks_per_sequence=tuple(len(anchors) for anchors in step.anchors),
            block_tokens_MG=torch.from_numpy(np.concatenate([block.block_tokens_AG for block in labels])).to(device),
        ),
        labels_MG=torch.from_numpy(np.concatenate([block.labels_AG for block in labels])).to(device),
        supervised_MG=torch.from_numpy(np.concatenate([block.supervised_AG for block in labels])).to(device),
        target_hidden_NH=torch.cat(hidden).to(device),
        target_log_normaliser_N=torch.cat(normalisers).to(device),
        target_argmax_N=torch.cat(argmaxes).to(device),
    )


def _generator(seed: int, stream: int, counter: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, (stream << 48) | counter]))
