"""Phases of a kernel that threads share: taking pieces of a phase's work, and meeting at its end.

A phase has ``threads + 1`` counters, each on a line of memory of its own: how many pieces are done, and of each
thread's part how many are taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_LOOKS = 2000  # some 50 microseconds, before the core is offered to another thread
_INT = ir.IntType(32)
_LONG = ir.IntType(64)
LINE = 64
"""Bytes of a line of memory."""


def new_counters(phases: int, threads: int) -> tuple[npt.NDArray[np.uint8], int]:
    """Memory for the counters of so many phases, and where they begin.

    First comes a line with the number of threads that came and a count of failures (8 bytes further); then, for each
    phase, what is done of it and what is taken of each thread's part.
    """
    counters = np.zeros(LINE * (phases * (threads + 1) + 2), np.uint8)
    return counters, (counters.ctypes.data + LINE - 1) // LINE * LINE


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def take(pieces: int, turn: int, counters_at: int, threads: int, thread: int) -> Any:
    """A piece of a phase's work: first of the thread's own part, the same in every phase, then of what others left.

    So a core finds in its caches what it wrote in the phase before, and threads rarely ask for one counter at once.

    Args:
        turn: 0, then what this gave before.

    Returns:
        The piece, or ``pieces`` when none is left; and the next ``turn``.
    """
    while turn < threads:
        owner = (thread + turn) % threads
        piece = owner * pieces // threads + add_atomically(counters_at + (1 + owner) * LINE, 1)
        if piece < (owner + 1) * pieces // threads:
            return piece, turn
        turn += 1
    return pieces, turn


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def meet(counters_at: int, done: int, pieces: int, threads: int) -> Any:
    """Say that this thread has done so many pieces and wait until all are; where the next phase's counters are."""
    add_atomically(counters_at, done)
    looks = 0
    while read_atomically(counters_at) < pieces:
        looks += 1
        if looks % _LOOKS != 0:
            pause()
        else:
            yield_core()
    return counters_at + (threads + 1) * LINE


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_atomically(typing: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address, which other threads may do too; what was there before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def read_atomically(typing: Any, address: Any) -> Any:
    """The int64 at an address, and with it all that its writer had written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _LONG.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def pause(typing: Any) -> Any:
    """Tell the processor that this is a loop that waits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def yield_core(typing: Any) -> Any:
    """Let another thread have this core."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_INT, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate
