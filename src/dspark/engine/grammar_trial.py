"""A process apart that compiles a grammar first: a hostile one can take for ever, or end the process that compiles it.

Run as a program it reads a grammar, compiles it and ends. Whether it came to its end is all that counts: what is wrong
with a grammar is found out where it is used.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from typing import TypedDict

from llguidance import LLMatcher, LLParserLimits

SECONDS = 10.0
_CPU_SECONDS = 60
_BYTES = 2**30
_STACK_BYTES = 2**20  # what compiles here is far from the end of the stack where it is used


class Limits(TypedDict):
    """Of compiling (``grammar_size``, ``initial``), and of each mask (``step``, ``row``), in units of llguidance."""

    max_items_in_row: int
    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    max_grammar_size: int
    verbose_errors: bool


LIMITS = Limits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


def trial_failure(grammar: str, seconds: float = SECONDS) -> str | None:
    """Why this process must not compile a grammar; None if it may.

    Args:
        grammar: as llguidance reads it.
        seconds: that compiling may take.
    """
    command = [sys.executable, "-P", __file__]  # -P: modules beside this one are not to stand for the library's
    try:
        ended = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"it takes more than {seconds:g} seconds to compile; make it simpler"
    return None if ended.returncode == 0 else "its rules are nested too deeply, or it needs too much memory"


def _limit_resources() -> None:
    with suppress(ImportError, ValueError, OSError):  # where there are no such limits, time alone is limited
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))  # should nobody be there to stop it


def _compile(grammar: str) -> None:
    LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**LIMITS))


if __name__ == "__main__":
    _limit_resources()
    threading.stack_size(_STACK_BYTES)
    compiling = threading.Thread(target=_compile, args=(sys.stdin.buffer.read().decode(),))
    compiling.start()
    compiling.join()
