"""A closed loop of requests: always as many as the concurrency says, each that finishes replaced at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from dspark.drafters.protocol import Drafter
from dspark.engine.core import EngineCore
from dspark.engine.request import Delta
from dspark.engine.request_stream import RequestStream
from dspark.engine.settings import EngineSettings
from dspark.engine.statistics import StepTotals
from dspark.models.target import Target
from dspark.scheduling import Policy, StepCost, StepRecord

__all__ = ["Answer", "ClosedLoop", "Turn"]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a loop did until so many more requests had finished.

    Attributes:
        seconds: all of it, with the prompts of the requests that came in.
        finished: requests.
        tokens: generated.
        round_tokens: those of rounds; the others came out of their prompts' own passes.
        steps: sums over the steps.
        user_tokens_per_second: median over requests of how fast each grew after its first step of the turn; None if
            none had two steps.
        first_token_seconds: median over requests, from submission to the first token; None if no first token came.
    """

    seconds: float
    finished: int
    tokens: int
    round_tokens: int
    steps: StepTotals
    user_tokens_per_second: float | None
    first_token_seconds: float | None


@dataclass(kw_only=True)
class Answer:
    """What a request was given so far."""

    token_ids: list[int]
    is_finished: bool = False

    def agrees(self, other: Answer) -> bool:
        """Whether both can be the same answer: one goes on where an unfinished one is."""
        shorter, longer = sorted((self, other), key=lambda answer: len(answer.token_ids))
        length = len(shorter.token_ids)
        if shorter.token_ids != longer.token_ids[:length]:
            return False
        return length == len(longer.token_ids) or not shorter.is_finished


@dataclass(kw_only=True)
class _Growth:
    """Tokens that a request gained after its first step of a turn, and when."""

    began_at: float
    at: float
    tokens: int = 0


class ClosedLoop:
    """An engine under one policy with ``concurrency`` requests of a stream in it at all times.

    `fill` brings it there, then each `turn` takes it on by a number of finished requests; between turns it stands
    still, and so does its clock, so that several loops can take turns. The answers of the first ``concurrency``
    requests are cut to lengths in even steps: requests then end one by one, as they do after a long time, and not in
    waves. Prompts are not reused, and answers are token ids without text.

    Args:
        cost: for policies that need it.
        kv_memory_bytes: as of ``EngineSettings``.
        on_step: is given the record of every step.
        clock: seconds.

    Raises:
        ValueError: as ``EngineCore`` does; ``concurrency`` is below 1.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        stream: RequestStream,
        *,
        policy: Policy,
        cost: StepCost | None,
        concurrency: int,
        kv_memory_bytes: int | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.answers: list[Answer] = []
        self._stream = stream
        self._concurrency = concurrency
        self._stopwatch = _Stopwatch(clock)
        self._on_step = on_step
        self._core = EngineCore(
            target,
            drafter,
            policy=policy,
            cost=cost,
            settings=EngineSettings(
                max_concurrency=concurrency,
                max_length=stream.max_length,
                kv_memory_bytes=kv_memory_bytes,
                max_waiting=concurrency,
                reuse_prefixes=False,
            ),
            on_step=self._take_in,
            clock=self._stopwatch,
        )
        self._num_running = self._num_finished = self._goal = 0
        self.begin_turn(0)

    def fill(self) -> float:
        """Submit the first requests and step until each has its first token; returns the seconds.

        Raises:
            ValueError: they do not fit into memory together.
        """
        with self._stopwatch.running():
            while not self.answers or not all(answer.token_ids for answer in self.answers[: self._concurrency]):
                self._step()
        self._goal = self._num_finished
        return self._stopwatch()

    def turn(self, requests: int) -> Turn:
        """A whole turn at once: `begin_turn`, `advance` to its end, `end_turn`."""
        self.begin_turn(requests)
        self.advance()
        return self.end_turn()

    def begin_turn(self, requests: int) -> None:
        """Set out for ``requests`` more finished ones than at the last turn's goal, and at least one step."""
        self._reset_turn()
        self._finished_before, self._turn_began = self._num_finished, self._stopwatch()
        self._goal += requests

    def advance(self, seconds: float = math.inf) -> bool:
        """Step for so long, a step at least; True once the turn has reached its goal.

        Raises:
            ValueError: memory does not hold ``concurrency`` requests.
        """
        end = self._stopwatch() + seconds
        with self._stopwatch.running():
            self._step()
            while self._num_finished < self._goal and self._stopwatch() < end:
                self._step()
        return self._num_finished >= self._goal

    def end_turn(self) -> Turn:
        """What came of it."""
        speeds = [growth.tokens / (growth.at - growth.began_at) for growth in self._growths.values() if growth.tokens]
        return Turn(
            seconds=self._stopwatch() - self._turn_began,
            finished=self._num_finished - self._finished_before,
            tokens=self._tokens,
            round_tokens=self._tokens - self._first_tokens,
            steps=self._steps,
            user_tokens_per_second=_median(speeds),
            first_token_seconds=_median(self._waits),
        )

    def close(self) -> None:
        """Leave what runs, and free its memory; only the answers stay."""
        del self._core

    def _reset_turn(self) -> None:
        self._steps = StepTotals()
        self._tokens = self._first_tokens = 0
        self._growths: dict[int, _Growth] = {}  # by the number of the request
        self._waits: list[float] = []  # for first tokens, in seconds

    def _step(self) -> None:
        while self._num_running < self._concurrency:
            self._submit()
        self._core.step()
        if self._core.num_waiting > 0:
            raise ValueError(
                f"{self._concurrency} requests of up to {self._stream.max_length} tokens do not fit into kv_memory "
                "together: give more, or less concurrency"
            )

    def _submit(self) -> None:
        number = len(self.answers)
        max_tokens = self._stream.max_tokens
        if number < self._concurrency:
            max_tokens = -(-max_tokens * (number + 1) // self._concurrency)
        self.answers.append(Answer(token_ids=[]))
        submitted_at = self._stopwatch()
        self._core.submit(
            self._stream.request(number, max_tokens=max_tokens),
            on_delta=lambda delta: self._grow(number, delta, submitted_at),
        )
        self._num_running += 1

    def _grow(self, number: int, delta: Delta, submitted_at: float) -> None:
        answer, now = self.answers[number], self._stopwatch()
        if not answer.token_ids:
            self._waits.append(now - submitted_at)
            self._first_tokens += len(delta.token_ids)
        answer.token_ids += delta.token_ids
        self._tokens += len(delta.token_ids)
        if number in self._growths:
            self._growths[number].at = now
            self._growths[number].tokens += len(delta.token_ids)
        else:
            self._growths[number] = _Growth(began_at=now, at=now)
        if delta.finish_reason is not None:
            answer.is_finished = True
            self._num_running -= 1
            self._num_finished += 1

    def _take_in(self, record: StepRecord) -> None:
        self._steps.add(record)
        if self._on_step is not None:
            self._on_step(record)


class _Stopwatch:
    """A clock that can stand still."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        """Seconds that it ran."""
        return self._before + (0.0 if self._since is None else self._clock() - self._since)

    @contextmanager
    def running(self) -> Iterator[None]:
        """It runs inside."""
        self._since = self._clock()
        try:
            yield
        finally:
            self._before += self._clock() - self._since
            self._since = None


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
