"""The engine without threads: requests come in, each step moves those that run, and what they give goes out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from dspark.drafters.protocol import Drafter
from dspark.engine.admission import check_fits
from dspark.engine.choice import Choice
from dspark.engine.queue import FairQueue
from dspark.engine.request import Delta, Request, RequestResult
from dspark.engine.request_handle import RequestHandle
from dspark.engine.settings import EngineSettings
from dspark.engine.slots import Slots
from dspark.engine.statistics import EngineStatistics, StepTotals
from dspark.engine.step import Row, Stepper
from dspark.heap import trim_heap
from dspark.models.target import Target
from dspark.scheduling import Off, Policy, StepCost, StepRecord

__all__ = ["EngineCore"]

_TRIM_EVERY_STEPS = 512


class EngineCore:
    """Continuous batching: choices join and leave between steps, prompts are computed in pieces beside decoding.

    Not thread-safe; `dspark.engine.engine.Engine` runs it in a thread of its own.

    Args:
        drafter: None for a target alone.
        policy: how much is drafted and verified. With `Off` the drafter is left out altogether.
        cost: what steps cost here (``dspark profile``), for the policies that need it.
        tokenizer: for texts; without one deltas carry token ids only.
        on_step: is given the record of every step.
        clock: seconds.

    Raises:
        ValueError: the policy needs confidences or costs that are not there, or memory and lengths do not fit.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        policy: Policy,
        cost: StepCost | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        settings: EngineSettings | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if isinstance(policy, Off):
            drafter = None
        elif drafter is None:
            raise ValueError(f"policy {policy.name} needs a drafter: give one, or choose off")
        elif policy.needs_confidences and not drafter.has_confidence_head:
            raise ValueError(
                f"policy {policy.name} needs a drafter with a confidence head, and this one has none: choose off or "
                "fixed:K"
            )
        if policy.needs_cost and cost is None:
            raise ValueError(f"policy {policy.name} needs to know what steps cost here: give a cost (`dspark profile`)")
        self.settings = settings or EngineSettings()
        self._target = target
        self._drafter = drafter
        self._tokenizer = tokenizer
        self._watchers = [] if on_step is None else [on_step]
        self._clock = clock
        self._slots = Slots(
            target,
            drafter,
            num_slots=self.settings.max_concurrency,
            max_length=self.settings.max_length,
            memory_bytes=self.settings.kv_memory_bytes,
            reuse_prefixes=self.settings.reuse_prefixes,
        )
        self._stepper = Stepper(
            target,
            drafter,
            self._slots.target_cache,
            self._slots.drafter_cache,
            policy=policy,
            cost=cost,
            clock=clock,
        )
        self._queue: FairQueue[Choice] = FairQueue(self.settings.max_waiting)
        self._handles: dict[int, RequestHandle] = {}  # unfinished, by request id
        self._handle_of: dict[int, RequestHandle] = {}  # by choice id
        self._next_request_id = self._next_choice_id = 0
        self._is_delivering = False
        self._to_cancel: list[RequestHandle] = []
        self._finished: Counter[str] = Counter()
        self._totals = StepTotals()

    @property
    def policy(self) -> Policy:
        """How much is drafted and verified."""
        return self._stepper.policy

    @property
    def cost(self) -> StepCost | None:
        """What steps cost, as corrected by those that were measured."""
        return self._stepper.cost

    @property
    def max_length(self) -> int:
        """Prompt and generated tokens of a choice at most."""
        return self._slots.max_length

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._handles)

    @property
    def num_waiting(self) -> int:
        """Choices that wait for a slot."""
        return len(self._queue)

    def submit(
        self,
        request: Request,
        *,
        on_delta: Callable[[Delta], None] | None = None,
        on_result: Callable[[RequestResult], None] | None = None,
        on_error: Callable[[Exception], None] | None = None,
        is_accepted: bool = False,
    ) -> RequestHandle:
        """Queue a request.

        Args:
            on_error: is given an error of the request's own, which ends it; others go on.
            is_accepted: the caller has told its user that it may wait: ``max_waiting`` does not refuse it any more.

        Raises:
            ValueError: naming the field, if it can never run here.
            QueueFull: too many wait.
        """
        self.check(request)
        handle = RequestHandle(
            request_id=self._next_request_id,
            request=request,
            first_choice_id=self._next_choice_id,
            choices=[],
            num_open=request.n,
            submitted_at=self._clock(),
            on_delta=on_delta,
            on_result=on_result,
            on_error=on_error,
        )
        handle.choices.append(self._choice(handle, 0))
        self._queue.push(handle.choices[0], request.user, is_accepted=is_accepted)
        self._next_request_id += 1
        self._next_choice_id += request.n
        self._handles[handle.request_id] = handle
        self._handle_of[handle.first_choice_id] = handle
        return handle

    def watch(self, on_step: Callable[[StepRecord], None]) -> None:
        """Give ``on_step`` the record of every step from now on, too."""
        self._watchers.append(on_step)

    def check(self, request: Request) -> None:
        """Raise ValueError, naming the field, unless the request can run here."""
        check_fits(
            request,
            vocab_size=self._target.config.vocab_size,
            max_length=self.max_length,
            max_choices=self.settings.max_choices,
            drafter=self._drafter,
            has_tokenizer=self._tokenizer is not None,
        )

    def cancel(self, handle: RequestHandle) -> None:
        """End a request where it is and free its memory at once; nothing happens if it is finished or abandoned.

        While a step's deltas go out, requests end behind them: what was computed is delivered.
        """
        if handle.request_id not in self._handles:
            return
        if self._is_delivering:
            self._to_cancel.append(handle)
            return
        self._fork(handle)
        for choice in handle.choices:
            if choice.finish_reason is not None:
                continue
            try:
                delta = choice.cancel()
            except Exception as error:  # its text cannot be finished
                self._fail(handle, error)
                return
            self._deliver(handle, delta)
            self._end(handle, choice)

    def step(self) -> bool:
        """Move every running choice by one round; False if there was nothing to do."""
        self._admit()
        decoding, chunks = self._rows()
        if not decoding and not chunks:
            return False
        now = self._clock()
        for row in (*decoding, *chunks):
            handle = self._handle_of[row.choice.choice_id]
            handle.started_at = now if handle.started_at is None else handle.started_at
        record, deltas = self._stepper.run(decoding, chunks)
        self._is_delivering = True
        for row, delta in zip((*decoding, *chunks), deltas, strict=True):
            self._take_in(row, delta)
        self._is_delivering = False
        self._totals.add(record)
        if self._totals.steps % _TRIM_EVERY_STEPS == 0:
            trim_heap()
        while self._to_cancel:
            self.cancel(self._to_cancel.pop())
        for watcher in self._watchers:
            watcher(record)
        return True

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.step():
            pass

    def abandon(self) -> list[RequestHandle]:
        """Drop all that is running or waits, without results, as after an error; returns what was dropped."""
        self._is_delivering = False
        self._to_cancel.clear()
        dropped = list(self._handles.values())
        for handle in dropped:
            for choice in handle.choices:
                self._drop(choice)
        self._handles.clear()
        self._handle_of.clear()
        return dropped

    def statistics(self) -> EngineStatistics:
        """Counts since the start, and what is there now."""
        return EngineStatistics(
            waiting=len(self._queue),
            running=len(self._slots.running),
            finished=dict(self._finished),
            memory=self._slots.memory.statistics(),
            steps=self._totals.copy(),
            cost=self.cost,
            acceptance_odds_ratio=self._stepper.acceptance_odds_ratio,
        )

    def _choice(self, handle: RequestHandle, index: int) -> Choice:
        request = handle.request
        return Choice(
            request,
            choice_id=handle.first_choice_id + index,
            index=index,
            max_tokens=min(request.max_tokens, self.max_length - len(request.prompt_ids)),
            drafter=self._drafter,
            tokenizer=self._tokenizer,
        )

    def _fork(self, handle: RequestHandle) -> list[Choice]:
        """Make the choices that are not there yet."""
        made = [self._choice(handle, index) for index in range(len(handle.choices), handle.request.n)]
        handle.choices += made
        self._handle_of.update((choice.choice_id, handle) for choice in made)
        return made

    # ---- who runs ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Bring waiting choices into memory, in their order, as long as there is room."""
        while self._queue:
            choice = self._queue.peek()
            reused = self._slots.enter(choice)
            if reused is None:
                assert self._slots.running, "a request that passed the check does not fit into empty memory"
                return
            self._queue.pop()
            handle = self._handle_of[choice.choice_id]
            if choice.index == 0 and handle.reused_tokens is None:
                handle.reused_tokens = reused

    def _rows(self) -> tuple[list[Row], list[Row]]:
        """What goes through the target in this step: anchors of decoding choices, and pieces of prompts."""
        decoding: list[Row] = []
        filling: list[Choice] = []
        for choice in list(self._slots.running):
            if choice.slot is None:
                continue  # preempted a moment ago
            if not self._make_room(choice):
                continue
            if self._slots.computed(choice) == len(choice.tokens) - 1:
                decoding.append(_row(choice, self._slots.computed(choice), 1))
            else:
                filling.append(choice)
        decoding = [row for row in decoding if row.choice.slot is not None]
        filling = [choice for choice in filling if choice.slot is not None]
        decoding.sort(key=lambda row: row.slot)
        return decoding, self._chunks(filling)

    def _make_room(self, choice: Choice) -> bool:
        """Room for the choice's next round, if need be at the cost of those that came last; False if of itself."""
        while not self._slots.extend(choice):
            last = self._slots.running[-1]
            self._preempt(last)
            if last is choice:
                return False
        return True

    def _preempt(self, choice: Choice) -> None:
        """Take a choice's memory; it goes on, with the same tokens, as soon as there is room again."""
        self._slots.leave(choice)
        choice.preemptions += 1
        self._queue.push_front(choice)
        self._totals.preemptions += 1

    def _chunks(self, filling: list[Choice]) -> list[Row]:
        """Share out the step's prompt tokens: an equal part each, what is left over to those that came first."""
        missing = [len(choice.tokens) - self._slots.computed(choice) for choice in filling]
        given = [0] * len(filling)
        left = self.settings.max_prefill_tokens
        open_places = list(range(len(filling)))
        while left > 0 and open_places:
            part = max(left // len(open_places), 1)
            for place in open_places:
                more = min(part, missing[place] - given[place], left)
                given[place] += more
                left -= more
            open_places = [place for place in open_places if given[place] < missing[place]]
        return [
            _row(choice, self._slots.computed(choice), length)
            for choice, length in zip(filling, given, strict=True)
            if length > 0
        ]

    # ---- what comes out ----------------------------------------------------------------------------------------------

    def _take_in(self, row: Row, delta: Delta | None) -> None:
        """What a step gave a choice goes out; a finished choice leaves memory."""
        choice = row.choice
        handle = self._handle_of.get(choice.choice_id)
        if handle is None:
            return  # an error of another of the request's choices has ended it
        if choice.error is not None:
            self._fail(handle, choice.error)
            return
        self._slots.publish(choice)
        if delta is not None:
            if handle.first_token_at is None:
                handle.first_token_at = self._clock()
            self._deliver(handle, delta)
        if not handle.is_forked and self._slots.computed(choice) >= choice.num_prompt_tokens - 1:
            for sibling in self._fork(handle):
                self._queue.push_front(sibling)
        if choice.finish_reason is not None:
            self._end(handle, choice)

    def _deliver(self, handle: RequestHandle, delta: Delta) -> None:
        if handle.on_delta is not None:
            handle.on_delta(delta)

    def _drop(self, choice: Choice) -> None:
        """Forget a choice, wherever it is."""
        if choice.slot is not None:
            self._slots.leave(choice)
        else:
            self._queue.remove(choice)

    def _fail(self, handle: RequestHandle, error: Exception) -> None:
        """An error of the request's own ends it."""
        handle.error = error
        for choice in handle.choices:
            self._drop(choice)
        self._forget(handle)
        self._finished["error"] += handle.request.n
        if handle.on_error is not None:
            handle.on_error(error)

    def _forget(self, handle: RequestHandle) -> None:
        del self._handles[handle.request_id]
        for choice in handle.choices:
            del self._handle_of[choice.choice_id]

    def _end(self, handle: RequestHandle, choice: Choice) -> None:
        """A choice is finished; with the last one of a request the result goes out."""
        self._drop(choice)
        handle.num_open -= 1
        if handle.num_open > 0:
            return
        now, started_at, first_token_at = self._clock(), handle.started_at, handle.first_token_at
        prompt_logprobs = handle.choices[0].prompt_logprobs
        handle.result = RequestResult(
            request_id=handle.request_id,
            completions=tuple(choice.completion() for choice in handle.choices),
            prompt_tokens=len(handle.request.prompt_ids),
            reused_tokens=handle.reused_tokens or 0,
            queue_seconds=(now if started_at is None else started_at) - handle.submitted_at,
            first_token_seconds=None if first_token_at is None else first_token_at - handle.submitted_at,
            seconds=now - handle.submitted_at,
            preemptions=sum(choice.preemptions for choice in handle.choices),
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
        )
        self._forget(handle)
        for choice in handle.choices:
            self._finished[str(choice.finish_reason)] += 1
        if handle.on_result is not None:
            handle.on_result(handle.result)


def _row(choice: Choice, start: int, length: int) -> Row:
    assert choice.slot is not None, "the choice is not in memory"
    return Row(choice=choice, slot=choice.slot, start=start, length=length)
