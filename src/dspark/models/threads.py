"""Threads that help with one call of compiled code at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache


def run_together(task: Callable[[], bool], threads: int, memory: object) -> bool:
    """Run ``task`` here and in ``threads - 1`` helpers at once, and wait for all; whether all returned True.

    The task hands out its work itself, to whoever asks: helpers may come late, or not at all. What one of them has
    taken is waited for.

    Args:
        memory: what the task knows by its addresses. It lives as long as a helper runs, even if Ctrl-C ends the wait.
    """
    if threads <= 1:
        return task()
    helpers: list[Future[bool]] = []
    try:
        with suppress(RuntimeError):  # the interpreter is going down: there are no helpers any more
            for _ in range(threads - 1):
                helpers.append(_threads(os.getpid()).submit(_help, task, memory))
        done = task()
        others = [helper.result() for helper in helpers if not helper.cancel()]
    except BaseException:  # a helper must not write to the caller's memory when the call is over
        wait([helper for helper in helpers if not helper.cancel()])
        raise
    return done and all(others)


def _help(task: Callable[[], bool], memory: object) -> bool:
    return task()


@lru_cache(maxsize=1)
def _threads(process_id: int) -> ThreadPoolExecutor:  # a forked process has none of its parent's
    return ThreadPoolExecutor(thread_name_prefix="compiled")
