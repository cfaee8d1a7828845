from __future__ import annotations

from dspark.decoding import TokenHistory


def test_prompt_and_output_are_counted_apart() -> None:
    history = TokenHistory([5, 3, 5])
    history.extend([7, 3, 7])
    assert set(history.seen_ids().tolist()) == {3, 5, 7}
    assert history.generated_ids().tolist() == [7, 3]
    assert history.generated_counts().tolist() == [2, 1]
    assert dict(history.counts) == {7: 2, 3: 1}


def test_empty() -> None:
    history = TokenHistory()
    assert history.seen_ids().shape == history.generated_ids().shape == history.generated_counts().shape == (0,)


def test_forks_are_independent() -> None:
    history = TokenHistory([1])
    history.append(2)
    fork = history.fork()
    fork.append(2)
    history.append(9)
    assert dict(fork.counts) == {2: 2}
    assert dict(history.counts) == {2: 1, 9: 1}
    assert set(fork.seen_ids().tolist()) == {1, 2}


def test_after_each_gives_one_history_a_row() -> None:
    history = TokenHistory([1])
    rows = history.after_each([4, 4, 6])
    assert [dict(row.counts) for row in rows] == [{}, {4: 1}, {4: 2}, {4: 2, 6: 1}]
    assert dict(history.counts) == {}
