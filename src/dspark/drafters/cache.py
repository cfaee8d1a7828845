"""What a drafter remembers of the committed context, and how a round's blocks are written behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.types import Segment


class DrafterCache:
    """Keys and values of the committed context, for every draft layer and slot, allocated once.

    Shapes: ``keys`` and ``values`` are ``[layers, slots, kv_heads, max_length + scratch, head_dim]``. The ``scratch``
    rows after a slot's context hold the keys and values of the block being drafted, so that attention reads one piece
    of memory; the next `extend` overwrites them.

    Drafters over pairs (`dspark.drafters.pairs`) also keep the feature of every context position, in ``features``
    ``[slots, max_length, feature_size]``: the next pair needs the last one, whatever was rolled back.

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
        feature_size: int = 0,
    ) -> None:
        if num_slots < 1 or max_length < 1:
            raise ValueError(f"num_slots and max_length must be at least 1, got {num_slots} and {max_length}")
        shape = (num_layers, num_slots, num_kv_heads, max_length + scratch, head_dim)
        self.keys: Tensor = torch.zeros(shape, device=device, dtype=dtype)
        self.values: Tensor = torch.zeros(shape, device=device, dtype=dtype)
        self.features: Tensor = torch.zeros((num_slots, max_length, feature_size), device=device, dtype=dtype)
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

    def __init__(self, slots: Sequence[int], starts: Sequence[int], inputs: int, device: torch.device) -> None:
        """See the class.

        Args:
            slots: One different slot per row.
            starts: Where each row's block begins; a row sees everything before and all of its block.
            inputs: Inputs of a block.
            device: Where the cache is.
        """
        lengths = list(starts)
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


def flat_places(segments: Sequence[Segment], device: torch.device) -> tuple[Tensor, Tensor]:
    """``(slots_N, positions_N)`` of the segments' tokens, in their order."""
    lengths = torch.tensor([segment.length for segment in segments])
    slots = torch.tensor([segment.slot for segment in segments])
    positions_N = torch.cat([position_range(segment.start, segment.end, device) for segment in segments])
    return slots.repeat_interleave(lengths).to(device), positions_N


def check_extension(
    cache: DrafterCache, segments: Sequence[Segment], token_ids_N: Tensor, taps_NT: Tensor, width: int
) -> int:
    """Check the arguments of a drafter's `extend`, whose features are `width` wide; returns the number of tokens.

    Raises:
        ValueError: if a segment does not continue its slot or does not fit, or if there are too few or too many
            features or tokens.
    """
    total = sum(segment.length for segment in segments)
    if taps_NT.shape != (total, width):
        raise ValueError(f"taps have shape {tuple(taps_NT.shape)}; the segments and tap_layers need ({total}, {width})")
    if token_ids_N.shape != (total,):
        raise ValueError(f"token_ids have shape {tuple(token_ids_N.shape)}; the segments hold {total} tokens")
    if len({segment.slot for segment in segments}) != len(segments):
        raise ValueError("a slot appears in two segments; pass each slot's tokens as one segment")
    for segment in segments:
        cache.check_segment(segment.slot, segment.start, segment.end)
    return total


def check_proposal(slots: Sequence[int], anchors_R: Tensor, num_tokens: int | None, block_size: int) -> int:
    """Check the arguments of a drafter's `propose`; returns the number of draft tokens.

    Raises:
        ValueError: for a wrong number of tokens, rows or slots.
    """
    count = block_size if num_tokens is None else num_tokens
    if not 1 <= count <= block_size:
        raise ValueError(f"num_tokens must be 1 to the block size {block_size}, got {count}")
    if len(slots) != len(anchors_R) or len(set(slots)) != len(slots) or not slots:
        raise ValueError(
            f"one different slot per anchor is needed, got {len(slots)} slots for {len(anchors_R)} anchors"
        )
    return count
