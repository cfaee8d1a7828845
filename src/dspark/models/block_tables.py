"""Which blocks of key/value memory hold the positions of each slot; a target's cache and a drafter's may share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dspark.compiling import remembered
from dspark.models.compiling import SOURCE
from dspark.types import Segment

BLOCK_SIZE = 16
"""Positions of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the ``N`` tokens of some segments sit, in the order of the segments.

    Attributes:
        table_5N: int64 rows, contiguous: `slots_N`, `positions_N`, `row_numbers`, `visible_N`, `ends_N`.
        first_row: `row_numbers` of the first token, if all lie side by side; else None.
        last_position: the largest position.
    """

    table_5N: torch.Tensor
    first_row: int | None
    last_position: int

    @property
    def slots_N(self) -> torch.Tensor:
        """Slot of each token."""
        return self.table_5N[0]

    @property
    def positions_N(self) -> torch.Tensor:
        """Position of each token in its slot."""
        return self.table_5N[1]

    @property
    def row_numbers(self) -> torch.Tensor:
        """Row of each token in the flat memory."""
        return self.table_5N[2]

    @property
    def visible_N(self) -> torch.Tensor:
        """Positions of its slot that each token sees: those before it, and its own."""
        return self.table_5N[3]

    @property
    def ends_N(self) -> torch.Tensor:
        """Positions of its slot up to the end of each token's segment."""
        return self.table_5N[4]

    @property
    def rows(self) -> slice | torch.Tensor:
        """`row_numbers`, as a slice where they lie side by side."""
        if self.first_row is None:
            return self.row_numbers
        return slice(self.first_row, self.first_row + self.table_5N.shape[1])


class BlockTables:
    """For each slot the blocks that hold its positions, in order; who gets which block is decided elsewhere.

    Block ``b`` is rows ``16 b .. 16 b + 15`` of every memory that goes by these tables, so position ``p`` of slot ``s``
    is row ``tables_SB[s, p // 16] * 16 + p % 16``. A block may be in the tables of several slots: whoever assigns it
    sees to it that none of them writes there. All slots start without blocks.

    Args:
        num_slots: slots ``S``.
        max_length: most positions of a slot, scratch included.
        num_blocks: blocks of the memory, for all slots together.
        device: where the memory is.

    Attributes:
        tables_SB: int32 ``[S, ceil(max_length / 16)]`` on ``device``; entries behind a slot's blocks mean nothing, but
            are blocks.
    """

    def __init__(self, *, num_slots: int, max_length: int, num_blocks: int, device: torch.device) -> None:
        if num_slots < 1 or max_length < 1 or num_blocks < 1:
            raise ValueError(
                f"block tables need at least one slot, position and block; got {num_slots=}, {max_length=} and "
                f"{num_blocks=}"
            )
        self.num_slots = num_slots
        self.max_length = max_length
        self.num_blocks = num_blocks
        self.device = device
        # Rows of new tokens are looked up on the host, those of all keys on the device.
        self._host_SB = np.zeros((num_slots, -(-max_length // BLOCK_SIZE)), np.int32)
        self.tables_SB = self._tensor(self._host_SB)  # the same memory on a CPU
        self._blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self._first_rows: list[int | None] = [None] * num_slots
        self._last_places: tuple[tuple[Segment, ...], Places] | None = None  # a drafter asks for what its target did

    @property
    def num_rows(self) -> int:
        """Rows of the memory."""
        return self.num_blocks * BLOCK_SIZE

    @classmethod
    def contiguous(cls, num_slots: int, max_length: int, device: torch.device) -> BlockTables:
        """Tables of fixed slots: each owns a run of blocks for ``max_length`` positions from the start."""
        blocks = -(-max_length // BLOCK_SIZE)
        tables = cls(num_slots=num_slots, max_length=max_length, num_blocks=num_slots * blocks, device=device)
        for slot in range(num_slots):
            tables.assign(slot, range(slot * blocks, (slot + 1) * blocks))
        return tables

    def assign(self, slot: int, blocks: Sequence[int]) -> None:
        """Say which blocks a slot has, all of them: the i-th holds positions ``16 i .. 16 i + 15``.

        Raises:
            ValueError: if the slot or a block does not exist, or there are more blocks than ``max_length`` needs.
        """
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} does not exist; the tables have slots 0 to {self.num_slots - 1}")
        if len(blocks) > self._host_SB.shape[1]:
            raise ValueError(
                f"slot {slot} would get {len(blocks)} blocks, its max_length {self.max_length} needs no more than "
                f"{self._host_SB.shape[1]}"
            )
        self._last_places = None
        new, old = list(blocks), self._blocks[slot]
        same = min(len(new), len(old))
        if new[:same] != old[:same]:
            same = 0
        tail = new[same:]
        if tail:
            if missing := [block for block in tail if not 0 <= block < self.num_blocks]:
                raise ValueError(f"slot {slot}: blocks {missing} are not in the memory's 0 to {self.num_blocks - 1}")
            self._host_SB[slot, same : len(new)] = tail
            if self.device.type != "cpu":
                self.tables_SB[slot, same : len(new)] = torch.tensor(tail, dtype=torch.int32, device=self.device)
        self._blocks[slot] = new
        in_a_row = bool(new) and new == list(range(new[0], new[0] + len(new)))
        self._first_rows[slot] = new[0] * BLOCK_SIZE if in_a_row else None

    def capacity(self, slot: int) -> int:
        """Positions that the slot's blocks hold."""
        return len(self._blocks[slot]) * BLOCK_SIZE

    def first_row(self, slot: int) -> int | None:
        """Row of the slot's position 0 if all its rows lie side by side, else None."""
        return self._first_rows[slot]

    def places(self, segments: Sequence[Segment]) -> Places:
        """Where the tokens of ``segments`` sit; they must be within the capacities of their slots."""
        key = tuple(segments)
        if self._last_places is None or self._last_places[0] != key:
            self._last_places = key, self._find(key)
        return self._last_places[1]

    def _find(self, segments: Sequence[Segment]) -> Places:
        # Compiled: operations of torch and numpy on so few numbers take several times as long.
        if min((segment.length for segment in segments), default=-1) < 0:
            raise ValueError(f"places are those of tokens, and {list(segments)} are none")
        segments_R3 = np.array([(segment.slot, segment.start, segment.length) for segment in segments], np.int64)
        table_5N = np.empty((5, sum(segment.length for segment in segments)), np.int64)
        if not _layout()(segments_R3, self._host_SB, table_5N):
            raise IndexError(f"a slot or position of {list(segments)} is outside the tables {self._host_SB.shape}")
        first_row = self._first_rows[segments[0].slot] if len(segments) == 1 else None
        return Places(
            table_5N=self._tensor(table_5N),
            first_row=None if first_row is None else first_row + segments[0].start,
            last_position=max(segment.end for segment in segments) - 1,
        )

    def slot_rows(self, slots: Sequence[int], length: int) -> torch.Tensor:
        """Rows ``[R, length]`` of the first positions of ``slots``, some row or other where a slot has none."""
        blocks_RB = self.tables_SB[list(slots), : -(-length // BLOCK_SIZE)].long()
        offsets = torch.arange(BLOCK_SIZE, device=self.device)
        return (blocks_RB.unsqueeze(-1) * BLOCK_SIZE + offsets).flatten(1)[:, :length]

    def _tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


@lru_cache
def _layout(source: str = SOURCE) -> Callable[..., bool]:
    def lay_out(segments_R3, tables_SB, table_5N):  # type: ignore[no-untyped-def]
        _ = source
        num_slots, blocks = tables_SB.shape
        n = 0
        for slot, start, length in segments_R3:
            if not (0 <= slot < num_slots and start >= 0 and start + length <= blocks * BLOCK_SIZE):
                return False
            for position in range(start, start + length):
                block = np.int64(tables_SB[slot, position // BLOCK_SIZE])
                table_5N[0, n] = slot
                table_5N[1, n] = position
                table_5N[2, n] = block * BLOCK_SIZE + position % BLOCK_SIZE
                table_5N[3, n] = position + 1
                table_5N[4, n] = start + length
                n += 1
        return True

    kernel: Callable[..., bool] = remembered(lay_out)
    return kernel
