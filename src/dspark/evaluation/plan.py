"""Which ways of decoding an evaluation compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["TARGET_ALONE", "Arm", "DrafterFacts", "evaluation_arms"]

TARGET_ALONE = "target alone"
"""Label of decoding without speculation."""


@dataclass(frozen=True, kw_only=True)
class DrafterFacts:
    """What a report says of a drafter.

    Attributes:
        label: what it is called in tables.
        fingerprint: of its weights.
        temperatures: T_1..T_γ that make probabilities of its confidence logits at the evaluation's sampling
            temperature; None where it has no calibration.
    """

    label: str
    kind: str
    num_layers: int
    block_size: int
    parameters: int
    has_confidence_head: bool
    fingerprint: str
    temperatures: tuple[float, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to decode every prompt.

    Attributes:
        label: unique in an evaluation.
        drafter: label of the drafter; None is the target alone.
        draft_tokens: draft tokens of a round at most; None for the drafter's block.
        threshold: confidence below which a draft is not verified any further; None verifies all of it.
    """

    label: str
    drafter: str | None = None
    draft_tokens: int | None = None
    threshold: float | None = None

    @property
    def is_base(self) -> bool:
        """Whether it is a drafter as it comes: whole blocks, all verified."""
        return self.drafter is not None and self.draft_tokens is None and self.threshold is None


def evaluation_arms(
    drafters: Sequence[DrafterFacts],
    *,
    baseline: bool,
    thresholds: Sequence[float] = (),
    draft_tokens: Sequence[int] = (),
) -> tuple[Arm, ...]:
    """The target alone, every drafter as it comes, and every drafter at every point of the two sweeps.

    A threshold of 0 and the block size itself are the drafter as it comes, so they are not decoded twice.

    Raises:
        ValueError: naming the drafter that a sweep cannot be run for, and why, or two arms of one name.
    """
    for threshold in thresholds:
        if not (math.isfinite(threshold) and 0.0 <= threshold <= 1.0):
            raise ValueError(f"threshold {threshold} is not a probability, 0 to 1")
    arms = [Arm(label=TARGET_ALONE)] if baseline else []
    for drafter in drafters:
        arms.append(Arm(label=drafter.label, drafter=drafter.label))
        if thresholds and not drafter.has_confidence_head:
            raise ValueError(f"drafter {drafter.label} has no confidence head: a threshold sweep needs one")
        for threshold in sorted(set(thresholds) - {0.0}):
            arms.append(
                Arm(label=f"{drafter.label}, threshold {threshold:g}", drafter=drafter.label, threshold=threshold)
            )
        for count in sorted(set(draft_tokens)):
            if not 1 <= count <= drafter.block_size:
                raise ValueError(
                    f"drafter {drafter.label} proposes 1 to {drafter.block_size} draft tokens a round, not {count}"
                )
            if count < drafter.block_size:
                arms.append(Arm(label=f"{drafter.label}, {count} drafted", drafter=drafter.label, draft_tokens=count))
    labels = [arm.label for arm in arms]
    for label in labels:
        if labels.count(label) > 1:  # answers are kept by label: one would be taken for the other's
            raise ValueError(
                f"two ways of decoding are called {label!r}: give the drafter another label, or fewer points"
            )
    return tuple(arms)
