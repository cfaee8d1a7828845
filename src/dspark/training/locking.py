"""One writer at a time for a directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["exclusive"]


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Make ``directory`` if need be and keep other writers out of it; a killed process holds nothing.

    Raises:
        BlockingIOError: another process writes there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BlockingIOError(
                f"another process is writing to {directory}: wait for it, stop it, or take another directory"
            ) from None
        yield
    finally:
        os.close(descriptor)
