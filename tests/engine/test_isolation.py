"""An error of one request's own ends that request; the others never know of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerBase

from dspark.decoding import SamplingSettings
from dspark.engine.core import EngineCore
from dspark.engine.engine import Engine
from dspark.engine.request import Delta, Request
from dspark.engine.request_handle import RequestHandle
from dspark.engine.settings import EngineSettings
from dspark.engine.submitted import EngineError
from dspark.models.loading import LoadedTarget
from dspark.scheduling import parse_policy
from tests.engine.confident import make_cost, make_drafter, make_request, make_target
from tests.engine.test_core import alone, assert_empty
from tests.engine.toy_grammar import END, PATTERN, toy_compiler, toy_tokenizer

SETTINGS = EngineSettings(kv_memory_bytes=10**6, max_concurrency=8, max_prefill_tokens=16)
WARM = SamplingSettings(temperature=1.0)
GRAMMAR = toy_compiler().regex(PATTERN)


class FlakyTokenizer:
    """Cannot decode where "c" comes after "1"."""

    def __init__(self) -> None:
        self._tokenizer = toy_tokenizer()

    def decode(self, token_ids: list[int], **arguments: bool) -> str:
        text = self._tokenizer.decode(token_ids, **arguments)
        assert isinstance(text, str)
        if "1c" in text:
            raise KeyError("no such character")
        return text


def make_core(tokenizer: PreTrainedTokenizerBase | FlakyTokenizer | None = None) -> EngineCore:
    return EngineCore(
        make_target(),
        make_drafter(),
        policy=parse_policy("fixed:2"),
        cost=make_cost(),
        tokenizer=tokenizer,  # type: ignore[arg-type]
        settings=SETTINGS,
    )


def failing_at(number: int, last: Callable[[], float]) -> Callable[[], float]:
    """Good numbers, and the last one then and ever after."""
    good: Iterator[float] = iter(random.Random(1).random() for _ in range(number))

    def draw() -> float:
        value = next(good, None)
        return last() if value is None else value

    return draw


def broken() -> float:
    raise OSError("the source of randomness is gone")


BAD_REQUESTS = {
    "raises": (Request(prompt_ids=(3, 1), sampling=WARM, random=failing_at(20, broken)), "randomness is gone"),
    "too large": (Request(prompt_ids=(3, 1), sampling=WARM, random=failing_at(20, lambda: 1.0)), "random gave 1"),
    "not a number": (Request(prompt_ids=(3, 1), sampling=WARM, random=lambda: math.nan), "random gave nan"),
    "several choices": (Request(prompt_ids=(3, 1), sampling=WARM, n=3, random=failing_at(50, broken)), "gone"),
    "nothing left": (
        Request(
            prompt_ids=(3, 1),
            grammar=GRAMMAR,
            sampling=SamplingSettings(temperature=0.7, seed=1, logit_bias={0: -math.inf, 2: -math.inf, 3: -math.inf}),
        ),
        "grammar and logit_bias together allow no token",
    ),
    "nothing left, greedy": (
        Request(
            prompt_ids=(3, 1),
            grammar=GRAMMAR,
            sampling=SamplingSettings(logit_bias={0: -math.inf, 2: -math.inf, 3: -math.inf}),
        ),
        "grammar and logit_bias together allow no token",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_the_others_go_on_unchanged(name: str) -> None:
    bad, message = BAD_REQUESTS[name]
    core = make_core()
    good = [make_request(seed) for seed in range(5)]
    unseeded = Request(prompt_ids=(2, 2), sampling=WARM, max_tokens=30)
    scripted = [core.submit(replace(unseeded, random=random.Random(7).random))]
    handles = [core.submit(request) for request in good[:2]]
    errors: list[Exception] = []
    failed = core.submit(replace(bad, max_tokens=60), on_error=errors.append)
    handles += [core.submit(request) for request in good[2:]]
    core.run()
    assert failed.result is None
    assert failed.is_finished
    assert errors == [failed.error]
    assert message in str(failed.error)
    for request, handle in zip(good, handles, strict=True):
        assert tokens_of(handle) == alone(request)
    plain = make_core()
    scripted.append(plain.submit(replace(unseeded, random=random.Random(7).random)))
    plain.run()
    assert tokens_of(scripted[0]) == tokens_of(scripted[1])
    assert_empty(core)
    assert core.statistics().finished["error"] == bad.n
    core.cancel(failed)  # nothing to do any more


def tokens_of(handle: RequestHandle) -> list[tuple[int, ...]]:
    assert handle.result is not None
    return [completion.token_ids for completion in handle.result.completions]


def test_a_dead_end_on_a_draft_that_is_not_taken_costs_nothing() -> None:
    """Speculation must not fail where the target alone would not."""
    bias = {1: -math.inf, 2: -math.inf}  # behind an "a" nothing is left, and the target alone never takes an "a"
    sampling = SamplingSettings(temperature=1.0, seed=3, logit_bias={**bias, 0: -60.0})
    request = Request(prompt_ids=(3, 1), grammar=GRAMMAR, sampling=sampling, max_tokens=30)
    answers = []
    for policy in ("off", "fixed:3"):
        drafter = make_drafter()
        drafter.table_SD[:, 0] += 5.0  # the drafter likes it
        core = EngineCore(make_target(), drafter, policy=parse_policy(policy), settings=SETTINGS)
        handles = [core.submit(replace(request, prompt_ids=(3, number))) for number in range(6)]
        core.run()
        answers.append([tokens_of(handle) for handle in handles])
    assert answers[0] == answers[1]


def test_a_text_that_cannot_be_decoded_ends_its_request() -> None:
    core = make_core(FlakyTokenizer())
    plain = make_core(toy_tokenizer())
    samplings = [SamplingSettings(temperature=1.0, seed=seed) for seed in range(6)]
    requests = [Request(prompt_ids=(3, 1), sampling=sampling, max_tokens=9) for sampling in samplings]
    requests += [replace(request, prompt_ids=(3, 1, 2)) for request in requests]
    handles = [core.submit(request) for request in requests]
    wholes = [plain.submit(request) for request in requests]
    core.run()
    plain.run()
    lost = 0
    for handle, whole in zip(handles, wholes, strict=True):
        assert whole.result is not None
        if "1c" in whole.result.completions[0].text:
            assert isinstance(handle.error, KeyError)
            lost += 1
        else:
            assert tokens_of(handle) == tokens_of(whole)
    assert 0 < lost < len(requests)
    assert_empty(core)


def test_an_error_while_others_of_the_request_wait_or_are_done() -> None:
    core = make_core()
    deltas: list[Delta] = []
    request = Request(prompt_ids=(3, 1), sampling=WARM, n=20, random=failing_at(400, broken), max_tokens=20)
    handle = core.submit(request, on_delta=deltas.append)
    core.run()
    assert isinstance(handle.error, OSError)
    assert any(delta.finish_reason is not None for delta in deltas)
    assert_empty(core)


def test_an_engine_tells_it_and_goes_on() -> None:
    target = LoadedTarget(model=make_target(), tokenizer=toy_tokenizer(), name="table", stop_token_ids=frozenset({END}))
    with Engine(target, make_drafter(), policy="fixed:2", settings=SETTINGS) as engine:
        for _ in range(5):  # as often as one likes
            generation = engine.submit_request(Request(prompt_ids=(3, 1), sampling=WARM, random=broken))
            beside = engine.submit(prompt_ids=(3, 2), max_tokens=30, stop_token_ids=frozenset())
            with pytest.raises(EngineError, match="randomness is gone") as caught:
                generation.result(60)
            assert isinstance(caught.value.__cause__, OSError)
            with pytest.raises(EngineError):
                list(generation.deltas(60))
            generation.cancel()
            assert [beside.result(60).completions[0].token_ids] == alone(Request(prompt_ids=(3, 2), max_tokens=30))
        answer = engine.submit(prompt_ids=(3, 1), grammar=engine.grammars.regex("(ab){3}")).result(60).completions[0]
        assert (answer.text, answer.finish_reason) == ("ababab", "stop")
        assert engine.statistics().memory.num_used_blocks == 0
