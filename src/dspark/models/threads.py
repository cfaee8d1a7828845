"""Threads that help with one call of compiled code at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache


def run_together(task: Callable[[], bool], threads: int) -> bool:
    """Run ``task`` here and in ``threads - 1`` helpers at once, and wait for all; whether all returned True.

    The task hands out its work itself, to whoever asks, and must be complete when the caller's own run returns: helpers
    may come late, or not at all.
    """
    if threads <= 1:
        return task()
    helpers = [_threads(os.getpid()).submit(task) for _ in range(threads - 1)]
    try:
        done = task()
    finally:  # none may outlive the call, and with it the memory
        others = [helper.result() for helper in helpers if not helper.cancel()]
    return done and all(others)


@lru_cache(maxsize=1)
def _threads(process_id: int) -> ThreadPoolExecutor:  # a forked process has none of its parent's
    return ThreadPoolExecutor(thread_name_prefix="compiled")
