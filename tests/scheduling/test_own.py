"""Requests with a policy of their own beside those that go by the engine's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.scheduling import (
    Delayed,
    Off,
    StepBatch,
    Threshold,
    choose_lengths,
    parse_own_policy,
    parse_policy,
    plan_step,
)
from tests.scheduling.tiny import batch_of, cost_over_tokens, drafts_of, past_of

STEEP = cost_over_tokens([1.0 + n for n in range(64)])
GENTLE = cost_over_tokens([1.0 + 0.3 * n for n in range(64)], draft=0.05)
OWN = st.sampled_from([None, None, "off", "fixed:1", "fixed:3", "threshold:0.5"])
ROWS = st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=5)


def decide(policy, rows, names, cost, past=None, **batch) -> tuple[list[int], list[int]]:
    """Draft and verify lengths."""
    plan = plan_step(policy, batch_of([len(row) for row in rows], own_policies_R=names, **batch), past, cost)
    drafts = drafts_of(rows, lengths=plan.draft_lengths_R)
    return plan.draft_lengths_R.tolist(), choose_lengths(policy, plan, drafts, cost).tolist()


@pytest.mark.parametrize("name", ["immediate", "delayed", "on", "fixed:-1"])
def test_a_policy_that_weighs_all_requests_cannot_be_one_requests(name: str) -> None:
    with pytest.raises(ValueError, match=f"policy '{name}'"):
        parse_own_policy(name)


def test_each_goes_by_its_own_and_the_rest_by_the_engines() -> None:
    rows = [[0.9, 0.4, 0.9], [0.9, 0.9, 0.1], [0.9, 0.9, 0.9], [0.9, 0.9, 0.9]]
    names = ("threshold:0.5", "fixed:2", None, "off")
    assert decide(Off(), rows, names, None) == ([3, 2, 0, 0], [1, 2, 0, 0])
    assert decide(Threshold(confidence=0.95), rows, names, None) == ([3, 2, 3, 0], [1, 2, 0, 0])
    assert decide(Delayed(), rows, names, STEEP, past_of(rows)) == ([3, 2, 0, 0], [1, 2, 0, 0])


@given(ROWS, st.data())
def test_a_request_gets_what_its_policy_gives_to_it_alone(rows, data) -> None:
    """Off, fixed and threshold look at one request only, so company changes nothing; nor do they need a cost."""
    names = tuple(data.draw(OWN) for _ in rows)
    engines = data.draw(st.sampled_from(["off", "fixed:2", "threshold:0.7"]))
    drafted, verified = decide(parse_policy(engines), rows, names, None)
    for row, name, *lengths in zip(rows, names, drafted, verified, strict=True):
        alone = decide(parse_policy(name or engines), [row], None, None)
        assert ([lengths[0]], [lengths[1]]) == alone


@given(ROWS, st.data())
def test_the_rest_is_scheduled_as_if_the_others_tokens_were_a_prompts(rows, data) -> None:
    names = tuple(data.draw(OWN) for _ in rows)
    drafted, verified = decide(Delayed(), rows, names, GENTLE, past_of(rows))
    own = [name is not None for name in names]
    others = sum(length for length, is_own in zip(drafted, own, strict=True) if is_own)
    draftable = [0 if is_own else len(row) for row, is_own in zip(rows, own, strict=True)]
    plan = Delayed().plan(batch_of(draftable, prefill_tokens=others), past_of(rows), GENTLE)
    assert [0 if is_own else length for length, is_own in zip(drafted, own, strict=True)] == (
        plan.draft_lengths_R.tolist()
    )
    lengths_R = Delayed().verify_lengths(plan, drafts_of(rows, lengths=plan.draft_lengths_R), GENTLE)
    assert [0 if is_own else length for length, is_own in zip(verified, own, strict=True)] == lengths_R.tolist()


def test_a_batch_with_too_few_names_is_refused() -> None:
    with pytest.raises(ValueError, match="own_policies_R has 1 names"):
        StepBatch(
            step=0,
            request_ids_R=np.array([1, 2]),
            draftable_R=np.array([1, 1]),
            context_tokens=0,
            own_policies_R=("off",),
        )
