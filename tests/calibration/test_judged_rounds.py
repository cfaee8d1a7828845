"""What rounds may be, and what is read off them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark.calibration.judged_rounds import JudgedRounds, joined


def rounds(**changes: Any) -> JudgedRounds:
    """Three rounds: rejected at 2, all accepted, a draft of one token that was accepted."""
    content: dict[str, Any] = {
        "logits_NG": np.array([[0.0, 1.0, 2.0], [1.0, 1.0, 1.0], [-1.0, np.nan, np.nan]]),
        "accepted_N": np.array([1, 3, 1]),
        "judged_N": np.array([3, 3, 1]),
        "verified_N": np.array([3, 3, 1]),
        "prompts_N": np.array([7, 7, 9]),
    }
    return JudgedRounds(**content | changes)


def sigma(value: float) -> float:
    return 1.0 / (1.0 + np.exp(-value))


def test_survival_is_the_product_beside_the_accepted_prefix() -> None:
    first, second = rounds().survival(1), rounds().survival(2, (1.0, 2.0, 1.0))
    np.testing.assert_allclose(first.confidences_M, [sigma(0.0), sigma(1.0), sigma(-1.0)])
    assert first.outcomes_M.tolist() == [True, True, True]
    np.testing.assert_allclose(second.confidences_M, [sigma(0.0) * sigma(0.5), sigma(1.0) * sigma(0.5)])
    assert second.outcomes_M.tolist() == [False, True]
    assert second.prompts_M.tolist() == [7, 7]


def test_conditional_takes_the_rounds_that_got_there() -> None:
    third = rounds().conditional(3)
    np.testing.assert_allclose(third.confidences_M, [sigma(1.0)])
    assert third.outcomes_M.tolist() == [True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verified_N": np.array([2, 3, 1]), "judged_N": np.array([2, 3, 1])}, "1 of 3 rounds were not verified"),
        ({"judged_N": np.array([2, 3, 1])}, "judged_N is below verified_N in a round with a rejection"),
        ({"accepted_N": np.array([1, 4, 1])}, "accepted_N must be between"),
        ({"accepted_N": np.array([1, 3])}, "accepted_N must have one number for each of 3 rounds"),
        ({"logits_NG": np.array([[0.0, np.nan, 2.0], [1.0] * 3, [1.0] * 3])}, "before one with"),
        ({"logits_NG": np.array([[0.0, np.inf, 2.0], [1.0] * 3, [1.0, np.nan, np.nan]])}, "must be finite"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rounds(**changes)


def test_positions_and_temperatures_out_of_range() -> None:
    with pytest.raises(ValueError, match="positions 1 to 3"):
        rounds().survival(4)
    with pytest.raises(ValueError, match="2 temperatures for 3 positions"):
        rounds().survival(1, (1.0, 1.0))


def test_joined_keeps_all_rounds() -> None:
    both = joined([rounds(), rounds().select(np.array([True, False, False]))])
    assert both.accepted_N.tolist() == [1, 3, 1, 1]
    assert both.prompts_N.tolist() == [7, 7, 9, 7]
