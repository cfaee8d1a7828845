"""Compiled code that is remembered between processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, njit

SOURCE = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()
"""Changes with the code of this package.

What numba remembers goes by a function's own file and by the variables of its closure, not by the files of what it
calls: a function to be remembered names this in its closure.
"""


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
