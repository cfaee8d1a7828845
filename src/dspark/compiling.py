"""Compiled code that is remembered between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cfunc, njit

__all__ = ["remembered"]


def remembered(function: Callable[..., Any], signature: Any = None) -> Any:
    """``function`` compiled, without the GIL: for Python, or with a ``signature`` as a C function.

    It is kept beside its file or in the user's cache directory.
    """

    def compiled(**options: Any) -> Any:
        if signature is None:
            return njit(nogil=True, error_model="numpy", **options)(function)
        return cfunc(signature, error_model="numpy", **options)(function)

    try:
        return compiled(cache=True)
    except RuntimeError:  # neither can be written: each process compiles anew
        return compiled()
