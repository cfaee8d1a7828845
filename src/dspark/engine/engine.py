"""The engine as users call it: requests from any thread, answers as they grow, one thread that computes."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

from dspark.decoding import SamplingSettings
from dspark.drafters.protocol import Drafter
from dspark.engine.core import EngineCore, EngineSettings, RequestHandle
from dspark.engine.grammar import Grammar, GrammarCompiler
from dspark.engine.queue import QueueFull
from dspark.engine.request import Delta, Request, RequestResult, token_ids
from dspark.engine.statistics import EngineStatistics
from dspark.models.chat import chat_token_ids, text_token_ids
from dspark.models.loading import LoadedTarget
from dspark.scheduling import Policy, StepCost, StepRecord, parse_policy

__all__ = ["Engine", "EngineError", "Generation"]

_ERRORS_IN_A_ROW = 3
_WAIT_SECONDS = 0.01


class EngineError(RuntimeError):
    """A request was lost to an error, of its own or inside the engine, or the engine has ended: see ``__cause__``."""


class Generation:
    """A submitted request: its deltas as they come, its result, and a way to end it. Safe to use from any thread."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self._engine = engine
        self._handle: RequestHandle | None = None
        self._changed = threading.Condition()
        self._deltas: list[Delta] = []
        self._result: RequestResult | None = None
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []

    def deltas(self, timeout: float | None = None) -> Iterator[Delta]:
        """What each step adds, from the first on, until every choice has ended.

        Args:
            timeout: seconds to wait for a delta.

        Raises:
            EngineError: the request was lost.
            TimeoutError: no delta came in time.
        """
        seen = 0
        while True:
            with self._changed:
                if not self._wait_for(partial(self._has_more_than, seen), timeout):
                    raise TimeoutError(f"no delta in {timeout} seconds")
                fresh = self._deltas[seen:]
            yield from fresh
            seen += len(fresh)
            if not fresh:
                self._raise_error()
                return

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        """The same in an event loop, which is not held up."""
        loop, changed, seen = asyncio.get_running_loop(), asyncio.Event(), 0

        def listener() -> None:
            with suppress(RuntimeError):  # the loop was closed in the middle: nobody listens any more
                loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._listeners.append(listener)
        try:
            while True:
                changed.clear()
                with self._changed:
                    fresh, is_over = self._deltas[seen:], self._is_over
                for delta in fresh:
                    yield delta
                seen += len(fresh)
                if not fresh:
                    if is_over:
                        self._raise_error()
                        return
                    await changed.wait()
        finally:
            with self._changed:
                self._listeners.remove(listener)

    def result(self, timeout: float | None = None) -> RequestResult:
        """Wait until every choice has ended.

        Args:
            timeout: seconds.

        Raises:
            EngineError: the request was lost.
            TimeoutError: it has not ended in time; it goes on.
        """
        with self._changed:
            if not self._wait_for(lambda: self._is_over, timeout):
                raise TimeoutError(f"the request has not ended in {timeout} seconds")
        self._raise_error()
        assert self._result is not None, "it is over"
        return self._result

    def cancel(self) -> None:
        """End it where it is: the result then holds what there was, with finish reason ``cancelled``."""
        self._engine._cancel(self)

    def _wait_for(self, is_there: Callable[[], bool], timeout: float | None) -> bool:
        if not is_there() and threading.current_thread() is self._engine._thread:
            raise RuntimeError("the engine's own thread cannot wait for what it has to compute: ask from another one")
        return self._changed.wait_for(is_there, timeout)

    def _has_more_than(self, seen: int) -> bool:
        return self._is_over or len(self._deltas) > seen

    @property
    def _is_over(self) -> bool:
        return self._result is not None or self._error is not None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise EngineError(f"the request was lost: {self._error}") from self._error

    # Called by the engine's thread.

    def _add(self, delta: Delta) -> None:
        with self._changed:
            self._deltas.append(delta)
            self._notify()

    def _end(self, outcome: RequestResult | BaseException) -> None:
        with self._changed:
            if isinstance(outcome, RequestResult):
                self._result = outcome
            else:
                self._error = outcome
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()


class Engine:
    """Serves many requests at once with one target and its drafter.

    What a request gets does not depend on the others: greedy and seeded answers are the same alone and in any company,
    where the target computes batch-invariantly (int8 on a CPU); elsewhere they may part at numerical ties.

    Args:
        target: the model with its tokenizer.
        drafter: None for the target alone, with policy ``off``.
        policy: how much is drafted and verified: a policy or its name (`dspark.scheduling.parse_policy`).
        cost: what steps cost here, for the policies that need it.
        settings: memory, concurrency, limits.
        on_step: is given the record of every step, in the engine's thread.

    Raises:
        ValueError: the parts do not fit together; the message says what to do.
    """

    def __init__(
        self,
        target: LoadedTarget,
        drafter: Drafter | None,
        *,
        policy: Policy | str = "delayed",
        cost: StepCost | None = None,
        settings: EngineSettings | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self._target = target
        self._core = EngineCore(
            target.model,
            drafter,
            policy=parse_policy(policy) if isinstance(policy, str) else policy,
            cost=cost,
            tokenizer=target.tokenizer,
            settings=settings,
            on_step=on_step,
        )
        self._grammars = GrammarCompiler(target.tokenizer, target.model.config.vocab_size, target.stop_token_ids)
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._submitted = 0  # accepted, and not in the core yet
        self._is_closed = False
        self._has_ended = False  # nobody looks at commands any more
        self._error: BaseException | None = None
        self._generations: dict[int, Generation] = {}  # unfinished, by request id; of the engine's thread
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread in the middle of a pass when the interpreter goes down would abort it

    @classmethod
    def load(
        cls,
        target: str = "embedded",
        drafter: str | None = None,
        *,
        policy: Policy | str = "delayed",
        dtype: str = "auto",
        device: str = "cpu",
        cost: StepCost | None = None,
        settings: EngineSettings | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> Self:
        """Load target and drafter by name, and what steps cost here.

        Where the policy needs costs and none are given, those that ``dspark profile`` has stored for this hardware and
        these models are used; if there are none, they are measured now (a minute or more) and stored. The logger
        ``dspark`` tells.

        Args:
            target: ``embedded``, a directory, a GGUF file or a name on the hub.
            drafter: a directory, or ``embedded``; by default ours for the embedded target. Policy ``off`` needs none.
            dtype: ``float32``, ``bfloat16``, ``int8``, or ``auto``.

        Raises:
            ValueError: the parts do not fit together; the message says what to do.
            OSError: a file cannot be found or fetched.
        """
        from dspark.engine.loading import load_parts

        policy = parse_policy(policy) if isinstance(policy, str) else policy
        parts = load_parts(
            target, drafter, policy=policy, dtype=dtype, device=device, cost=cost, settings=settings or EngineSettings()
        )
        return cls(parts.target, parts.drafter, policy=policy, cost=parts.cost, settings=settings, on_step=on_step)

    @property
    def target(self) -> LoadedTarget:
        """The model whose output this is, with its tokenizer."""
        return self._target

    @property
    def max_length(self) -> int:
        """Prompt and generated tokens of a choice at most."""
        return self._core.max_length

    @property
    def settings(self) -> EngineSettings:
        """Memory, concurrency, limits."""
        return self._core.settings

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles what answers shall keep to, for ``grammar`` of requests to this engine."""
        return self._grammars

    def submit(
        self,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        prompt: str | None = None,
        prompt_ids: Sequence[int] | None = None,
        sampling: SamplingSettings | None = None,
        max_tokens: int = 256,
        stop: str | Sequence[str] = (),
        stop_token_ids: frozenset[int] | None = None,
        n: int = 1,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
        max_draft_tokens: int | None = None,
        policy: str | None = None,
        user: str = "",
        prefix_namespace: str = "",
    ) -> Generation:
        """Queue a request; its answer comes through what is returned. Exactly one of the three prompts is given.

        Args:
            messages: a conversation, ``{"role": ..., "content": ...}`` each, through the target's chat template.
            prompt: text to continue as it is.
            prompt_ids: tokens to continue.
            sampling: greedy by default.
            stop: a text, or several, that end an answer and are not shown.
            stop_token_ids: tokens that end an answer; the target's own by default, none if empty.

        The others are those of `dspark.engine.request.Request`.

        Raises:
            ValueError: naming the field, if the request can never run here.
            QueueFull: ``max_waiting`` requests wait already.
            EngineError: the engine has ended.
        """
        request = Request(
            prompt_ids=token_ids(self._prompt_ids(messages, prompt, prompt_ids)),
            sampling=SamplingSettings() if sampling is None else sampling,
            max_tokens=max_tokens,
            stop_token_ids=self._target.stop_token_ids if stop_token_ids is None else stop_token_ids,
            stop_strings=_stop_strings(stop),
            n=n,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            max_draft_tokens=max_draft_tokens,
            policy=policy,
            user=user,
            prefix_namespace=prefix_namespace,
        )
        return self.submit_request(request)

    def submit_request(self, request: Request) -> Generation:
        """`submit` for a request that is made already."""
        self._core.check(request)
        generation = self._submit_if_room(request)
        if generation is None:
            raise QueueFull(
                f"{self.settings.max_waiting} requests are waiting already (max_waiting): "
                "try again when some are done, or set it higher"
            )
        return generation

    def generate(self, requests: Sequence[Request]) -> list[RequestResult]:
        """Answers to all of ``requests``, in their order; they may be more than ``max_waiting``."""
        for request in requests:
            self._core.check(request)
        generations: list[Generation] = []
        for request in requests:
            while (generation := self._submit_if_room(request)) is None:
                time.sleep(_WAIT_SECONDS)
            generations.append(generation)
        return [generation.result() for generation in generations]

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken: until it is closed, or an error has ended it."""
        return not (self._is_closed or self._has_ended or self._error is not None)

    def statistics(self, timeout: float | None = None) -> EngineStatistics:
        """Counts since the start, and what is there now, between two steps.

        Args:
            timeout: seconds to wait for the end of a step.

        Raises:
            TimeoutError: the step took longer.
        """
        answer: Future[EngineStatistics] = Future()
        with self._wake:
            if self._has_ended or threading.current_thread() is self._thread:
                return self._core.statistics()
            self._commands.append(lambda: answer.set_result(self._core.statistics()))
            self._wake.notify()
        return answer.result(timeout)

    def watch(self, on_step: Callable[[StepRecord], None]) -> None:
        """Give ``on_step`` the record of every step from now on, in the engine's thread; from any thread."""
        self._core.watch(on_step)

    def close(self, *, drain: bool = False) -> None:
        """End the engine. Unfinished requests are cancelled, or with ``drain`` finished first; new ones are refused."""
        with self._wake:
            self._is_closed = True
            if not drain:
                self._commands.append(self._cancel_all)
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _prompt_ids(
        self,
        messages: Sequence[Mapping[str, str]] | None,
        prompt: str | None,
        prompt_ids: Sequence[int] | None,
    ) -> Sequence[int]:
        if sum(given is not None for given in (messages, prompt, prompt_ids)) != 1:
            raise ValueError("give exactly one of messages, prompt and prompt_ids")
        tokenizer = self._target.tokenizer
        if messages is not None:
            _check_messages(messages)
            return tuple(chat_token_ids(tokenizer, messages))
        if prompt is not None:
            if not isinstance(prompt, str):
                raise ValueError(f"prompt is {prompt!r}; it must be a text (tokens go into prompt_ids)")
            return tuple(text_token_ids(tokenizer, prompt))
        assert prompt_ids is not None, "one of the three is given"
        return prompt_ids

    def _submit_if_room(self, request: Request) -> Generation | None:
        generation = Generation(self, request)
        with self._wake:
            self._refuse_if_ended()
            if self._core.num_waiting + self._submitted >= self.settings.max_waiting:
                return None
            self._submitted += 1
            self._commands.append(lambda: self._start(generation))
            self._wake.notify()
        return generation

    def _refuse_if_ended(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has ended: {self._error}") from self._error
        if self._is_closed:
            raise EngineError("the engine is closed")

    def _cancel(self, generation: Generation) -> None:
        with self._wake:
            self._commands.append(lambda: self._core_cancel(generation))
            self._wake.notify()

    # ---- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # an exit, too, would leave those who wait without an answer
            self._die(error)

    def _serve(self) -> None:
        errors_in_a_row = 0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._commands or self._core.has_work or self._is_closed)
                num_commands = len(self._commands)
                if num_commands == 0 and not self._core.has_work:
                    self._has_ended = True
                    return
            try:
                for _ in range(num_commands):
                    self._commands.popleft()()
                if self._core.step():
                    errors_in_a_row = 0
            except Exception as error:
                errors_in_a_row += 1
                if errors_in_a_row == _ERRORS_IN_A_ROW:
                    raise
                self._lose_all(error)

    def _start(self, generation: Generation) -> None:
        try:
            if self._error is not None:
                raise self._error
            handle = self._core.submit(
                generation.request,
                on_delta=generation._add,
                on_result=lambda result: self._finish(generation, result),
                on_error=lambda error: self._fail(generation, error),
                is_accepted=True,
            )
        except Exception as error:
            generation._end(error)
            return
        finally:
            with self._wake:
                self._submitted -= 1
        generation._handle = handle
        self._generations[handle.request_id] = generation

    def _finish(self, generation: Generation, result: RequestResult) -> None:
        del self._generations[result.request_id]
        generation._end(result)

    def _fail(self, generation: Generation, error: Exception) -> None:
        assert generation._handle is not None, "it runs"
        del self._generations[generation._handle.request_id]
        generation._end(error)

    def _core_cancel(self, generation: Generation) -> None:
        if generation._handle is not None:
            self._core.cancel(generation._handle)

    def _cancel_all(self) -> None:
        for generation in list(self._generations.values()):
            self._core_cancel(generation)

    def _lose_all(self, error: BaseException) -> None:
        """After an error in a step nothing that was running can be trusted; the engine goes on empty."""
        try:
            self._core.abandon()
        finally:
            for generation in list(self._generations.values()):
                generation._end(error)
            self._generations.clear()

    def _die(self, error: BaseException) -> None:
        with self._wake:
            self._error = error
        try:
            self._lose_all(error)
        finally:
            with self._wake:
                while self._commands:  # who submitted or asked meanwhile is told, too
                    self._commands.popleft()()
                self._has_ended = True


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if len(messages) == 0:
        raise ValueError("messages is empty: give at least one")
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError('messages must be {"role": ..., "content": ...} each, with texts')


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, Sequence):
        raise ValueError(f"stop is {stop!r}; give a text or a list of texts")
    return tuple(stop)
