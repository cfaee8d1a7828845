"""Records of rounds: to lines and back, to arrays."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dspark.evaluation.rounds import RoundRecord, judged_rounds


def record(**changes: Any) -> RoundRecord:
    content: dict[str, Any] = {
        "prompt_id": "math/1",
        "drafted": 3,
        "verified": 3,
        "judged": 3,
        "accepted": 1,
        "committed": 2,
        "confidence_logits": (0.5, -1.0, 2.0),
        "sampling_temperature": 0.7,
    }
    return RoundRecord(**content | changes)


def test_lines_come_back() -> None:
    for one in (
        record(),
        record(confidence_logits=None),
        record(drafted=5, verified=2, judged=2, confidence_logits=None),
    ):
        line = one.to_line(answer=3)
        assert line.endswith("\n")
        assert json.loads(line)["answer"] == 3
        assert RoundRecord.from_json(json.loads(line)) == one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accepted": 4}, "each must be at most the next"),
        ({"judged": 0}, "each must be at most the next"),
        ({"committed": 4}, "committed is 4"),
        ({"committed": 0, "accepted": 0}, "committed is 0"),
        ({"confidence_logits": (1.0,)}, "1 confidence_logits for 3 drafted"),
    ],
)
def test_rounds_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(**changes)


@pytest.mark.parametrize("field", ["prompt_id", "drafted", "judged", "confidence_logits", "sampling_temperature"])
def test_a_damaged_field_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        RoundRecord.from_json(record().to_json() | {field: {"not": "this"}})


def test_arrays_for_calibration() -> None:
    ended = record(prompt_id="b", accepted=1, judged=1, committed=1)  # a stop token, first of three
    short = record(drafted=1, verified=1, judged=1, accepted=0, committed=1, confidence_logits=(0.25,))
    rounds = judged_rounds([record(), ended, short], 3)
    np.testing.assert_array_equal(rounds.logits_NG, [[0.5, -1, 2], [0.5, -1, 2], [0.25, np.nan, np.nan]])
    assert rounds.judged_N.tolist() == [3, 1, 1]
    assert rounds.prompts_N[0] == rounds.prompts_N[2] != rounds.prompts_N[1]
    assert rounds.survival(1).outcomes_M.tolist() == [True, True, False]
    assert rounds.survival(2).outcomes_M.tolist() == [False]
    again = judged_rounds([ended], 3)
    assert again.prompts_N[0] == rounds.prompts_N[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verified": 2, "judged": 2}, "not verified to the end of their draft"),
        ({"confidence_logits": None}, "no confidence_logits"),
        ({"drafted": 4, "verified": 4, "judged": 4, "confidence_logits": (0.0,) * 4}, "more than the block size 3"),
    ],
)
def test_rounds_that_tell_nothing_about_confidence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judged_rounds([record(**changes)], 3)
