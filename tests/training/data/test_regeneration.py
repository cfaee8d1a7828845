from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dspark.training.data import DataProgress, iterate_rows, parse_sources, read_manifest, read_rows
from dspark.training.data.regeneration import (
    ANSWER_EMPTY,
    FORBIDDEN_PROMPT,
    PROMPT_TOO_LONG,
    USER_TURN_EMPTY,
    USER_TURN_NEAR_DUPLICATE,
    USER_TURN_SPECIAL_TOKEN,
    USER_TURN_UNFINISHED,
)
from tests.training.data import fakes
from tests.training.data.fakes import END, SELF, FakeGenerator, make_settings, make_tokenizer, run, write_prompts


def contents(directory: Path) -> set[str]:
    """Lines of rows and dropped rows; none may be there twice."""
    lines = [
        line
        for file in sorted(directory.glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]  # fmt: skip
    assert len(set(lines)) == len(lines)
    assert len({json.loads(line)["id"] for line in lines}) == len(lines)
    return set(lines)


def test_every_planned_row_is_kept_or_dropped_with_its_reason(tmp_path: Path) -> None:
    result = run(tmp_path / "out", settings=make_settings(rows=200))
    manifest = read_manifest(tmp_path / "out")
    assert manifest == result.manifest
    assert manifest["complete"]
    assert manifest["rows"] + sum(manifest["dropped"].values()) == manifest["planned"] == 200
    assert set(manifest["dropped"]) == {
        USER_TURN_UNFINISHED, USER_TURN_SPECIAL_TOKEN, USER_TURN_EMPTY, USER_TURN_NEAR_DUPLICATE, ANSWER_EMPTY,
    }  # fmt: skip
    rows = read_rows(tmp_path / "out", vocab_size=259)
    assert len(rows) == manifest["rows"]
    assert sum(row.response_tokens for row in rows) == manifest["response_tokens"]
    assert sum(len(row.token_ids) for row in rows) == manifest["total_tokens"]
    assert {row.temperature for row in rows} == {0.0, 0.7, 1.0}


def test_loss_spans_are_exactly_the_generated_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    generator = FakeGenerator(tokenizer)
    run(tmp_path / "out", sources=[SELF, write_prompts(tmp_path / "prompts.jsonl")], generator=generator)
    answers = {
        request.request_id: (request, generator.complete(request))
        for request in generator.requests
        if not request.request_id.endswith("#user")
    }
    checked = 0
    for row in iterate_rows(tmp_path / "out"):
        for turn, ((start, end), reason) in enumerate(zip(row.response_spans, row.finish_reasons, strict=True)):
            request, completion = answers[f"{row.id}#answer{turn}"]
            assert row.token_ids[:start] == request.prompt_ids
            assert row.token_ids[start:end] == completion.token_ids
            assert reason == completion.finish_reason == ("stop" if row.token_ids[end - 1] == END else "length")
            assert request.settings.temperature == row.temperature
            checked += 1
        assert row.response_spans[-1][1] == len(row.token_ids)
    assert checked > 40


def test_a_conversation_reads_as_the_template_writes_it(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    run(
        tmp_path / "out", sources=[write_prompts(tmp_path / "prompts.jsonl")], settings=make_settings(rows=4, seed=11)
    )  # fmt: skip
    rows = {row.id: row for row in iterate_rows(tmp_path / "out")}
    row = rows["prompts/000000"]
    assert row.user_turns == ("How many?", "And then?", "Is that all?")
    messages = []
    for user_turn, (start, end), reason in zip(row.user_turns, row.response_spans, row.finish_reasons, strict=True):
        messages.append({"role": "user", "content": user_turn})
        answer = tokenizer.decode(row.token_ids[start : end - 1 if reason == "stop" else end])
        messages.append({"role": "assistant", "content": answer})
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    written = tokenizer.decode(row.token_ids)
    assert rendered.startswith(written)
    assert rendered.removeprefix(written) in ("\n", "<|im_end|>\n")

    briefly = rows["prompts/000001"]
    assert tokenizer.decode(briefly.token_ids).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert briefly.user_turns == ("Why?", "Why not?")


def test_answers_are_mostly_given_under_the_default_system_prompt(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    for fraction, wanted in ((0.0, {"You are a default."}), (1.0, {"You count.", "You add."})):
        out = tmp_path / str(fraction)
        run(out, settings=make_settings(steered_answer_fraction=fraction))
        systems = {tokenizer.decode(row.token_ids).split("<|im_end|>")[0].split("\n")[1] for row in iterate_rows(out)}
        assert systems == wanted


def test_openers_and_closers_surround_what_the_target_writes(tmp_path: Path) -> None:
    generator = FakeGenerator(make_tokenizer())
    run(tmp_path / "out", generator=generator)
    turns = [row.user_turns[0] for row in iterate_rows(tmp_path / "out")]
    assert any(turn.startswith("Count from") and turn.endswith("\nThink first.") for turn in turns)
    assert any(not turn.startswith("Count from") and not turn.endswith("\nThink first.") for turn in turns)


def test_slots_are_refilled_while_there_is_anything_to_do(tmp_path: Path) -> None:
    generator = FakeGenerator(make_tokenizer(), concurrency=9)
    batch_sizes: list[int] = []

    def watched(requests):
        for completion in generator(requests):
            yield completion
            batch_sizes.append(len(generator.requests) - len(batch_sizes))

    run(tmp_path / "out", generator=watched, settings=make_settings(rows=100))
    assert generator.largest_batch == 9
    assert batch_sizes[:100] == [9] * 100


@pytest.mark.parametrize("order_seed", range(3))
def test_the_rows_do_not_depend_on_the_order_of_completion(tmp_path: Path, order_seed: int) -> None:
    for name, concurrency, seed in (("one", 1, 0), ("many", 25, order_seed)):
        run(tmp_path / name, generator=FakeGenerator(make_tokenizer(), concurrency=concurrency, order_seed=seed))
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


def test_the_seed_changes_the_rows(tmp_path: Path) -> None:
    run(tmp_path / "a", settings=make_settings(seed=1))
    run(tmp_path / "b", settings=make_settings(seed=2))
    assert contents(tmp_path / "a") != contents(tmp_path / "b")


def test_a_run_torn_at_any_byte_goes_on_to_the_same_rows(tmp_path: Path) -> None:
    sources = [SELF, write_prompts(tmp_path / "prompts.jsonl")]
    run(tmp_path / "whole", sources=sources)
    whole = contents(tmp_path / "whole")
    rng = random.Random(5)
    out = tmp_path / "torn"
    torn = 0
    for attempt in range(12):
        kill_after = None if attempt == 11 else rng.randrange(1, 25)
        generator = FakeGenerator(make_tokenizer(), kill_after=kill_after, order_seed=attempt)
        result = run(out, sources=sources, generator=generator)
        assert result.interrupted == (not result.manifest["complete"])
        if attempt < 11:
            for file in out.glob("*.jsonl"):  # a kill leaves a file at any length it had, the manifest older or newer
                size = file.stat().st_size
                os.truncate(file, max(0, size - rng.randrange(0, 400)))
                torn += file.read_bytes()[-1:] not in (b"", b"\n")
    assert torn
    assert contents(out) == whole
    assert read_manifest(out)["torn_lines"] == torn
    whole_manifest = read_manifest(tmp_path / "whole")
    for field in ("rows", "dropped", "response_tokens", "total_tokens", "rows_by_source", "finish_reasons", "recipe"):
        assert read_manifest(out)[field] == whole_manifest[field]


def test_kill_9_loses_and_doubles_nothing(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    sources = [SELF, write_prompts(prompts)]
    rows = 150
    run(tmp_path / "whole", sources=sources, settings=make_settings(rows=rows))
    out = tmp_path / "out"
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}
    done = 0
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, fakes.__file__, str(out), str(prompts), str(rows)], env=environment, cwd=root
        )
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            lines = sum(file.read_bytes().count(b"\n") for file in out.glob("*.jsonl"))
            if lines >= done + 25:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        done = sum(file.read_bytes().count(b"\n") for file in out.glob("*.jsonl"))
        assert not read_manifest(out)["complete"]
    assert 50 <= done < rows
    generator = FakeGenerator(make_tokenizer())
    result = run(out, sources=sources, settings=make_settings(rows=rows), generator=generator)
    assert contents(out) == contents(tmp_path / "whole")
    assert result.manifest["complete"]
    started = {request.request_id.split("#")[0] for request in generator.requests}
    assert len(started) <= rows - done


def test_a_finished_run_does_nothing_when_run_again(tmp_path: Path) -> None:
    run(tmp_path / "out")
    before = contents(tmp_path / "out")
    generator = FakeGenerator(make_tokenizer())
    assert run(tmp_path / "out", generator=generator).manifest["complete"]
    assert not generator.requests
    assert contents(tmp_path / "out") == before


def test_more_rows_extend_a_directory_to_what_one_run_makes(tmp_path: Path) -> None:
    run(tmp_path / "whole", settings=make_settings(rows=80))
    run(tmp_path / "out", settings=make_settings(rows=30))
    run(tmp_path / "out", settings=make_settings(rows=80))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    with pytest.raises(ValueError, match="planned for 80 rows; rows is 79"):
        run(tmp_path / "out", settings=make_settings(rows=79))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperatures": (0.0,)}, r"settings\.temperatures"),
        ({"seed": 4}, r"settings\.seed was 3 and now is 4"),
        ({"max_answer_tokens": 41}, r"settings\.max_answer_tokens"),
    ],
)
def test_other_settings_for_the_same_directory_are_refused(tmp_path: Path, changes: dict, field: str) -> None:
    run(tmp_path / "out", settings=make_settings(rows=5))
    with pytest.raises(ValueError, match=field):
        run(tmp_path / "out", settings=make_settings(rows=5, **changes))


def test_other_sources_for_the_same_directory_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "out", settings=make_settings(rows=5), forbidden=["count the ways in which it goes wrong"])
    with pytest.raises(ValueError, match=r"forbidden"):
        run(tmp_path / "out", settings=make_settings(rows=5))
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    run(tmp_path / "files", sources=[prompts], settings=make_settings(rows=3))
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["changed"]}\n')
    with pytest.raises(ValueError, match=r"sources\.prompts\.(prompts|sha256)"):
        run(
            tmp_path / "files", sources=parse_sources([str(tmp_path / "prompts.jsonl")]), settings=make_settings(rows=3)
        )


@pytest.mark.parametrize(
    ("name", "value"), [("created", None), ("torn_lines", "2"), ("seconds", None), ("recipe", {"target": [1]})]
)
def test_a_manifest_that_was_changed_by_hand_is_named(tmp_path: Path, name: str, value: Any) -> None:
    run(tmp_path / "out", settings=make_settings(rows=3))
    file = tmp_path / "out" / "manifest.json"
    file.write_text(json.dumps(read_manifest(tmp_path / "out") | {name: value}))
    with pytest.raises(ValueError, match=rf"manifest\.json: {name}"):
        run(tmp_path / "out", settings=make_settings(rows=3))


def test_rows_without_a_manifest_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "out", settings=make_settings(rows=5))
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"has rows but no manifest\.json"):
        run(tmp_path / "out", settings=make_settings(rows=5))


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    result = run(tmp_path / "out", generator=FakeGenerator(make_tokenizer(), kill_after=40))
    assert result.interrupted
    manifest = read_manifest(tmp_path / "out")
    assert not manifest["complete"]
    assert 0 < manifest["done"] == len(contents(tmp_path / "out")) < 60


def test_a_failing_generator_keeps_what_is_done(tmp_path: Path) -> None:
    generator = FakeGenerator(make_tokenizer())

    def failing(requests):
        yield from itertools.islice(generator(requests), 40)
        raise MemoryError

    with pytest.raises(MemoryError):
        run(tmp_path / "out", generator=failing)
    assert read_manifest(tmp_path / "out")["done"] == len(contents(tmp_path / "out")) > 0
    with pytest.raises(RuntimeError, match="rows unfinished"):
        run(tmp_path / "out", generator=lambda requests: iter(()))


def test_prompts_close_to_forbidden_ones_are_dropped(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    generator = FakeGenerator(make_tokenizer())
    forbidden = ["Oh WHAT a forbidden question - this is to ask anyone, really."]
    result = run(
        tmp_path / "out", sources=[prompts], settings=make_settings(rows=4), forbidden=forbidden, generator=generator
    )  # fmt: skip
    assert result.manifest["dropped"] == {FORBIDDEN_PROMPT: 1}
    assert "prompts/000003" not in {row.id for row in iterate_rows(tmp_path / "out")}
    assert not any(request.request_id.startswith("prompts/000003") for request in generator.requests)


def test_prompts_that_do_not_fit_are_dropped_and_later_turns_left_out(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"turns": ["word " * 100]}, {"turns": ["Hi", "word " * 100]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run(tmp_path / "out", sources=parse_sources([str(file)]), settings=make_settings(rows=2, seed=1))
    assert result.manifest["dropped"] == {PROMPT_TOO_LONG: 1}
    (row,) = read_rows(tmp_path / "out")
    assert row.user_turns == ("Hi",)
    assert len(row.token_ids) <= 300


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    def nested(requests):
        with pytest.raises(BlockingIOError, match="another process is writing"):
            run(tmp_path / "out")
        yield from FakeGenerator(make_tokenizer())(requests)

    run(tmp_path / "out", generator=nested)


def test_progress_is_reported(tmp_path: Path) -> None:
    seen: list[DataProgress] = []
    result = run(tmp_path / "out", on_progress=seen.append)
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    assert seen[-1] == result.progress
    assert seen[-1].done == seen[-1].planned == 60
    assert seen[-1].rows == result.manifest["rows"]
    assert seen[-1].response_tokens == result.manifest["response_tokens"] < seen[-1].tokens
    assert seen[-1].tokens_per_second > 0


def test_a_system_prompt_that_fills_the_context_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_length is 30"):
        run(tmp_path / "out", settings=make_settings(max_length=30))
    assert not (tmp_path / "out").exists()


def test_no_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sources is empty"):
        run(tmp_path / "out", sources=[])


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        ("{{ raise_exception('System role not supported') }}", "refuses a conversation with the roles system, user"),
        ("{% set messages = messages[1:] %}", "leaves the system message out"),
    ],
)
def test_a_template_without_the_system_role_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instead: str, message: str
) -> None:
    template = f"{{% if messages[0]['role'] == 'system' %}}{instead}{{% endif %}}{fakes.CHATML}"
    template = "{% set ns = namespace() %}" + template
    if "set messages" in instead:  # a template that goes on without the message
        template = fakes.CHATML.replace(
            "{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}"
        )
    monkeypatch.setattr(fakes, "make_tokenizer", lambda: make_tokenizer(template))
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    with pytest.raises(ValueError, match=f"1 of the 4 prompts of prompts have a system message, but .*{message}"):
        run(tmp_path / "out", sources=[prompts], settings=make_settings(rows=4))
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", sources=[SELF])
    assert not (tmp_path / "out").exists()
    (tmp_path / "plain.jsonl").write_text('{"turns": ["How many?"]}\n')
    run(tmp_path / "out", sources=parse_sources([str(tmp_path / "plain.jsonl")]), settings=make_settings(rows=1))
