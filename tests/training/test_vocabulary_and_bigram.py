from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.training.bigram import count_bigrams, fit_markov_start
from dspark.training.data.rows import DataRow
from dspark.training.vocabulary import choose_draft_vocabulary, count_response_tokens


def row(token_ids: list[int], *spans: tuple[int, int]) -> DataRow:
    return DataRow(
        id="r",
        source="s",
        token_ids=tuple(token_ids),
        response_spans=spans,
        finish_reasons=("stop",) * len(spans),
        temperature=1.0,
    )


def test_only_response_tokens_are_counted() -> None:
    counts = count_response_tokens([row([9, 9, 3, 4, 9, 3], (2, 4), (5, 6))], 12)
    assert counts[[3, 4, 9]].tolist() == [2, 1, 0]


def test_the_most_frequent_tokens_and_the_required_ones() -> None:
    counts = np.array([0, 5, 5, 1, 9, 0, 0, 2])
    vocabulary = choose_draft_vocabulary(counts, 4, always_include=[6])
    assert vocabulary.token_ids == (1, 2, 4, 6)
    assert vocabulary.coverage == pytest.approx(19 / 22)
    assert vocabulary.columns_of_target_ids(8).tolist() == [-1, 0, 1, -1, 2, -1, 3, -1]
    assert choose_draft_vocabulary(counts, 2).token_ids == (1, 4)  # ties to the lower id


@pytest.mark.parametrize(
    ("size", "required", "message"), [(9, [], "draft_vocab_size is 9"), (1, [1, 2], "fewer than"), (4, [8], "exceed")]
)
def test_impossible_vocabularies_are_refused(size: int, required: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_draft_vocabulary(np.ones(8, dtype=np.int64), size, always_include=required)


def test_bigrams_do_not_cross_spans_or_leave_the_vocabulary() -> None:
    columns = np.array([-1, 0, 1, 2, -1])
    counts = count_bigrams([row([1, 2, 3, 4, 1, 2, 1, 2], (0, 5), (5, 8))], columns)
    pairs = {
        (int(previous), int(column)): int(count)
        for i, previous in enumerate(counts.predecessors_P)
        for column, count in zip(
            counts.columns[counts.offsets[i] : counts.offsets[i + 1]],
            counts.counts[counts.offsets[i] : counts.offsets[i + 1]],
            strict=True,
        )
    }
    # 3->4 leaves the vocabulary; 4->1 only has its predecessor outside; 1->2 across the two spans is not a bigram.
    assert pairs == {(1, 1): 2, (2, 2): 1, (4, 0): 1, (2, 0): 1}
    assert counts.total == 5
    with pytest.raises(ValueError, match="no response with two tokens"):
        count_bigrams([row([0, 0], (0, 2))], columns)


def test_the_fit_learns_the_conditionals_and_falls_back_to_the_unigram() -> None:
    generator = np.random.default_rng(0)
    transitions = generator.dirichlet(np.full(12, 0.2), size=12)
    tokens = [0]
    for _ in range(8000):
        tokens.append(int(generator.choice(12, p=transitions[tokens[-1]])))
    counts = count_bigrams([row(tokens, (0, len(tokens)))], np.append(np.arange(12), [-1, -1]))
    start = fit_markov_start(
        counts, vocab_size=14, draft_vocab_size=12, rank=8, steps=300, draws_per_step=64, learning_rate=0.05, seed=1
    )
    again = fit_markov_start(
        counts, vocab_size=14, draft_vocab_size=12, rank=8, steps=300, draws_per_step=64, learning_rate=0.05, seed=1
    )
    assert torch.equal(start.w1_Vr, again.w1_Vr)
    frequency = np.bincount(tokens[:-1], minlength=12) / (len(tokens) - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -float((frequency[:, None] * np.nan_to_num(transitions * np.log(transitions))).sum())
    assert start.unigram_nats > entropy + 0.5
    assert start.bigram_nats < entropy + 0.15
    unseen = torch.softmax(start.w1_Vr[13] @ start.w2_Dr.T, dim=0)
    unigram = torch.from_numpy(np.bincount(tokens[1:], minlength=12) / (len(tokens) - 1))
    assert (unseen - unigram).abs().sum() < 0.6
    with pytest.raises(ValueError, match="rank of at least 2"):
        fit_markov_start(counts, vocab_size=14, draft_vocab_size=12, rank=1)
