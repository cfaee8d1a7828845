"""Verifying less than was drafted: what is chosen, and that the output does not change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from dspark.calibration.calibration import Calibration
from dspark.decoding import SamplingSettings
from dspark.drafters import DraftBlock, DrafterCache, DraftSampler
from dspark.engine.generation import generate
from dspark.engine.result import RoundEvent
from dspark.engine.speculation import SpeculationSettings
from tests.engine.table_models import TableDrafter, TableTarget, random_table
from tests.engine.test_generation import PROMPT, SETTINGS, VOCABULARY, exact_law


def logit(prefix_sum: int) -> float:
    return 3.0 * math.sin(prefix_sum)


class ConfidentDrafter(TableDrafter):
    """Confidences that are a function of the tokens before the one they are about."""

    def __init__(self, calibration: Calibration | None = None) -> None:
        super().__init__((random_table(VOCABULARY, 0) + 0.3 * random_table(VOCABULARY, 1)) / 1.3, 3)
        self.has_confidence_head = True
        self.calibration = calibration

    def propose(
        self,
        cache: DrafterCache,
        slots: Sequence[int],
        anchors_R: torch.Tensor,
        sample: DraftSampler,
        num_tokens: int | None = None,
    ) -> DraftBlock:
        block = super().propose(cache, slots, anchors_R, sample, num_tokens)
        before_RG = torch.cat((anchors_R[:, None], block.tokens_RG[:, :-1]), dim=1).cumsum(dim=1)
        logits = [[logit(value) for value in row] for row in before_RG.tolist()]
        return replace(block, confidence_logits_RG=torch.tensor(logits))


def run(settings: SamplingSettings, speculation: SpeculationSettings, **arguments: Any) -> list[RoundEvent]:
    drafter = ConfidentDrafter(arguments.pop("calibration", None))
    target = TableTarget(random_table(VOCABULARY, 0))
    return list(generate(target, drafter, PROMPT, settings, speculation=speculation, **arguments))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_threshold_keeps_the_targets_distribution(name: str) -> None:
    law = exact_law(random_table(VOCABULARY, 0), SETTINGS[name], 4)
    random = np.random.default_rng(7).random
    counts: Counter[tuple[int, ...]] = Counter()
    verified = drafted = 0
    for _ in range(400):
        events = run(SETTINGS[name], SpeculationSettings(confidence_threshold=0.5), max_tokens=4, random=random)
        counts[tuple(token for event in events for token in event.token_ids)] += 1
        result = events[-1].result
        assert result is not None
        verified, drafted = verified + result.verified, drafted + result.drafted
    assert 0 < verified < drafted
    expected = {tokens: 400 * probability for tokens, probability in law.items()}
    frequent = [tokens for tokens, count in expected.items() if count >= 5]
    observed = [counts[tokens] for tokens in frequent]
    observed.append(400 - sum(observed))
    theory = [expected[tokens] for tokens in frequent]
    theory.append(400 - sum(theory))
    if theory[-1] < 1e-9:
        observed, theory = observed[:-1], theory[:-1]
    assert chisquare(observed, theory).pvalue > 1e-4


@pytest.mark.parametrize("settings", [SamplingSettings(), SamplingSettings(temperature=1.0, seed=3)])
def test_greedy_and_seeded_output_is_the_same_under_every_choice(settings: SamplingSettings) -> None:
    outputs = set()
    for threshold in (None, 0.0, 0.3, 0.5, 0.9, 1.0):
        for most in (None, 0, 1, 2):
            speculation = SpeculationSettings(confidence_threshold=threshold, max_draft_tokens=most)
            events = run(settings, speculation, max_tokens=25)
            outputs.add(tuple(token for event in events for token in event.token_ids))
            assert all(event.drafted <= (3 if most is None else most) for event in events)
    assert len(outputs) == 1


@pytest.mark.parametrize("calibration", [None, Calibration(temperatures=(0.5, 4.0, 4.0))])
def test_tokens_are_verified_up_to_the_first_that_is_unlikely(calibration: Calibration | None) -> None:
    threshold = 0.6
    settings = SamplingSettings(temperature=1.0, seed=5)
    speculation = SpeculationSettings(confidence_threshold=threshold)
    events = run(settings, speculation, max_tokens=40, calibration=calibration)
    lengths = set()
    for event in events[1:]:
        logits = event.confidence_logits or ()
        assert len(logits) == event.drafted
        temperatures = (1.0,) * 3 if calibration is None else calibration.temperatures
        likely = [1 / (1 + math.exp(-z / t)) >= threshold for z, t in zip(logits, temperatures, strict=False)]
        length = likely.index(False) if False in likely else len(likely)
        assert event.verified == length
        assert event.accepted <= event.judged <= event.verified
        lengths.add(length)
    assert len(lengths) > 1
    result = events[-1].result
    assert result is not None
    assert result.drafted == sum(event.drafted for event in events)
    assert result.verified == sum(event.verified for event in events) < result.drafted
    assert sum(result.verified_per_position) == sum(event.judged for event in events)


def test_settings_that_make_no_sense_are_named() -> None:
    with pytest.raises(ValueError, match="confidence_threshold must be a probability"):
        SpeculationSettings(confidence_threshold=1.5)
    with pytest.raises(ValueError, match="max_draft_tokens must not be negative"):
        SpeculationSettings(max_draft_tokens=-1)
    drafter = TableDrafter(random_table(VOCABULARY, 0), 3)
    with pytest.raises(ValueError, match="confidence_threshold needs a drafter with a confidence head"):
        generate(
            TableTarget(random_table(VOCABULARY, 0)),
            drafter,
            PROMPT,
            SamplingSettings(),
            max_tokens=3,
            speculation=SpeculationSettings(confidence_threshold=0.5),
        )
