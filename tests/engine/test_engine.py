"""The engine from other threads: streams, results, cancellation, errors, the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dspark.decoding import SamplingSettings
from dspark.engine import loading
from dspark.engine.choice import Choice
from dspark.engine.engine import Engine
from dspark.engine.queue import QueueFull
from dspark.engine.request import Request
from dspark.engine.settings import EngineSettings
from dspark.engine.submitted import EngineError, Generation
from dspark.models.loading import LoadedTarget
from dspark.scheduling import StepRecord
from tests.cli.tokenizer import character_tokenizer
from tests.engine.confident import make_cost, make_drafter, make_request, make_target
from tests.engine.table_models import TableTarget
from tests.engine.test_core import alone


class FlakyTarget(TableTarget):
    """Raises while ``failures`` is above 0; waits in a pass while ``gate`` is closed."""

    failures = 0
    gate: threading.Event

    def forward(self, *arguments, **named):  # type: ignore[no-untyped-def]
        self.gate.wait()
        if self.failures > 0:
            self.failures -= 1
            raise MemoryError("no memory left")
        return super().forward(*arguments, **named)


def make_engine(
    policy: str = "delayed", *, on_step: Callable[[StepRecord], None] | None = None, **settings: object
) -> tuple[Engine, FlakyTarget]:
    plain = make_target()
    model = FlakyTarget(plain.table_SV, context=plain.config.max_position_embeddings)
    model.gate = threading.Event()
    model.gate.set()
    target = LoadedTarget(model=model, tokenizer=character_tokenizer(), name="table", stop_token_ids=frozenset())
    made = EngineSettings(**{"kv_memory_bytes": 10**6, "max_concurrency": 4, **settings})  # type: ignore[arg-type]
    return Engine(target, make_drafter(), policy=policy, cost=make_cost(), settings=made, on_step=on_step), model


def submit_without_end(engine: Engine) -> None:
    while True:
        engine.submit(prompt_ids=(3, 1), max_tokens=2)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine, _ = make_engine()
    with engine:
        yield engine


def test_many_threads_get_what_they_asked_for(engine: Engine) -> None:
    wrong: list[int] = []

    def work(first: int) -> None:
        requests = [make_request(seed) for seed in range(first, first + 5)]
        generations = [engine.submit_request(request) for request in requests]
        for seed, request, generation in zip(range(first, first + 5), requests, generations, strict=True):
            if [completion.token_ids for completion in generation.result(60).completions] != alone(request):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(5 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert engine.statistics().running == 0


def test_deltas_come_while_it_runs_and_can_be_read_twice(engine: Engine) -> None:
    generation = engine.submit(prompt_ids=(3, 1), max_tokens=20)
    first = next(generation.deltas(60))
    assert len(first.token_ids) >= 1
    tokens = sum((delta.token_ids for delta in generation.deltas(60)), ())
    assert tokens == generation.result(60).completions[0].token_ids
    assert len(tokens) == 20


def test_an_event_loop_is_not_held_up(engine: Engine) -> None:
    async def read(generation: Generation) -> tuple[int, ...]:
        return sum([delta.token_ids async for delta in generation], ())

    async def main() -> list[tuple[int, ...]]:
        generations = [engine.submit(prompt_ids=(3, number), max_tokens=15) for number in range(5)]
        return list(await asyncio.gather(*(read(generation) for generation in generations)))

    for number, tokens in enumerate(asyncio.run(main())):
        assert [tokens] == alone(Request(prompt_ids=(3, number), max_tokens=15))


def test_texts_and_conversations(engine: Engine) -> None:
    tokenizer = character_tokenizer()
    text = tokenizer.decode([3, 1])
    generation = engine.submit(prompt=text, max_tokens=3)
    assert generation.request.prompt_ids == tuple(tokenizer(text)["input_ids"])
    with pytest.raises(ValueError, match="exactly one of"):
        engine.submit(prompt=text, prompt_ids=(1,))
    with pytest.raises(ValueError, match="exactly one of"):
        engine.submit()


def test_a_single_stop_string_is_not_its_characters(engine: Engine) -> None:
    sampling = SamplingSettings(temperature=1.0, seed=3)
    text = engine.submit(prompt_ids=(3, 1), sampling=sampling, max_tokens=30).result(60).completions[0].text
    stop = text[18:22]
    assert min(text.index(character) for character in stop) < text.index(stop)
    for given in (stop, [stop]):
        generation = engine.submit(prompt_ids=(3, 1), sampling=sampling, max_tokens=30, stop=given)
        (completion,) = generation.result(60).completions
        assert completion.finish_reason == "stop"
        assert completion.text == text[: text.index(stop)]


def test_cancelling_ends_a_request_where_it_is() -> None:
    engine, model = make_engine(max_concurrency=1)
    with engine:
        running = engine.submit(prompt_ids=(3, 1), max_tokens=100)
        next(running.deltas(60))
        model.gate.clear()
        waiting = engine.submit(prompt_ids=(3, 1), max_tokens=100)
        running.cancel()
        waiting.cancel()
        model.gate.set()
        assert running.result(60).completions[0].finish_reason == "cancelled"
        assert 0 < len(running.result().completions[0].token_ids) < 100
        assert waiting.result(60).completions[0].token_ids == ()
        assert engine.statistics().memory.num_used_blocks == 0


def test_a_full_queue_refuses_and_generate_waits() -> None:
    engine, model = make_engine(max_waiting=3, max_concurrency=1)
    with engine:
        model.gate.clear()
        with pytest.raises(QueueFull, match="max_waiting"):
            submit_without_end(engine)
        model.gate.set()
        requests = [Request(prompt_ids=(3, number % 5), max_tokens=4) for number in range(20)]
        for request, result in zip(requests, engine.generate(requests), strict=True):
            assert [result.completions[0].token_ids] == alone(request)


def test_an_error_loses_what_was_running_and_the_engine_goes_on() -> None:
    engine, model = make_engine()
    with engine:
        model.failures = 1
        lost = engine.submit(prompt_ids=(3, 1), max_tokens=5)
        with pytest.raises(EngineError, match="no memory left") as caught:
            lost.result(60)
        assert isinstance(caught.value.__cause__, MemoryError)
        with pytest.raises(EngineError):
            list(lost.deltas(60))
        request = Request(prompt_ids=(3, 1), max_tokens=5)
        assert [engine.submit_request(request).result(60).completions[0].token_ids] == alone(request)
        assert engine.statistics().memory.num_used_blocks == 0


def test_errors_without_end_end_the_engine() -> None:
    engine, model = make_engine()
    with engine:
        model.failures = 10**6
        for _ in range(3):
            with pytest.raises(EngineError):
                engine.submit(prompt_ids=(3, 1), max_tokens=5).result(60)
        engine._thread.join(60)
        with pytest.raises(EngineError, match="the engine has ended: no memory left"):
            engine.submit(prompt_ids=(3, 1))
        assert engine.statistics().running == 0


def test_closing_cancels_and_draining_finishes() -> None:
    engine, model = make_engine(max_concurrency=1)
    generations = [engine.submit(prompt_ids=(3, 1), max_tokens=90) for _ in range(3)]
    engine.close(drain=True)
    assert [generation.result(1).completions[0].finish_reason for generation in generations] == ["length"] * 3
    with pytest.raises(EngineError, match="closed"):
        engine.submit(prompt_ids=(3, 1))
    engine, model = make_engine(max_concurrency=1)
    model.gate.clear()
    generations = [engine.submit(prompt_ids=(3, 1), max_tokens=90) for _ in range(3)]
    threading.Timer(0.05, model.gate.set).start()
    engine.close()
    assert "cancelled" in [generation.result(1).completions[0].finish_reason for generation in generations]
    engine.close()


def test_statistics_are_there_while_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine()
    engine.submit(prompt_ids=(3, 1), max_tokens=5).result(60)
    engine.close()
    monkeypatch.setattr(engine._thread, "is_alive", lambda: True)  # its last moment, after its last look at commands
    finished: list[dict[str, int]] = []
    reader = threading.Thread(target=lambda: finished.append(dict(engine.statistics().finished)), daemon=True)
    reader.start()
    reader.join(10)
    assert finished == [{"length": 1}]


def test_unseeded_requests_differ_and_seeded_do_not(engine: Engine) -> None:
    def answers(seed: int | None) -> set[tuple[int, ...]]:
        sampling = SamplingSettings(temperature=1.0, seed=seed)
        requests = [Request(prompt_ids=(3, 1), sampling=sampling, max_tokens=30) for _ in range(4)]
        return {result.completions[0].token_ids for result in engine.generate(requests)}

    assert len(answers(None)) > 1
    assert len(answers(7)) == 1


def test_a_lost_request_can_be_cancelled() -> None:
    engine, model = make_engine()
    with engine:
        model.failures = 1
        lost = engine.submit(prompt_ids=(3, 1), max_tokens=5)
        with pytest.raises(EngineError):
            lost.result(60)
        lost.cancel()
        assert len(engine.submit(prompt_ids=(3, 1), max_tokens=5).result(60).completions[0].token_ids) == 5


def test_a_listener_whose_event_loop_is_gone_costs_nobody(engine: Engine) -> None:
    generation = engine.submit(prompt_ids=(3, 1), max_tokens=60)
    deltas = aiter(generation)

    async def first() -> None:
        await anext(deltas)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(first())
    loop.close()  # the iteration is left where it is, listener and all
    assert len(generation.result(60).completions[0].token_ids) == 60
    assert engine.statistics().running == 0


def test_what_is_accepted_is_not_refused_later() -> None:
    """The queue may have filled meanwhile, with choices whose prompt became known."""
    engine, model = make_engine(max_waiting=2, max_concurrency=1)
    with engine:
        model.gate.clear()
        first = engine.submit(prompt_ids=(3, 1, 2), max_tokens=5, n=4)
        while engine._core.num_waiting or engine._submitted:
            time.sleep(0.01)
        others = [engine.submit(prompt_ids=(3, number), max_tokens=5) for number in range(2)]
        model.gate.set()
        for generation in (first, *others):
            assert generation.result(60).completions[-1].finish_reason == "length"


def test_an_exit_in_a_listener_is_told_to_those_who_wait() -> None:
    def leave(record: StepRecord) -> None:
        raise SystemExit(3)

    engine, _ = make_engine(on_step=leave)
    with engine:
        with pytest.raises(EngineError):
            engine.submit(prompt_ids=(3, 1), max_tokens=50).result(60)
        with pytest.raises(EngineError, match="the engine has ended"):
            engine.submit(prompt_ids=(3, 1))


def test_an_error_while_cancelling_costs_what_was_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = make_engine()
    with engine:
        generation = engine.submit(prompt_ids=(3, 1), max_tokens=100)
        next(generation.deltas(60))
        model.gate.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Choice, "cancel", lambda choice: 1 / 0)
            generation.cancel()
            model.gate.set()
            with pytest.raises(EngineError, match="division"):
                generation.result(60)
        assert len(engine.submit(prompt_ids=(3, 1), max_tokens=5).result(60).completions[0].token_ids) == 5
        assert engine.statistics().memory.num_used_blocks == 0


def test_the_engines_own_thread_is_not_left_waiting_for_itself() -> None:
    caught: list[BaseException] = []
    generations: list[Generation] = []

    def wait(record: StepRecord) -> None:
        for waiting in (generations[0].result, lambda: list(generations[0].deltas())):
            try:
                waiting()
            except RuntimeError as error:
                caught.append(error)

    engine, model = make_engine(on_step=wait)
    with engine:
        model.gate.clear()
        generations.append(engine.submit(prompt_ids=(3, 1), max_tokens=50))
        model.gate.set()
        assert len(generations[0].result(60).completions[0].token_ids) == 50
    assert "the engine's own thread" in str(caught[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": 7}, "prompt is 7"),
        ({"prompt": ""}, "prompt_ids is empty"),
        ({"prompt_ids": (1.5,)}, "prompt_ids must"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hello"}, "messages must"),
        ({"messages": [{"role": "user", "content": None}]}, "messages must"),
        ({"prompt_ids": (1,), "stop": 5}, "stop is 5"),
        ({"prompt_ids": (1,), "sampling": {}}, "sampling is"),
        ({"prompt_ids": (1,), "stop_token_ids": 5}, "stop_token_ids must"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(
    engine: Engine, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.submit(**arguments)  # type: ignore[arg-type]


def test_a_program_may_end_with_its_engine_at_work() -> None:
    program = """
from tests.engine.test_engine import make_engine
engine, _ = make_engine()
generations = [engine.submit(prompt_ids=(3, 1), max_tokens=100) for _ in range(8)]
next(generations[0].deltas(60))
"""
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=root, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_costs_are_measured_in_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with little memory for its requests needs no more for the measurement of what steps cost."""
    asked: dict[str, object] = {}

    def measured(key: object, *models: object, **arguments: object) -> str:
        asked.update(arguments)
        return "measured"

    monkeypatch.setattr(loading, "profile_key", lambda *models, max_concurrency: max_concurrency)
    monkeypatch.setattr(loading, "read_profile", lambda key: None)
    monkeypatch.setattr(loading, "measured_profile", measured)
    monkeypatch.setattr(loading, "write_profile", lambda profile: profile)
    engine, _ = make_engine()
    with engine:
        target = engine._target
        settings = EngineSettings(max_concurrency=4, kv_memory_bytes=1000)
        assert loading.known_or_measured(target, make_drafter(), settings) == "measured"  # type: ignore[arg-type]
    assert asked == {}
