"""How the arms of an evaluation decode: which drafter and which policy, by the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dspark.drafters.registry import TrainableDrafter
from dspark.engine.answering import answer_conversations
from dspark.evaluation.plan import Arm
from dspark.evaluation.questions import Conversation
from dspark.models.loading import LoadedTarget
from dspark.scheduling import Fixed, Off, Policy, Threshold

__all__ = ["ArmDecoder"]


@dataclass(frozen=True, kw_only=True)
class ArmDecoder:
    """Leads the conversations of an arm, as the evaluation's `Lead` callable.

    Attributes:
        drafters: by label.
        concurrency: answers made at once.
        max_tokens: of an answer.
    """

    target: LoadedTarget
    drafters: Mapping[str, TrainableDrafter]
    concurrency: int
    max_tokens: int

    def __call__(self, arm: Arm, conversations: Iterator[Conversation]) -> None:
        """Answer them all."""
        drafter = None if arm.drafter is None else self.drafters[arm.drafter]
        answer_conversations(
            conversations,
            self.target,
            drafter,
            policy=_policy(arm, drafter),
            concurrency=self.concurrency,
            max_tokens=self.max_tokens,
        )


def _policy(arm: Arm, drafter: TrainableDrafter | None) -> Policy:
    if drafter is None:
        return Off()
    if arm.threshold is not None:
        return Threshold(confidence=arm.threshold)
    return Fixed(length=drafter.block_size if arm.draft_tokens is None else arm.draft_tokens)
