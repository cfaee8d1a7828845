"""SIGINT and SIGTERM as a wish to stop after the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopWish", "listening"]


class StopWish:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        """Not yet."""
        self.made = False


@contextmanager
def listening(wish: StopWish) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into ``wish``; a second one acts at once. Outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        wish.made = True
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
