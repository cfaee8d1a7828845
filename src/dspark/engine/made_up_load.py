"""An engine under a load that is made up: so many requests, this much context, told what to draft and verify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dspark.drafters.protocol import Drafter
from dspark.engine.core import EngineCore
from dspark.engine.request import Request
from dspark.engine.request_handle import RequestHandle
from dspark.engine.settings import EngineSettings
from dspark.models.target import Target
from dspark.scheduling import Drafts, PastSurvivals, StepBatch, StepCost, StepPlan, StepRecord, StepSeconds
from dspark.scheduling.admission import verify_lengths
from dspark.scheduling.batch import IntArray

__all__ = ["MadeUpLoad", "TimedStep"]


@dataclass(kw_only=True)
class _Dictated:
    """A policy that does as it was told before the step, whatever the confidences."""

    draft_length: int = 0
    verified: int = 0
    name: str = field(default="dictated", init=False)
    needs_confidences: bool = field(default=False, init=False)
    needs_cost: bool = field(default=False, init=False)

    def plan(self, batch: StepBatch, past: PastSurvivals | None, cost: StepCost | None) -> StepPlan:
        """Drafts ``draft_length`` tokens of every request."""
        return StepPlan(batch=batch, draft_lengths_R=np.minimum(batch.draftable_R, self.draft_length), why="always")

    def verify_lengths(self, plan: StepPlan, drafts: Drafts, cost: StepCost | None) -> IntArray:
        """``verified`` tokens of all requests together, by position, then row."""
        alike_RG = np.ones((drafts.lengths_R.size, int(drafts.lengths_R.max(initial=0))))
        return verify_lengths(alike_RG, drafts.lengths_R, self.verified)


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """What a round held, and how long it took."""

    context_tokens: int
    seconds: StepSeconds


class MadeUpLoad:
    """Greedy requests of random tokens in an engine that is stepped one round at a time.

    Args:
        max_requests: that ever decode together.
        max_context: tokens of a prompt at most.
        room: tokens that a request may grow by before it is replaced.
        max_chunk: prompt tokens of a step at most.
        kv_memory_bytes: as of ``EngineSettings``.
        clock: seconds.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        max_requests: int,
        max_context: int,
        room: int,
        max_chunk: int,
        kv_memory_bytes: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._policy = _Dictated()
        self._records: list[StepRecord] = []
        self._core = EngineCore(
            target,
            drafter,
            policy=self._policy,
            settings=EngineSettings(
                max_concurrency=max_requests + 1,  # and a prompt beside them
                max_length=max_context + room,
                kv_memory_bytes=kv_memory_bytes,
                max_prefill_tokens=max_chunk,
                reuse_prefixes=False,
            ),
            on_step=self._records.append,
            clock=clock,
        )
        self._running: list[RequestHandle] = []
        self._wanted = (0, 0)
        self._vocab_size = target.config.vocab_size
        self._random = np.random.default_rng(0)

    def fill(self, requests: int, context: int) -> None:
        """Have ``requests`` decode. Those that do stay as they are; new ones begin with ``context`` tokens.

        Raises:
            ValueError: memory ends before.
        """
        self._wanted = (requests, context)
        num_decoding = -1
        while num_decoding != requests:
            self._running = [handle for handle in self._running if not handle.is_finished]
            for handle in self._running[requests:]:
                self._core.cancel(handle)
            self._running = self._running[:requests]
            while len(self._running) < requests:
                self._running.append(self._submit(context, max_tokens=self._core.max_length))
            batch = self._step().plan.batch
            num_decoding = batch.num_requests
            some_wait = num_decoding < requests and batch.prefill_tokens == 0
            if some_wait or any(choice.preemptions for handle in self._running for choice in handle.choices):
                raise ValueError(
                    f"{requests} requests do not fit into memory together: give more (kv_memory_bytes), or profile for"
                    " fewer (max_concurrency)"
                )

    def clear(self) -> None:
        """End all requests."""
        for handle in self._running:
            self._core.cancel(handle)
        self._running = []

    def step(self, *, draft_length: int, verified: int) -> TimedStep:
        """One round of the requests that were asked for, which stand in for those that came to their end.

        Args:
            draft_length: tokens to draft for each.
            verified: draft tokens of all together to verify.
        """
        record = self._step(draft_length, verified)
        if record.plan.batch.num_requests != self._wanted[0] or record.verify_lengths_R.sum() != verified:
            self.clear()  # some came to their end
            self.fill(*self._wanted)
            record = self._step(draft_length, verified)
        assert record.verify_lengths_R.sum() == verified, "requests have no room for the draft"
        return TimedStep(context_tokens=record.plan.batch.context_tokens, seconds=_seconds(record))

    def seconds_of_prompt(self, tokens: int) -> float:
        """What a prompt of so many tokens adds to a round without drafts, in seconds."""
        alone = self.step(draft_length=0, verified=0)
        self._submit(tokens, max_tokens=1)
        beside = self._step()
        assert beside.plan.batch.prefill_tokens == tokens, "the prompt did not go through in one step"
        return _seconds(beside).verify - alone.seconds.verify

    def _submit(self, context: int, *, max_tokens: int) -> RequestHandle:
        prompt = self._random.integers(0, self._vocab_size, context)
        return self._core.submit(Request(prompt_ids=tuple(prompt.tolist()), max_tokens=max_tokens))

    def _step(self, draft_length: int = 0, verified: int = 0) -> StepRecord:
        self._policy.draft_length, self._policy.verified = draft_length, verified
        self._core.step()
        return self._records.pop()


def _seconds(record: StepRecord) -> StepSeconds:
    assert record.measured is not None, "the engine times its steps"
    return record.measured
