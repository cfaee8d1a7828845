"""Regeneration through an OpenAI-compatible server, over real sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from dspark.decoding.request import GenerationRequest
from dspark.decoding.settings import SamplingSettings
from dspark.training.data import iterate_rows, read_manifest
from dspark.training.data.endpoint import Endpoint, EndpointError, Retries, _retry_after_s
from dspark.training.data.regeneration import ANSWER_TOKENS_UNKNOWN
from tests.training.data import endpoint_server
from tests.training.data.endpoint_server import MODEL, QUICK, FakeServer, Fault, in_process, make_generator
from tests.training.data.fakes import END, SELF, START, make_settings, make_tokenizer, run, write_prompts
from tests.training.data.test_regeneration import contents


def request(text: str = "Hi", *, number: int = 0, max_tokens: int = 30, **changes: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(make_tokenizer()(text, add_special_tokens=False)["input_ids"]),
        settings=SamplingSettings(temperature=0.7, top_p=0.9, seed=2**40 + number),
        max_tokens=max_tokens,
        stop_token_ids=frozenset([END]),
        **changes,
    )


def requests(count: int) -> Any:
    return iter([request(number=number) for number in range(count)])


def expected(count: int) -> dict[str, tuple[int, ...]]:
    return {completion.request_id: completion.token_ids for completion in in_process(requests(count))}


def answers(generator: Any, count: int) -> dict[str, tuple[int, ...]]:
    return {completion.request_id: completion.token_ids for completion in generator.run(requests(count))}


@pytest.mark.parametrize("style", ["ids", "text"])
def test_the_rows_are_those_of_the_model_in_process(tmp_path: Path, style: Any) -> None:
    sources = [SELF, write_prompts(tmp_path / "prompts.jsonl")]
    run(tmp_path / "here", sources=sources, generator=in_process)
    with FakeServer(style=style) as server:
        generator = make_generator(server.url)
        run(tmp_path / "there", sources=sources, generator=generator.run)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert generator.from_text == (len(server.bodies) if style == "text" else 0)


def test_what_is_sent_leaves_nothing_to_the_server(tmp_path: Path) -> None:
    with FakeServer() as server:
        list(make_generator(server.url).run(iter([request("Hi", number=3)])))
    (body,) = server.bodies
    assert body["prompt"] == list(request("Hi").prompt_ids)
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == (MODEL, 30, 0.7, 0.9)
    assert body["seed"] == 3  # 2**40 + 3, to what every server takes
    assert body["stop_token_ids"] == [END]
    assert body["return_token_ids"] is True
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: body[name] for name in neutral} == neutral


def test_the_openai_dialect_sends_openais_fields_only() -> None:
    with FakeServer(style="text") as server:
        list(make_generator(server.url, dialect="openai").run(iter([request()])))
    assert server.bodies[0].keys() == {"model", "prompt", "max_tokens", "temperature", "top_p", "seed"}


def test_ids_beside_log_probabilities_are_taken() -> None:
    with FakeServer(style="logprobs") as server:
        generator = make_generator(server.url, dialect="llama.cpp")
        assert answers(generator, 20) == expected(20)
    assert generator.from_text == 0
    assert server.bodies[0]["logprobs"] == 1


def test_concurrency_is_bounded_and_used() -> None:
    with FakeServer(pause_s=0.03) as server:
        assert answers(make_generator(server.url, max_concurrency=5), 25) == expected(25)
    assert server.largest_load == 5


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(status=500), "answered 500: the fake is unwell"),
        (Fault(status=503, body="<html>bad\n gateway</html>"), "answered 503: <html>bad gateway</html>"),
        (Fault(status=429, headers={"Retry-After": "0"}), "answered 429"),
        (Fault(hang_up=True), "could not be reached"),
        (Fault(body="{oops"), "with something that is no answer"),
        (Fault(body='{"choices": []}'), "with something that is no answer (choices:"),
        (Fault(body="[" * 100_000), "with something that is no answer"),
        (Fault(body="garbage", headers={"Content-Encoding": "gzip"}), "sent what cannot be decompressed"),
        (Fault(drip_s=0.1), "did not answer within 0.3 s"),
        (Fault(pause_s=0.6), "did not answer within 0.3 s"),
    ],
)
def test_what_may_pass_is_tried_again(fault: Fault, said: str) -> None:
    told: list[str] = []
    with FakeServer(fault=lambda number: fault if number in (0, 3, 4) else None) as server:
        quick = Retries(
            attempts=4, first_wait_s=0.01, longest_wait_s=0.02, timeout_s=0.3 if fault.pause_s or fault.drip_s else 20.0
        )
        generator = make_generator(server.url, retries=quick, on_wait=told.append, max_concurrency=2)
        assert answers(generator, 8) == expected(8)
    assert len(server.bodies) == 11
    assert len(told) == 3
    assert all(said in message and "trying again in" in message for message in told)


def test_retry_after_is_honoured() -> None:
    with FakeServer(
        fault=lambda number: Fault(status=429, headers={"Retry-After": "0.4"}) if not number else None
    ) as server:
        started = time.monotonic()
        assert answers(make_generator(server.url), 1) == expected(1)
        assert time.monotonic() - started >= 0.4
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert _retry_after_s(date) == pytest.approx(89, abs=2)
    assert [_retry_after_s(value) for value in (None, "soon", "nan", "-3", "12")] == [None, None, None, 0.0, 12.0]


def test_a_very_long_retry_after_ends_the_run() -> None:
    fault = Fault(status=429, headers={"Retry-After": "86400"})
    with FakeServer(fault=lambda number: fault) as server, pytest.raises(EndpointError, match="left alone for 86400 s"):
        answers(make_generator(server.url), 1)


def test_waits_double_up_to_the_longest_and_are_spread() -> None:
    retries = Retries(first_wait_s=1.0, longest_wait_s=5.0)
    for failures, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (5000, 5.0)):
        waits = {retries.wait_s(failures, None) for _ in range(50)}
        assert longest / 2 <= min(waits) < max(waits) <= longest
    assert retries.wait_s(1, 7.0) == 7.0


@pytest.mark.parametrize(
    ("status", "remedy"),
    [(401, "--api-key-env"), (403, "--api-key-env"), (404, "mostly ends in /v1"), (400, "--endpoint-dialect")],
)
def test_a_refusal_is_not_tried_again(tmp_path: Path, status: int, remedy: str) -> None:
    def fault(number: int) -> Fault | None:
        return Fault(status=status, body='{"error": {"message": "no, sk-secret is no good"}}') if number >= 30 else None

    with FakeServer(fault=fault) as server:
        generator = make_generator(server.url, api_key="sk-secret")
        with pytest.raises(EndpointError) as error:
            run(tmp_path / "out", sources=[SELF], generator=generator.run)
        message = str(error.value)
        assert f"{server.url}/completions answered {status}: no, *** is no good" in message
        assert remedy in message
        assert len(server.bodies) <= 30 + 8
    assert "sk-secret" not in repr(Endpoint(url=server.url, api_key="sk-secret"))
    assert set(server.keys) == {"Bearer sk-secret"}

    manifest = read_manifest(tmp_path / "out")  # what was finished is kept, and the same run goes on
    assert not manifest["complete"]
    assert 0 < manifest["done"] == len(contents(tmp_path / "out")) < 60
    with FakeServer() as server:
        assert run(tmp_path / "out", sources=[SELF], generator=make_generator(server.url).run).manifest["complete"]
    run(tmp_path / "whole", sources=[SELF], generator=in_process)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_an_endpoint_that_stays_away_is_named() -> None:
    with FakeServer(fault=lambda number: Fault(status=502)) as server:
        with pytest.raises(
            EndpointError, match=r"/completions answered 502: the fake is unwell, 4 times in a row; what"
        ):
            answers(make_generator(server.url), 1)
        assert len(server.bodies) == 4
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(EndpointError, match=rf"http://127.0.0.1:{port}/v1/models could not be reached \(.*\), 4 times"):
        make_generator(f"http://127.0.0.1:{port}/v1")


def test_everything_that_came_back_is_given_before_a_failure_is_raised() -> None:
    given: list[str] = []
    with FakeServer(fault=lambda number: Fault(status=400) if number == 6 else None) as server:
        generator = make_generator(server.url, max_concurrency=1)
        with pytest.raises(EndpointError, match="answered 400"):
            given.extend(completion.request_id for completion in generator.run(requests(9)))
    assert given == [f"r{number}" for number in range(6)]


def test_kill_9_loses_and_doubles_nothing(tmp_path: Path) -> None:
    rows, out = 150, tmp_path / "out"
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}
    with FakeServer(pause_s=0.005) as server:
        process = subprocess.Popen(
            [sys.executable, endpoint_server.__file__, str(out), server.url, str(rows)], env=environment, cwd=root
        )
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if sum(file.read_bytes().count(b"\n") for file in out.glob("*.jsonl")) >= 40:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        done = sum(file.read_bytes().count(b"\n") for file in out.glob("*.jsonl"))
        assert 40 <= done < rows
        asked = len(server.bodies)
        server.pause_s = 0.0
        result = run(out, sources=[SELF], settings=make_settings(rows=rows), generator=make_generator(server.url).run)
    assert result.manifest["complete"]
    assert len(server.bodies) - asked <= 2 * (rows - done)
    run(tmp_path / "whole", sources=[SELF], settings=make_settings(rows=rows), generator=in_process)
    assert contents(out) == contents(tmp_path / "whole")


def test_ctrl_c_ends_at_once_and_keeps_what_is_done(tmp_path: Path) -> None:
    def fault(number: int) -> Fault | None:
        if number == 20:
            signal.raise_signal(signal.SIGINT)
        return Fault(pause_s=60.0) if number >= 20 else None

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with FakeServer(fault=fault) as server:
        started = time.monotonic()
        result = run(tmp_path / "out", sources=[SELF], generator=make_generator(server.url, max_concurrency=2).run)
        assert time.monotonic() - started < 50.0  # nobody waited for the answers that were under way
    assert result.interrupted
    assert 0 < result.manifest["done"] == len(contents(tmp_path / "out"))


class TestText:
    """Answers that come as text alone."""

    def completion(self, change: Any, style: Any = "text", **changes: Any) -> Any:
        with FakeServer(style=style, change=change) as server:
            return next(iter(make_generator(server.url, dialect="openai").run(iter([request(**changes)]))))

    def test_the_end_of_turn_token_is_put_back(self) -> None:
        def change(answer: dict[str, Any]) -> None:
            answer["choices"][0] |= {"text": "five", "finish_reason": "stop"}
            answer["usage"]["completion_tokens"] = 4

        completion = self.completion(change)
        assert make_tokenizer().decode(completion.token_ids) == "five<|im_end|>"
        assert (completion.finish_reason, completion.exact) == ("stop", True)

    def test_an_answer_that_was_cut_has_none(self) -> None:
        def change(answer: dict[str, Any]) -> None:
            answer["choices"][0] |= {"text": "five si", "finish_reason": "length"}
            answer["usage"]["completion_tokens"] = 7

        completion = self.completion(change)
        assert make_tokenizer().decode(completion.token_ids) == "five si"
        assert (completion.finish_reason, completion.exact) == ("length", True)

    def test_another_count_of_tokens_is_another_answer(self) -> None:
        for count, exact in ((3, False), (4, True), (5, True), (6, False)):

            def change(answer: dict[str, Any], count: int = count) -> None:
                answer["choices"][0] |= {"text": "five", "finish_reason": "stop"}
                answer["usage"]["completion_tokens"] = count

            assert self.completion(change).exact is exact

    def test_text_that_the_tokens_do_not_spell_is_not_exact(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tokenizer that normalises its input."""
        tokenizer = make_tokenizer()
        real = tokenizer.__call__

        def lower(text: str, **options: Any) -> Any:
            return real(text.lower(), **options)

        monkeypatch.setattr("tests.training.data.endpoint_server.make_tokenizer", lambda: _Wrapped(tokenizer, lower))
        for text, exact in (("five", True), ("Five", False)):

            def change(answer: dict[str, Any], text: str = text) -> None:
                answer["choices"][0] |= {"text": text, "finish_reason": "stop"}
                answer["usage"]["completion_tokens"] = 4

            assert self.completion(change).exact is exact

    def test_bytes_that_are_no_text_are_not_exact(self) -> None:
        def change(answer: dict[str, Any]) -> None:
            answer["choices"][0] |= {"text": "fi\ufffd", "finish_reason": "stop"}
            answer["usage"]["completion_tokens"] = 5

        assert not self.completion(change).exact

    def test_without_counts_the_spelling_decides(self) -> None:
        assert self.completion(lambda answer: None, style="text without usage").exact

    def test_a_stop_token_in_the_text_ends_it(self) -> None:
        def change(answer: dict[str, Any]) -> None:
            answer["choices"][0] |= {"text": "one<|im_end|>two", "finish_reason": "length"}
            answer["usage"]["completion_tokens"] = 7

        completion = self.completion(change)
        assert make_tokenizer().decode(completion.token_ids) == "one<|im_end|>"
        assert completion.finish_reason == "stop"

    def test_inexact_answers_are_dropped_and_stay_dropped(self, tmp_path: Path) -> None:
        def change(answer: dict[str, Any]) -> None:
            if answer["choices"][0]["text"].count("o") % 2:
                answer["usage"]["completion_tokens"] += 5

        with FakeServer(style="text", change=change) as server:
            generator = make_generator(server.url)
            run(tmp_path / "whole", sources=[SELF], generator=generator.run)
            run(tmp_path / "out", sources=[SELF], settings=make_settings(rows=25), generator=generator.run)
            run(tmp_path / "out", sources=[SELF], generator=generator.run)
        manifest = read_manifest(tmp_path / "out")
        assert 0 < manifest["dropped"][ANSWER_TOKENS_UNKNOWN] < 60
        assert manifest["rows"] > 0
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        decoded = [
            make_tokenizer().decode(row.token_ids[slice(*row.response_spans[0])])
            for row in iterate_rows(tmp_path / "out")
        ]
        assert all(text.count("o") % 2 == 0 for text in decoded)


class _Wrapped:
    def __init__(self, tokenizer: Any, call: Any) -> None:
        self._tokenizer, self._call = tokenizer, call

    def __call__(self, text: str, **options: Any) -> Any:
        return self._call(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_the_stop_token_that_the_server_names_is_taken() -> None:
    def change(answer: dict[str, Any]) -> None:
        answer["choices"][0] |= {"token_ids": [70, 71], "finish_reason": "stop", "stop_reason": START}

    asked = GenerationRequest(
        request_id="r", prompt_ids=(START, 70), settings=SamplingSettings(temperature=0.0, seed=1), max_tokens=9,
        stop_token_ids=frozenset([START, END]),
    )  # fmt: skip
    with FakeServer(change=change) as server:
        (completion,) = make_generator(server.url).run(iter([asked]))
    assert completion.token_ids == (70, 71, START)


class TestChat:
    def test_rows_from_a_file_are_those_of_the_other_api(self, tmp_path: Path) -> None:
        prompts = write_prompts(tmp_path / "prompts.jsonl")
        with FakeServer() as server:
            for api in ("chat", "completions"):
                generator = make_generator(server.url, api=api)
                run(tmp_path / api, sources=[prompts], settings=make_settings(rows=4), generator=generator.run)
        assert contents(tmp_path / "chat") == contents(tmp_path / "completions")
        assert any("messages" in body and body["messages"][0]["role"] == "system" for body in server.bodies)

    def test_it_cannot_continue_a_users_message(self, tmp_path: Path) -> None:
        with FakeServer() as server, pytest.raises(ValueError, match="chat API cannot continue a user's message"):
            run(tmp_path / "out", sources=[SELF], generator=make_generator(server.url, api="chat").run)

    def test_another_template_on_the_server_is_found_out(self, tmp_path: Path) -> None:
        prompts = write_prompts(tmp_path / "prompts.jsonl")
        with FakeServer(style="text") as server:
            server.tokenizer.chat_template = server.tokenizer.chat_template.replace(
                "You are a default.", "You are Qwen."
            )
            with pytest.raises(ValueError, match="its chat template is not the one of --target's tokenizer"):
                run(tmp_path / "out", sources=[prompts], settings=make_settings(rows=4),
                    generator=make_generator(server.url, api="chat").run)  # fmt: skip

    def test_an_earlier_answer_that_is_read_otherwise_drops_the_row(self) -> None:
        def change(answer: dict[str, Any]) -> None:
            answer["choices"][0]["prompt_token_ids"] = [1, 2, 3]

        messages = (("user", "Hi"), ("assistant", "five"), ("user", "More"))
        with FakeServer(change=change) as server:
            generator = make_generator(server.url, api="chat")
            (completion,) = generator.run(iter([request(messages=messages)]))
            assert not completion.exact
            with pytest.raises(ValueError, match="chat template is not the one"):
                list(generator.run(iter([request(messages=messages[:1])])))


def test_a_prompt_that_is_read_otherwise_is_found_out() -> None:
    for place in ({"usage": {"prompt_tokens": 3}}, {"prompt_token_ids": [0, 1, 2]}):
        with (
            FakeServer(style="text", change=lambda answer, place=place: answer.update(place)) as server,
            pytest.raises(ValueError, match="read a prompt of 2 tokens as 3 other ones: it adds tokens"),
        ):
            list(make_generator(server.url).run(iter([request("Hi")])))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([5, 6, 7, 8, 9], ((5, 6, 7, 8), "length")),
        ([5, 6, 7, 8, END], ((5, 6, 7, 8), "length")),
        ([5, 6, 7, 8], ((5, 6, 7, 8), "length")),
        ([5, 6, 7, END], ((5, 6, 7, END), "stop")),
        ([5, 6, 7], ((5, 6, 7, END), "stop")),
    ],
)
def test_an_answer_is_never_longer_than_asked_for(ids: list[int], expected: tuple[tuple[int, ...], str]) -> None:
    """Some servers know `max_tokens` by another name only, and go on."""
    with FakeServer(change=lambda answer: answer["choices"][0].update(token_ids=ids, finish_reason="stop")) as server:
        (completion,) = make_generator(server.url).run(iter([request(max_tokens=4)]))
    assert (completion.token_ids, completion.finish_reason) == expected


def test_ids_of_another_vocabulary_are_found_out() -> None:
    with (
        FakeServer(change=lambda answer: answer["choices"][0].update(token_ids=[5, 259])) as server,
        pytest.raises(EndpointError, match="outside the vocabulary of 259"),
    ):
        list(make_generator(server.url).run(iter([request()])))


def test_an_unknown_finish_reason_is_named() -> None:
    with (
        FakeServer(change=lambda answer: answer["choices"][0].update(token_ids=[5], finish_reason="abort")) as server,
        pytest.raises(EndpointError, match="finish_reason 'abort'"),
    ):
        list(make_generator(server.url).run(iter([request()])))


class TestConnecting:
    def test_the_model_must_be_there(self) -> None:
        with FakeServer(models=({"id": "a"}, {"id": "b"})) as server:
            with pytest.raises(ValueError, match="has no model org/other; it has a, b"):
                make_generator(server.url, model="org/other")
            with pytest.raises(ValueError, match="has the models a, b: name one with --model"):
                make_generator(server.url)
            assert make_generator(server.url, model="b").connect().model == "b"

    def test_the_only_model_needs_no_name(self) -> None:
        with FakeServer() as server:
            identity = make_generator(server.url + "/").connect()
        assert (identity.model, identity.api, identity.dialect) == (MODEL, "completions", "vllm")

    def test_a_short_context_is_refused(self) -> None:
        with FakeServer(models=({"id": MODEL, "max_model_len": 100},)) as server:
            generator = make_generator(server.url)
            assert generator.connect(max_length=100)
            with pytest.raises(ValueError, match="served with a context of 100 tokens; give at most 100"):
                generator.connect(max_length=101)

    def test_a_url_that_is_no_base_is_refused(self) -> None:
        with (
            FakeServer() as server,
            pytest.raises(EndpointError, match=r"/v1/completions/models answered 404: .*ends in /v1"),
        ):
            make_generator(f"{server.url}/completions")

    @pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/v1", "http://", "http://me:secret@host/v1"])
    def test_a_url_is_checked(self, url: str) -> None:
        with pytest.raises(ValueError, match="endpoint") as error:
            Endpoint(url=url)
        assert "secret" not in str(error.value)

    @pytest.mark.parametrize("key", ["secret\nsecond line", "secret key", "secr\u00e9t", "secret\0"])
    def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(self, key: str) -> None:
        with pytest.raises(ValueError, match="key of the endpoint") as error:
            Endpoint(url="http://host/v1", api_key=key)
        assert "sec" not in str(error.value)

    @pytest.mark.parametrize("field", ["attempts", "timeout_s", "connect_timeout_s"])
    def test_retries_are_checked(self, field: str) -> None:
        with pytest.raises(ValueError, match=field):
            Retries(**{field: 0})

    def test_a_generator_runs_after_connecting_only(self) -> None:
        with FakeServer() as server:
            generator = make_generator(server.url)
            generator._model = None
            with pytest.raises(RuntimeError, match="connect"):
                next(generator.run(iter([])))
        assert QUICK.attempts == 4
