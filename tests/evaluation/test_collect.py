"""Collections of rounds: what a kill leaves is taken up, and nothing else."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dspark.evaluation.collect import Collection, CollectProgress, Task, collect_rounds, halves
from dspark.evaluation.rounds import RoundRecord
from dspark.files import exclusive

PROMPTS = [f"{domain}/{number}" for domain in ("math", "chat") for number in range(4)]
SETTINGS = {"target": {"name": "tiny"}, "sizes": (1, 2)}


class Killed(Exception):
    """What a kill looks like from inside."""


class Source:
    """Answers of three rounds with a draft and one without; dies when ``dies_at`` are kept.

    ``at_once`` answers are made at a time and end in any order.
    """

    def __init__(self, dies_at: int | None = None, at_once: int = 1) -> None:
        self.calls: list[tuple[str, float]] = []
        self.dies_at = dies_at
        self.at_once = at_once

    def __call__(self, tasks: Iterator[Task], keep: Callable[[Task, Sequence[RoundRecord]], None]) -> None:
        chance, made = random.Random(5), list[Task]()
        while True:
            made += islice(tasks, self.at_once - len(made))
            if not made:
                return
            task = made.pop(chance.randrange(len(made)))
            if len(self.calls) == self.dies_at:
                raise Killed
            self.calls.append((task.prompt_id, task.sampling_temperature))
            keep(task, self.answer(task, task.uniforms(3)))

    def answer(self, task: Task, uniforms: Callable[[], float]) -> list[RoundRecord]:
        return [
            RoundRecord(
                prompt_id=task.prompt_id,
                drafted=drafted,
                verified=drafted,
                judged=drafted,
                accepted=0,
                committed=1,
                confidence_logits=(uniforms(),) * drafted,
                sampling_temperature=task.sampling_temperature,
            )
            for drafted in (2, 2, 2, 0)
        ]


def collect(path: Path, source: Source, **changes: Any) -> Collection:
    options: dict[str, Any] = {
        "prompt_ids": PROMPTS,
        "sampling_temperatures": (0.0, 1.0),
        "rounds": 12,
        "seed": 3,
        "settings": SETTINGS,
    }
    return collect_rounds(path, answer=source, **options | changes)


def test_each_temperature_gets_its_rounds(tmp_path: Path) -> None:
    source, seen = Source(), list[CollectProgress]()
    collection = collect(tmp_path / "rounds.jsonl", source, on_progress=seen.append)
    assert [temperature for _, temperature in source.calls] == [0.0, 1.0] * 4
    assert len({prompt for prompt, _ in source.calls}) == 4
    assert len(collection.records) == 32
    assert (collection.resumed, collection.short) == (0, ())
    assert seen[-1].rounds == {0.0: 12, 1.0: 12}


def test_greedy_answers_are_not_repeated_and_sampled_ones_differ(tmp_path: Path) -> None:
    source = Source()
    collection = collect(tmp_path / "rounds.jsonl", source, rounds=30)
    assert collection.short == (0.0,)
    assert sum(temperature == 0.0 for _, temperature in source.calls) == 8
    assert sum(temperature == 1.0 for _, temperature in source.calls) == 10
    sampled = [record for record in collection.records if record.sampling_temperature == 1.0 and record.drafted]
    assert len({record.confidence_logits for record in sampled}) == len(sampled)


@pytest.mark.parametrize("at_once", [2, 5, 30])
@pytest.mark.parametrize("rounds", [4, 12, 30, 10**6])
def test_a_collection_is_the_same_however_many_are_answered_at_once(at_once: int, rounds: int, tmp_path: Path) -> None:
    expected = collect(tmp_path / "one" / "rounds.jsonl", Source(), rounds=rounds)
    path = tmp_path / "many" / "rounds.jsonl"
    many = Source(at_once=at_once)
    assert collect(path, many, rounds=rounds) == expected
    if rounds == 12:
        assert 8 < len(many.calls) <= 8 + at_once  # some were begun before it was known that they are not needed
    again = Source()
    assert collect(path, again, rounds=rounds).records == expected.records
    assert again.calls == []


@pytest.mark.parametrize("dies_at", [0, 1, 5, 9])
def test_a_run_that_is_killed_with_many_in_flight_loses_only_these(dies_at: int, tmp_path: Path) -> None:
    expected = collect(tmp_path / "whole" / "rounds.jsonl", Source(), rounds=30)
    path = tmp_path / "killed" / "rounds.jsonl"
    with pytest.raises(Killed):
        collect(path, Source(dies_at, at_once=6), rounds=30)
    assert path.read_bytes().count(b'"answer":') == dies_at
    assert collect(path, Source(at_once=3), rounds=30).records == expected.records


@pytest.mark.parametrize("dies_at", [0, 1, 5])
@pytest.mark.parametrize("tear", ["nothing", "half a line", "half an answer"])
def test_a_killed_run_goes_on_to_the_same_rounds(dies_at: int, tear: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole" / "rounds.jsonl"
    expected = collect(whole, Source())
    path = tmp_path / "killed" / "rounds.jsonl"
    with pytest.raises(Killed):
        collect(path, Source(dies_at))
    lines = whole.read_bytes().splitlines(keepends=True)
    done = 1 + 4 * dies_at
    assert path.read_bytes() == b"".join(lines[:done])
    with path.open("ab") as file:
        if tear == "half a line":
            file.write(lines[done][:20])
        if tear == "half an answer":
            file.write(b"".join(lines[done : done + 2]))
    source = Source()
    collection = collect(path, source)
    assert collection.records == expected.records
    assert collection.resumed == 4 * dies_at
    assert len(source.calls) == 8 - dies_at
    assert path.read_bytes() == whole.read_bytes()


SLOW = """
import sys, time
from pathlib import Path
from tests.evaluation.test_collect import Source, collect

class Slow(Source):
    def answer(self, *arguments):
        time.sleep(0.02)
        return super().answer(*arguments)

collect(Path(sys.argv[1]), Slow(), rounds=300)
"""


def test_a_process_that_is_killed_leaves_what_can_be_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "killed" / "rounds.jsonl"
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(path)], cwd=root, env=environment)
    while not path.exists() or path.stat().st_size < 2000:
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert collect(path, Source()).records[:8] == collect(tmp_path / "whole" / "rounds.jsonl", Source()).records[:8]


def test_a_first_line_that_was_torn_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text('{"settings": {"tar')
    assert len(collect(path, Source()).records) == 32


def test_more_rounds_extend_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    collect(path, Source(), rounds=6)
    source = Source()
    assert collect(path, source).records == collect(tmp_path / "other" / "rounds.jsonl", Source()).records
    assert len(source.calls) == 4


def test_answers_without_a_round_are_counted_when_the_file_is_taken_up(tmp_path: Path) -> None:
    class Silent(Source):
        """Ends every other answer at once."""

        def answer(self, task: Task, uniforms: Callable[[], float]) -> list[RoundRecord]:
            return super().answer(task, uniforms) if uniforms() < 0.5 else []

    options: dict[str, Any] = {"sampling_temperatures": (1.0,)}
    expected = collect(tmp_path / "whole" / "rounds.jsonl", Silent(), rounds=60, **options)
    for rounds in (20, 40, 60):
        collection = collect(tmp_path / "rounds.jsonl", Silent(), rounds=rounds, **options)
    assert collection.records == expected.records
    logits = [record.confidence_logits for record in collection.records if record.drafted]
    assert len(set(logits)) == len(logits)


def test_rounds_of_prompts_no_longer_asked_are_left_aside(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    collect(path, Source(), prompt_ids=[*PROMPTS, "code/1"], rounds=27)
    records = collect(path, Source()).records
    assert "code/1" not in {record.prompt_id for record in records}


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    collect(path, Source())
    with pytest.raises(ValueError, match=r"collected with sizes \[1, 2\] \(now \[1, 3\]\); delete the file"):
        collect(path, Source(), settings=SETTINGS | {"sizes": (1, 3)})


def test_what_is_no_file_of_rounds_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text('{"turns": ["hello"]}\n')
    with pytest.raises(ValueError, match="line 1: no settings in the first line"):
        collect(path, Source())
    assert path.read_text() == '{"turns": ["hello"]}\n'

    collect(tmp_path / "b" / "rounds.jsonl", Source())
    damaged = (tmp_path / "b" / "rounds.jsonl").read_text().replace('"judged":2', '"judged":"two"', 1)
    path.write_text(damaged)
    with pytest.raises(ValueError, match="line 2: judged must be an integer"):
        collect(path, Source())


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(BlockingIOError, match="another process"):
        collect(tmp_path / "rounds.jsonl", Source())


def test_the_first_line_holds_the_settings(tmp_path: Path) -> None:
    collect(tmp_path / "rounds.jsonl", Source())
    with (tmp_path / "rounds.jsonl").open() as lines:
        assert json.loads(next(lines)) == {"settings": {"target": {"name": "tiny"}, "sizes": [1, 2]}, "format": 2}


def test_a_file_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    collect(path, Source())
    old = path.read_text().replace(', "format": 2', "")
    path.write_text(old)
    with pytest.raises(ValueError, match="kept by another version of dspark; delete the file"):
        collect(path, Source())
    assert path.read_text() == old


def test_halves_split_prompts_within_domains() -> None:
    prompts = [f"{domain}/{number}" for domain in ("math", "code", "chat") for number in range(7)]
    fit, check = halves(prompts, 0)
    assert fit | check == set(prompts)
    assert not fit & check
    for domain in ("math", "code", "chat"):
        assert sum(name.startswith(domain) for name in fit) in (3, 4)
    assert abs(len(fit) - len(check)) == 1
    assert halves(prompts[::-1], 0) == (fit, check)
    assert halves(prompts, 1) != (fit, check)
