"""Conversations answered many at once: the answers, rounds and times of each on its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dspark.decoding import SamplingSettings
from dspark.engine.answering import _logits, answer_conversations
from dspark.engine.generation import generate
from dspark.evaluation.answers import Answer
from dspark.evaluation.questions import Conversation, DoesNotFit, Question
from dspark.models.chat import chat_token_ids
from dspark.models.loading import LoadedTarget
from dspark.scheduling import Fixed, Off, Policy, Threshold
from tests.cli.tokenizer import VOCABULARY_SIZE, character_tokenizer
from tests.engine.confident import ConfidentTableDrafter
from tests.engine.table_models import TableDrafter, TableTarget, random_table

TABLE = random_table(VOCABULARY_SIZE, 0, sharpness=4.0)
BLOCK = 3
CONTEXT = 200


def make_target(context: int = CONTEXT) -> LoadedTarget:
    return LoadedTarget(
        model=TableTarget(TABLE, context=context),
        tokenizer=character_tokenizer(),
        name="tables",
        stop_token_ids=frozenset({int(TABLE[3].argmax())}),
    )


def make_drafter() -> ConfidentTableDrafter:
    return ConfidentTableDrafter((TABLE + 0.3 * random_table(VOCABULARY_SIZE, 1, sharpness=4.0)) / 1.3, BLOCK)


def sampling(number: int) -> SamplingSettings:
    return (SamplingSettings(), SamplingSettings(temperature=1.0, seed=number), SamplingSettings(temperature=0.8))[
        number % 3
    ]


def talk(number: int, told: list[Answer], *, settings: SamplingSettings | None = None) -> Conversation:
    """One to three turns, of very different lengths."""
    chance = random.Random(number)
    messages: list[dict[str, str]] = []
    for turn in range(1 + number % 3):
        messages.append({"role": "user", "content": "ab" * chance.choice([1, 3, 20])})
        answer = yield Question(
            prompt_id=f"p/{number}",
            messages=tuple(messages),
            sampling=sampling(number) if settings is None else settings,
            random=random.Random(f"{number} {turn}").random,
        )
        told.append(answer)
        messages.append({"role": "assistant", "content": answer.text})


def answers(policy: Policy, concurrency: int, count: int = 20, **options: Any) -> list[list[Answer]]:
    told: list[list[Answer]] = [[] for _ in range(count)]
    target = options.pop("target", None) or make_target()
    drafter = None if isinstance(policy, Off) else make_drafter()
    conversations = (talk(number, told[number], **options) for number in range(count))
    answer_conversations(conversations, target, drafter, policy=policy, concurrency=concurrency, max_tokens=12)
    return told


def without_times(told: list[list[Answer]]) -> list[list[tuple[Any, ...]]]:
    return [[(one.token_ids, one.text, one.finish_reason, one.rounds) for one in turns] for turns in told]


@pytest.mark.parametrize("policy", [Off(), Fixed(length=2), Fixed(length=BLOCK), Threshold(confidence=0.4)])
@pytest.mark.parametrize(
    "settings", [SamplingSettings(), SamplingSettings(temperature=1.0, seed=3), SamplingSettings(temperature=0.8)]
)
def test_answers_and_rounds_do_not_depend_on_the_company(policy: Policy, settings: SamplingSettings) -> None:
    alone = answers(policy, 1, settings=settings)
    assert [len(turns) for turns in alone] == [1 + number % 3 for number in range(20)]
    for concurrency in (2, 7, 50):
        assert without_times(answers(policy, concurrency, settings=settings)) == without_times(alone)


@pytest.mark.parametrize("concurrency", [1, 6])
def test_rounds_are_those_of_a_request_by_itself(concurrency: int) -> None:
    target, drafter = make_target(), make_drafter()
    policy = Fixed(length=BLOCK)
    for number, told in enumerate(answers(policy, concurrency, settings=SamplingSettings(), target=target)):
        first = next(talk(number, [], settings=SamplingSettings()))
        prompt_ids = chat_token_ids(target.tokenizer, first.messages)
        events = list(
            generate(
                target.model,
                drafter,
                prompt_ids,
                SamplingSettings(),
                max_tokens=12,
                stop_token_ids=target.stop_token_ids,
            )
        )
        assert told[0].prompt_tokens == len(prompt_ids)
        assert told[0].token_ids == tuple(token for event in events for token in event.token_ids)
        assert [
            (one.drafted, one.verified, one.judged, one.accepted, one.committed, one.confidence_logits)
            for one in told[0].rounds
        ] == [
            (one.drafted, one.verified, one.judged, one.accepted, len(one.token_ids), one.confidence_logits)
            for one in events[1:]
        ]
        assert {(one.prompt_id, one.sampling_temperature) for one in told[0].rounds} <= {(f"p/{number}", 0.0)}


def test_a_target_that_shares_no_blocks_gives_the_same() -> None:
    class OwnSlots(TableTarget):
        shares_blocks = False

    target = replace(make_target(), model=OwnSlots(TABLE, context=CONTEXT))
    policy, settings = Fixed(length=BLOCK), SamplingSettings()
    expected = without_times(answers(policy, 1, settings=settings))
    assert without_times(answers(policy, 4, settings=settings, target=target)) == expected


def test_some_answers_end_inside_a_round() -> None:
    rounds = [one for turns in answers(Fixed(length=BLOCK), 5) for told in turns for one in told.rounds]
    assert {one.drafted for one in rounds} == {0, 1, 2, BLOCK}
    cut = [one for one in rounds if one.judged < one.verified]
    assert cut
    assert all(one.judged == one.committed == one.accepted for one in cut)


def test_a_drafter_without_confidence_head_has_rounds_without_logits() -> None:
    silent = TableDrafter(TABLE, BLOCK)
    told: list[Answer] = []
    answer_conversations(
        iter([talk(0, told)]), make_target(), silent, policy=Fixed(length=BLOCK), concurrency=1, max_tokens=12
    )
    assert any(one.drafted for one in told[0].rounds)
    assert {one.confidence_logits for one in told[0].rounds} == {None}


def test_the_seconds_of_all_answers_are_those_of_all_steps() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    told: list[list[Answer]] = [[] for _ in range(9)]
    answer_conversations(
        (talk(number, told[number]) for number in range(9)),
        make_target(),
        make_drafter(),
        policy=Fixed(length=BLOCK),
        concurrency=4,
        max_tokens=12,
        clock=clock,
    )
    timings = [one.timing for turns in told for one in turns]
    # A tick before each step is nobody's, and one at each submission.
    steps = sum(one.total for one in timings)
    assert 0.7 * now < steps < now
    assert steps == pytest.approx(round(steps))
    for answer in (one for turns in told for one in turns):
        one = answer.timing
        assert one.prefill > 0.0
        assert (one.draft > 0.0) == any(round_.drafted for round_ in answer.rounds)
        assert (one.verify > 0.0) == (one.commit > 0.0) == bool(answer.rounds)
        assert one.total == pytest.approx(one.prefill + one.draft + one.schedule + one.verify + one.commit)


def test_a_step_is_shared_out_by_tokens() -> None:
    told: list[Answer] = []
    ticks = iter(float(tick) for tick in range(10**6))

    def ask(letters: int) -> Conversation:
        question = next(talk(0, []))
        messages = ({"role": "user", "content": "a" * letters},)
        told.append((yield replace(question, messages=messages)))

    answer_conversations(
        iter([ask(14), ask(24)]),
        make_target(),
        None,
        policy=Off(),
        concurrency=2,
        max_tokens=1,
        clock=lambda: next(ticks),
    )
    short, long = told
    assert (short.prompt_tokens, long.prompt_tokens) == (20, 30)
    assert long.timing.prefill == pytest.approx(1.5 * short.timing.prefill)
    assert long.timing.total == long.timing.prefill


def test_a_conversation_that_does_not_fit_is_told_and_the_others_go_on() -> None:
    told: list[Answer] = []
    reasons: list[str] = []

    def long_talk() -> Conversation:
        question = next(talk(0, []))
        try:
            yield question
            yield Question(
                prompt_id="p",
                messages=({"role": "user", "content": "x" * CONTEXT},),
                sampling=question.sampling,
                random=question.random,
            )
        except DoesNotFit as error:
            reasons.append(str(error))
            told.append((yield question))

    others: list[Answer] = []
    talks: Iterator[Conversation] = iter([long_talk(), talk(5, others)])
    answer_conversations(talks, make_target(), make_drafter(), policy=Fixed(length=1), concurrency=2, max_tokens=12)
    assert reasons == [f"{CONTEXT + 6} tokens of conversation and 12 of answer, but the target's context has {CONTEXT}"]
    assert len(told) == 1
    assert len(others) == 3


def test_conversations_are_pulled_when_there_is_room() -> None:
    pulled: list[int] = []
    told: list[list[Answer]] = [[] for _ in range(12)]

    def conversations() -> Iterator[Conversation]:
        for number in range(12):
            assert number - sum(len(told[before]) > before % 3 for before in pulled) < 3
            pulled.append(number)
            yield talk(number, told[number])

    answer_conversations(conversations(), make_target(), None, policy=Off(), concurrency=3, max_tokens=12)
    assert pulled == list(range(12))


@pytest.mark.parametrize("temperatures", [(1.0,) * 4, (0.5, 2.0, 1.3, 0.7)])
def test_logits_come_back_from_confidences_with_the_same_bits(temperatures: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        logits_G = torch.rand(4, generator=generator) * 18 - 9
        scaled_G = logits_G.double().numpy() / np.array(temperatures)
        confidences_G = 0.5 + 0.5 * np.tanh(0.5 * scaled_G)
        assert _logits(confidences_G, np.array(temperatures)) == tuple(logits_G.tolist())
    assert _logits(np.array([0.0, 1.0]), np.ones(2)) == (-36.0, 36.0)
