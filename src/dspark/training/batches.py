"""Which sequences and anchors a step trains on, and their tensors.

Everything random is a function of (seed, epoch) or (seed, step): a resumed run needs no generator state, only its step.

Shapes: B sequences, S context tokens (padded), A anchors of a sequence (padded), G slots of a block, N supervised
slots, H hidden size, T tap features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.training.anchors import block_labels, sample_anchors, target_rows
from dspark.training.states import StateStore, StoredRow

__all__ = ["BatchOrder", "TrainingBatch", "held_out_split", "load_batch"]

_EPOCH_STREAM, _STEP_STREAM = 1, 2
_WINDOW_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Tensors of one step.

    Attributes:
        taps_BST: target features of the context, zero after a sequence's last anchor.
        anchors_BA: position of each anchor; padding repeats position 0.
        block_tokens_BAG: x_0..x_{γ−1}, target ids.
        labels_BAG: x_1..x_γ, target ids.
        supervised_BAG: whether a slot counts; False everywhere for padding.
        target_hidden_NH: the target's final hidden state for each supervised slot, in row-major order of
            ``supervised_BAG``.
        target_log_normaliser_N: logsumexp of its logits over the full vocabulary.
        target_argmax_N: its most likely token.
        num_blocks: anchors without padding.
        context_tokens: context positions without padding.
    """

    taps_BST: Tensor
    anchors_BA: Tensor
    block_tokens_BAG: Tensor
    labels_BAG: Tensor
    supervised_BAG: Tensor
    target_hidden_NH: Tensor
    target_log_normaliser_N: Tensor
    target_argmax_N: Tensor
    num_blocks: int
    context_tokens: int


def held_out_split(rows: Sequence[StoredRow], fraction: float) -> tuple[list[StoredRow], list[StoredRow]]:
    """Split rows in (training, held out) by a hash of their ids.

    Raises:
        ValueError: one of the two would be empty.
    """
    training: list[StoredRow] = []
    held_out: list[StoredRow] = []
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


def load_batch(
    store: StateStore,
    rows: Sequence[tuple[StoredRow, int]],
    *,
    block_size: int,
    seed: int,
    step: int,
    device: torch.device | str = "cpu",
) -> TrainingBatch:
    """Draw the anchors of a step and read its tensors.

    Args:
        store: teacher states.
        rows: rows, each with its number of anchors (``BatchOrder.batch``).
        block_size: γ.
        seed: of the run.
        step: with the seed decides the anchors.
        device: where the tensors go.
    """
    generator = _generator(seed, _STEP_STREAM, step)
    states = [store.read(row) for row, _ in rows]
    anchors = [sample_anchors(row.response_spans, count, generator) for row, count in rows]
    labels = [
        block_labels(state.token_ids_S.numpy(), state.response_spans, anchor, block_size)
        for state, anchor in zip(states, anchors, strict=True)
    ]
    num_anchors = max(len(anchor) for anchor in anchors)
    context = max(int(anchor[-1]) for anchor in anchors)
    shape = (len(rows), num_anchors)
    anchors_BA = np.zeros(shape, dtype=np.int64)
    block_tokens_BAG = np.zeros((*shape, block_size), dtype=np.int64)
    labels_BAG = np.zeros((*shape, block_size), dtype=np.int64)
    supervised_BAG = np.zeros((*shape, block_size), dtype=np.bool_)
    taps_BST = torch.zeros(len(rows), max(context, 1), states[0].taps_ST.shape[1], dtype=states[0].taps_ST.dtype)
    hidden, normalisers, argmaxes = [], [], []
    for index, (state, anchor, block) in enumerate(zip(states, anchors, labels, strict=True)):
        count, length = len(anchor), int(anchor[-1])
        anchors_BA[index, :count] = anchor
        block_tokens_BAG[index, :count] = block.block_tokens_AG
        labels_BAG[index, :count] = block.labels_AG
        supervised_BAG[index, :count] = block.supervised_AG
        taps_BST[index, :length] = state.taps_ST[:length]
        positions_AG = anchor[:, None] + np.arange(block_size, dtype=np.int64)
        predicting = torch.from_numpy(target_rows(state.response_spans, positions_AG[block.supervised_AG]))
        hidden.append(state.hidden_PH[predicting])
        normalisers.append(state.log_normaliser_P[predicting])
        argmaxes.append(state.argmax_P[predicting].long())
    return TrainingBatch(
        taps_BST=taps_BST.to(device),
        anchors_BA=torch.from_numpy(anchors_BA).to(device),
        block_tokens_BAG=torch.from_numpy(block_tokens_BAG).to(device),
        labels_BAG=torch.from_numpy(labels_BAG).to(device),
        supervised_BAG=torch.from_numpy(supervised_BAG).to(device),
        target_hidden_NH=torch.cat(hidden).to(device),
        target_log_normaliser_N=torch.cat(normalisers).to(device),
        target_argmax_N=torch.cat(argmaxes).to(device),
        num_blocks=sum(len(anchor) for anchor in anchors),
        context_tokens=sum(int(anchor[-1]) for anchor in anchors),
    )


def _generator(seed: int, stream: int, counter: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, (stream << 48) | counter]))
