"""A request that was submitted, as its user sees it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from functools import partial

from dspark.engine.request import Delta, Request, RequestResult

__all__ = ["EngineError", "Generation"]


class EngineError(RuntimeError):
    """A request was lost to an error, of its own or inside the engine, or the engine has ended: see ``__cause__``."""


class Generation:
    """A submitted request: its deltas as they come, its result, and a way to end it. Safe to use from any thread.

    `Engine.submit` makes it.

    Args:
        cancel: asks the engine to end it.
        engine_thread: computes it, and so cannot wait for it.
    """

    def __init__(
        self, request: Request, *, cancel: Callable[[Generation], None], engine_thread: threading.Thread
    ) -> None:
        self.request = request
        self._cancel = cancel
        self._engine_thread = engine_thread
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
        self._cancel(self)

    def _wait_for(self, is_there: Callable[[], bool], timeout: float | None) -> bool:
        if not is_there() and threading.current_thread() is self._engine_thread:
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

    # For the engine alone, in its thread.

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
