"""What became of drafts corrects what is expected of later ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.scheduling import Correction, Delayed, Drafts, History, Immediate, MeasuredCurve, Policy
from dspark.scheduling.correction import corrected_survivals
from tests.scheduling.tiny import batch_of, cost_over_tokens, drafts_of

COST = replace(
    cost_over_tokens([1.0 + 0.05 * n for n in range(40)]),
    draft={
        1: MeasuredCurve(sizes=(1, 2), seconds=(0.3, 0.35)),
        7: MeasuredCurve(sizes=(1, 2), seconds=(0.35, 0.4)),
    },
)
"""A draft pays from about 0.4 accepted tokens a request on; each verified one has to bring 0.05."""


class Run:
    """Requests whose tokens have a confidence and are accepted with a probability, each its own, for some steps."""

    def __init__(self, policy: Policy, confidences: list[float], probabilities: list[float], seed: int = 0) -> None:
        self.policy, self.history, self.step = policy, History(), 0
        self.confidences, self.probabilities = confidences, probabilities
        self.random = np.random.default_rng(seed)
        self.whys: list[str] = []
        self.verified: list[list[int]] = []

    def steps(self, count: int) -> Run:
        for _ in range(count):
            rows = len(self.confidences)
            plan = self.policy.plan(batch_of([7] * rows, step=self.step), self.history.past, COST)
            drafts, verified_R, accepted_R = None, np.zeros(rows, int), np.zeros(rows, int)
            if plan.drafts:
                drafts = drafts_of(
                    [[c] * n for c, n in zip(self.confidences, plan.draft_lengths_R, strict=True)], step=self.step
                )
                verified_R = self.policy.verify_lengths(plan, drafts, COST)
                passes_RG = self.random.random((rows, 7)) < np.array(self.probabilities)[:, None]
                accepted_R = np.minimum(np.logical_and.accumulate(passes_RG, axis=1).sum(axis=1), verified_R)
            self.history = self.history.after(drafts, verified_R, accepted_R)
            self.whys.append(plan.why)
            self.verified.append(verified_R.tolist())
            self.step += 1
        return self

    def drafted(self, first: int, last: int) -> float:
        """Share of these steps that drafted because it pays."""
        return float(np.mean([why == "pays" for why in self.whys[first:last]]))


@pytest.mark.parametrize("policy", [Delayed(), Immediate()], ids=lambda policy: policy.name)
def test_a_request_whose_drafts_never_pass_is_soon_not_drafted_for(policy: Policy) -> None:
    run = Run(policy, [0.8], [0.0]).steps(400)
    assert run.drafted(2, 10) == 1
    assert run.drafted(60, 400) == 0
    assert run.whys.count("probe") in (2, 3)
    assert all(run.verified[step] == [7] for step, why in enumerate(run.whys) if why == "probe")


@pytest.mark.parametrize("policy", [Delayed(), Immediate()], ids=lambda policy: policy.name)
def test_one_that_always_passes_gets_longer_blocks(policy: Policy) -> None:
    run = Run(policy, [0.4], [1.0]).steps(200)
    lengths = [verified for (verified,) in run.verified]
    assert max(lengths[:4]) < 6
    assert min(lengths[100:]) == 7


def test_a_parked_request_is_drafted_for_again_once_a_probe_shows_that_it_pays() -> None:
    """And it stays so: drafting and parked steps do not take turns."""
    run = Run(Delayed(probe_every_steps=32), [0.8], [0.0]).steps(200)
    run.probabilities = [0.95]
    run.steps(600)
    assert run.drafted(100, 200) == 0
    assert run.drafted(600, 800) == 1
    kinds = [why for why in run.whys if why in ("pays", "parked")]
    assert sum(one != other for one, other in pairwise(kinds)) <= 6


def test_requests_are_told_apart_in_one_batch() -> None:
    """Equal confidences; what is verified goes to the one whose tokens pass."""
    run = Run(Delayed(), [0.6, 0.6], [0.9, 0.2]).steps(300)
    passing, failing = np.mean(run.verified[100:], axis=0)
    assert passing > 3 * failing
    assert passing > 4


@pytest.mark.parametrize("policy", [Delayed(), Immediate()], ids=lambda policy: policy.name)
def test_where_drafting_does_not_pay_a_newcomer_is_tried_without_the_others(policy: Policy) -> None:
    run = Run(policy, [0.6, 0.6], [0.4, 0.4]).steps(100)
    assert run.drafted(80, 100) == 0
    past, ids = run.history.past, [0, 1, 9]
    assert past is not None
    plan = policy.plan(batch_of([7, 7, 7], step=run.step, ids=ids), past, COST)
    assert plan.why == "newcomer"
    lengths = plan.draft_lengths_R.tolist()
    assert lengths[:2] == [0, 0]
    assert lengths[2] > 1
    unsure = drafts_of([[], [], [0.1] * lengths[2]], step=run.step, ids=ids)
    verified = policy.verify_lengths(plan, unsure, COST).tolist()[2]
    assert verified >= 2  # or it would stay one
    assert plan.budget is None or plan.budget >= verified
    assert policy.plan(batch_of([7, 7, 0], step=run.step, ids=ids), past, COST).why == "parked"
    hopeless = replace(past, correction=replace(past.correction, shared=past.correction.shared - 1.5))
    assert policy.plan(batch_of([7, 7, 7], step=run.step, ids=ids), hopeless, COST).why == "parked"


def test_a_newcomer_goes_by_what_was_learned_of_others_and_is_given_a_chance() -> None:
    learned = Correction()
    for step in range(300):
        drafts = drafts_of([[0.6] * 3] * 4, step=step)
        learned = learned.after(drafts, np.full(4, 3), np.zeros(4, int))
    assert learned.shared < -0.5
    old, new = learned.log_odds_of(np.array([0, 9]))
    assert learned.shared < new < learned.shared + 0.51
    assert old < new - 0.5


def test_right_confidences_stay_what_they_are() -> None:
    """Of many runs, on average exactly so; of one, within what 1 / sqrt(information) lets expect."""
    random, shifts = np.random.default_rng(5), []
    for _ in range(40):
        correction = Correction()
        for step in range(100):
            rows = random.uniform(0.2, 0.95, (4, 7))
            passes_RG = np.logical_and.accumulate(random.random((4, 7)) < rows, axis=1)
            verified_R = random.integers(0, 8, 4)
            accepted_R = np.minimum(passes_RG.sum(axis=1), verified_R)
            correction = correction.after(drafts_of(rows, step=step), verified_R, accepted_R)
        shifts.append([correction.shared, *correction.own_R])
    assert np.abs(np.mean(shifts, axis=0)).max() < 0.08
    assert np.std(shifts, axis=0).max() < 0.35
    assert np.std([shared for shared, *_ in shifts]) < 0.15


def test_it_finds_the_shift_of_confidences_that_are_off() -> None:
    random, correction = np.random.default_rng(6), Correction()
    for step in range(1500):
        truth = random.uniform(0.2, 0.95, (4, 7))
        odds = truth / (1 - truth) * np.exp(np.array([1.5, 1.5, 0.5, 0.5]))[:, None]
        passes_RG = np.logical_and.accumulate(random.random((4, 7)) < truth, axis=1)
        accepted_R = np.minimum(passes_RG.sum(axis=1), 3)
        correction = correction.after(drafts_of(odds / (1 + odds), step=step), np.full(4, 3), accepted_R)
    np.testing.assert_allclose(correction.log_odds_of(np.arange(4)), [-1.5, -1.5, -0.5, -0.5], atol=0.35)


def test_what_was_not_judged_teaches_nothing() -> None:
    drafts = drafts_of([[0.5, 0.9, 0.9]])
    rejected_first = Correction().after(drafts, np.array([3]), np.array([0]))
    alone = Correction().after(drafts_of([[0.5]]), np.array([1]), np.array([0]))
    assert rejected_first.own_R.tolist() == alone.own_R.tolist()
    unverified = Correction().after(drafts, np.array([0]), np.array([0]))
    assert (unverified.shared, *unverified.own_R, *unverified.own_information_R) == (0, 0, 0)


def test_requests_that_left_are_forgotten() -> None:
    correction = Correction().after(drafts_of([[0.9], [0.9]], ids=[3, 8]), np.array([1, 1]), np.array([0, 0]))
    correction = correction.after(drafts_of([[0.9]], ids=[8]), np.array([1]), np.array([0]))
    assert correction.request_ids_R.tolist() == [8]
    never = correction.log_odds_of(np.array([99]))
    assert correction.log_odds_of(np.array([3])).tolist() == never.tolist()


def test_without_confidences_there_is_nothing_to_correct() -> None:
    ids_R = np.array([0])
    drafts = Drafts(step=0, request_ids_R=ids_R, lengths_R=np.array([1]), confidences_RG=None)
    with pytest.raises(ValueError, match="nothing to correct"):
        Correction().after(drafts, np.array([1]), np.array([0]))
    assert History().after(drafts, np.array([1]), np.array([0])).past is None


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=4, max_size=4),
    st.integers(1, 40),
)
@settings(max_examples=100)
def test_whatever_happens_shifts_are_bounded_and_survivals_fall(rows, outcomes, repeats) -> None:
    drafts = drafts_of(rows)
    verified_R = np.array([high for high, _ in outcomes[: len(rows)]])
    accepted_R = np.minimum(verified_R, [low for _, low in outcomes[: len(rows)]])
    correction = Correction()
    for _ in range(repeats):
        correction = correction.after(drafts, verified_R, accepted_R)
    log_odds_R = correction.log_odds_of(drafts.request_ids_R)
    assert (np.abs(log_odds_R) <= 4).all()
    survivals_RG = corrected_survivals(drafts.survivals_RG, log_odds_R)
    assert ((survivals_RG >= 0) & (survivals_RG <= 1)).all()
    assert (np.diff(survivals_RG, axis=1) <= 0).all()


def test_corrected_survivals_by_hand() -> None:
    """Odds 1 and 4 (survivals 0.5, 0.4), three times as good: 3 and 12."""
    survivals_RG = np.array([[0.5, 0.4, 0.0], [1.0, 0.0, 0.0]])
    expected = [[3 / 4, 3 / 4 * 12 / 13, 0.0], [1.0, 0.0, 0.0]]
    np.testing.assert_allclose(corrected_survivals(survivals_RG, np.log([3.0, 3.0])), expected)


def test_what_became_of_other_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="one number for each of the 2 requests"):
        Correction().after(drafts_of([[0.9], [0.9]]), np.array([1]), np.array([1]))
    with pytest.raises(ValueError, match="do not fit"):
        corrected_survivals(np.ones((2, 2)), np.zeros(1))


def test_tokens_behind_the_confidences_teach_nothing() -> None:
    drafts = drafts_of([[0.9]])
    one, many = (Correction().after(drafts, np.array([n]), np.array([n])) for n in (1, 10**6))
    assert many.own_information_R.tolist() == one.own_information_R.tolist()
