"""A head start for the Markov head: W1 and W2 fitted alone to the bigrams of the responses.

The head's part of the logits is ``W1[x_{k−1}] W2``. Before the backbone knows anything, the best it can be is the
data's bigram model, and that can be had in a minute instead of hundreds of training steps. Tokens that are never a
predecessor in the data share one row of W1, which is fitted to the unigram.

Shapes: V target ids, D draft columns, r rank, U distinct predecessors of a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.training.data.rows import DataRow

__all__ = ["BigramCounts", "MarkovStart", "count_bigrams", "fit_markov_start"]

_UNIGRAM_WEIGHT = 0.02
"""Weight of the unigram's row in a minibatch, whose other weights add up to one."""


@dataclass(frozen=True, kw_only=True)
class BigramCounts:
    """Bigrams of responses whose second token is in the draft vocabulary, grouped by predecessor.

    Attributes:
        predecessors_P: target ids, ascending.
        offsets: successors of predecessor i are entries ``offsets[i] : offsets[i + 1]``; length P + 1.
        columns: draft columns of the successors.
        counts: how often each bigram occurs.
    """

    predecessors_P: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @property
    def total(self) -> int:
        """Number of bigrams counted."""
        return int(self.counts.sum())


@dataclass(frozen=True, kw_only=True)
class MarkovStart:
    """Fitted weights, as the checkpoint stores them.

    Attributes:
        w1_Vr: embedding of the previous token.
        w2_Dr: projection to the draft columns.
        unigram_nats: cross-entropy of the unigram on the data's bigrams.
        bigram_nats: cross-entropy of ``softmax(W1[prev] W2)`` on the last minibatches.
    """

    w1_Vr: Tensor
    w2_Dr: Tensor
    unigram_nats: float
    bigram_nats: float


def count_bigrams(rows: Iterable[DataRow], column_of_target_id_V: npt.NDArray[np.int64]) -> BigramCounts:
    """Count (previous token, next token) over the responses; the pairs that blocks are made of.

    Raises:
        ValueError: there are none.
    """
    width = int(column_of_target_id_V.max()) + 1
    keys = []
    for row in rows:
        token_ids = np.asarray(row.token_ids, dtype=np.int64)
        for start, end in row.response_spans:
            columns = column_of_target_id_V[token_ids[start + 1 : end]]
            keys.append((token_ids[start : end - 1] * width + columns)[columns >= 0])
    pairs, counts = np.unique(np.concatenate(keys) if keys else np.empty(0, np.int64), return_counts=True)
    if len(pairs) == 0:
        raise ValueError("the data has no response with two tokens of the draft vocabulary in a row")
    predecessors, first = np.unique(pairs // width, return_index=True)
    return BigramCounts(
        predecessors_P=predecessors,
        offsets=np.append(first, len(pairs)).astype(np.int64),
        columns=pairs % width,
        counts=counts.astype(np.int64),
    )


def fit_markov_start(
    bigrams: BigramCounts,
    *,
    vocab_size: int,
    draft_vocab_size: int,
    rank: int,
    steps: int = 600,
    draws_per_step: int = 2048,
    learning_rate: float = 0.02,
    seed: int = 0,
    device: torch.device | str = "cpu",
    on_step: Callable[[int, float], None] | None = None,
) -> MarkovStart:
    """Fit W1 and W2 to the bigrams by Adam on the cross-entropy, with its gradient written out.

    A step draws predecessors in proportion to their counts and uses each one's exact successor distribution, so it
    sees far more bigrams than it draws. The learning rate falls linearly to zero.

    Args:
        bigrams: counts.
        vocab_size: V, rows of W1.
        draft_vocab_size: D, rows of W2.
        rank: r, at least 2.
        steps: minibatches.
        draws_per_step: predecessors drawn for one.
        learning_rate: of Adam.
        seed: of weights and draws.
        device: where to fit.
        on_step: called with (step, cross-entropy in nats) after every step.
    """
    if rank < 2:
        raise ValueError(f"markov_rank is {rank}: the bigram start needs a rank of at least 2; set bigram.steps to 0")
    generator = np.random.Generator(np.random.Philox(key=[seed, 0xB16]))
    noise = torch.Generator().manual_seed(seed)
    unigram = np.bincount(bigrams.columns, weights=bigrams.counts, minlength=draft_vocab_size) + 0.5
    log_unigram_D = torch.from_numpy(np.log(unigram / unigram.sum())).to(torch.float32)
    # One direction of the latent space starts as the unigram, in a scale usual for W1 and W2.
    scale = 4.0
    w1_Vr = torch.randn(vocab_size, rank, generator=noise) * 0.05
    w2_Dr = torch.randn(draft_vocab_size, rank, generator=noise) * 0.05
    w1_Vr[:, 0] = scale
    w2_Dr[:, 0] = (log_unigram_D - log_unigram_D.mean()) / scale
    w1_Vr, w2_Dr, unigram_1D = w1_Vr.to(device), w2_Dr.to(device), log_unigram_D.exp()[None].to(device)
    seen = torch.from_numpy(bigrams.predecessors_P).to(device)
    # The last row is the unigram's: a predecessor that stands for all that were never seen.
    w1_Pr = torch.cat((w1_Vr[seen], w1_Vr[:1]))
    w1_adam, w2_adam = _Adam(w1_Pr), _Adam(w2_Dr)
    totals_P = np.add.reduceat(bigrams.counts, bigrams.offsets[:-1])
    cumulative_P = np.cumsum(totals_P)
    smoothed = 0.0
    for step in range(steps):
        draws = np.searchsorted(cumulative_P, generator.integers(0, bigrams.total, draws_per_step), side="right")
        rows_U, multiplicity_U = np.unique(draws, return_counts=True)
        target_UD = torch.cat(
            (_successor_distributions(bigrams, rows_U, totals_P, draft_vocab_size).to(device), unigram_1D)
        )
        weights_U = torch.from_numpy(np.append(multiplicity_U / draws_per_step, _UNIGRAM_WEIGHT)).to(
            device, torch.float32
        )
        index_U = torch.from_numpy(np.append(rows_U, len(totals_P))).to(device)
        latent_Ur = w1_Pr[index_U]
        log_draft_UD = torch.log_softmax(latent_Ur @ w2_Dr.T, dim=1)
        nats_U = -torch.linalg.vecdot(target_UD, log_draft_UD, dim=1)
        nats = float(weights_U[:-1] @ nats_U[:-1])
        gradient_UD = log_draft_UD.exp_().sub_(target_UD).mul_(weights_U[:, None])
        rate = learning_rate * (1.0 - step / steps)
        w1_gradient_Ur = gradient_UD @ w2_Dr
        w2_adam.step(w2_Dr, gradient_UD.T @ latent_Ur, rate)
        w1_adam.step(w1_Pr, w1_gradient_Ur, rate, index_U)
        smoothed = nats if step == 0 else smoothed + 0.05 * (nats - smoothed)
        if on_step is not None:
            on_step(step + 1, smoothed)
    w1_Vr[:] = w1_Pr[-1]
    w1_Vr[seen] = w1_Pr[:-1]
    probabilities = unigram / unigram.sum()
    unigram_nats = -float((np.log(probabilities[bigrams.columns]) * bigrams.counts).sum() / bigrams.total)
    return MarkovStart(w1_Vr=w1_Vr, w2_Dr=w2_Dr, unigram_nats=unigram_nats, bigram_nats=smoothed)


def _successor_distributions(
    bigrams: BigramCounts, rows_U: npt.NDArray[np.int64], totals_P: npt.NDArray[np.int64], draft_vocab_size: int
) -> Tensor:
    lengths = bigrams.offsets[rows_U + 1] - bigrams.offsets[rows_U]
    owner = np.repeat(np.arange(len(rows_U)), lengths)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    entries = np.repeat(bigrams.offsets[rows_U], lengths) + within
    target_UD = torch.zeros(len(rows_U), draft_vocab_size)
    values = (bigrams.counts[entries] / totals_P[rows_U][owner]).astype(np.float32)
    target_UD[torch.from_numpy(owner), torch.from_numpy(bigrams.columns[entries])] = torch.from_numpy(values)
    return target_UD


class _Adam:
    """Adam on a plain tensor; on given rows only, when there are, each with its own step count."""

    def __init__(self, weight: Tensor) -> None:
        self._first = torch.zeros_like(weight)
        self._second = torch.zeros_like(weight)
        self._count = torch.zeros(weight.shape[0], 1, device=weight.device)

    def step(self, weight: Tensor, gradient: Tensor, rate: float, rows: Tensor | None = None) -> None:
        index = rows if rows is not None else torch.arange(weight.shape[0], device=weight.device)
        count = self._count[index] + 1.0
        first = self._first[index].lerp_(gradient, 0.1)
        second = self._second[index].lerp_(gradient.square(), 0.01)
        self._count[index], self._first[index], self._second[index] = count, first, second
        update = (first / (1.0 - 0.9**count)) / ((second / (1.0 - 0.99**count)).sqrt_() + 1e-8)
        weight.index_add_(0, index, update, alpha=-rate)
