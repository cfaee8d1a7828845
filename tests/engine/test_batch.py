"""Many requests at once equal the same requests alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dspark.decoding import GenerationCompletion, GenerationRequest, SamplingSettings
from dspark.engine.batch import BatchGenerator
from tests.engine.table_models import TableTarget, random_table

VOCABULARY = 6


def make_requests(count: int) -> list[GenerationRequest]:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "presence_penalty": 1.5},
        {"temperature": 0.0, "logit_bias": {3: 2.0}},
    ]
    return [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_ids=tuple((i * 7 + j) % VOCABULARY for j in range(1 + i % 5)),
            settings=SamplingSettings(seed=i, **kinds[i % len(kinds)]),  # type: ignore[arg-type]
            max_tokens=1 + i % 9,
            stop_token_ids=frozenset({5}) if i % 2 else frozenset(),
        )
        for i in range(count)
    ]


def complete(requests: list[GenerationRequest], concurrency: int) -> dict[str, GenerationCompletion]:
    generator = BatchGenerator(TableTarget(random_table(VOCABULARY, 3)), max_concurrency=concurrency, max_length=20)
    return {completion.request_id: completion for completion in generator.run(iter(requests))}


def test_a_request_does_not_notice_its_batch_mates() -> None:
    requests = make_requests(40)
    alone = {r.request_id: complete([r], 1)[r.request_id] for r in requests}
    for concurrency in (1, 3, 16):
        assert complete(requests, concurrency) == alone
    assert {completion.finish_reason for completion in alone.values()} == {"stop", "length"}
    for request in requests:
        completion = alone[request.request_id]
        stopped = completion.token_ids[-1] in request.stop_token_ids
        assert (completion.finish_reason == "stop") == stopped
        assert stopped or len(completion.token_ids) == request.max_tokens
        assert not request.stop_token_ids.intersection(completion.token_ids[:-1])


def test_requests_may_depend_on_completions() -> None:
    generator = BatchGenerator(TableTarget(random_table(VOCABULARY, 3)), max_concurrency=4, max_length=20)
    waiting, done = make_requests(3), []

    def requests() -> Iterator[GenerationRequest | None]:
        follow_ups = 0
        while follow_ups < 5:
            if waiting:
                yield waiting.pop()
            elif len(done) > follow_ups:
                follow_ups += 1
                yield GenerationRequest(
                    request_id=f"again-{follow_ups}",
                    prompt_ids=done[-1].token_ids,
                    settings=SamplingSettings(seed=0),
                    max_tokens=3,
                    stop_token_ids=frozenset(),
                )
            else:
                yield None

    for completion in generator.run(requests()):
        done.append(completion)
    assert sorted(c.request_id for c in done) == [
        "again-1",
        "again-2",
        "again-3",
        "again-4",
        "again-5",
        "r0",
        "r1",
        "r2",
    ]


def test_max_length_ends_a_request() -> None:
    request = make_requests(1)[0]
    long = GenerationRequest(
        request_id="long", prompt_ids=(1, 2, 3), settings=request.settings, max_tokens=500, stop_token_ids=frozenset()
    )
    completion = complete([long], 2)["long"]
    assert len(completion.token_ids) == 17
    assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": ()}, "r: the prompt has 0 tokens"),
        ({"prompt_ids": (1,) * 20}, "r: the prompt has 20 tokens"),
        ({"settings": SamplingSettings()}, "r: settings.seed is missing"),
        ({"max_tokens": 0}, "r: max_tokens is 0"),
    ],
)
def test_bad_requests_are_named(changes: dict[str, object], message: str) -> None:
    arguments = {
        "request_id": "r",
        "prompt_ids": (1,),
        "settings": SamplingSettings(seed=0),
        "max_tokens": 1,
        "stop_token_ids": frozenset(),
    }
    with pytest.raises(ValueError, match=message):
        complete([GenerationRequest(**{**arguments, **changes})], 1)  # type: ignore[arg-type]


def test_a_uniform_next_to_one_is_not_rounded_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 it would be 1, which no token answers to: one token in 30 million would end a data run for good."""
    monkeypatch.setattr("dspark.engine.batch.uniform", lambda seed, position: 1.0 - 2.0**-53)
    request = make_requests(2)[1]
    assert complete([request], 1)[request.request_id].token_ids[0] == VOCABULARY - 1
