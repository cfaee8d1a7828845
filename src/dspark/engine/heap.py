"""Giving memory that is free inside the process back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

__all__ = ["EVERY_STEPS", "trim_heap"]

EVERY_STEPS = 512
"""How often an engine does it: the tensors of a step differ in size with the batch, and the C library's heap would grow
by their gaps for a long time."""


def trim_heap() -> None:
    """Return free pages of the C library's heap; nothing happens where the library is not glibc."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
