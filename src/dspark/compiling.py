"""Compiled code that is remembered between processes.

It rests on numba's own names (``FunctionCache``, ``CFunc``, ``_cache``): look here when its pinned range moves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba import njit
from numba.core import config
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

__all__ = ["remembered"]

_log = logging.getLogger("dspark")


def remembered(function: Callable[..., Any], signature: Any = None) -> Any:
    """``function`` compiled, without the GIL: for Python, or with a ``signature`` as a C function.

    It is kept beside its file or in the user's cache directory. What cannot be kept there, or cannot be read again, is
    compiled by each process anew; the log warns of it.
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
        _warn_of_keeping(function, error)
    if signature is not None:
        compiled.compile()
    return compiled


class _LenientCache(FunctionCache):  # type: ignore[misc]
    """numba's files of a function, whose errors cost time and nothing else."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # cut files raise whatever their bytes happen to ask for
            with suppress(OSError):
                self.flush()  # or a damaged index is read again before something is saved
            _log.warning("kept code of %s cannot be read (%s): it is compiled again", _name(self._py_func), error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # it reads the index, too
            _warn_of_keeping(self._py_func, error)


def _warn_of_keeping(function: Callable[..., Any], error: Exception) -> None:
    _log.warning(
        "compiled code of %s cannot be kept (%s): each process compiles it again; NUMBA_CACHE_DIR may name another "
        "directory",
        _name(function),
        error,
    )


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
