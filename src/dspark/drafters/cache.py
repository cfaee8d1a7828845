"""Context keys and values of the draft layers, and how a round's blocks are written behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DrafterCache:
    """Keys and values of the committed context, for every draft layer and slot, allocated once.

    Shapes: ``keys`` and ``values`` are ``[layers, slots, kv_heads, max_length + scratch, head_dim]``. The ``scratch``
    rows after a slot's context hold the keys and values of the block being drafted, so that attention reads one piece
    of memory; the next `extend` overwrites them.

    Attributes:
        lengths: Committed context tokens of every slot; also the position of the slot's next anchor.
        max_length: Most context tokens a slot can hold.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        max_length: int,
        scratch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if num_slots < 1 or max_length < 1:
            raise ValueError(f"num_slots and max_length must be at least 1, got {num_slots} and {max_length}")
        shape = (num_layers, num_slots, num_kv_heads, max_length + scratch, head_dim)
        self.keys: Tensor = torch.zeros(shape, device=device, dtype=dtype)
        self.values: Tensor = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths: list[int] = [0] * num_slots
        self.max_length = max_length

    @property
    def num_slots(self) -> int:
        """Requests the cache has room for."""
        return len(self.lengths)

    def truncate(self, slot: int, length: int) -> None:
        """Forget every context token of `slot` from position `length` on.

        Raises:
            ValueError: if the slot does not exist, or holds fewer than `length` tokens.
        """
        self._check_slot(slot)
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot truncate slot {slot} to length {length}: it holds {self.lengths[slot]} tokens")
        self.lengths[slot] = length

    def check_segment(self, slot: int, start: int, end: int) -> None:
        """Raise ValueError unless positions ``start .. end - 1`` continue `slot` and fit in it."""
        self._check_slot(slot)
        if start != self.lengths[slot]:
            raise ValueError(
                f"segment of slot {slot} starts at {start}, but the slot holds {self.lengths[slot]} tokens; "
                "truncate the slot or pass every token in order"
            )
        if end > self.max_length:
            raise ValueError(
                f"slot {slot} would hold {end} tokens, more than max_length {self.max_length}; allocate a longer cache"
            )

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < len(self.lengths):
            raise ValueError(f"slot {slot} does not exist; the cache has slots 0 to {len(self.lengths) - 1}")


class BlockPlan:
    """Where a round's block keys and values go in the cache, and how rows are read back; one plan serves all layers.

    Attributes:
        positions_N: Absolute positions of all block inputs, row after row.
        end: Keys that the longest row sees, its own block included.
        mask_R11K: True at the keys a row may see; None where all rows are equally long.
    """

    def __init__(self, cache: DrafterCache, slots: Sequence[int], inputs: int, device: torch.device) -> None:
        lengths = [cache.lengths[slot] for slot in slots]
        first, rows = slots[0], len(slots)
        self.end = max(lengths) + inputs
        self._inputs = inputs
        self._single = (first, lengths[0]) if rows == 1 else None
        # Neighbouring slots are read in place; others have to be gathered.
        contiguous = list(slots) == list(range(first, first + rows))
        self._range = slice(first, first + rows) if contiguous else None
        self.mask_R11K: Tensor | None = None
        if rows == 1:
            self.positions_N = position_range(lengths[0], lengths[0] + inputs, device)
            return
        lengths_R = torch.tensor(lengths, device=device)
        self._slots_R = torch.tensor(list(slots), device=device)
        self._positions_RI = lengths_R[:, None] + position_range(0, inputs, device)
        self.positions_N = self._positions_RI.view(-1)
        if min(lengths) != max(lengths):
            ends_R = lengths_R + inputs
            self.mask_R11K = (position_range(0, self.end, device) < ends_R[:, None])[:, None, None]

    def write(self, layer_cache: Tensor, block_RIgd: Tensor) -> None:
        """Put the blocks' keys or values behind their contexts in one layer's ``[slots, g, positions, d]``."""
        if self._single is not None:
            slot, start = self._single
            layer_cache[slot, :, start : start + self._inputs] = block_RIgd[0].transpose(0, 1)
        else:
            layer_cache[self._slots_R[:, None], :, self._positions_RI] = block_RIgd

    def read(self, layer_cache: Tensor) -> Tensor:
        """Keys or values ``[R, g, end, d]`` of all rows."""
        if self._range is not None:
            return layer_cache[self._range, :, : self.end]
        return layer_cache[:, :, : self.end].index_select(0, self._slots_R)


def position_range(start: int, end: int, device: torch.device) -> Tensor:
    """Positions ``start .. end - 1``."""
    return torch.arange(start, end, device=device)
