"""Policies: whether to draft, how much to verify, what they refuse."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dspark.scheduling import (
    Delayed,
    Drafts,
    Fixed,
    History,
    Immediate,
    MeasuredCurve,
    Off,
    PastSurvivals,
    Policy,
    StepPlan,
    Threshold,
    parse_policy,
    predicted_seconds,
)
from tests.scheduling.tiny import batch_of, cost_over_tokens, drafts_of, past_of

CHEAP = cost_over_tokens([1.0 + 0.001 * n for n in range(64)])
STEEP = cost_over_tokens([1.0 + n for n in range(64)])
ADAPTIVE = [Immediate(), Delayed()]
ALL = [Off(), Fixed(length=2), Threshold(confidence=0.5), *ADAPTIVE]


def names(policies) -> list[str]:
    return [policy.name for policy in policies]


def lengths_of(policy: Policy, rows, cost, past=None, **batch) -> list[int]:
    plan = policy.plan(batch_of([len(row) for row in rows], **batch), past, cost)
    drafts = drafts_of(rows, lengths=plan.draft_lengths_R)
    return policy.verify_lengths(plan, drafts, cost).tolist()


def by_length(seconds: float) -> dict[int, MeasuredCurve]:
    """A draft that costs ``seconds`` for each token of its length."""
    return {length: MeasuredCurve(sizes=(1, 2), seconds=(seconds * length,) * 2) for length in (1, 8)}


@pytest.mark.parametrize("text", ["off", "fixed:4", "fixed:0", "threshold:0.6", "immediate", "delayed"])
def test_names_are_read_back(text: str) -> None:
    assert parse_policy(text).name == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "on",
        "fixed",
        "fixed:",
        "fixed:x",
        "fixed:-1",
        "fixed:99999999999999999999",
        "threshold:1.5",
        "threshold:nan",
        "delayed:2",
        "off:",
    ],
)
def test_names_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"policy '{text}'"):
        parse_policy(text)


def test_a_plan_is_made_before_drafting_by_its_types() -> None:
    """No type that ``plan`` takes, in whatever it holds, can hold a draft of the step; no type holds a token."""
    for policy in ALL:
        assert list(inspect.signature(policy.plan).parameters) == ["batch", "past", "cost"]
    for kind in (StepPlan, PastSurvivals, Drafts):
        assert not any("token" in one.name and one.name != "context_tokens" for one in dataclasses.fields(kind))


def test_off_and_fixed_ask_nobody() -> None:
    rows = [[0.0, 0.0, 0.0], [1.0]]
    assert lengths_of(Off(), rows, CHEAP) == [0, 0]
    assert lengths_of(Fixed(length=2), rows, STEEP) == [2, 1]
    assert not Off().plan(batch_of([3]), None, CHEAP).drafts


def test_fixed_needs_no_confidences_and_the_others_name_what_they_need() -> None:
    batch = batch_of([3, 2])
    drafts = Drafts(step=7, request_ids_R=np.array([0, 1]), lengths_R=np.array([2, 2]), confidences_RG=None)
    fixed = Fixed(length=2)
    assert fixed.verify_lengths(fixed.plan(batch, None, CHEAP), drafts, CHEAP).tolist() == [2, 2]
    for policy in (Threshold(confidence=0.5), *ADAPTIVE):
        with pytest.raises(ValueError, match="confidence head"):
            policy.verify_lengths(policy.plan(batch, None, CHEAP), drafts, CHEAP)


def test_threshold_ends_at_the_first_token_below() -> None:
    rows = [[0.9, 0.4, 1.0], [0.5, 0.5, 0.5], [0.1], []]
    assert lengths_of(Threshold(confidence=0.5), rows, STEEP) == [1, 3, 0, 0]
    assert lengths_of(Threshold(confidence=0.0), rows, STEEP) == [3, 3, 1, 0]


@pytest.mark.parametrize("policy", ADAPTIVE, ids=names(ADAPTIVE))
def test_low_load_verifies_all_and_a_steep_cost_nothing(policy: Policy) -> None:
    rows = [[0.9, 0.8], [0.7, 0.7]]
    past = past_of(rows)
    assert lengths_of(policy, rows, CHEAP, past) == [2, 2]
    assert lengths_of(policy, rows, STEEP, past) == [0, 0]


@pytest.mark.parametrize("policy", ADAPTIVE, ids=names(ADAPTIVE))
def test_no_more_is_drafted_than_pays_and_one(policy: Policy) -> None:
    """From the third token on survivals are not worth their place; where drafting costs by length, fewer are worth it.

    By hand, drafts of 1, 2, 3 tokens at 0.5 s each: 1.95 / 1.6 = 1.22, 2.805 / 2.2 = 1.28, 2.89 / 2.8 = 1.03; at 0.8 s:
    1.95 / 1.9 = 1.03, 2.805 / 2.8 = 1.002.
    """
    rows = [[0.95, 0.9, 0.1, 0.9, 0.9]]
    slow = cost_over_tokens([1.0 + 0.1 * n for n in range(64)])
    for cost, drafted in ((slow, 3), (dataclasses.replace(slow, draft=by_length(0.5)), 3), (CHEAP, 5)):
        plan = policy.plan(batch_of([5]), past_of(rows), cost)
        assert (plan.why, plan.draft_lengths_R.tolist()) == ("pays", [drafted])
    steep = dataclasses.replace(slow, draft=by_length(0.8))
    assert policy.plan(batch_of([5]), past_of(rows), steep).draft_lengths_R.tolist() == [2]


@pytest.mark.parametrize("policy", ADAPTIVE, ids=names(ADAPTIVE))
def test_the_drafts_own_cost_decides_whether_to_draft(policy: Policy) -> None:
    """(2 + 1.2) / (1 + draft) against 2 / 1: pays below 0.6 s."""
    past = past_of([[0.6], [0.6]])
    for draft, drafts in ((0.59, True), (0.61, False)):
        cost = cost_over_tokens([1.0] * 8, draft=draft * 32)
        plan = policy.plan(batch_of([1, 1]), past, cost)
        assert (plan.drafts, plan.why) == (drafts, "pays" if drafts else "parked")


def test_the_delayed_budget_is_of_the_past_and_the_ranking_of_the_present() -> None:
    """Two tokens were worth it two steps ago. Now four would be, and the two go where the present is sure."""
    cost = cost_over_tokens([1.0, 1.0, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0])
    past = past_of([[1.0, 0.1], [1.0, 0.1]])
    plan = Delayed().plan(batch_of([2, 2]), past, cost)
    assert plan.budget == 2
    now = drafts_of([[0.2, 0.2], [1.0, 1.0]])
    assert Delayed().verify_lengths(plan, now, cost).tolist() == [0, 2]
    sure = drafts_of([[1.0, 1.0], [1.0, 1.0]])
    assert Delayed().verify_lengths(plan, sure, cost).tolist() == [1, 1]
    immediate = Immediate()
    assert immediate.verify_lengths(immediate.plan(batch_of([2, 2]), past, cost), sure, cost).tolist() == [2, 2]


def test_without_history_the_delayed_policy_goes_by_algorithm_1_and_says_so() -> None:
    plan = Delayed().plan(batch_of([2, 2]), None, CHEAP)
    assert (plan.why, plan.budget, plan.drafts) == ("no history", None, True)
    drafts = drafts_of([[0.9, 0.1], [0.5, 0.0]])
    expected = Immediate().verify_lengths(plan, drafts, CHEAP).tolist()
    assert Delayed().verify_lengths(plan, drafts, CHEAP).tolist() == expected == [2, 1]


def test_a_parked_batch_probes_each_time_its_history_has_aged_and_returns_when_load_falls() -> None:
    policy, history = Delayed(probe_every_steps=10), History()
    reasons = []
    steep = cost_over_tokens([1.0, 1.0, 1.0, *range(2, 20)])
    for step in range(40):
        requests = 8 if step < 36 else 1
        batch = batch_of([2] * requests, step=step)
        plan = policy.plan(batch, history.past, steep)
        reasons.append(plan.why)
        rows = [[0.5, 0.5]] * requests
        history = history.after(drafts_of(rows, step=step) if plan.drafts else None)
    assert reasons[:3] == ["no history", "no history", "parked"]
    probes = [step for step, why in enumerate(reasons) if why == "probe"]
    assert probes == [11, 21, 31]
    assert set(reasons[36:]) == {"pays"}


def probed(policy: Policy, step: int, ids: list[int], draftable: list[int], last: list[int]) -> set[int]:
    """Whom a probe in this step drafts for, if the draft before was for ``last``."""
    past = PastSurvivals(
        step=step % 128,
        request_ids_R=ids,
        lengths_R=[2] * len(ids),
        survivals_RG=[[0.5, 0.2]] * len(ids),
        is_new_R=np.isin(ids, last),
    )
    steep = cost_over_tokens([float(tokens) for tokens in range(1, 90)])
    plan = policy.plan(batch_of(draftable, step=step, ids=ids), past, steep)
    assert plan.why == "probe"
    lengths = plan.draft_lengths_R.tolist()
    assert all(length in (0, most) for length, most in zip(lengths, draftable, strict=True))
    return {request for request, length in zip(ids, lengths, strict=True) if length > 0}


@pytest.mark.parametrize("policy", ADAPTIVE, ids=names(ADAPTIVE))
def test_a_probe_of_many_drafts_for_some_of_the_last_draft_and_for_all_others_by_turns(policy: Policy) -> None:
    ids = [40, 3, 31, 33, 35, 7, 37, 39, 20, 36, 38, 41, 2, 9]
    draftable = [0 if request in (37, 3) else 1 if request == 36 else 2 for request in ids]
    last = [40, 39, 38, 37, 36, 35]
    seen: set[int] = set()
    for turn in range(2):
        drafted = probed(policy, 128 * (1 + turn), ids, draftable, last)
        assert len(drafted) == 8
        assert drafted & set(last) == {40, 39, 38, 36}
        seen |= drafted - set(last)
    assert seen == {41, 33, 31, 20, 9, 7, 2}
    assert len(probed(policy, 128, ids, draftable, ids)) == 8  # there are no others
    assert probed(policy, 128, ids[:8], [2] * 8, [40]) == set(ids[:8])


@pytest.mark.parametrize("policy", ADAPTIVE, ids=names(ADAPTIVE))
def test_parked_requests_are_looked_at_again_now_and_then_and_others_at_once(policy: Policy) -> None:
    past = past_of([[0.9], [0.9]], step=5, ids=[1, 2])
    whys = {
        step: policy.plan(batch_of([1, 1], step=step, ids=[1, 2]), past, CHEAP).why for step in (7, 8, 12, 13, 14, 21)
    }
    assert whys == {7: "pays", 8: "parked", 12: "parked", 13: "pays", 14: "parked", 21: "pays"}
    for others in ([2], [2, 3], [1, 2, 3]):
        assert policy.plan(batch_of([1] * len(others), step=8, ids=others), past, CHEAP).why == "pays"


def test_nothing_to_draft() -> None:
    for policy in ADAPTIVE:
        for batch in (batch_of([0, 0]), batch_of([])):
            plan = policy.plan(batch, past_of([[0.5]]), CHEAP)
            assert (plan.why, plan.drafts) == ("nothing to draft", False)


def test_the_draft_of_another_step_or_longer_than_planned_is_refused() -> None:
    for policy in ALL[1:]:
        plan = policy.plan(batch_of([1, 1]), None, CHEAP)
        for wrong in (drafts_of([[0.5], [0.5]], step=6), drafts_of([[0.5], [0.5]], ids=[0, 5])):
            with pytest.raises(ValueError, match="not those of the planned step"):
                policy.verify_lengths(plan, wrong, CHEAP)
        with pytest.raises(ValueError, match="longer than planned"):
            policy.verify_lengths(plan, drafts_of([[0.5, 0.5], [0.5]]), CHEAP)


def test_settings_that_are_refused() -> None:
    for make, message in (
        (lambda: Fixed(length=-1), "length"),
        (lambda: Threshold(confidence=float("nan")), "confidence"),
        (lambda: Immediate(probe_every_steps=0), "probe_every_steps"),
        (lambda: Delayed(probe_every_steps=0), "probe_every_steps"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


ROWS = st.lists(st.lists(st.floats(0, 1), max_size=4), min_size=1, max_size=5)


@given(ROWS, ROWS, st.lists(st.floats(0, 1), min_size=30, max_size=30), st.integers(0, 4), st.integers(0, 10))
@example(
    [[0.0], [0.0], [], [0.0], [0.0]], [[0.75]], [0, 0, 1, 0.5, 0.5, 0.875, 0, 0.625] + [0.0] * 22, 0, 4
)  # newcomers
@settings(max_examples=150)
def test_every_policy_keeps_to_prefixes_plan_and_token_limit(rows, past_rows, increments, prefill, spare) -> None:
    cost = cost_over_tokens(0.5 + np.cumsum(increments), draft=0.1)
    past = past_of(past_rows) if any(past_rows) else None
    limit = len(rows) + prefill + spare
    for policy in ALL:
        batch = batch_of([len(row) for row in rows], prefill_tokens=prefill, token_limit=limit)
        plan = policy.plan(batch, past, cost)
        assert (plan.draft_lengths_R <= batch.draftable_R).all()
        drafts = drafts_of(rows, lengths=plan.draft_lengths_R)
        lengths_R = policy.verify_lengths(plan, drafts, cost)
        assert ((lengths_R >= 0) & (lengths_R <= plan.draft_lengths_R)).all()
        assert lengths_R.sum() <= spare
        if plan.budget is not None:
            assert lengths_R.sum() <= plan.budget


@given(ROWS, ROWS, st.randoms())
@settings(max_examples=100)
def test_permuted_requests_get_permuted_lengths(rows, past_rows, random) -> None:
    """But for ties, which go by row; the number verified is the same even then."""
    cost = cost_over_tokens([1.0 + 0.2 * (n // 3) for n in range(40)], draft=0.1)
    past = past_of(past_rows) if any(past_rows) else None
    order = list(range(len(rows)))
    random.shuffle(order)
    for policy in ALL:
        results = []
        for ids in (list(range(len(rows))), order):
            plan = policy.plan(batch_of([len(rows[r]) for r in ids], ids=ids), past, cost)
            drafts = drafts_of([rows[r] for r in ids], ids=ids, lengths=plan.draft_lengths_R)
            lengths = policy.verify_lengths(plan, drafts, cost).tolist()
            results.append(dict(zip(ids, lengths, strict=True)))
        values = [value for row in rows for value in np.cumprod(row).tolist()]
        assert sum(results[0].values()) == sum(results[1].values())
        if len(set(values)) == len(values):
            assert results[0] == results[1]


def test_predicted_seconds() -> None:
    cost = cost_over_tokens([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], draft=0.32, schedule_seconds=0.03)
    plan = Fixed(length=2).plan(batch_of([2, 1], prefill_tokens=1), None, cost)
    predicted = predicted_seconds(plan, 3, cost)
    assert predicted.draft == pytest.approx(0.02)
    assert predicted.schedule == 0.03
    assert predicted.verify == pytest.approx(6 - 3 + 2 + 0.1)
    assert predicted.total == pytest.approx(0.02 + 0.03 + 5.1)
    parked = predicted_seconds(Off().plan(batch_of([2, 1]), None, cost), 0, cost)
    assert (parked.draft, parked.schedule, parked.verify) == (0.0, 0.0, 2.0)
