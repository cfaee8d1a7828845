"""Collections of rounds: what a kill leaves is taken up, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.evaluation.collect import Collection, CollectProgress, collect_rounds, halves
from dspark.evaluation.rounds import RoundRecord
from dspark.files import exclusive

PROMPTS = [f"{domain}/{number}" for domain in ("math", "chat") for number in range(4)]
SETTINGS = {"target": {"name": "tiny"}, "sizes": (1, 2)}


class Killed(Exception):
    """What a kill looks like from inside."""


class Source:
    """Answers of three rounds with a draft and one without; dies before answer number ``dies_at``."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.calls: list[tuple[str, float]] = []
        self.dies_at = dies_at

    def __call__(self, prompt_id: str, sampling_temperature: float, random: Callable[[], float]) -> list[RoundRecord]:
        if len(self.calls) == self.dies_at:
            raise Killed
        self.calls.append((prompt_id, sampling_temperature))
        return [
            RoundRecord(
                prompt_id=prompt_id,
                drafted=drafted,
                verified=drafted,
                judged=drafted,
                accepted=0,
                committed=1,
                confidence_logits=(random(),) * drafted,
                sampling_temperature=sampling_temperature,
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
    def __call__(self, *arguments):
        time.sleep(0.02)
        return super().__call__(*arguments)

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

        def __call__(self, prompt_id: str, sampling_temperature: float, random: Callable[[], float]) -> Any:
            return super().__call__(prompt_id, sampling_temperature, random) if random() < 0.5 else []

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
        assert json.loads(next(lines)) == {"settings": {"target": {"name": "tiny"}, "sizes": [1, 2]}}


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
