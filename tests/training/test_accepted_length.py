from __future__ import annotations

import pytest
import torch

from dspark.training.accepted_length import AcceptanceSums, AcceptedLength


def accepted_length(acceptance: torch.Tensor, supervised: torch.Tensor) -> AcceptedLength:
    return AcceptanceSums.of(acceptance, supervised).accepted_length()


def test_the_expectation_over_blocks_of_different_lengths() -> None:
    acceptance = torch.tensor([[0.5, 0.5, 0.2], [1.0, 0.0, 0.9], [0.6, 0.7, 0.3]])
    supervised = torch.tensor([[True, True, True], [True, True, True], [True, False, False]])
    result = accepted_length(acceptance, supervised)
    assert result.survival == pytest.approx((0.7, 0.125, 0.025))
    assert result.acceptance == pytest.approx((0.7, 0.25, 0.55))
    assert result.conditional_acceptance == pytest.approx((0.7, 0.25 / 1.5, 0.05 / 0.25))
    assert result.value == pytest.approx(1 + 0.7 + 0.125 + 0.025)


def test_perfect_drafts_give_the_whole_block_and_one_more() -> None:
    result = accepted_length(torch.ones(4, 7), torch.ones(4, 7, dtype=torch.bool))
    assert result.value == pytest.approx(8.0)


def test_sums_of_batches_add_up_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    acceptance = torch.rand(9, 4, generator=generator)
    supervised = torch.arange(4) < torch.randint(0, 5, (9, 1), generator=generator)
    parts = [AcceptanceSums.of(acceptance[i : i + 3], supervised[i : i + 3]) for i in (0, 3, 6)]
    summed, whole = (parts[0] + parts[1] + parts[2]).accepted_length(), accepted_length(acceptance, supervised)
    for name in ("value", "survival", "acceptance", "conditional_acceptance"):
        assert getattr(summed, name) == pytest.approx(getattr(whole, name))


def test_a_slot_that_is_never_reached_counts_nothing() -> None:
    result = accepted_length(torch.tensor([[0.0, 0.5]]), torch.tensor([[True, True]]))
    assert result.conditional_acceptance == (0.0, 0.0)
    assert accepted_length(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool)).value == 1.0
