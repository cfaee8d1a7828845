from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest

from dspark.evaluation.answers import AnswerLog
from dspark.evaluation.plan import TARGET_ALONE, Arm
from dspark.evaluation.questions import DoesNotFit
from dspark.evaluation.runner import answer_prompts, arm_order, questions_left
from tests.evaluation.made import answer, prompt, round_of

ARMS = [Arm(label=TARGET_ALONE), Arm(label="d", drafter="d"), Arm(label="e", drafter="e")]
PROMPTS = [prompt("a/0", turns=2), prompt("a/1"), prompt("a/2", turns=3), prompt("a/3")]
QUESTIONS = len(ARMS) * 7


class Kill(Exception):
    pass


class Leader:
    """Answers are a function of the question; counts them, and dies when told to. Leads several at a time, anyhow."""

    def __init__(self, die_at: int | None = None, too_long: str | None = None, at_once: int = 1) -> None:
        self.questions = []
        self._die_at = die_at
        self._too_long = too_long
        self._at_once = at_once
        self._chance = random.Random(0)

    def __call__(self, arm, conversations):
        open_ones = []
        while True:
            while len(open_ones) < self._at_once:
                conversation = next(conversations, None)
                if conversation is None:
                    break
                self._go_on(open_ones, conversation, None)
            if not open_ones:
                return
            conversation, question = open_ones.pop(self._chance.randrange(len(open_ones)))
            if len(self.questions) == self._die_at:
                raise Kill
            self.questions.append((arm, question))
            if self._too_long is not None and question.messages[-1]["content"] == self._too_long:
                self._go_on(open_ones, conversation, DoesNotFit("no room"))
            else:
                text = f"{arm.label} said {len(question.messages)}"
                given = answer([round_of(int(3 * question.random()), prompt_id=question.prompt_id)], text=text)
                self._go_on(open_ones, conversation, given)

    @staticmethod
    def _go_on(open_ones, conversation, sent):
        with suppress(StopIteration):
            too_long = isinstance(sent, DoesNotFit)
            open_ones.append((conversation, conversation.throw(sent) if too_long else conversation.send(sent)))


def run(leader, log, *, seed=0, in_turns=True, coupled=False):
    answer_prompts(
        PROMPTS, ARMS, leader, log, temperature=1.0 if coupled else 0.0, coupled=coupled, seed=seed, in_turns=in_turns
    )


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_arm_is_at_every_place_equally_often_and_the_direction_alternates(count):
    arms = [Arm(label=str(n), drafter=str(n)) for n in range(count)]
    orders = [arm_order(arms, index) for index in range(2 * count)]
    for place in range(count):
        assert set(Counter(order[place].label for order in orders).values()) == {2}
    assert all(orders[n] == orders[n + 1][::-1] for n in range(0, 2 * count, 2))


def test_all_arms_of_a_prompt_before_the_next():
    leader = Leader()
    with AnswerLog.opened(None, {}) as log:
        run(leader, log)
        assert len(log.records) == QUESTIONS
    prompts_in_order = [question.prompt_id for _, question in leader.questions]
    assert prompts_in_order == sorted(prompts_in_order)


def test_all_prompts_of_an_arm_before_the_next_arm():
    leader = Leader(at_once=3)
    with AnswerLog.opened(None, {}) as log:
        run(leader, log, in_turns=False)
        assert len(log.records) == QUESTIONS
    arms_in_order = [arm for arm, _ in leader.questions]
    assert arms_in_order == sorted(arms_in_order, key=ARMS.index)


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_conversation_goes_on_with_the_arms_own_answers(at_once):
    leader = Leader(at_once=at_once)
    with AnswerLog.opened(None, {}) as log:
        run(leader, log, in_turns=at_once == 1)
    for arm, question in leader.questions:
        replies = [message["content"] for message in question.messages if message["role"] == "assistant"]
        assert replies == [f"{arm.label} said {1 + 2 * n}" for n in range(len(replies))]
        assert question.messages[-1]["content"] == f"turn {len(replies)}"


def test_what_is_drawn_depends_on_seed_prompt_and_turn_alone():
    drawn = {}
    for seed in (0, 1):
        leader = Leader()
        with AnswerLog.opened(None, {}) as log:
            run(leader, log, seed=seed, coupled=True)
        for _, question in leader.questions:
            assert 0 <= question.sampling.seed < 2**63
            found = drawn.setdefault((seed, question.prompt_id, len(question.messages)), set())
            found.add((question.sampling.seed, question.random()))
    assert all(len(found) == 1 for found in drawn.values())
    assert len({next(iter(found)) for found in drawn.values()}) == len(drawn)


def test_what_is_left_counts_neither_what_was_answered_nor_what_does_not_fit():
    with AnswerLog.opened(None, {}) as log:
        assert questions_left(PROMPTS, ARMS, log) == QUESTIONS
        with pytest.raises(Kill):
            run(Leader(die_at=4), log)
        assert questions_left(PROMPTS, ARMS, log) == QUESTIONS - 4
        run(Leader(too_long="turn 2"), log)
        assert questions_left(PROMPTS, ARMS, log) == 0


@pytest.mark.parametrize("die_at", [0, 1, 4, 9, 20])
@pytest.mark.parametrize("at_once", [1, 3])
def test_a_killed_run_goes_on_and_ends_with_the_same_answers(tmp_path, die_at, at_once):
    with AnswerLog.opened(None, {}) as log:
        run(Leader(), log)
        expected = {(r.arm, r.prompt_id, r.turn): r for r in log.records}
    in_turns = at_once == 1
    killed = Leader(die_at=die_at, at_once=at_once)
    with pytest.raises(Kill), AnswerLog.opened(tmp_path, {}) as log:
        run(killed, log, in_turns=in_turns)
    rest = Leader(at_once=at_once)
    with AnswerLog.opened(tmp_path, {}) as log:
        assert len(log.records) == len(killed.questions) == die_at
        run(rest, log, in_turns=in_turns)
        assert {(r.arm, r.prompt_id, r.turn): r for r in log.records} == expected
    assert len(killed.questions) + len(rest.questions) == len(expected)


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_prompt_that_does_not_fit_is_skipped_and_not_asked_again(tmp_path, at_once):
    first = Leader(too_long="turn 2", at_once=at_once)
    with AnswerLog.opened(tmp_path, {}) as log:
        run(first, log, in_turns=at_once == 1)
        skipped = [record for record in log.records if record.answer is None]
        assert [(record.prompt_id, record.turn, record.skipped) for record in skipped] == [("a/2", 2, "no room")]
    assert len({arm.label for arm, question in first.questions if question.prompt_id == "a/2"}) == 1
    again = Leader(too_long="turn 2")
    with AnswerLog.opened(tmp_path, {}) as log:
        run(again, log)
    assert again.questions == []
