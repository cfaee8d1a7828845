"""Rounds for ``dspark calibrate``: which prompts, how they are answered, where the rounds are kept."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.cli.models import Models
    from dspark.cli.prompts import Prompt
    from dspark.evaluation.collect import Collection, CollectProgress, Task
    from dspark.evaluation.questions import Conversation
    from dspark.evaluation.rounds import RoundRecord

__all__ = ["RoundSource", "calibration_prompts", "collect", "note"]

SECONDS_BETWEEN_LINES = 15.0


@dataclass(frozen=True, kw_only=True)
class RoundSource:
    """Answers prompts with the models, every draft verified to its end, as the collector's `AnswerTasks` callable."""

    models: Models
    prompts: Mapping[str, Prompt]
    max_tokens: int
    seed: int
    concurrency: int

    def __call__(self, tasks: Iterator[Task], keep: Callable[[Task, Sequence[RoundRecord]], None]) -> None:
        from dspark.engine.answering import answer_conversations
        from dspark.scheduling import Fixed

        assert self.models.drafter is not None
        answer_conversations(
            (self._conversation(task, keep) for task in tasks),
            self.models.target,
            self.models.drafter,
            policy=Fixed(length=self.models.drafter.block_size),
            concurrency=self.concurrency,
            max_tokens=self.max_tokens,
        )

    def fits(self, prompt_id: str) -> bool:
        """Whether the target's context has room for an answer to the first turn."""
        from dspark.engine.answering import question_token_ids
        from dspark.evaluation.questions import DoesNotFit

        prompt = self.prompts[prompt_id]
        messages = [*_system_message(prompt), {"role": "user", "content": prompt.turns[0]}]
        try:
            question_token_ids(self.models.target, messages, max_tokens=self.max_tokens)
        except DoesNotFit:
            return False
        return True

    def _conversation(self, task: Task, keep: Callable[[Task, Sequence[RoundRecord]], None]) -> Conversation:
        from dspark.decoding.settings import SamplingSettings
        from dspark.evaluation.questions import DoesNotFit, Question

        prompt, random = self.prompts[task.prompt_id], task.uniforms(self.seed)
        messages = _system_message(prompt)
        rounds: list[RoundRecord] = []
        for turn in prompt.turns:
            messages.append({"role": "user", "content": turn})
            try:
                answer = yield Question(
                    prompt_id=task.prompt_id,
                    messages=tuple(messages),
                    sampling=SamplingSettings(temperature=task.sampling_temperature),
                    random=random,
                )
            except DoesNotFit:
                break  # the conversation has filled the context; what it gave so far is good
            rounds += answer.rounds
            messages.append({"role": "assistant", "content": answer.text})
        keep(task, rounds)


def _system_message(prompt: Prompt) -> list[dict[str, str]]:
    return [] if prompt.system is None else [{"role": "system", "content": prompt.system}]


def collect(
    models: Models,
    prompts: Mapping[str, Prompt],
    *,
    path: Path,
    sampling_temperatures: tuple[float, ...],
    rounds: int,
    seed: int,
    concurrency: int,
    settings: Mapping[str, Any],
    quiet: bool,
) -> Collection:
    """Collect rounds in the file, showing how far it is unless ``quiet``.

    Raises:
        ValueError: the file has rounds of other settings, or a line that cannot be read.
    """
    from dspark.evaluation.collect import collect_rounds

    source = RoundSource(
        models=models, prompts=prompts, max_tokens=settings["max_tokens"], seed=seed, concurrency=concurrency
    )
    fitting = [prompt_id for prompt_id in prompts if source.fits(prompt_id)]
    if len(fitting) < len(prompts):
        left_out = f"{len(prompts) - len(fitting)} of {len(prompts)} prompts"
        note(f"note: {left_out} leave no room for an answer in the target's context: left out")
    try:
        collection = collect_rounds(
            path,
            prompt_ids=fitting,
            sampling_temperatures=sampling_temperatures,
            rounds=rounds,
            answer=source,
            seed=seed,
            settings=settings,
            on_progress=None if quiet else _LineDisplay(),
        )
    except KeyboardInterrupt:
        note(f"the rounds so far are in {path}; the same command goes on from there")
        raise
    if collection.short:
        some = ", ".join(f"{sampling_temperature:g}" for sampling_temperature in collection.short)
        note(f"note: fewer than {rounds} rounds at sampling temperature {some}; more --prompts give more")
    return collection


def calibration_prompts(paths: Sequence[Path], forbid: Sequence[Path]) -> dict[str, Prompt]:
    """Prompts by id, which starts with their domain; without benchmarks, and without what evaluation asks."""
    from dspark.cli.prompts import read_prompts
    from dspark.evaluation.benchmarks import BENCHMARKS, BUILTIN, load_prompts
    from dspark.training.data.near_copy import NearCopyGuard

    for path in paths:
        if path.name.removesuffix(".jsonl").lower() in BENCHMARKS:
            raise ValueError(
                f"--prompts {path}: {path.stem} is a benchmark, and numbers on a benchmark mean nothing once a"
                " calibration has seen it; give prompts that are no test set"
            )
    forbidden = [turn for prompt in load_prompts(BUILTIN) for turn in prompt.turns]
    forbidden += [turn for path in forbid for prompt in read_prompts(path) for turn in prompt.turns]
    guard = NearCopyGuard(forbidden)
    if paths:
        read = [prompt for path in paths for prompt in read_prompts(path)]
    else:
        with as_file(files("dspark").joinpath("assets", "prompts", "calibration.jsonl")) as built_in:
            read = read_prompts(built_in)
    kept = [prompt for prompt in read if not any(map(guard.is_near_copy, prompt.turns))]
    if len(kept) < len(read):
        note(f"note: {len(read) - len(kept)} of {len(read)} prompts are (nearly) prompts of a test set: dropped")
    chosen = {_prompt_id(prompt): prompt for prompt in kept}
    if len(chosen) < 4:
        raise ValueError(f"--prompts: {len(chosen)} different prompts are left; calibration takes at least 4")
    return chosen


def _prompt_id(prompt: Prompt) -> str:
    content = json.dumps([prompt.system, prompt.turns])
    return f"{prompt.domain or 'other'}/{hashlib.sha256(content.encode()).hexdigest()[:12]}"


class _LineDisplay:
    """Prints how far the collection is, at most every ``SECONDS_BETWEEN_LINES``, and when it is done."""

    def __init__(self) -> None:
        self._printed_at = 0.0
        self._is_done = False

    def __call__(self, progress: CollectProgress) -> None:
        if self._is_done:
            return  # what else was being made only comes to its end
        self._is_done = all(count >= progress.wanted for count in progress.rounds.values())
        if self._is_done or time.monotonic() - self._printed_at >= SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            counts = ", ".join(
                f"{min(count, progress.wanted):,} at temperature {one:g}" for one, count in progress.rounds.items()
            )
            note(f"rounds of {progress.wanted:,}: {counts}")


def note(message: str) -> None:
    """Tell the user on stderr."""
    print(message, file=sys.stderr, flush=True)
