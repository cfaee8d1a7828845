"""Policies by turns on table models: a clock that ticks once a look stands in for the machine's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dspark.decoding import Acceptance
from dspark.engine.batch_sampling import VerifyRow, verify_rows
from dspark.engine.bench import METRICS, BenchStep, Cell, Spread, measure_cell
from dspark.engine.closed_loop import Answer, ClosedLoop
from dspark.engine.request_stream import RequestStream, StreamPrompt
from dspark.scheduling import Policy, parse_policy
from tests.engine.confident import CONTEXT, make_cost, make_drafter, make_target

POLICIES = ("off", "fixed:1", "fixed:3", "threshold:0.4", "immediate", "delayed")
PROMPTS = (
    StreamPrompt(domain="math", prompt_ids=(1, 2, 3)),
    StreamPrompt(domain="math", prompt_ids=(4, 4, 1, 0, 2)),
    StreamPrompt(domain="chat", prompt_ids=(5, 0) * 12),
)


def ticking() -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: float(next(ticks))


def make_stream(**arguments: Any) -> RequestStream:
    return RequestStream(PROMPTS, **{"max_tokens": 12, **arguments})


def make_loop(policy: Policy | str = "delayed", *, concurrency: int = 4, **arguments: Any) -> ClosedLoop:
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    stream = arguments.pop("stream", None) or make_stream()
    return ClosedLoop(
        make_target(),
        make_drafter(),
        stream,
        policy=policy,
        cost=make_cost(),
        concurrency=concurrency,
        **{"kv_memory_bytes": 10**6, **arguments},
    )


def measure(policies: tuple[str, ...] = POLICIES, **arguments: Any) -> Cell:
    stream = arguments.pop("stream", None) or make_stream()
    return measure_cell(
        make_target(),
        make_drafter(),
        [parse_policy(policy) for policy in policies],
        stream,
        **{
            "concurrency": 4,
            "requests": 5,
            "rounds": 3,
            "cost": make_cost(),
            "kv_memory_bytes": 10**6,
            "clock": ticking(),
            **arguments,
        },
    )


def test_domains_take_turns_and_prompts_come_again() -> None:
    stream = make_stream()
    prompts = [stream.request(number).prompt_ids for number in range(8)]
    math = {PROMPTS[0].prompt_ids, PROMPTS[1].prompt_ids}
    assert set(prompts[0:4:2]) == math
    assert prompts[0:4:2] == prompts[4:8:2]
    assert prompts[1::2] == [PROMPTS[2].prompt_ids] * 4
    assert stream.max_length == 24 + 12
    again = make_stream()
    assert [again.request(number).prompt_ids for number in range(8)] == prompts


def test_a_request_draws_the_same_by_its_number_and_seed_alone() -> None:
    def drawn(seed: int, number: int) -> float:
        random = make_stream(temperature=1.0, seed=seed).request(number).random
        assert random is not None
        return random()

    assert drawn(0, 3) == drawn(0, 3)
    assert len({drawn(0, 3), drawn(0, 4), drawn(1, 3)}) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_so_many_requests_run_at_all_times(policy: str) -> None:
    records: list[BenchStep] = []
    cell = measure((policy,), on_step=records.append)
    measured = [step.record.plan.batch for step in records if step.round is not None]
    # Prompts here go through in one step: what came in beside the decoding ones fills them up.
    assert {batch.num_requests + (batch.prefill_tokens > 0) for batch in measured} <= {3, 4, 5}
    assert max(batch.num_requests for batch in measured) == 4
    spread = cell.spread(policy, "requests_per_step")
    assert spread is not None
    assert 3.0 < spread.low <= spread.high <= 4.0


def test_requests_end_one_by_one_from_the_beginning() -> None:
    loop = make_loop("off")
    loop.fill()
    ends = []
    for _ in range(12):
        turn = loop.turn(1)
        ends.append(turn.finished)
    assert ends == [1] * 12
    assert [len(answer.token_ids) for answer in loop.answers[:4]] == [3, 6, 9, 12]


def test_turns_end_with_as_many_requests_and_begin_where_the_last_one_ended() -> None:
    loop = make_loop("fixed:3")
    loop.fill()
    before = sum(len(answer.token_ids) for answer in loop.answers)
    turns = [loop.turn(3) for _ in range(4)]
    finished = sum(turn.finished for turn in turns)
    assert 12 <= finished <= 12 + 3
    assert sum(turn.tokens for turn in turns) == sum(len(answer.token_ids) for answer in loop.answers) - before
    assert all(turn.steps.rounds + turn.steps.accepted >= turn.round_tokens for turn in turns)
    assert all(turn.tokens > turn.round_tokens > turn.steps.rounds for turn in turns)


def test_a_turn_takes_at_least_a_step_when_its_requests_had_finished_before() -> None:
    loop = make_loop("fixed:3", concurrency=8, stream=make_stream(max_tokens=1))
    loop.fill()
    turns = [loop.turn(1) for _ in range(4)]  # every step ends eight
    assert [turn.steps.steps for turn in turns] == [1, 1, 1, 1]


def test_the_clock_of_a_loop_stands_while_others_have_their_turn() -> None:
    clock = ticking()
    loop = make_loop("off", concurrency=1, clock=clock)
    loop.fill()
    alone = loop.turn(3)
    for _ in range(10_000):
        clock()
    paused = loop.turn(3)
    assert paused.seconds < 2 * alone.seconds
    assert alone.user_tokens_per_second is not None
    assert alone.first_token_seconds is not None
    # One request at a time: what it needs is the turn's time, without the steps that begin requests.
    assert alone.user_tokens_per_second > alone.tokens / alone.seconds
    assert alone.first_token_seconds < alone.seconds / 3


def test_too_little_memory_is_named() -> None:
    loop = make_loop("off", concurrency=30, kv_memory_bytes=30 * 64)
    with pytest.raises(ValueError, match="30 requests of up to 36 tokens do not fit into kv_memory together"):
        loop.fill()


def test_every_round_has_every_policy_once_each_first_in_turn() -> None:
    order: list[str] = []
    cell = measure(("off", "fixed:3", "delayed"), on_turn=order.append)
    assert order[:3] == ["off", "fixed:3", "delayed"]  # filled
    assert order[3:] == ["off", "fixed:3", "delayed", "fixed:3", "delayed", "off", "delayed", "off", "fixed:3"]
    assert {len(turns) for turns in cell.turns.values()} == {3}


def test_greedy_answers_are_the_same_under_every_policy() -> None:
    cell = measure()
    assert cell.baseline == "off"
    assert set(cell.differing.values()) == {0}
    assert min(cell.compared.values()) >= 15
    sampled = measure(stream=make_stream(temperature=1.0))
    assert (sampled.baseline, sampled.differing) == (None, {})


def test_a_rule_that_changes_answers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_all(rows: Sequence[VerifyRow], *target: Any) -> list[Acceptance]:
        acceptances = verify_rows(rows, *target)
        return [
            replace(acceptance, num_accepted=len(row.draft_tokens))
            for row, acceptance in zip(rows, acceptances, strict=True)
        ]

    monkeypatch.setattr("dspark.engine.step.verify_rows", accept_all)
    cell = measure(("fixed:3", "off"))
    assert cell.baseline == "off"
    assert cell.differing["off"] == 0
    assert cell.differing["fixed:3"] > 5
    assert cell.to_json()["policies"]["fixed:3"]["differing_answers"] == cell.differing["fixed:3"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (([1, 2], False), ([1, 2, 3], True), True),
        (([1, 2], True), ([1, 2, 3], False), False),
        (([1, 2], True), ([1, 2], False), True),
        (([1, 2], False), ([1, 3, 3], False), False),
    ],
)
def test_answers_agree_as_far_as_both_go(one: tuple[Any, Any], other: tuple[Any, Any], same: bool) -> None:
    first, second = (Answer(token_ids=tokens, is_finished=is_finished) for tokens, is_finished in (one, other))
    assert first.agrees(second) is second.agrees(first) is same


def test_numbers_are_those_of_the_steps() -> None:
    steps: list[BenchStep] = []
    cell = measure(("off", "fixed:1", "fixed:3", "delayed"), on_step=steps.append)
    for policy, turns in cell.turns.items():
        for number, turn in enumerate(turns):
            records = [s.record for s in steps if s.record.policy == policy and s.round == number]
            rounds = sum(record.plan.batch.num_requests for record in records)
            verified = sum(int(record.verify_lengths_R.sum()) for record in records)
            assert METRICS["verified"](turn) == pytest.approx(verified / rounds)
            step_seconds = sum(record.measured.total for record in records if record.measured) / len(records)
            assert METRICS["step_seconds"](turn) == pytest.approx(step_seconds)
            assert METRICS["accepted_length"](turn) == pytest.approx(turn.round_tokens / rounds)
    assert any(step.round is None for step in steps)
    off, one = cell.spread("off", "verified"), cell.spread("fixed:1", "drafted")
    assert off is not None
    assert one is not None
    assert off.high == 0.0
    assert 0.8 < one.median <= 1.0  # the last token of an answer needs no draft


def test_speeds_are_compared_round_by_round() -> None:
    cell = measure(("off", "fixed:1", "fixed:3"))
    values = [
        (turn.tokens / turn.seconds) / (off.tokens / off.seconds)
        for turn, off in zip(cell.turns["fixed:3"], cell.turns["off"], strict=True)
    ]
    assert cell.speed_against("fixed:3", "off") == Spread.of(values)
    assert cell.speed_against("off", "delayed") is None
    assert cell.best_fixed in ("fixed:1", "fixed:3")
    best = cell.spread(cell.best_fixed, "tokens_per_second")
    assert best is not None
    assert all(
        spread.median <= best.median
        for policy in ("fixed:1", "fixed:3")
        if (spread := cell.spread(policy, "tokens_per_second"))
    )
    assert measure(("off", "delayed")).best_fixed is None


def test_a_spread_is_of_the_rounds_that_have_a_value() -> None:
    assert Spread.of([None, 3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0)
    assert Spread.of([None, None]) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rounds": 0}, "rounds is 0; it must be at least 1"),
        ({"requests": 0}, "requests is 0; it must be at least 1"),
        ({"concurrency": 0}, "concurrency is 0; it must be at least 1"),
        ({"policies": ("off", "off")}, "policies are off, off: give at least one, and each once"),
        ({"policies": ()}, "policies are none"),
        ({"cost": None}, "policy immediate needs to know what steps cost here"),
    ],
)
def test_what_does_not_fit_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(**arguments)


def test_a_stream_needs_prompts_and_room() -> None:
    with pytest.raises(ValueError, match="prompts is empty"):
        RequestStream([], max_tokens=3)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        make_stream(max_tokens=0)
    with pytest.raises(ValueError, match="max_length is 134"):
        make_loop("off", stream=make_stream(max_tokens=CONTEXT - 10))
