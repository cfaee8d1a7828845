"""The proof machinery itself, on cases small enough to do by hand."""

from __future__ import annotations

import pytest
import torch

from dspark.decoding import Acceptance
from dspark.decoding.enumeration import (
    Drafting,
    VerifiedBlock,
    autoregressive_law,
    fixed_length,
    intervals_of_constancy,
    largest_deviation,
    non_anticipating,
    output_law,
    speculative_rule,
)


def test_autoregressive_law_is_the_product_of_conditionals() -> None:
    law = autoregressive_law(lambda prefix: torch.tensor([0.25, 0.75] if prefix[-1] == 0 else [1.0, 0.0]), (0,), 2)
    assert law == pytest.approx({(0, 0): 0.0625, (0, 1): 0.1875, (1, 0): 0.75})


def test_intervals_are_found_with_right_wrong_and_no_expectations() -> None:
    def steps(uniform: float) -> int:
        return sum(uniform >= cut for cut in (0.1, 1 / 3, 0.9))

    for expected in ([], [0.1, 1 / 3, 0.9], [0.05, 0.5], [0.1 + 1e-15]):
        widths = dict.fromkeys(range(4), 0.0)
        cells = intervals_of_constancy(steps, expected)
        for start, end, value in cells:
            widths[value] += end - start
        assert widths == pytest.approx({0: 0.1, 1: 1 / 3 - 0.1, 2: 0.9 - 1 / 3, 3: 0.1}, abs=1e-12)
        assert [cells[0][0], cells[-1][1]] == [0, 1]


def test_one_draft_token_by_hand() -> None:
    """p = (0.7, 0.3), q = (0.4, 0.6): token 1 is accepted with probability 1/2, else 0 is emitted."""
    block = VerifiedBlock(
        draft_tokens=(1,),
        target_probs_RV=torch.tensor([[0.7, 0.3], [0.1, 0.9]], dtype=torch.float64),
        draft_probs_LD=torch.tensor([[0.4, 0.6]], dtype=torch.float64),
        draft_token_ids_D=None,
    )
    law = speculative_rule()(block)
    expected = {Acceptance(0, 0): 0.5, Acceptance(1, 0): 0.05, Acceptance(1, 1): 0.45}
    assert largest_deviation(law, expected) < 1e-15


def test_largest_deviation_counts_missing_outcomes() -> None:
    assert largest_deviation({0: 1.0}, {0: 0.75, 1: 0.25}) == 0.25


def test_lengths() -> None:
    assert fixed_length(2)((0,), (1, 1, 1), ()) == 2
    seen = []
    stop_after_a_one = non_anticipating(lambda prefix, drafted, past: seen.append(drafted) or 1 not in drafted)
    assert stop_after_a_one((0,), (0, 1, 0), ()) == 2
    assert seen == [(), (0,), (0, 1)]


def test_earlier_rounds_reach_the_scheduler() -> None:
    pasts = set()

    def admits(prefix, drafted, past) -> bool:
        pasts.add(past)
        return True

    drafting = Drafting(probs=lambda prefix: torch.tensor([1.0, 0.0], dtype=torch.float64), num_tokens=1)
    target = drafting.probs
    law = output_law(target, drafting, non_anticipating(admits), speculative_rule(), (0,), 4)
    assert law == {(0, 0, 0, 0): 1.0}
    assert pasts == {(), (((0,), (0,)),)}
