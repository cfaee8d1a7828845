"""Survivals come out two steps later, fitted to the requests that are there then."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.scheduling import Drafts, History, StepBatch
from tests.scheduling.tiny import batch_of, drafts_of, past_of


def test_survivals_are_given_out_two_steps_later() -> None:
    history, given_out = History(), []
    for step in range(5):
        given_out.append(None if history.past is None else history.past.step)
        history = history.after(drafts_of([[0.5]], step=step))
    assert given_out == [None, None, 0, 1, 2]


def test_so_is_what_became_of_them() -> None:
    history, learned = History(), []
    for step in range(4):
        learned.append(0.0 if history.past is None else history.past.correction.shared)
        history = history.after(drafts_of([[0.5]], step=step), np.array([1]), np.array([step % 2]))
    assert learned[:2] == [0, 0]
    assert learned[2] < min(0, learned[3])  # rejected in step 0, accepted in step 1
    assert history.last is not None
    assert history.correction is history.last.correction


def test_it_says_whether_newer_survivals_are_on_their_way() -> None:
    history, followed = History(), []
    for step, is_drafted in enumerate([True, True, False, False, True, False]):
        history = history.after(drafts_of([[0.5]], step=step) if is_drafted else None)
        followed.append(history.past is not None and history.past.is_followed)
    assert followed == [False, True, False, False, True, False]


def test_they_stay_while_nothing_is_drafted() -> None:
    history = History().after(drafts_of([[0.5]], step=0)).after(drafts_of([[0.6]], step=1))
    empty = drafts_of([[]], step=3)
    without_head = Drafts(step=4, request_ids_R=np.array([0]), lengths_R=np.array([1]), confidences_RG=None)
    for drafts in (None, empty, without_head, None):
        history = history.after(drafts)
        assert history.past is not None
        assert history.past.step == 1


def test_newer_survivals_than_two_steps_are_refused() -> None:
    past = past_of([[0.5]], step=5)
    assert past.age(batch_of([1], step=7)) == 2
    for step in (5, 6):
        with pytest.raises(ValueError, match="2 steps old"):
            past.age(batch_of([1], step=step))


def test_requests_that_stayed_left_and_joined() -> None:
    """7 stayed and has its own; 3 left; 9 joined and gets the mean; 8 had drafted less than it can use now."""
    past = past_of([[0.9, 0.5, 1.0], [0.5], [0.1, 1.0, 1.0]], ids=[7, 8, 3])
    expected = past.expected_for(batch_of([2, 3, 3], ids=[9, 7, 8]))
    mean = [1.5 / 3, 0.55 / 2, 0.55 / 2]
    np.testing.assert_allclose(expected, [[*mean[:2], 0.0], [0.9, 0.45, 0.45], [0.5, *mean[1:]]])


def test_expected_survivals_never_rise_and_unknown_positions_fail() -> None:
    past = past_of([[0.2], [0.9, 1.0]], ids=[0, 1])
    expected = past.expected_for(batch_of([4, 4, 4], ids=[0, 1, 2]))
    np.testing.assert_allclose(expected, [[0.2, 0.2, 0, 0], [0.9, 0.9, 0, 0], [0.55, 0.55, 0, 0]])
    assert past.expected_for(batch_of([0, 0], ids=[1, 5])).shape == (2, 0)


def test_those_that_were_not_drafted_for_keep_what_is_known_of_them() -> None:
    """As a probe of some leaves the others: 7 keeps its own, 5 is drafted for, 4 left, 6 is not known yet."""
    history = History().after(drafts_of([[0.9, 0.5], [0.4], [0.1]], step=0, ids=[7, 5, 4]))
    history = history.after(drafts_of([[], [0.6, 0.5, 0.5], []], step=1, ids=[7, 5, 6])).after(None)
    past = history.past
    assert past is not None
    assert (past.step, past.lengths_R.tolist(), past.is_new_R.tolist()) == (1, [2, 3, 0], [False, True, False])
    np.testing.assert_allclose(past.survivals_RG[0], [0.9, 0.45, 0.0])
    assert 0.4 < past.survivals_RG[1, 0] < 0.6
    expected = past.expected_for(batch_of([2, 1, 2], step=9, ids=[7, 5, 6]))
    np.testing.assert_allclose(expected[0], [0.9, 0.45])
    assert expected[2, 0] == pytest.approx((0.9 + past.survivals_RG[1, 0]) / 2)


def test_survivals_are_averaged_over_the_steps_of_a_request() -> None:
    """One unsure block among sure ones does not make a request look unsure."""
    history = History()
    for step in range(40):
        sure = 0.1 if step % 10 == 9 else 0.8
        drafts = Drafts(
            step=step,
            request_ids_R=np.array([7]),
            lengths_R=np.array([2]),
            confidences_RG=np.array([[sure, 0.5]]),
        )
        history = history.after(drafts)
    assert history.past is not None
    assert history.last is not None
    (first, second) = history.last.survivals_RG[0]
    assert 0.6 < first < 0.8  # the last step alone says 0.1
    assert second == pytest.approx(first / 2)
    newcomer = StepBatch(step=42, request_ids_R=np.array([9]), draftable_R=np.array([2]), context_tokens=0)
    assert history.past.expected_for(newcomer)[0, 0] > 0.6
