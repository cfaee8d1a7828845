"""What threads share lives as long as any of them uses it, whatever interrupts the caller."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref

import pytest

from dspark.models import threads
from dspark.models.threads import run_parts, run_together


@pytest.fixture(autouse=True)
def new_crew() -> None:
    """Helpers of other tests do not come."""
    threads._crew.cache_clear()


class Memory:
    """What a task knows by its address."""


def test_helpers_are_done_when_an_exception_ends_the_call() -> None:
    caller, helps, done = threading.get_ident(), threading.Event(), threading.Event()

    def task() -> bool:
        if threading.get_ident() == caller:
            assert helps.wait(10.0)
            raise KeyboardInterrupt
        helps.set()
        done.wait(0.2)
        done.set()
        return True

    with pytest.raises(KeyboardInterrupt):
        run_together(task, 2, None)
    assert done.is_set()


def test_memory_lives_until_the_last_helper_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a second interrupt ends the wait for helpers."""
    caller, helps, go_on = threading.get_ident(), threading.Event(), threading.Event()
    seen: list[bool] = []
    memory = Memory()
    alive = weakref.ref(memory)

    def task() -> bool:
        if threading.get_ident() == caller:
            assert helps.wait(10.0)
            raise KeyboardInterrupt
        helps.set()
        assert go_on.wait(10.0)
        seen.append(alive() is not None)
        return True

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dspark.models.threads.time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_together(task, 2, memory)
    del memory
    go_on.set()
    monkeypatch.undo()
    assert run_together(lambda: True, 2, None)
    for _ in range(100):
        if seen:
            break
        threading.Event().wait(0.05)
    assert seen == [True]


def test_the_caller_does_not_wait_for_helpers_to_leave() -> None:
    caller, helps, go_on, left = threading.get_ident(), threading.Event(), threading.Event(), threading.Event()

    def task() -> bool:
        if threading.get_ident() == caller:
            return helps.wait(10.0)
        helps.set()
        go_on.wait(10.0)
        left.set()
        return True

    assert run_together(task, 2, None)
    assert not left.is_set()
    go_on.set()
    assert left.wait(10.0)


def test_who_comes_when_the_call_is_over_does_nothing() -> None:
    release, came = threading.Event(), threading.Event()
    callers: set[int] = set()

    def hold() -> bool:
        came.set()
        return release.wait(10.0)

    def later() -> bool:
        callers.add(threading.get_ident())
        return True

    # The caller of `hold` gets on at once, its helper is held.
    assert run_together(lambda: came.wait(10.0), 2, None, helping=hold)
    assert run_together(later, 2, None)
    release.set()
    next_came = threading.Event()
    assert run_together(lambda: next_came.wait(10.0), 2, None, helping=next_came.set)
    assert callers == {threading.get_ident()}


def test_parts_are_all_computed_before_one_is_missed() -> None:
    ended: list[int] = []

    def compute(part: int) -> bool:
        if part == 1:
            raise ValueError("part 1")
        threading.Event().wait(0.01)
        ended.append(part)
        return part != 5

    with pytest.raises(ValueError, match="part 1"):
        run_parts(compute, 8, 3, None)
    assert sorted(ended) == [0, 2, 3, 4, 5, 6, 7]
    assert not run_parts(lambda part: part != 5, 8, 3, None)
    assert run_parts(lambda part: part != 8, 8, 3, None)


def test_what_a_helper_raises_reaches_the_caller_and_ends_no_thread() -> None:
    ended = threading.Event()

    def fail() -> None:
        try:
            raise MemoryError("helper")
        finally:
            ended.set()

    def wait() -> bool:
        assert ended.wait(10.0)
        threading.Event().wait(0.1)
        return True

    for _ in range(3):  # one thread helps each time
        ended.clear()
        with pytest.raises(MemoryError, match="helper"):
            run_together(wait, 2, None, helping=fail)


def test_a_call_that_is_over_holds_nothing_for_a_helper_that_is_busy() -> None:
    release, came = threading.Event(), threading.Event()
    assert run_together(lambda: came.wait(10.0), 2, None, helping=lambda: (came.set(), release.wait(10.0)))
    memory = Memory()
    alive = weakref.ref(memory)
    assert run_together(lambda: True, 2, memory)
    del memory
    assert alive() is None
    release.set()


def test_threads_that_cannot_be_had_leave_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    helped = threading.Event()
    assert run_together(lambda: helped.wait(10.0), 2, None, helping=helped.set)
    helped.clear()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("dspark.models.threads.Thread.start", fail)
    assert run_together(lambda: helped.wait(10.0), 8, None, helping=helped.set)
    threads._crew.cache_clear()
    assert run_together(lambda: True, 8, None)


def test_a_call_needs_no_helpers_when_the_interpreter_goes_down() -> None:
    script = """
import atexit
from dspark.models.threads import run_together
assert run_together(lambda: True, 3, None)
atexit.register(lambda: print("at exit:", run_together(lambda: True, 3, None)))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout.strip(), ended.stderr) == ("at exit: True", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_helpers_of_its_own() -> None:
    """Its parent's threads are not there any more: without new ones it would do all of its work alone."""

    def is_helped() -> bool:
        caller, helped = threading.get_ident(), threading.Event()

        def task() -> bool:
            if threading.get_ident() != caller:
                helped.set()
            return helped.wait(10.0)

        return run_together(task, 2, None)

    assert is_helped()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if is_helped() else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
