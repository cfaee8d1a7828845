"""Threads that help with one call at a time: of compiled code, or of Python that calls it part by part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from queue import SimpleQueue
from threading import Lock, Thread

_LOOK_SECONDS = 0.001


def run_together(
    task: Callable[[], bool], threads: int, memory: object, *, helping: Callable[[], object] | None = None
) -> bool:
    """Run ``task`` here and in ``threads - 1`` helpers at once; what it returns here.

    The task hands out its work itself, to whoever asks, and returns here when all of it is done: helpers may come late,
    or not at all. Those that came may still be on their way out, but write nothing any more.

    Args:
        memory: what the task knows by its addresses. It lives as long as a helper runs.
        helping: what helpers run, if it is not the whole task.

    Raises:
        BaseException: what the task raised, here or in a helper that was done by then.
    """
    if threads <= 1:
        return task()
    call = _Call(helping or task, memory)
    try:
        _crew(os.getpid()).ask(call, threads - 1)
        done = task()
    except BaseException:  # a helper must not write to the caller's memory when the call is over
        call.end()
        while call.helpers:
            time.sleep(_LOOK_SECONDS)
        raise
    finally:
        call.end()
    if call.error is not None:
        raise call.error
    return done


def run_parts(compute: Callable[[int], bool], parts: int, threads: int, memory: object) -> bool:
    """Compute parts 0, 1, ... here and in ``threads - 1`` helpers; whether all returned True.

    Args:
        memory: what ``compute`` knows by its addresses. It lives as long as a helper runs.

    Raises:
        BaseException: what a part raised, when all have ended.
    """
    left = iter(range(parts))
    results: SimpleQueue[bool | BaseException] = SimpleQueue()

    def take() -> None:
        for part in left:
            end: bool | BaseException
            try:
                end = compute(part)
            except BaseException as error:
                end = error
            results.put(end)

    def compute_all() -> bool:
        take()
        ends = [results.get() for _ in range(parts)]
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return all(ends)

    return run_together(compute_all, min(threads, parts), memory, helping=take)


class _Call:
    """Something to help with, until it is over; ``helpers`` are at it now."""

    def __init__(self, task: Callable[[], object], memory: object) -> None:
        self._wanted: tuple[Callable[[], object], object] | None = (task, memory)
        self._lock = Lock()
        self.helpers = 0
        self.error: BaseException | None = None

    def help(self) -> None:
        with self._lock:
            wanted = self._wanted
            if wanted is None:
                return
            self.helpers += 1
        try:
            wanted[0]()
        except BaseException as error:
            self.error = error
        finally:
            with self._lock:
                self.helpers -= 1

    def end(self) -> None:
        """Let nobody begin any more, and hold nothing but for those who have begun."""
        with self._lock:
            self._wanted = None


class _Crew:
    """As many threads as were ever asked for at once."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._lock = Lock()
        self._size = 0

    def ask(self, call: _Call, helpers: int) -> None:
        for _ in range(helpers):
            self._calls.put(call)
        if self._size < helpers:
            with self._lock, suppress(RuntimeError):  # no more threads can be had: those that are there help
                while self._size < helpers:
                    Thread(target=self._serve, name="compiled", daemon=True).start()
                    self._size += 1

    def _serve(self) -> None:
        while True:
            self._calls.get().help()  # and no call is held until the next one


@lru_cache(maxsize=1)
def _crew(process_id: int) -> _Crew:  # a forked process has none of its parent's threads
    return _Crew()
