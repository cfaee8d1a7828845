from __future__ import annotations

from dataclasses import replace

import pytest

from dspark.evaluation.plan import TARGET_ALONE, DrafterFacts, evaluation_arms

DRAFTER = DrafterFacts(
    label="d", kind="dspark", num_layers=2, block_size=5, parameters=10, has_confidence_head=True, fingerprint="f"
)


def test_sweeps_vary_one_thing_and_leave_out_what_the_drafter_does_anyway():
    other = replace(DRAFTER, label="e")
    arms = evaluation_arms([DRAFTER, other], baseline=True, thresholds=(0.4, 0.0, 0.2, 0.4), draft_tokens=(5, 1, 3))
    assert arms[0].label == TARGET_ALONE
    for label in ("d", "e"):
        mine = [(arm.draft_tokens, arm.threshold) for arm in arms if arm.drafter == label]
        assert mine == [(None, None), (None, 0.2), (None, 0.4), (1, None), (3, None)]
    assert [arm.label for arm in arms if arm.is_base] == ["d", "e"]
    assert len({arm.label for arm in arms}) == len(arms)


def test_without_a_baseline_there_is_none():
    assert [arm.label for arm in evaluation_arms([DRAFTER], baseline=False)] == ["d"]


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        (replace(DRAFTER, has_confidence_head=False), {"thresholds": (0.2,)}, "d has no confidence head"),
        (DRAFTER, {"thresholds": (1.2,)}, "1.2 is not a probability"),
        (DRAFTER, {"draft_tokens": (6,)}, "1 to 5 draft tokens a round, not 6"),
        (DRAFTER, {"draft_tokens": (0,)}, "not 0"),
        (replace(DRAFTER, label=TARGET_ALONE), {}, "two ways of decoding are called 'target alone'"),
        (DRAFTER, {"thresholds": (0.1234567, 0.1234568)}, "called 'd, threshold 0.123457'"),
    ],
)
def test_what_a_drafter_cannot_do_is_an_error(drafter, options, message):
    with pytest.raises(ValueError, match=message):
        evaluation_arms([drafter], baseline=True, **options)
