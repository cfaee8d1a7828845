"""Many requests at once on table models: whatever the company, a request gets what it would get alone."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from dspark.calibration.calibration import Calibration
from dspark.decoding import SamplingSettings
from dspark.drafters.cache import DrafterCache
from dspark.drafters.protocol import DraftBlock
from dspark.engine.core import EngineCore
from dspark.engine.generation import generate
from dspark.engine.queue import QueueFull
from dspark.engine.request import Delta, Request, RequestResult
from dspark.engine.request_handle import RequestHandle
from dspark.engine.settings import EngineSettings
from dspark.models.block_tables import BLOCK_SIZE
from dspark.scheduling import StepRecord, parse_policy, replayed_lengths
from tests.cli.tokenizer import character_tokenizer
from tests.engine.confident import (
    CONTEXT,
    VOCABULARY,
    ConfidentTableDrafter,
    make_cost,
    make_drafter,
    make_request,
    make_target,
)
from tests.engine.table_models import TableDrafter, random_table

POLICIES = ("off", "fixed:2", "threshold:0.4", "immediate", "delayed")
BYTES_PER_BLOCK = 2 * 4 * BLOCK_SIZE  # keys and values, one number each
SMALL = EngineSettings(kv_memory_bytes=10**6)


def make_core(policy: str = "delayed", *, blocks: int = 200, **arguments: object) -> EngineCore:
    settings = EngineSettings(
        **{  # type: ignore[arg-type]
            "max_concurrency": 8,
            "max_prefill_tokens": 16,
            "kv_memory_bytes": blocks * BYTES_PER_BLOCK * (1 if policy == "off" else 2),  # in target and drafter
            "max_length": min(CONTEXT, blocks * BLOCK_SIZE - 4),
            **arguments,
        }
    )
    return EngineCore(make_target(), make_drafter(), policy=parse_policy(policy), cost=make_cost(), settings=settings)


def alone(request: Request) -> list[tuple[int, ...]]:
    """Every choice's tokens from plain decoding of one request, without any engine."""
    answers = []
    for index in range(request.n):
        seed = request.sampling.seed
        sampling = request.sampling if seed is None else replace(request.sampling, seed=seed + index)
        budget = min(request.max_tokens, CONTEXT - len(request.prompt_ids))
        events = list(
            generate(
                make_target(),
                None,
                request.prompt_ids,
                # Without a drafter a seed draws with the same coupled noise: the answer is speculation's.
                sampling,
                max_tokens=budget,
                stop_token_ids=request.stop_token_ids,
            )
        )
        assert events[-1].result is not None
        answers.append(events[-1].result.token_ids)
    return answers


def result_of(handle: RequestHandle) -> RequestResult:
    assert handle.result is not None
    return handle.result


def tokens_of(handle: RequestHandle) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in result_of(handle).completions]


def assert_empty(core: EngineCore) -> None:
    statistics = core.statistics()
    assert not core.has_work
    assert (statistics.running, statistics.waiting) == (0, 0)
    assert statistics.memory.num_used_blocks == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("blocks", [200, 8])
def test_a_request_gets_what_it_gets_alone(policy: str, blocks: int) -> None:
    core = make_core(policy, blocks=blocks)
    requests = [make_request(seed) for seed in range(30)]
    handles = [core.submit(request) for request in requests]
    core.run()
    for request, handle in zip(requests, handles, strict=True):
        assert tokens_of(handle) == alone(request)
    assert_empty(core)
    assert blocks == 200 or core.statistics().steps.preemptions > 0
    assert core.statistics().memory.reused_tokens > 0


@pytest.mark.parametrize("seed", range(4))
def test_any_company_with_cancellations(seed: int) -> None:
    """A small soak: requests come at random times, some are cancelled, memory is too small."""
    draw = random.Random(seed)
    core = make_core(draw.choice(POLICIES), blocks=11, max_concurrency=draw.choice([2, 5]))
    kept: list[tuple[Request, RequestHandle]] = []
    cancelled: list[tuple[Request, RequestHandle]] = []
    for number in range(60):
        request = make_request(1000 * seed + number)
        handle = core.submit(request)
        (cancelled if draw.random() < 0.3 else kept).append((request, handle))
        for _ in range(draw.randrange(4)):
            core.step()
        if cancelled and draw.random() < 0.5:
            core.cancel(draw.choice(cancelled)[1])
    for _, handle in cancelled:
        core.cancel(handle)
    core.run()
    for request, handle in kept:
        assert tokens_of(handle) == alone(request)
    for request, handle in cancelled:
        for tokens, whole in zip(tokens_of(handle), alone(request), strict=True):
            assert tokens == whole[: len(tokens)]
    assert_empty(core)


@pytest.mark.parametrize("seed", range(6))
def test_rounds_count_as_those_of_a_single_request(seed: int) -> None:
    """In company, with stop tokens inside drafts; prompts go through in one piece, as they do alone."""
    core = make_core("fixed:3")
    sampling = SamplingSettings(temperature=0.8, seed=seed)
    requests = [
        Request(
            prompt_ids=(1 + seed % 5, number)[: 1 + number % 2],
            sampling=sampling,
            max_tokens=40,
            stop_token_ids=frozenset({5}),
        )
        for number in range(5)
    ]
    handles = [core.submit(request) for request in requests]
    core.run()
    for request, handle in zip(requests, handles, strict=True):
        events = generate(
            make_target(),
            make_drafter(),
            request.prompt_ids,
            sampling,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
        )
        *_, last = events
        assert last.result is not None
        counts = asdict(result_of(handle).completions[0].counts)
        committed = counts.pop("committed")
        assert counts == {name: getattr(last.result, name) for name in counts}
        assert committed == len(last.result.token_ids) - 1


def test_deltas_spell_the_result() -> None:
    core = make_core()
    deltas: list[Delta] = []
    results: list[RequestResult] = []
    request = replace(make_request(3), n=3, logprobs=2, sampling=SamplingSettings(temperature=1.0, seed=5))
    core.submit(request, on_delta=deltas.append, on_result=results.append)
    core.run()
    for index, completion in enumerate(results[0].completions):
        mine = [delta for delta in deltas if delta.choice == index]
        assert sum((delta.token_ids for delta in mine), ()) == completion.token_ids
        assert sum((delta.logprobs or () for delta in mine), ()) == completion.logprobs
        assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == completion.finish_reason


def test_logprobs_are_the_targets_own() -> None:
    core = make_core("fixed:3")
    sampling = SamplingSettings(temperature=0.5, top_k=2, logit_bias={1: 3.0}, seed=1)
    handle = core.submit(Request(prompt_ids=(3, 1), sampling=sampling, max_tokens=12, logprobs=VOCABULARY))
    core.run()
    (completion,) = result_of(handle).completions
    state, table_SV = 4, random_table(VOCABULARY, 0).log()
    assert completion.logprobs is not None
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        assert logprob.token_id == token
        assert logprob.logprob == pytest.approx(float(table_SV[state % 7, token]), abs=1e-5)
        best_first = table_SV[state % 7].sort(descending=True)
        assert [token_id for token_id, _ in logprob.top] == best_first.indices.tolist()
        assert [value for _, value in logprob.top] == pytest.approx(best_first.values.tolist(), abs=1e-5)
        state += token


def test_a_warm_prompt_answers_as_a_cold_one() -> None:
    core = make_core("fixed:3")
    request = Request(prompt_ids=(4, 1, 3) * 15, max_tokens=30)
    cold = core.submit(request)
    core.run()
    warm = core.submit(request)
    core.run()
    assert result_of(cold).reused_tokens == 0
    assert result_of(warm).reused_tokens == 32
    assert tokens_of(warm) == tokens_of(cold)
    # The last piece of a cold prompt gives its token without a draft; from then on the rounds are the same.
    counts = [result_of(handle).completions[0].counts for handle in (cold, warm)]
    assert counts[0] == counts[1]


def test_an_answer_is_the_prefix_of_the_next_turn() -> None:
    core = make_core("fixed:3")
    first = core.submit(Request(prompt_ids=(4, 1, 3) * 10, max_tokens=20))
    core.run()
    answer = tokens_of(first)[0]
    second = core.submit(Request(prompt_ids=(4, 1, 3) * 10 + answer + (2,), max_tokens=5))
    core.run()
    assert result_of(second).reused_tokens == 48


def test_namespaces_share_no_prefix() -> None:
    core = make_core()
    for namespace in ("x", "y"):
        handle = core.submit(Request(prompt_ids=(4, 1, 3) * 15, max_tokens=3, prefix_namespace=namespace))
        core.run()
        assert result_of(handle).reused_tokens == 0


def test_choices_share_their_prompt() -> None:
    core = make_core("off")
    core.submit(Request(prompt_ids=(4, 1, 3) * 15, max_tokens=3, n=4))
    core.run()
    # 45 tokens once, and for each further choice what two blocks do not hold; the last may go as the anchor of a round.
    assert 45 + 3 * 12 <= core.statistics().steps.prefill_tokens <= 45 + 3 * 13


def test_choices_that_wait_take_no_memory() -> None:
    core = make_core("off")
    handle = core.submit(Request(prompt_ids=(4, 1, 3) * 15, max_tokens=3, n=128))
    waiting = core.submit(Request(prompt_ids=(4, 1, 3) * 15, max_tokens=3, n=128))
    assert len(handle.choices) == len(waiting.choices) == 1
    core.cancel(waiting)
    assert [completion.finish_reason for completion in result_of(waiting).completions] == ["cancelled"] * 128
    core.run()
    assert len(result_of(handle).completions) == 128
    assert_empty(core)


def test_cancelling_frees_memory_at_once() -> None:
    core = make_core()
    handles = [core.submit(Request(prompt_ids=(1,) * 30, max_tokens=50, n=2)) for _ in range(12)]
    for _ in range(6):
        core.step()
    for handle in handles:
        core.cancel(handle)
        core.cancel(handle)
        assert {completion.finish_reason for completion in result_of(handle).completions} == {"cancelled"}
    assert_empty(core)
    assert not core.step()


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    core = make_core("off", max_prefill_tokens=8)
    first = core.submit(Request(prompt_ids=(1, 2), max_tokens=60))
    core.step()
    core.submit(Request(prompt_ids=tuple(i % 5 for i in range(90)), max_tokens=2))
    short = core.submit(Request(prompt_ids=(3, 2, 1), max_tokens=1))
    core.step()
    assert short.is_finished  # it got its share of the step's prompt tokens
    for _ in range(5):
        core.step()
    assert first.choices[0].num_generated == 7  # a token a step, all the while


def test_users_take_turns() -> None:
    core = make_core("off", max_concurrency=1)
    order: list[str] = []
    for user, count in (("many", 5), ("one", 1)):
        for _ in range(count):
            core.submit(
                Request(prompt_ids=(1, 2), max_tokens=2, user=user), on_result=lambda _, user=user: order.append(user)
            )
    core.run()
    assert order.index("one") == 1


def test_a_stop_string_ends_a_choice_inside_a_block() -> None:
    tokenizer = character_tokenizer()
    text_of = tokenizer.decode
    core = EngineCore(
        make_target(), make_drafter(), policy=parse_policy("fixed:3"), tokenizer=tokenizer, settings=SMALL
    )
    request = Request(prompt_ids=(3, 1), max_tokens=30, sampling=SamplingSettings(temperature=1.0, seed=3))
    plain = core.submit(request)
    core.run()
    text = result_of(plain).completions[0].text
    assert text == text_of(tokens_of(plain)[0])
    stop = text[18:22]
    assert text.index(stop) > 3
    stopped = core.submit(replace(request, stop_strings=(stop,)))
    core.run()
    completion = result_of(stopped).completions[0]
    assert completion.finish_reason == "stop"
    assert completion.text == text[: text.index(stop)]


def recording_core() -> tuple[EngineCore, list[StepRecord]]:
    """A core that delays its decisions, and the records of its steps."""
    records: list[StepRecord] = []
    core = EngineCore(
        make_target(),
        make_drafter(),
        policy=parse_policy("delayed"),
        cost=make_cost(),
        settings=SMALL,
        on_step=records.append,
        clock=lambda: 0.0,  # no time passes: the cost stays as it is
    )
    return core, records


def assert_replayed(core: EngineCore, records: list[StepRecord]) -> None:
    """The records, written and read again, give the lengths that were verified."""
    read = [StepRecord.from_dict(json.loads(json.dumps(record.as_dict()))) for record in records]
    assert core.cost is not None
    for lengths_R, record in zip(replayed_lengths(read, parse_policy("delayed"), core.cost), records, strict=True):
        assert lengths_R.tolist() == record.verify_lengths_R.tolist()


def test_steps_are_recorded_and_can_be_replayed() -> None:
    core, records = recording_core()
    for seed in range(12):
        core.submit(make_request(seed))
    core.run()
    assert len(records) == core.statistics().steps.steps
    assert_replayed(core, records)
    assert any(record.verify_lengths_R.any() for record in records)


def test_requests_may_bring_their_own_policy() -> None:
    """Answers stay what they are alone; each request drafts and verifies as it asked, and the run can be replayed."""
    core, records = recording_core()
    names = ["off", "fixed:2", "threshold:0.5", None]
    requests = [
        replace(make_request(seed), policy=names[seed % 4], max_draft_tokens=None, max_tokens=30) for seed in range(16)
    ]
    handles = [core.submit(request) for request in requests]
    core.run()
    verified = dict.fromkeys(names, 0)
    for request, handle in zip(requests, handles, strict=True):
        assert tokens_of(handle) == alone(request)
        for completion in result_of(handle).completions:
            counts = completion.counts
            verified[request.policy] += counts.verified
            assert request.policy != "off" or counts.drafted == 0
            assert request.policy != "fixed:2" or counts.drafted == counts.verified > 0
            assert request.policy != "fixed:2" or max(counts.verified_per_position[2:], default=0) == 0
    assert verified["threshold:0.5"] > 0
    assert_replayed(core, records)


def test_confidences_are_calibrated_for_each_request_by_its_temperature() -> None:
    temperatures = (0.0, 1.0, 0.4)
    calibration = Calibration(by_sampling_temperature={0.0: (0.5, 2.0, 4.0), 1.0: (3.0, 0.25, 1.5)})

    def records(fitted: Calibration | None) -> list[StepRecord]:
        drafter, steps = make_drafter(), []
        drafter.calibration = fitted
        core = EngineCore(make_target(), drafter, policy=parse_policy("fixed:3"), settings=SMALL, on_step=steps.append)
        for number, temperature in enumerate(temperatures):  # their choices are numbered like them
            sampling = SamplingSettings(temperature=temperature, seed=1)
            core.submit(Request(prompt_ids=(3, number), sampling=sampling, max_tokens=15 + number))
        core.run()
        return steps

    compared = 0
    for plain, calibrated in zip(records(None), records(calibration), strict=True):
        if plain.drafts is None:
            continue
        assert calibrated.drafts is not None
        assert plain.drafts.confidences_RG is not None
        assert calibrated.drafts.confidences_RG is not None
        for row, (choice, length) in enumerate(zip(plain.drafts.request_ids_R, plain.drafts.lengths_R, strict=True)):
            confidences = plain.drafts.confidences_RG[row, :length]
            logits = (np.log(confidences) - np.log1p(-confidences)).tolist()
            expected = calibration.confidences(logits, temperatures[choice])
            assert calibrated.drafts.confidences_RG[row, :length].tolist() == pytest.approx(expected)
            compared += length
    assert compared > 40


def test_measured_steps_correct_the_cost() -> None:
    ticks = iter(range(10**6))
    core = EngineCore(
        make_target(),
        make_drafter(),
        policy=parse_policy("delayed"),
        cost=make_cost(),
        settings=SMALL,
        clock=lambda: float(next(ticks)),
    )
    core.submit(Request(prompt_ids=(1, 2), max_tokens=50))
    core.run()
    assert core.cost is not None
    assert core.cost.draft_ratio > 1.0  # a tick a draft, where 0.1 was measured


def test_catching_up_with_long_contexts_is_spread_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers stay what they are; those of whom least is unread are drafted for first, and in the end all are."""
    monkeypatch.setattr("dspark.engine.step._MOST_CAUGHT_UP", 20)

    class Behind(ConfidentTableDrafter):
        def new_cache(self, *arguments: Any) -> DrafterCache:
            cache = super().new_cache(*arguments)
            cache.num_behind = lambda slot: cache.lengths[slot] - read.get(slot, 0)  # type: ignore[method-assign]
            return cache

        def catch_up(self, cache: DrafterCache, slots: Sequence[int]) -> None:
            behind = [cache.num_behind(slot) for slot in slots]
            caught_up.append(behind)
            read.update((slot, cache.lengths[slot]) for slot in slots)

    read, caught_up = dict[int, int](), list[list[int]]()
    settings = replace(SMALL, reuse_prefixes=False, max_concurrency=4)
    core = EngineCore(
        make_target(), Behind(random_table(VOCABULARY, 0), 3), policy=parse_policy("fixed:3"), settings=settings
    )
    requests = [Request(prompt_ids=(1, 2, 3, 4, 5) * count, max_tokens=12) for count in (1, 2, 3, 6)]
    handles = [core.submit(request) for request in requests]
    core.run()
    for request, handle in zip(requests, handles, strict=True):
        assert tokens_of(handle) == alone(request)
        assert result_of(handle).completions[0].counts.drafted > 0
    assert all(sum(behind) <= 20 or len(behind) == 1 for behind in caught_up)
    assert max(map(max, caught_up)) > 20


def test_what_a_drafter_catches_up_with_counts_for_the_step_but_not_as_a_draft() -> None:
    class Late(ConfidentTableDrafter):
        def catch_up(self, cache: DrafterCache, slots: Sequence[int]) -> None:
            caught_up.extend(slots)
            now[0] += 7.0

        def propose(self, *arguments: Any) -> DraftBlock:
            now[0] += 0.1 * arguments[-1] / 3  # as `make_cost` says, for one request
            return super().propose(*arguments)

    now, caught_up, records = [0.0], list[int](), list[StepRecord]()
    core = EngineCore(
        make_target(),
        Late(random_table(VOCABULARY, 0), 3),
        policy=parse_policy("delayed"),
        cost=make_cost(),
        settings=SMALL,
        on_step=records.append,
        clock=lambda: now[0],
    )
    core.submit(Request(prompt_ids=(1, 2), max_tokens=20))
    core.run()
    measured = [record.measured for record in records if record.drafts is not None and record.measured is not None]
    assert len(measured) == len(caught_up) > 3
    assert all(seconds.catch_up == pytest.approx(7.0) for seconds in measured)
    assert all(seconds.total == pytest.approx(7.0 + seconds.draft) for seconds in measured)
    assert core.cost is not None
    assert core.cost.draft_ratio == pytest.approx(1.0)
    assert core.statistics().steps.draft_seconds == pytest.approx(sum(seconds.total for seconds in measured))


def test_what_cannot_work_is_refused() -> None:
    core = make_core(max_waiting=2, max_length=50)
    for changes, message in (
        ({"prompt_ids": (1,) * 50}, "prompt has 50 tokens"),
        ({"prompt_ids": (VOCABULARY,)}, "outside the vocabulary"),
        ({"stop_strings": ("a",)}, "stop_strings need a tokenizer"),
        ({"sampling": SamplingSettings(logit_bias={99: 1.0})}, "logit_bias names"),
        ({"logprobs": 100}, "logprobs is 100"),
        ({"policy": "delayed"}, "policy 'delayed' weighs all requests"),
    ):
        with pytest.raises(ValueError, match=message):
            core.submit(Request(**{"prompt_ids": (1,), **changes}))  # type: ignore[arg-type]
    core.submit(Request(prompt_ids=(1,)))
    core.submit(Request(prompt_ids=(1,)))
    with pytest.raises(QueueFull, match="max_waiting is 2"):
        core.submit(Request(prompt_ids=(1,)))
    core.run()
    assert_empty(core)


def test_a_policy_that_the_engine_cannot_follow_is_refused() -> None:
    target_alone = EngineCore(make_target(), None, policy=parse_policy("off"))
    unsure = EngineCore(make_target(), TableDrafter(random_table(VOCABULARY, 0), 3), policy=parse_policy("fixed:1"))
    for core, policy, message in (
        (target_alone, "fixed:2", "runs without a drafter"),
        (unsure, "threshold:0.5", "no confidence head"),
    ):
        with pytest.raises(ValueError, match=f"policy is '{policy}'.*{message}"):
            core.submit(Request(prompt_ids=(1,), policy=policy))
        core.submit(Request(prompt_ids=(1,), policy="off", max_tokens=3))
        core.run()
        assert_empty(core)


def test_parts_that_do_not_fit_are_refused() -> None:
    silent = TableDrafter(random_table(VOCABULARY, 1), 3)
    with pytest.raises(ValueError, match="confidence head"):
        EngineCore(make_target(), silent, policy=parse_policy("threshold:0.5"))
    with pytest.raises(ValueError, match="dspark profile"):
        EngineCore(make_target(), make_drafter(), policy=parse_policy("delayed"))
    with pytest.raises(ValueError, match="needs a drafter"):
        EngineCore(make_target(), None, policy=parse_policy("fixed:2"))
    with pytest.raises(ValueError, match="kv_memory_bytes is 100"):
        make_core(kv_memory_bytes=100, max_length=None)
    with pytest.raises(ValueError, match="max_length is 121"):
        make_core(max_length=121)


def test_a_single_token_prompt_and_a_full_context() -> None:
    core = make_core("fixed:3")
    handle = core.submit(Request(prompt_ids=(2,), max_tokens=10_000))
    core.run()
    (completion,) = result_of(handle).completions
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == CONTEXT - 1
    assert tokens_of(handle) == alone(Request(prompt_ids=(2,), max_tokens=10_000))


def test_a_request_that_was_abandoned_can_be_cancelled() -> None:
    core = make_core()
    handle = core.submit(Request(prompt_ids=(1, 2), max_tokens=30, n=2))
    core.step()
    assert core.abandon() == [handle]
    core.cancel(handle)
    assert_empty(core)
    again = core.submit(Request(prompt_ids=(1, 2), max_tokens=5))
    core.run()
    assert tokens_of(again) == alone(Request(prompt_ids=(1, 2), max_tokens=5))


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_cancelling_from_a_delta(victim: int) -> None:
    """Its own request, or one that has its turn before or after it in the same step."""
    core = make_core("fixed:3")
    deltas: list[list[Delta]] = [[], [], []]
    handles: list[RequestHandle] = []

    def take_in(number: int, delta: Delta) -> None:
        deltas[number].append(delta)
        if number == 1 and len(deltas[1]) == 3:
            core.cancel(handles[victim])

    for number in range(3):
        request = Request(prompt_ids=(3, number), max_tokens=30, n=2)
        handles.append(core.submit(request, on_delta=lambda delta, number=number: take_in(number, delta)))
    core.run()
    assert_empty(core)
    for number, handle in enumerate(handles):
        whole = alone(handle.request)
        for index, completion in enumerate(result_of(handle).completions):
            spelt = sum((delta.token_ids for delta in deltas[number] if delta.choice == index), ())
            assert completion.token_ids == spelt == whole[index][: len(spelt)]
            assert completion.finish_reason == ("cancelled" if number == victim else "length")


def test_settings_that_leave_no_token_are_refused_before_they_cost_others() -> None:
    core = make_core("fixed:3")
    other = core.submit(Request(prompt_ids=(1, 2), max_tokens=20))
    for changes, message in (
        ({"logit_bias": dict.fromkeys(range(VOCABULARY), -math.inf)}, "logit_bias forbids every token"),
        ({"logit_bias": dict.fromkeys(range(VOCABULARY), -1e300)}, "logit_bias"),
        ({"logit_bias": {1: 1e300}}, "logit_bias"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"temperature": 1e300, "logit_bias": {1: -math.inf}}, "temperature"),
    ):
        sampling = SamplingSettings(**changes)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            core.submit(Request(prompt_ids=(1, 2), max_tokens=5, sampling=sampling))
    core.run()
    assert tokens_of(other) == alone(other.request)


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1e10])
@pytest.mark.parametrize("penalty", [1e-10, 1e10])
@pytest.mark.parametrize("bias", [{}, {1: 1e10, 2: -math.inf}, dict.fromkeys(range(VOCABULARY), -1e10)])
def test_the_farthest_settings_that_are_let_in_work(temperature: float, penalty: float, bias: dict[int, float]) -> None:
    core = make_core("fixed:3")
    sampling = SamplingSettings(temperature=temperature, repetition_penalty=penalty, logit_bias=bias)
    handle = core.submit(Request(prompt_ids=(1, 2, 3, 4, 5, 0), max_tokens=20, sampling=sampling))
    core.run()
    assert len(tokens_of(handle)[0]) == 20


@pytest.mark.parametrize("length", [1, 2, *range(12, 18), *range(28, 34)])
def test_prompts_that_end_near_the_end_of_a_block(length: int) -> None:
    """Whole drafts verified, at every distance to the end of a block; in the smallest memory, too."""
    request = Request(prompt_ids=(1, 3, 4, 0, 2) * 7, max_tokens=24)
    request = replace(request, prompt_ids=request.prompt_ids[:length])
    for blocks in (20, 4):
        core = make_core("fixed:3", blocks=blocks)
        first = core.submit(request)
        core.run()
        second = core.submit(request)
        core.run()
        assert tokens_of(first) == tokens_of(second) == alone(request)
        assert result_of(second).reused_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
