"""Memory for weights, which every pass reads from end to end: side by side, in large pages where the system has them.

With pages of 4 KiB the processor looks up a place in memory for every 64 of its lines, and its own reading ahead ends
with each page.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from threading import Lock

import torch

_PAGE = 2 << 20
_CHUNK = 16 << 20
_LINE = 64


class _Rooms:
    """Hands out chunks of memory in parts."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    @torch.inference_mode(False)  # what one model leaves of a chunk, another writes to
    def room(self, size: int) -> torch.Tensor:
        wanted = -(-size // _LINE) * _LINE
        with self._lock:
            if len(self._left) >= wanted:
                room, self._left = self._left[:size], self._left[wanted:]
                return room
            chunk = _chunk(max(_CHUNK, -(-wanted // _PAGE) * _PAGE))
            # What is left of a larger one would keep all of it in memory.
            if len(chunk) == _CHUNK and len(chunk) - wanted > len(self._left):
                self._left = chunk[wanted:]
            return chunk[:size]


_ROOMS = _Rooms()


def weight_room(size: int) -> torch.Tensor:
    """uint8 ``[size]``, from the start of a line of memory on; what is in it means nothing."""
    return _ROOMS.room(size)


def _chunk(size: int) -> torch.Tensor:
    """Memory that lives as long as a part of it is known."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # another system
        memory = torch.empty(size + _LINE, dtype=torch.uint8)
        return memory[-memory.data_ptr() % _LINE :][:size]
    mapped = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system that was built without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _PAGE :][:size]
