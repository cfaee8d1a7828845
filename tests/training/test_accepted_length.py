from __future__ import annotations

import pytest
import torch

from dspark.training.accepted_length import accepted_length


def test_the_expectation_over_blocks_of_different_lengths() -> None:
    acceptance = torch.tensor([[0.5, 0.5, 0.2], [1.0, 0.0, 0.9], [0.6, 0.7, 0.3]])
    supervised = torch.tensor([[True, True, True], [True, True, True], [True, False, False]])
    result = accepted_length(acceptance, supervised)
    assert result.survival == pytest.approx((0.7, 0.125, 0.025))
    assert result.acceptance == pytest.approx((0.7, 0.25, 0.55))
    assert result.value == pytest.approx(1 + 0.7 + 0.125 + 0.025)


def test_perfect_drafts_give_the_whole_block_and_one_more() -> None:
    result = accepted_length(torch.ones(4, 7), torch.ones(4, 7, dtype=torch.bool))
    assert result.value == pytest.approx(8.0)
