"""The engine as users call it: requests from any thread, answers as they grow, one thread that computes."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from dspark.decoding import SamplingSettings
from dspark.drafters.protocol import Drafter
from dspark.engine.core import EngineCore
from dspark.engine.grammar import Grammar, GrammarCompiler
from dspark.engine.queue import QueueFull
from dspark.engine.request import Request, RequestResult, token_ids
from dspark.engine.request_handle import RequestHandle
from dspark.engine.settings import EngineSettings
from dspark.engine.statistics import EngineStatistics
from dspark.engine.submitted import EngineError, Generation
from dspark.models.chat import chat_token_ids, text_token_ids
from dspark.models.loading import LoadedTarget
from dspark.scheduling import Policy, StepCost, StepRecord, parse_policy

__all__ = ["Engine"]

_ERRORS_IN_A_ROW = 3
_WAIT_SECONDS = 0.01


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
        self._handles: dict[Generation, RequestHandle] = {}  # of those that are unfinished; of the engine's thread
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
        generation = Generation(request, cancel=self._cancel, engine_thread=self._thread)
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
                on_error=lambda error: self._finish(generation, error),
                is_accepted=True,
            )
        except Exception as error:
            generation._end(error)
            return
        finally:
            with self._wake:
                self._submitted -= 1
        self._handles[generation] = handle

    def _finish(self, generation: Generation, outcome: RequestResult | Exception) -> None:
        del self._handles[generation]
        generation._end(outcome)

    def _core_cancel(self, generation: Generation) -> None:
        if generation in self._handles:
            self._core.cancel(self._handles[generation])

    def _cancel_all(self) -> None:
        for generation in list(self._handles):
            self._core_cancel(generation)

    def _lose_all(self, error: BaseException) -> None:
        """After an error in a step nothing that was running can be trusted; the engine goes on empty."""
        try:
            self._core.abandon()
        finally:
            for generation in list(self._handles):
                generation._end(error)
            self._handles.clear()

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
