"""Records of steps: through JSON and back, and decided again."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from dspark.scheduling import (
    Delayed,
    Fixed,
    History,
    Immediate,
    Off,
    Policy,
    StepRecord,
    StepSeconds,
    Threshold,
    predicted_seconds,
    replayed_lengths,
)
from tests.scheduling.tiny import batch_of, cost_over_tokens, drafts_of

COST = cost_over_tokens([1.0 + 0.3 * (n // 4) for n in range(64)], draft=0.5)


def recorded(policy: Policy, steps: int = 30) -> list[StepRecord]:
    """A run with requests that come and go, and that end."""
    generator, history, records = np.random.default_rng(3), History(), []
    for step in range(steps):
        ids = [r for r in range(12) if r <= step < r + 15]
        batch = batch_of(generator.integers(0, 5, len(ids)), step=step, ids=ids, prefill_tokens=step % 3)
        plan = policy.plan(batch, history.past, COST)
        rows = [generator.beta(5, 1, length).tolist() for length in plan.draft_lengths_R]
        drafts = drafts_of(rows, step=step, ids=ids) if plan.drafts else None
        lengths_R = np.zeros_like(plan.draft_lengths_R)
        if drafts is not None:
            lengths_R = policy.verify_lengths(plan, drafts, COST)
        record = StepRecord(
            policy=policy.name,
            plan=plan,
            drafts=drafts,
            verify_lengths_R=lengths_R,
            predicted=predicted_seconds(plan, int(lengths_R.sum()), COST),
        )
        if step % 2:
            measured = StepSeconds(draft=0.1, schedule=0.0, verify=1.0)
            record = dataclasses.replace(record, measured=measured, accepted_R=lengths_R // 2)
        records.append(record)
        history = history.after(drafts, lengths_R, record.accepted_R)
    return records


@pytest.mark.parametrize(
    "policy",
    [Off(), Fixed(length=3), Threshold(confidence=0.7), Immediate(), Delayed()],
    ids=lambda policy: policy.name,
)
def test_a_run_read_back_from_json_is_decided_alike(policy: Policy) -> None:
    records = recorded(policy)
    lines = [json.dumps(record.as_dict(), allow_nan=False) for record in records]
    read = [StepRecord.from_dict(json.loads(line)) for line in lines]
    assert [json.dumps(record.as_dict()) for record in read] == lines
    lengths = [record.verify_lengths_R.tolist() for record in records]
    assert [lengths_R.tolist() for lengths_R in replayed_lengths(read, policy, COST)] == lengths
    assert any(map(any, lengths)) is (policy.name != "off")


def test_another_policy_on_the_same_drafts() -> None:
    records = recorded(Fixed(length=4))
    two = replayed_lengths(records, Fixed(length=2), COST)
    assert [lengths_R.tolist() for lengths_R in two] == [
        np.minimum(record.plan.draft_lengths_R, 2).tolist() for record in records
    ]
    delayed = replayed_lengths(records, Delayed(), COST)
    assert 0 < sum(map(np.sum, delayed)) < sum(record.verify_lengths_R.sum() for record in records)


def test_drafts_without_confidences_are_kept_as_such() -> None:
    record = recorded(Fixed(length=2))[1]
    assert record.drafts is not None
    drafts = dataclasses.replace(record.drafts, confidences_RG=None)
    read = StepRecord.from_dict(dataclasses.replace(record, drafts=drafts).as_dict())
    assert read.drafts is not None
    assert read.drafts.confidences_RG is None
    assert read.drafts.lengths_R.tolist() == drafts.lengths_R.tolist()


def test_more_accepted_than_verified_is_refused() -> None:
    record = recorded(Fixed(length=2))[1]
    with pytest.raises(ValueError, match="accepted_R"):
        dataclasses.replace(record, accepted_R=record.verify_lengths_R + 1)


@pytest.mark.parametrize("name", ["verify_lengths_R", "accepted_R"])
def test_numbers_of_other_requests_than_the_batchs_are_refused(name: str) -> None:
    record = recorded(Fixed(length=2))[1]
    with pytest.raises(ValueError, match=rf"{name} has shape \(9,\): give one number for each of the batch's"):
        dataclasses.replace(record, **{name: np.zeros(9, np.int64)})
