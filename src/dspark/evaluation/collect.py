"""Collecting rounds of held-out prompts in a file that a killed run loses nothing of."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.evaluation.rounds import RoundRecord
from dspark.files import exclusive

__all__ = ["CollectProgress", "Collection", "collect_rounds", "halves"]

Answer = Callable[[str, float, Callable[[], float]], Sequence[RoundRecord]]
"""``answer(prompt_id, sampling_temperature, random)``: all rounds of one answer, every draft verified to its end.

``random`` gives uniforms in [0, 1), the same ones in every run with the same seed.
"""

_LAST = "last"  # key of the round that completes an answer
_SETTINGS = "settings"  # key of the first line

# Answers of one prompt at most: they resemble each other, and an interval over prompts gains little from more.
_MOST_ANSWERS = 8


@dataclass(frozen=True, kw_only=True)
class CollectProgress:
    """How far a collection is: rounds with a draft, by sampling temperature, and how many are wanted of each."""

    rounds: Mapping[float, int]
    wanted: int


@dataclass(frozen=True, kw_only=True)
class Collection:
    """What a file holds now.

    Attributes:
        records: all rounds of answers that are complete.
        resumed: how many of them were there before this run.
        short: sampling temperatures for which the prompts did not give as many rounds as wanted.
    """

    records: tuple[RoundRecord, ...]
    resumed: int
    short: tuple[float, ...]


def collect_rounds(
    path: Path,
    *,
    prompt_ids: Sequence[str],
    sampling_temperatures: Sequence[float],
    rounds: int,
    answer: Answer,
    seed: int,
    settings: Mapping[str, Any],
    on_progress: Callable[[CollectProgress], None] | None = None,
) -> Collection:
    """Answer prompts until there are ``rounds`` rounds of each sampling temperature, or no prompt is left.

    Prompts come in an order drawn by ``seed``, each at every sampling temperature in turn, so that a run ended early
    has some of all. At temperature 0 a prompt has one answer; above, another pass over the prompts gives other ones.

    The file has one line of settings, then a :class:`RoundRecord` a line, all of an answer written at once (an answer
    without a round is a line of its own). A run that
    goes on takes the complete answers from it and cuts off what a kill left of another.

    Args:
        path: JSONL file; made if it is not there.
        answer: decodes one answer.
        settings: what the rounds depend on (models, limits); a file with other ones is refused.

    Raises:
        ValueError: the file has other settings, or a line that cannot be read.
        BlockingIOError: another process collects in the same directory.
        OSError: it cannot be written.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1")
    if not prompt_ids or len(set(prompt_ids)) != len(prompt_ids):
        raise ValueError("prompt_ids must be different, and at least one")
    with exclusive(path.parent):
        records, answers = _resume(path, settings)
        wanted_ids = set(prompt_ids)
        records = [record for record in records if record.prompt_id in wanted_ids]
        resumed = len(records)
        counts = Counter(record.sampling_temperature for record in records if record.drafted)
        order = _shuffled(prompt_ids, seed)

        def show() -> None:
            if on_progress is not None:
                on_progress(CollectProgress(rounds={one: counts[one] for one in sampling_temperatures}, wanted=rounds))

        show()
        with path.open("a", encoding="utf-8") as file:
            for prompt_id, sampling_temperature, number in _tasks(order, sampling_temperatures, counts, rounds):
                if number < answers[prompt_id, sampling_temperature]:
                    continue
                uniforms = random.Random(f"{seed} {prompt_id} {sampling_temperature!r} {number}").random
                told = list(answer(prompt_id, sampling_temperature, uniforms))
                last = len(told) - 1
                lines = [record.to_line(**({_LAST: True} if row == last else {})) for row, record in enumerate(told)]
                if not told:  # counted too: which answer comes next, and what is drawn for it, depends on the number
                    nothing = {_LAST: True, "prompt_id": prompt_id, "sampling_temperature": sampling_temperature}
                    lines = [json.dumps(nothing, ensure_ascii=False) + "\n"]
                file.write("".join(lines))
                file.flush()
                records += told
                counts[sampling_temperature] += sum(record.drafted > 0 for record in told)
                show()
        return Collection(
            records=tuple(record for record in records if record.sampling_temperature in sampling_temperatures),
            resumed=resumed,
            short=tuple(one for one in sampling_temperatures if counts[one] < rounds),
        )


def halves(prompt_ids: Sequence[str], seed: int) -> tuple[frozenset[str], frozenset[str]]:
    """Two halves of the prompts, each with half of every domain (what is before the ``/`` of an id).

    An id's half depends on its domain's other ids and the seed alone, not on the order they are given in.
    """
    by_domain: dict[str, list[str]] = defaultdict(list)
    for prompt_id in set(prompt_ids):
        by_domain[prompt_id.partition("/")[0]].append(prompt_id)
    first, second = set[str](), set[str]()
    # Domains start at alternate halves, so that odd counts do not add up on one side.
    for number, domain in enumerate(sorted(by_domain)):
        order = _shuffled(by_domain[domain], seed)
        first.update(order[number % 2 :: 2])
        second.update(order[1 - number % 2 :: 2])
    return frozenset(first), frozenset(second)


def _tasks(
    order: Sequence[str], sampling_temperatures: Sequence[float], counts: Counter[float], rounds: int
) -> Iterator[tuple[str, float, int]]:
    """Answers to make: prompt, sampling temperature, and how many answers of the two came before."""
    for number in range(_MOST_ANSWERS):
        for prompt_id in order:
            for sampling_temperature in sampling_temperatures:
                if counts[sampling_temperature] < rounds and (number == 0 or sampling_temperature > 0.0):
                    yield prompt_id, sampling_temperature, number


def _resume(path: Path, settings: Mapping[str, Any]) -> tuple[list[RoundRecord], Counter[tuple[str, float]]]:
    """Rounds of the complete answers in the file, and how many answers there are of each prompt and temperature.

    Leaves the file ending behind the last of them, with its line of settings in any case.
    """
    records: list[RoundRecord] = []
    answers: Counter[tuple[str, float]] = Counter()
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # what a kill left of a line
    if not lines:
        path.write_text(json.dumps({_SETTINGS: dict(settings)}, ensure_ascii=False) + "\n", encoding="utf-8")
        return records, answers
    complete = 1
    pending: list[RoundRecord] = []
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
            if number == 1:
                _check_settings(content, settings)
                continue
            if not isinstance(content, dict) or "drafted" in content or _LAST not in content:
                pending.append(RoundRecord.from_json(content))
            answered = content["prompt_id"], float(content["sampling_temperature"])
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if content.get(_LAST):
            records += pending
            answers[answered] += 1
            pending, complete = [], number
    with path.open("r+b") as file:
        file.truncate(sum(len(line) for line in lines[:complete]))
    return records, answers


def _check_settings(content: object, settings: Mapping[str, Any]) -> None:
    found = content.get(_SETTINGS) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ValueError("no settings in the first line: it is no file of collected rounds; name another file")
    # As JSON, which knows no tuples.
    asked = json.loads(json.dumps(dict(settings)))
    different = [
        f"{name} {found.get(name)!r} (now {asked.get(name)!r})"
        for name in sorted(found.keys() | asked.keys())
        if found.get(name) != asked.get(name)
    ]
    if different:
        raise ValueError(
            f"these rounds were collected with {', '.join(different)}; delete the file, name another one, or give the"
            " same again"
        )


def _shuffled(prompt_ids: Sequence[str], seed: int) -> list[str]:
    return sorted(prompt_ids, key=lambda prompt_id: hashlib.sha256(f"{seed} {prompt_id}".encode()).digest())
