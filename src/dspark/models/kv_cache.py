"""Key/value memory of a target or a drafter: blocks of positions, for a fixed number of slots, one request each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dspark.models.block_tables import BLOCK_SIZE, BlockTables
from dspark.types import Segment


class KVCache:
    """Keys and values of ``num_slots`` requests, allocated once.

    ``keys`` and ``values`` are ``[layers, kv_heads, rows, head_dim]``; ``tables`` says which row holds which position
    of which slot, and may be shared with other caches. ``lengths[slot]`` counts the valid positions; what lies beyond
    is stale, masked in attention and overwritten before it counts, so rolling back (:meth:`truncate`) costs nothing.

    Args:
        max_length: most valid positions of a slot.
        has_key_columns: whether keys lie as the columns of their blocks, ``[layers, kv_heads, blocks, head_dim,
            BLOCK_SIZE]``, as compiled attention over float16 reads them.
        tables: where the positions are.
        scratch: positions behind the valid ones that are written too, but never count.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        tables: BlockTables | None = None,
        scratch: int = 0,
        has_key_columns: bool = False,
    ) -> None:
        check_size(num_slots, max_length)
        if tables is None:
            tables = BlockTables.contiguous(num_slots, max_length + scratch, device)
        if tables.num_slots != num_slots or tables.max_length < max_length + scratch:
            raise ValueError(
                f"tables have {tables.num_slots} slots of {tables.max_length} positions; the cache needs {num_slots} "
                f"of at least {max_length + scratch}"
            )
        self.tables = tables
        self.has_key_columns = has_key_columns
        self.num_slots = num_slots
        self.max_length = max_length
        shape = (num_layers, num_kv_heads, tables.num_rows, head_dim)
        # Zeros, not empty: attention multiplies masked positions by zero, and 0 * NaN would be NaN.
        self.keys = torch.zeros(columns_shape(shape) if has_key_columns else shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * num_slots

    def check_layout(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, has_key_columns: bool
    ) -> None:
        """Raise ValueError unless keys and values lie as a model of these sizes reads them."""
        shape = (num_layers, num_kv_heads, self.tables.num_rows, head_dim)
        expected = (columns_shape(shape) if has_key_columns else shape, shape)
        found = (tuple(self.keys.shape), tuple(self.values.shape))
        if found != expected or {self.keys.dtype, self.values.dtype} != {dtype}:
            raise ValueError(
                f"the cache holds keys and values {found} in {self.keys.dtype} and {self.values.dtype}, this model "
                f"{expected} in {dtype}: take one from its new_cache"
            )

    @property
    def nbytes_per_block(self) -> int:
        """Bytes that one block takes here."""
        return (self.keys.nbytes + self.values.nbytes) // self.tables.num_blocks

    def truncate(self, slot: int, length: int) -> None:
        """Forget every position of ``slot`` from ``length`` on (see :func:`truncate_slot`)."""
        truncate_slot(self.lengths, slot, length)

    def adopt(self, slot: int, length: int) -> None:
        """Count positions ``0 .. length - 1`` of ``slot`` as valid: its blocks hold them from another request.

        Raises:
            ValueError: if the slot does not exist, or has no room for them.
        """
        check_slot(self.lengths, slot)
        if not 0 <= length <= self.room(slot):
            raise ValueError(f"cannot adopt {length} positions in slot {slot}: it has room for {self.room(slot)}")
        self.lengths[slot] = length

    def reserve(self, segments: Sequence[Segment]) -> None:
        """Check that ``segments`` continue their slots and fit, then count them as written (:func:`reserve_slots`)."""
        reserve_slots(self.lengths, self.room, segments)

    def room(self, slot: int) -> int:
        """Valid positions that the slot can have with the blocks that it has now."""
        return min(self.max_length, self.tables.capacity(slot))


def columns_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of rows ``[..., rows, head_dim]`` that lie as columns of their blocks."""
    *rest, rows, head_dim = shape
    return *rest, rows // BLOCK_SIZE, head_dim, BLOCK_SIZE


def check_size(num_slots: int, max_length: int) -> None:
    """Raise ValueError unless a cache of this size can hold anything."""
    if num_slots < 1 or max_length < 1:
        raise ValueError(f"a cache needs at least one slot and one position, got {num_slots=} and {max_length=}")


def check_slot(lengths: Sequence[int], slot: int) -> None:
    """Raise ValueError unless a cache of these lengths has the slot."""
    if not 0 <= slot < len(lengths):
        raise ValueError(f"slot {slot} is unknown: the cache has slots 0 to {len(lengths) - 1}")


def truncate_slot(lengths: list[int], slot: int, length: int) -> None:
    """Cut ``lengths[slot]`` to ``length``.

    Raises:
        ValueError: if the slot does not exist, or holds fewer than ``length`` positions.
    """
    check_slot(lengths, slot)
    if not 0 <= length <= lengths[slot]:
        raise ValueError(f"cannot truncate slot {slot} to {length}: it holds {lengths[slot]} positions")
    lengths[slot] = length


def reserve_slots(lengths: list[int], room: Callable[[int], int], segments: Sequence[Segment]) -> None:
    """Check that ``segments`` continue their slots and fit, then set ``lengths`` to their ends.

    Args:
        room: positions that a slot can hold.

    Raises:
        ValueError: if a slot does not exist or is named twice, a segment is empty, leaves a gap after the slot's valid
            positions, or ends beyond the slot's room. Nothing is changed then.
    """
    seen: set[int] = set()
    for segment in segments:
        if not 0 <= segment.slot < len(lengths) or segment.slot in seen:
            raise ValueError(f"slot {segment.slot} is unknown or named twice (the cache has {len(lengths)})")
        seen.add(segment.slot)
        if segment.length < 1:
            raise ValueError(f"slot {segment.slot}: a segment needs at least one token")
        if segment.start > lengths[segment.slot] or segment.start < 0:
            raise ValueError(
                f"slot {segment.slot}: a segment starts at {segment.start}, the slot holds "
                f"{lengths[segment.slot]} positions"
            )
        if segment.end > (positions := room(segment.slot)):
            raise ValueError(
                f"slot {segment.slot}: position {segment.end - 1} is beyond the cache's {positions} positions for it; "
                "take a longer cache, or give the slot more blocks"
            )
    for segment in segments:
        lengths[segment.slot] = segment.end
