"""Counting rounds, whole and cut."""

from __future__ import annotations

from dspark.engine.round_counts import RoundCounts, num_judged


def test_a_round_counts_what_was_reached_and_a_cut_one_only_what_came_before_the_end() -> None:
    rounds = RoundCounts(3)
    rounds.add(drafted=3, verified=3, accepted=1, committed=2, kept=2)
    rounds.add(drafted=3, verified=2, accepted=2, committed=3, kept=3)
    rounds.add(drafted=3, verified=3, accepted=3, committed=4, kept=2)  # the second draft token ended the answer
    counts = rounds.counts()
    assert (counts.rounds, counts.drafted, counts.verified, counts.accepted, counts.committed) == (3, 9, 8, 5, 7)
    assert counts.verified_per_position == (3, 3, 1)
    assert counts.reached_per_position == (3, 3, 0)  # the first round's second token was rejected, its third is moot
    assert counts.accepted_per_position == (3, 2, 0)
    assert counts.accepted_length == 7 / 3


def test_without_a_round_there_is_no_length() -> None:
    assert RoundCounts(0).counts().accepted_length == 0.0


def test_behind_the_end_nothing_is_judged() -> None:
    assert num_judged(verified=3, committed=2, kept=2) == 3
    assert num_judged(verified=3, committed=4, kept=1) == 1
