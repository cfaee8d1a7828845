from __future__ import annotations

from collections import Counter

import pytest

from dspark.evaluation.answers import AnswerLog
from dspark.evaluation.plan import TARGET_ALONE, Arm
from dspark.evaluation.runner import DoesNotFit, answer_prompts, arm_order, questions_left
from tests.evaluation.made import answer, prompt, round_of

ARMS = [Arm(label=TARGET_ALONE), Arm(label="d", drafter="d"), Arm(label="e", drafter="e")]
PROMPTS = [prompt("a/0", turns=2), prompt("a/1"), prompt("a/2", turns=3), prompt("a/3")]


class Kill(Exception):
    pass


class Decoder:
    """Answers are a function of the question; counts them, and dies when told to."""

    def __init__(self, die_at: int | None = None, too_long: str | None = None) -> None:
        self.questions = []
        self._die_at = die_at
        self._too_long = too_long

    def __call__(self, question):
        if len(self.questions) == self._die_at:
            raise Kill
        self.questions.append(question)
        if self._too_long is not None and question.messages[-1]["content"] == self._too_long:
            raise DoesNotFit("no room")
        text = f"{question.arm.label} said {len(question.messages)}"
        return answer([round_of(question.random_seed % 3, prompt_id=question.prompt_id)], text=text)


def run(decoder, log, *, seed=0):
    answer_prompts(PROMPTS, ARMS, decoder, log, seed=seed)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_arm_is_at_every_place_equally_often_and_the_direction_alternates(count):
    arms = [Arm(label=str(n), drafter=str(n)) for n in range(count)]
    orders = [arm_order(arms, index) for index in range(2 * count)]
    for place in range(count):
        assert set(Counter(order[place].label for order in orders).values()) == {2}
    assert all(orders[n] == orders[n + 1][::-1] for n in range(0, 2 * count, 2))


def test_all_arms_of_a_prompt_before_the_next_and_its_own_answers_as_context():
    decoder = Decoder()
    with AnswerLog.opened(None, {}) as log:
        run(decoder, log)
        assert len(log.records) == len(ARMS) * 7
    prompts_in_order = [question.prompt_id for question in decoder.questions]
    assert prompts_in_order == sorted(prompts_in_order)
    for question in decoder.questions:
        replies = [message["content"] for message in question.messages if message["role"] == "assistant"]
        assert replies == [f"{question.arm.label} said {1 + 2 * n}" for n in range(len(replies))]
        assert question.messages[-1]["content"] == f"turn {len(replies)}"


def test_what_is_drawn_depends_on_seed_prompt_and_turn_alone():
    seeds = {}
    for seed in (0, 1):
        decoder = Decoder()
        with AnswerLog.opened(None, {}) as log:
            run(decoder, log, seed=seed)
        for question in decoder.questions:
            assert 0 <= question.random_seed < 2**63
            seeds.setdefault((seed, question.prompt_id, len(question.messages)), set()).add(question.random_seed)
    assert all(len(found) == 1 for found in seeds.values())
    assert len({next(iter(found)) for found in seeds.values()}) == len(seeds)


def test_what_is_left_counts_neither_what_was_answered_nor_what_does_not_fit():
    with AnswerLog.opened(None, {}) as log:
        assert questions_left(PROMPTS, ARMS, log) == len(ARMS) * 7
        with pytest.raises(Kill):
            run(Decoder(die_at=4), log)
        assert questions_left(PROMPTS, ARMS, log) == len(ARMS) * 7 - 4
        run(Decoder(too_long="turn 2"), log)
        assert questions_left(PROMPTS, ARMS, log) == 0


@pytest.mark.parametrize("die_at", [0, 1, 4, 9, 20])
def test_a_killed_run_goes_on_and_ends_with_the_same_answers(tmp_path, die_at):
    with AnswerLog.opened(None, {}) as log:
        run(Decoder(), log)
        expected = {(r.arm, r.prompt_id, r.turn): r for r in log.records}
    killed = Decoder(die_at=die_at)
    with pytest.raises(Kill), AnswerLog.opened(tmp_path, {}) as log:
        run(killed, log)
    rest = Decoder()
    with AnswerLog.opened(tmp_path, {}) as log:
        run(rest, log)
        assert {(r.arm, r.prompt_id, r.turn): r for r in log.records} == expected
    assert len(killed.questions) + len(rest.questions) == len(expected)


def test_a_prompt_that_does_not_fit_is_skipped_and_not_asked_again(tmp_path):
    with AnswerLog.opened(tmp_path, {}) as log:
        run(Decoder(too_long="turn 2"), log)
        skipped = [record for record in log.records if record.answer is None]
        assert [(record.prompt_id, record.turn, record.skipped) for record in skipped] == [("a/2", 2, "no room")]
    again = Decoder(too_long="turn 2")
    with AnswerLog.opened(tmp_path, {}) as log:
        run(again, log)
    assert again.questions == []
