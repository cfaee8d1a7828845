"""What threads share lives as long as any of them uses it, whatever interrupts the caller."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref

import pytest

from dspark.models.threads import run_together


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

    def interrupted(helpers: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dspark.models.threads.wait", interrupted)
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


def test_a_call_needs_no_helpers_when_the_interpreter_goes_down() -> None:
    script = """
import atexit
from dspark.models.threads import run_together
assert run_together(lambda: True, 3, None)
atexit.register(lambda: print("at exit:", run_together(lambda: True, 3, None)))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout.strip(), ended.stderr) == ("at exit: True", "")
