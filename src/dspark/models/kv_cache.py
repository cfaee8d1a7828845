"""Key/value memory of a target: a fixed number of slots, one request each."""

from __future__ import annotations

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
        if num_slots < 1 or max_length < 1:
            raise ValueError(f"a cache needs at least one slot and one position, got {num_slots=} and {max_length=}")
        self.num_slots = num_slots
        self.max_length = max_length
        positions = -(-max_length // block) * block
        shape = (num_layers, num_slots, num_kv_heads, positions, head_dim)
        # Zeros, not empty: attention multiplies masked positions by zero, and 0 * NaN would be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * num_slots

    def truncate(self, slot: int, length: int) -> None:
        """Forget every position of ``slot`` from ``length`` on.

        Raises:
            ValueError: if the slot holds fewer than ``length`` positions.
        """
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot truncate slot {slot} to {length}: it holds {self.lengths[slot]} positions")
        self.lengths[slot] = length

    def reserve(self, segments: list[Segment]) -> None:
        """Check that ``segments`` continue their slots and fit, then count them as written.

        Raises:
            ValueError: if a slot does not exist or is named twice, a segment is empty, leaves a gap after the slot's
                valid positions, or ends beyond ``max_length``. Nothing is changed then.
        """
        seen: set[int] = set()
        for segment in segments:
            if not 0 <= segment.slot < self.num_slots or segment.slot in seen:
                raise ValueError(f"slot {segment.slot} is unknown or named twice (the cache has {self.num_slots})")
            seen.add(segment.slot)
            if segment.length < 1:
                raise ValueError(f"slot {segment.slot}: a segment needs at least one token")
            if segment.start > self.lengths[segment.slot] or segment.start < 0:
                raise ValueError(
                    f"slot {segment.slot}: a segment starts at {segment.start}, the slot holds "
                    f"{self.lengths[segment.slot]} positions"
                )
            if segment.end > self.max_length:
                raise ValueError(
                    f"slot {segment.slot}: position {segment.end - 1} is beyond the cache's {self.max_length} positions"
                )
        for segment in segments:
            self.lengths[segment.slot] = segment.end
