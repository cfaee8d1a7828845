"""Answering the questions of an evaluation by the engine, one request at a time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dspark.cli.prompts import chat_token_ids
from dspark.decoding.settings import SamplingSettings
from dspark.drafters.registry import TrainableDrafter
from dspark.engine.generation import generate
from dspark.engine.speculation import SpeculationSettings
from dspark.evaluation.answers import Answer, Timing
from dspark.evaluation.rounds import round_records
from dspark.evaluation.runner import DoesNotFit, Question
from dspark.models.loading import LoadedTarget

__all__ = ["RequestDecoder"]


@dataclass(frozen=True, kw_only=True)
class RequestDecoder:
    """Answers questions as the evaluation's `Decode` callable.

    Attributes:
        drafters: by label.
        coupled: draw by seeded coupling, so that an output does not depend on speculation; else by the p/q rule.
    """

    target: LoadedTarget
    drafters: Mapping[str, TrainableDrafter]
    temperature: float
    coupled: bool
    max_tokens: int

    def __call__(self, question: Question) -> Answer:
        """Answer one question. Raises DoesNotFit when prompt and answer do not fit into the context."""
        target, arm = self.target, question.arm
        prompt_ids = chat_token_ids(target.tokenizer, question.messages)
        context = target.model.config.max_position_embeddings
        if len(prompt_ids) + self.max_tokens > context:
            raise DoesNotFit(
                f"{len(prompt_ids)} tokens of conversation and {self.max_tokens} of answer, but the target's context "
                f"has {context}"
            )
        events = list(
            generate(
                target.model,
                None if arm.drafter is None else self.drafters[arm.drafter],
                prompt_ids,
                SamplingSettings(temperature=self.temperature, seed=question.random_seed if self.coupled else None),
                max_tokens=self.max_tokens,
                stop_token_ids=target.stop_token_ids,
                random=random.Random(question.random_seed).random,
                speculation=SpeculationSettings(max_draft_tokens=arm.draft_tokens, confidence_threshold=arm.threshold),
            )
        )
        result = events[-1].result
        assert result is not None, "generation ended without a result"
        text: str = target.tokenizer.decode(result.token_ids, skip_special_tokens=True)
        return Answer(
            text=text,
            token_ids=result.token_ids,
            finish_reason=result.finish_reason,
            prompt_tokens=result.prompt_tokens,
            timing=Timing(
                total=result.seconds,
                prefill=result.prefill_seconds,
                draft=result.draft_seconds,
                schedule=result.schedule_seconds,
                verify=result.verify_seconds,
                commit=result.commit_seconds,
            ),
            rounds=tuple(round_records(events, prompt_id=question.prompt_id, sampling_temperature=self.temperature)),
        )

    def warm_up(self, question: Question, *, max_tokens: int) -> None:
        """Pay for first-time work (allocations, kernel selection) outside the measurement."""
        replace(self, max_tokens=min(max_tokens, self.max_tokens))(question)
