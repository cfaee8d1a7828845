"""Compiled code that is remembered between processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba import njit
from numba.core import config
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

__all__ = ["remembered"]


def remembered(function: Callable[..., Any], signature: Any = None) -> Any:
    """``function`` compiled, without the GIL: for Python, or with a ``signature`` as a C function.

    It is kept beside its file or in the user's cache directory. What cannot be kept there, or cannot be read again, is
    compiled by each process anew; a warning says why.
    """
    if signature is None:
        compiled = njit(nogil=True, error_model="numpy")(function)
        if config.DISABLE_JIT:
            return compiled
    else:
        compiled = CFunc(function, normalize_signature(signature), locals={}, options={"error_model": "numpy"})
    try:
        compiled._cache = _LenientCache(function)
    except RuntimeError as error:  # neither directory can be written
        _warn(function, error)
    if signature is not None:
        compiled.compile()
    return compiled


class _LenientCache(FunctionCache):  # type: ignore[misc]
    """numba's files of a function, whose errors cost time and nothing else."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # cut files raise whatever their bytes happen to ask for
            _warn(self._py_func, error)
            with suppress(OSError):
                self.flush()  # or the damaged index is read again before something is saved
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn(self._py_func, error)


def _warn(function: Callable[..., Any], error: Exception) -> None:
    name = f"{function.__module__}.{function.__qualname__}"
    warnings.warn(
        f"compiled code of {name} is not remembered ({type(error).__name__}: {error}); NUMBA_CACHE_DIR can name "
        "another directory for it",
        RuntimeWarning,
        stacklevel=3,
    )
