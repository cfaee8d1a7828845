"""What a drafter remembers of the committed context, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.models.block_tables import BlockTables, Places
from dspark.models.kv_cache import KVCache
from dspark.types import Segment


@dataclass(frozen=True, kw_only=True)
class WaitingContext:
    """Features ``[N, T]`` of tokens that count as context, and where their keys and values will go."""

    taps_NT: Tensor
    places: Places


class DrafterCache(KVCache):
    """Keys and values of the committed context, for every draft layer and slot.

    The ``scratch`` positions after a slot's context hold the keys and values of the block being drafted, so that
    attention reads one piece of memory; the next `extend` overwrites them. ``lengths[slot]`` is also the position of
    the slot's next anchor.

    A drafter need not compute keys and values before it drafts: what it has put off is in ``waiting``, oldest first.
    Slots and blocks may have changed hands since; a place that is there twice belongs to the later one.

    Drafters over pairs (`dspark.drafters.pairs`) also keep the feature of every context position, in ``features``
    ``[rows, feature_size]``: the next pair needs the last one, whatever was rolled back.

    Args:
        max_length: Most context tokens of a slot.
        scratch: Inputs of a block.
        tables: Where the positions are; with room for ``scratch`` more than ``max_length`` a slot.
        dtype: Of what the drafter computes.
        for_int8: Keep float16, keys as columns, for the compiled code of int8; else what attention reads best.
        feature_size: Width of ``features``; 0 for none.
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
        for_int8: bool = False,
        feature_size: int = 0,
        tables: BlockTables | None = None,
    ) -> None:
        # On a CPU the compiled attention reads float32: faster, and a row's bits do not depend on the others.
        memory_dtype = torch.float16 if for_int8 else torch.float32 if device.type == "cpu" else dtype
        super().__init__(
            num_layers=num_layers,
            num_slots=num_slots,
            num_kv_heads=num_kv_heads,
            max_length=max_length,
            head_dim=head_dim,
            dtype=memory_dtype,
            device=device,
            tables=tables,
            scratch=scratch,
            key_columns=for_int8,
        )
        self.features: Tensor = torch.zeros((self.tables.num_rows, feature_size), device=device, dtype=dtype)
        self.waiting: list[WaitingContext] = []

    @property
    def num_waiting(self) -> int:
        """Tokens in ``waiting``."""
        return sum(context.taps_NT.shape[0] for context in self.waiting)

    @property
    def nbytes_per_block(self) -> int:
        """Bytes that one block takes here."""
        return super().nbytes_per_block + self.features.nbytes // self.tables.num_blocks

    def blocks(self, slots: Sequence[int], inputs: int) -> list[Segment]:
        """Where blocks of ``inputs`` tokens go, each behind its slot's context.

        Raises:
            ValueError: if a slot has no room for its block.
        """
        segments = [Segment(slot, self.lengths[slot], inputs) for slot in slots]
        for segment in segments:
            if segment.end > (capacity := self.tables.capacity(segment.slot)):
                raise ValueError(
                    f"slot {segment.slot} has room for {capacity} positions, its block of {inputs} needs "
                    f"{segment.end}: give the slot more blocks"
                )
        return segments


def position_range(start: int, end: int, device: torch.device) -> Tensor:
    """Positions ``start .. end - 1``."""
    return torch.arange(start, end, device=device)


def reserve_extension(
    cache: DrafterCache, segments: Sequence[Segment], token_ids_N: Tensor, taps_NT: Tensor, width: int
) -> list[Segment]:
    """Check the arguments of a drafter's `extend`, whose features are `width` wide, and count its tokens as written.

    Returns:
        The segments that hold tokens.

    Raises:
        ValueError: if a segment does not continue its slot or does not fit, or if there are too few or too many
            features or tokens. Nothing is changed then.
    """
    total = sum(segment.length for segment in segments)
    if taps_NT.shape != (total, width):
        raise ValueError(f"taps have shape {tuple(taps_NT.shape)}; the segments and tap_layers need ({total}, {width})")
    if token_ids_N.shape != (total,):
        raise ValueError(f"token_ids have shape {tuple(token_ids_N.shape)}; the segments hold {total} tokens")
    filled = [segment for segment in segments if segment.length != 0]
    cache.reserve(filled)
    return filled


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
