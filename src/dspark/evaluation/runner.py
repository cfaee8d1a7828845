"""Answer every prompt in every arm, and keep what was answered."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from dspark.decoding.settings import SamplingSettings
from dspark.evaluation.answers import AnswerLog, Record
from dspark.evaluation.benchmarks import EvaluationPrompt
from dspark.evaluation.plan import Arm
from dspark.evaluation.questions import Conversation, DoesNotFit, Question

__all__ = ["Lead", "answer_prompts", "arm_order", "questions_left"]

Lead = Callable[[Arm, Iterator[Conversation]], None]
"""Leads conversations to their end, with everything decoded as the arm says; several at a time if it likes."""


def answer_prompts(
    prompts: Sequence[EvaluationPrompt],
    arms: Sequence[Arm],
    lead: Lead,
    log: AnswerLog,
    *,
    temperature: float,
    coupled: bool,
    seed: int,
    in_turns: bool = True,
    on_answer: Callable[[Record], None] = lambda record: None,
) -> None:
    """Fill ``log`` with the answers that it lacks; an interrupted call goes on where it was.

    A conversation goes on with the arm's own answers. A prompt with a turn that does not fit is recorded as skipped
    with the reason, and not asked any further.

    Args:
        temperature: of sampling.
        coupled: draw by seeded coupling, so that an output does not depend on speculation; else by the p/q rule.
        seed: of whatever is drawn; what is drawn for a question depends on it, the prompt and the turn alone.
        in_turns: answer a prompt in every arm before the next one is begun, so that all arms see the machine in the
            same condition; else an arm answers all prompts before the next arm begins.
    """
    skipped = {record.prompt_id for record in log.records if record.answer is None}

    def keep(record: Record) -> None:
        log.add(record)
        if record.answer is None:
            skipped.add(record.prompt_id)
        on_answer(record)

    def conversation(prompt: EvaluationPrompt, arm: Arm) -> Conversation:
        messages: list[Mapping[str, str]] = []
        if prompt.system is not None:
            messages.append({"role": "system", "content": prompt.system})
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            record = log.get(arm.label, prompt.id, turn)
            answer = None if record is None else record.answer
            if answer is None:
                try:
                    answer = yield _question(prompt.id, turn, messages, temperature, coupled, seed)
                except DoesNotFit as error:
                    keep(Record(arm=arm.label, prompt_id=prompt.id, turn=turn, skipped=str(error)))
                    return
                keep(Record(arm=arm.label, prompt_id=prompt.id, turn=turn, answer=answer))
            messages.append({"role": "assistant", "content": answer.text})

    groups = [[prompt] for prompt in prompts] if in_turns else [list(prompts)]
    for index, group in enumerate(groups):
        for arm in arm_order(arms, index):
            lead(arm, (conversation(prompt, arm) for prompt in group if prompt.id not in skipped))


def questions_left(prompts: Sequence[EvaluationPrompt], arms: Sequence[Arm], log: AnswerLog) -> int:
    """How many answers ``log`` lacks; a prompt that was skipped lacks none."""
    skipped = {record.prompt_id for record in log.records if record.answer is None}
    return sum(
        log.get(arm.label, prompt.id, turn) is None
        for prompt in prompts
        if prompt.id not in skipped
        for arm in arms
        for turn in range(len(prompt.turns))
    )


def arm_order(arms: Sequence[Arm], index: int) -> list[Arm]:
    """The order of the arms for prompt ``index``: every arm is first, second, ... equally often, and the direction
    alternates, so that none profits from what another leaves in the machine's caches.
    """
    start = (index // 2) % len(arms) if arms else 0
    rotated = [*arms[start:], *arms[:start]]
    return rotated if index % 2 == 0 else rotated[::-1]


def _question(
    prompt_id: str, turn: int, messages: Sequence[Mapping[str, str]], temperature: float, coupled: bool, seed: int
) -> Question:
    digest = hashlib.sha256(f"{seed} {prompt_id} {turn}".encode()).digest()
    drawn = int.from_bytes(digest[:8], "big") >> 1  # fits a signed 64-bit integer
    return Question(
        prompt_id=prompt_id,
        messages=tuple(messages),
        sampling=SamplingSettings(temperature=temperature, seed=drawn if coupled else None),
        random=random.Random(drawn).random,
    )
