"""Answer every prompt in every arm, side by side, and keep what was answered."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dspark.evaluation.answers import Answer, AnswerLog, Record
from dspark.evaluation.benchmarks import EvaluationPrompt
from dspark.evaluation.plan import Arm

__all__ = ["Decode", "DoesNotFit", "Question", "answer_prompts", "arm_order", "questions_left"]


class DoesNotFit(ValueError):
    """A conversation has no room for an answer in the target's context; says how much there is."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One answer that is asked for.

    Attributes:
        messages: the conversation so far, ``{"role", "content"}`` each, a user's message last.
        random_seed: for whatever is drawn; a function of the evaluation's seed, the prompt and the turn, so the same in
            every arm.
    """

    arm: Arm
    prompt_id: str
    messages: tuple[Mapping[str, str], ...]
    random_seed: int


Decode = Callable[[Question], Answer]
"""Gives the answer to a question, or raises `DoesNotFit`."""


def answer_prompts(
    prompts: Sequence[EvaluationPrompt],
    arms: Sequence[Arm],
    decode: Decode,
    log: AnswerLog,
    *,
    seed: int,
    on_answer: Callable[[Record], None] = lambda record: None,
) -> None:
    """Fill ``log`` with the answers that it lacks; an interrupted call goes on where it was.

    A prompt is answered in every arm before the next one is begun, so that all arms see the machine in the same
    condition. A conversation goes on with the arm's own answers. A prompt with a turn that does not fit is recorded as
    skipped with the reason.
    """
    for index, prompt in enumerate(prompts):
        for arm in arm_order(arms, index):
            if not _answer_turns(prompt, arm, decode, log, seed, on_answer):
                break


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


def _answer_turns(
    prompt: EvaluationPrompt,
    arm: Arm,
    decode: Decode,
    log: AnswerLog,
    seed: int,
    on_answer: Callable[[Record], None],
) -> bool:
    """Whether all turns have an answer."""
    messages: list[Mapping[str, str]] = []
    if prompt.system is not None:
        messages.append({"role": "system", "content": prompt.system})
    for turn, text in enumerate(prompt.turns):
        messages.append({"role": "user", "content": text})
        record = log.get(arm.label, prompt.id, turn)
        if record is None:
            record = _ask(prompt, arm, turn, messages, decode, seed)
            log.add(record)
            on_answer(record)
        if record.answer is None:
            return False
        messages.append({"role": "assistant", "content": record.answer.text})
    return True


def _ask(
    prompt: EvaluationPrompt, arm: Arm, turn: int, messages: Sequence[Mapping[str, str]], decode: Decode, seed: int
) -> Record:
    digest = hashlib.sha256(f"{seed} {prompt.id} {turn}".encode()).digest()
    question = Question(
        arm=arm,
        prompt_id=prompt.id,
        messages=tuple(messages),
        random_seed=int.from_bytes(digest[:8], "big") >> 1,  # fits a signed 64-bit integer
    )
    try:
        return Record(arm=arm.label, prompt_id=prompt.id, turn=turn, answer=decode(question))
    except DoesNotFit as error:
        return Record(arm=arm.label, prompt_id=prompt.id, turn=turn, skipped=str(error))
