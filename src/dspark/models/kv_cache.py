"""Key/value memory of a target: a fixed number of slots, one request each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.types import Segment


class KVCache:
    """Keys and values of ``num_slots`` requests, allocated once.

    ``keys[layer]`` and ``values[layer]`` have shape ``[slots, kv_heads, positions, head_dim]``, where ``positions`` is
    ``max_length`` rounded up to a multiple of ``block``. ``lengths[slot]`` counts the valid positions; what lies beyond
    is stale, masked in attention and overwritten before it counts, so rolling back (:meth:`truncate`) costs nothing.
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
        block: int = 1,
    ) -> None:
        check_size(num_slots, max_length)
        self.num_slots = num_slots
        self.max_length = max_length
        positions = -(-max_length // block) * block
        shape = (num_layers, num_slots, num_kv_heads, positions, head_dim)
        # Zeros, not empty: attention multiplies masked positions by zero, and 0 * NaN would be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * num_slots

    def truncate(self, slot: int, length: int) -> None:
        """Forget every position of ``slot`` from ``length`` on (see :func:`truncate_slot`)."""
        truncate_slot(self.lengths, slot, length)

    def reserve(self, segments: Sequence[Segment]) -> None:
        """Check that ``segments`` continue their slots and fit, then count them as written (:func:`reserve_slots`)."""
        reserve_slots(self.lengths, self.max_length, segments)


def check_size(num_slots: int, max_length: int) -> None:
    """Raise ValueError unless a cache of this size can hold anything."""
    if num_slots < 1 or max_length < 1:
        raise ValueError(f"a cache needs at least one slot and one position, got {num_slots=} and {max_length=}")


def truncate_slot(lengths: list[int], slot: int, length: int) -> None:
    """Cut ``lengths[slot]`` to ``length``.

    Raises:
        ValueError: if the slot holds fewer than ``length`` positions.
    """
    if not 0 <= length <= lengths[slot]:
        raise ValueError(f"cannot truncate slot {slot} to {length}: it holds {lengths[slot]} positions")
    lengths[slot] = length


def reserve_slots(lengths: list[int], max_length: int, segments: Sequence[Segment]) -> None:
    """Check that ``segments`` continue their slots and fit, then set ``lengths`` to their ends.

    Raises:
        ValueError: if a slot does not exist or is named twice, a segment is empty, leaves a gap after the slot's valid
            positions, or ends beyond ``max_length``. Nothing is changed then.
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
        if segment.end > max_length:
            raise ValueError(
                f"slot {segment.slot}: position {segment.end - 1} is beyond the cache's {max_length} positions"
            )
    for segment in segments:
        lengths[segment.slot] = segment.end
