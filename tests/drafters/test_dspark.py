"""What only the DSpark drafter has: base logits, heads over them, a confidence with a gradient of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dspark.drafters import DSparkConfig, DSparkDrafter
from dspark.drafters.registry import drafter_from_target
from tests.drafters.conftest import Context
from tests.drafters.packed import train

DrafterOf = Callable[..., DSparkDrafter]
ContextOf = Callable[[DSparkDrafter, int], Context]
BLOCKS = torch.tensor([[[1, 2, 3, 4], [5, 6, 7, 8]]])
ANCHORS = torch.tensor([[4, 9]])


def test_new_drafter_starts_as_the_base(
    config_of: Callable[..., DSparkConfig], target: Any, context_of: ContextOf
) -> None:
    drafter = drafter_from_target(config_of("rnn"), target)
    output = train(drafter, context_of(drafter, 12).taps_NT[None], ANCHORS, BLOCKS)
    base = torch.nn.functional.linear(output.hidden_BAGH, drafter.lm_head.weight)
    assert torch.equal(output.logits_BAGD, base)


@pytest.mark.parametrize("kind", ["none", "vanilla", "gated", "rnn"])
def test_detached_confidence_trains_its_own_head_alone(kind: str, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    drafter = drafter_of(kind)
    output = train(drafter, context_of(drafter, 12).taps_NT[None], ANCHORS, BLOCKS)
    _, confidence = drafter.teacher_forced(output.hidden_BAGH[0], BLOCKS[0], detach_confidence=True)
    assert confidence is not None
    assert output.confidence_logits_BAG is not None
    torch.testing.assert_close(confidence, output.confidence_logits_BAG[0])
    confidence.sum().backward()
    reached = {name for name, parameter in drafter.named_parameters() if parameter.grad is not None}
    assert reached == {"confidence_head.proj.weight", "confidence_head.proj.bias"}


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("kind", ["none", "vanilla", "gated", "rnn"])
def test_heads_over_single_slots_equal_heads_over_blocks(
    kind: str, detach: bool, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = drafter_of(kind)
    output = train(drafter, context_of(drafter, 12).taps_NT[None], ANCHORS, BLOCKS)
    chosen = torch.tensor([[False, True, True, False], [True, False, False, True]])
    logits, confidence = drafter.teacher_forced(output.hidden_BAGH[0], BLOCKS[0], chosen, detach_confidence=detach)
    assert confidence is not None
    assert output.confidence_logits_BAG is not None
    torch.testing.assert_close(logits, output.logits_BAGD[0][chosen])
    torch.testing.assert_close(confidence, output.confidence_logits_BAG[0][chosen])


def test_no_confidence_head_no_confidence(drafter_of: DrafterOf) -> None:
    drafter = drafter_of("vanilla", confidence=False)
    hidden, previous = torch.zeros(2, 4, 24), torch.zeros(2, 4, dtype=torch.int64)
    assert drafter.teacher_forced(hidden, previous)[1] is None
