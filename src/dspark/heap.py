"""Giving memory that is free inside the process back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Return free pages of the C library's heap; nothing happens where the library is not glibc.

    Steps whose tensors differ in size leave gaps there, and without this it grows by them for a long time.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
