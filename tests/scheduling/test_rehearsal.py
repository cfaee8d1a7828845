"""Made-up steps before the first real one."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.scheduling import compiled, parse_policy, rehearse
from tests.scheduling.test_cost import fitted

LOOPS = ("confidences", "survivals", "expected", "moved_average", "log_odds", "learned", "best_draft", "verified")


@pytest.mark.parametrize("policy", ["off", "fixed:1", "threshold:0.4", "immediate", "delayed"])
def test_every_policy_can_be_rehearsed(policy: str) -> None:
    rehearse(parse_policy(policy), fitted())


def test_real_steps_find_nothing_left_to_compile() -> None:
    """Each loop has one signature, whatever a policy gives it."""
    for policy in ("immediate", "delayed", "fixed:1", "threshold:0.4"):
        rehearse(parse_policy(policy), fitted())
    assert {name: len(getattr(compiled, name).signatures) for name in LOOPS} == dict.fromkeys(LOOPS, 1)


def test_nothing_is_left_of_it() -> None:
    cost = fitted()
    rehearse(parse_policy("delayed"), cost)
    assert cost.draft_ratio == cost.verify_ratio == 1.0
    assert not np.any(cost.draft_table(1)[0].flags.writeable)
