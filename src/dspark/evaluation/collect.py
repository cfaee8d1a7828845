"""Collecting rounds of held-out prompts in a file that outlasts a kill."""

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

__all__ = ["AnswerTasks", "CollectProgress", "Collection", "Task", "collect_rounds", "halves"]

_ANSWER = "answer"  # key of the round that completes an answer: which of its prompt's answers it is, from 0
_SETTINGS = "settings"  # key of the first line
_FORMAT = 2  # of the file

# Answers of one prompt at most: they resemble each other, and an interval over prompts gains little from more.
_MOST_ANSWERS = 8


@dataclass(frozen=True, kw_only=True)
class Task:
    """An answer that is wanted.

    Attributes:
        number: how many answers of the prompt at this sampling temperature come before it.
    """

    prompt_id: str
    sampling_temperature: float
    number: int

    def uniforms(self, seed: int) -> Callable[[], float]:
        """What to draw it with: numbers in [0, 1), the same ones for a seed each time."""
        return random.Random(f"{seed} {self.prompt_id} {self.sampling_temperature!r} {self.number}").random


AnswerTasks = Callable[[Iterator[Task], Callable[[Task, Sequence[RoundRecord]], None]], None]
"""``answer(tasks, keep)``: answers the tasks, several at a time if it likes, and says ``keep(task, rounds)`` of each as
soon as it is answered: all its rounds, every draft verified to its end. A task is pulled when there is room for it."""


@dataclass(frozen=True, kw_only=True)
class CollectProgress:
    """How far a collection is: rounds with a draft, by sampling temperature, and how many are wanted of each."""

    rounds: Mapping[float, int]
    wanted: int


@dataclass(frozen=True, kw_only=True)
class Collection:
    """What was collected.

    Attributes:
        records: all rounds of its answers, in the answers' order.
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
    answer: AnswerTasks,
    seed: int,
    settings: Mapping[str, Any],
    on_progress: Callable[[CollectProgress], None] | None = None,
) -> Collection:
    """Answer prompts until there are ``rounds`` rounds of each sampling temperature, or no prompt is left.

    Prompts come in an order drawn by ``seed``, each at every sampling temperature in turn, so that a run ended early
    has some of all. At temperature 0 a prompt has one answer; above, another pass over the prompts gives other ones.
    What is collected depends neither on how many are answered at a time nor on where a run was interrupted: it is the
    first answers of that order that have enough rounds.

    The file has one line of settings, then a :class:`RoundRecord` a line, all of an answer written at once (an answer
    without a round is a line of its own). A run that goes on takes the complete answers from it and cuts off what a
    kill left of another; it loses those that were being made.

    Args:
        path: JSONL file; made if it is not there.
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
        wanted_ids = set(prompt_ids)
        answers = {task: told for task, told in _resume(path, settings).items() if task.prompt_id in wanted_ids}
        known_before = set(answers)
        progress = _counts(answers)
        order = _shuffled(prompt_ids, seed)

        def show() -> None:
            if on_progress is not None:
                counts = {one: progress[one] for one in sampling_temperatures}
                on_progress(CollectProgress(rounds=counts, wanted=rounds))

        show()
        with path.open("a", encoding="utf-8") as file:

            def keep(task: Task, told: Sequence[RoundRecord]) -> None:
                file.write(_lines(task, told))
                file.flush()
                answers[task] = tuple(told)
                progress.update(_counts({task: told}))
                show()

            tasks = _needed(order, sampling_temperatures, rounds, answers)
            answer((task for task in tasks if task not in answers), keep)
        chosen = {task: answers[task] for task in _needed(order, sampling_temperatures, rounds, answers)}
        counts = _counts(chosen)
        return Collection(
            records=tuple(record for told in chosen.values() for record in told),
            resumed=sum(len(told) for task, told in chosen.items() if task in known_before),
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


def _needed(
    order: Sequence[str],
    sampling_temperatures: Sequence[float],
    rounds: int,
    answers: Mapping[Task, Sequence[RoundRecord]],
) -> Iterator[Task]:
    """Answers in their order, as long as those before that are known by then do not have enough rounds."""
    counts = Counter[float]()
    unknown: list[Task] = []
    for number in range(_MOST_ANSWERS):
        for prompt_id in order:
            for sampling_temperature in sampling_temperatures:
                counts.update(_counts({task: answers[task] for task in unknown if task in answers}))
                unknown = [task for task in unknown if task not in answers]
                if counts[sampling_temperature] < rounds and (number == 0 or sampling_temperature > 0.0):
                    task = Task(prompt_id=prompt_id, sampling_temperature=sampling_temperature, number=number)
                    unknown.append(task)
                    yield task


def _counts(answers: Mapping[Task, Sequence[RoundRecord]]) -> Counter[float]:
    """Rounds with a draft, by sampling temperature."""
    counts = Counter[float]()
    for task, told in answers.items():
        counts[task.sampling_temperature] += sum(record.drafted > 0 for record in told)
    return counts


def _lines(task: Task, told: Sequence[RoundRecord]) -> str:
    """What the file says of an answer. One without a round is there too, or it would be asked for again."""
    completes = {_ANSWER: task.number}
    if not told:
        nothing = {"prompt_id": task.prompt_id, "sampling_temperature": task.sampling_temperature}
        return json.dumps(nothing | completes, ensure_ascii=False) + "\n"
    return "".join(record.to_line() for record in told[:-1]) + told[-1].to_line(**completes)


def _resume(path: Path, settings: Mapping[str, Any]) -> dict[Task, tuple[RoundRecord, ...]]:
    """Rounds of the complete answers in the file.

    Leaves the file ending behind the last of them, with its line of settings in any case.
    """
    answers: dict[Task, tuple[RoundRecord, ...]] = {}
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # what a kill left of a line
    if not lines:
        first = {_SETTINGS: dict(settings), "format": _FORMAT}
        path.write_text(json.dumps(first, ensure_ascii=False) + "\n", encoding="utf-8")
        return answers
    complete = 1
    pending: list[RoundRecord] = []
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
            if number == 1:
                _check_settings(content, settings)
                continue
            if not isinstance(content, dict) or "drafted" in content or _ANSWER not in content:
                pending.append(RoundRecord.from_json(content))
            if _ANSWER in content:
                task = Task(
                    prompt_id=content["prompt_id"],
                    sampling_temperature=float(content["sampling_temperature"]),
                    number=int(content[_ANSWER]),
                )
                answers[task] = tuple(pending)
                pending, complete = [], number
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    with path.open("r+b") as file:
        file.truncate(sum(len(line) for line in lines[:complete]))
    return answers


def _check_settings(content: object, settings: Mapping[str, Any]) -> None:
    found = content.get(_SETTINGS) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ValueError("no settings in the first line: it is no file of collected rounds; name another file")
    if isinstance(content, dict) and content.get("format") != _FORMAT:
        raise ValueError("these rounds were kept by another version of dspark; delete the file, or name another one")
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
