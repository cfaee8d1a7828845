"""Survival, and what batches and drafts refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.scheduling import Drafts, survival
from tests.scheduling.tiny import batch_of, drafts_of

PROBABILITIES = st.lists(st.floats(0, 1), max_size=16)


def test_survival_is_the_product_and_padding_is_zero() -> None:
    rows = survival([[0.5, 0.5, 0.5], [1.0, np.nan, 7.0]], [3, 1])
    np.testing.assert_array_equal(rows, [[0.5, 0.25, 0.125], [1.0, 0.0, 0.0]])


@given(PROBABILITIES)
def test_survival_never_rises(confidences: list[float]) -> None:
    row = survival([confidences], [len(confidences)])[0]
    assert (np.diff(row, prepend=1.0) <= 0).all()
    assert ((row >= 0) & (row <= 1)).all()


@pytest.mark.parametrize("wrong", [np.nan, -0.01, 1.01, np.inf])
def test_what_is_no_probability_is_refused_by_its_place(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"confidences_RG\[1, 2\].*not logits"):
        drafts_of([[0.5], [0.5, 0.5, wrong]])


@pytest.mark.parametrize(("shape", "lengths"), [((2, 3), [1]), ((1, 3), [4]), ((1, 3), [-1]), ((3,), [1])])
def test_shapes_that_do_not_fit(shape, lengths) -> None:
    with pytest.raises(ValueError, match="_R"):
        survival(np.zeros(shape), lengths)


def test_a_drafter_without_confidences_has_no_survivals() -> None:
    drafts = Drafts(step=0, request_ids_R=np.array([4]), lengths_R=np.array([2]), confidences_RG=None)
    with pytest.raises(ValueError, match="confidence head"):
        _ = drafts.survivals_RG


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"lengths": [1, -1]}, "draftable_R"),
        ({"lengths": [1, 1], "ids": [3, 3]}, "request_ids_R names a request twice"),
        ({"lengths": [1, 1], "ids": [3]}, "draftable_R has shape"),
        ({"lengths": [1], "step": -1}, "step"),
        ({"lengths": [1], "context_tokens": -1}, "context_tokens"),
        ({"lengths": [1, 1], "prefill_tokens": 5, "token_limit": 6}, "token_limit is 6"),
    ],
)
def test_batches_that_are_refused(how, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_of(**how)


def test_the_token_limit_counts_anchors_and_prompt_tokens() -> None:
    assert batch_of([3, 3], prefill_tokens=5, token_limit=10).most_verified(6) == 3
    assert batch_of([3, 3], token_limit=100).most_verified(6) == 6
    assert batch_of([3, 3]).most_verified(6) == 6


def test_arrays_are_copies_that_nobody_can_change() -> None:
    ids = np.array([1, 2])
    drafts = Drafts(step=0, request_ids_R=ids, lengths_R=np.array([1, 1]), confidences_RG=np.ones((2, 1)))
    ids[0] = 9
    assert drafts.request_ids_R.tolist() == [1, 2]
    for array in (drafts.request_ids_R, drafts.lengths_R, drafts.confidences_RG, drafts.survivals_RG):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
