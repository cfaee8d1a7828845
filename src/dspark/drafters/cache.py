"""What a drafter remembers of the committed context, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
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

    A drafter need not compute keys and values before it drafts. It may put them off in one of two ways. Features that
    came are in ``waiting``, oldest first; slots and blocks may have changed hands since, and a place that is there
    twice belongs to the later one. Or each place keeps its own: ``features_of_rows`` holds them, in ``feature_bytes``
    bytes of the drafter's own making, where ``is_waiting``. These may wait for ever, and are forgotten with the place.

    Drafters over pairs (`dspark.drafters.pairs`) also keep the feature of every context position, in ``features``
    ``[rows, feature_size]``: the next pair needs the last one, whatever was rolled back.

    Args:
        max_length: Most context tokens of a slot.
        scratch: Inputs of a block.
        tables: Where the positions are; with room for ``scratch`` more than ``max_length`` a slot.
        dtype: Of what the drafter computes.
        for_int8: Keep float16, keys as columns, for the compiled code of int8; else what attention reads best.
        feature_bytes: Of a row of ``features_of_rows``; 0 for none.
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
        feature_bytes: int = 0,
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
            has_key_columns=for_int8,
        )
        self.features: Tensor = torch.zeros((self.tables.num_rows, feature_size), device=device, dtype=dtype)
        self.waiting: list[WaitingContext] = []
        self.features_of_rows: Tensor = torch.empty((self.tables.num_rows, feature_bytes), dtype=torch.uint8)
        self.is_waiting: npt.NDArray[np.bool_] = np.zeros(self.tables.num_rows if feature_bytes else 0, np.bool_)
        self._ready = [0] * num_slots

    @property
    def num_waiting(self) -> int:
        """Tokens in ``waiting``."""
        return sum(context.taps_NT.shape[0] for context in self.waiting)

    @property
    def nbytes_per_block(self) -> int:
        """Bytes that one block takes here."""
        own = self.features.nbytes + self.features_of_rows.nbytes + self.is_waiting.nbytes
        return super().nbytes_per_block + own // self.tables.num_blocks

    # ---- places that keep features of their own ----------------------------------------------------------------------

    def truncate(self, slot: int, length: int) -> None:
        """Forget every position of ``slot`` from ``length`` on."""
        super().truncate(slot, length)
        self._ready[slot] = min(self._ready[slot], length)

    def adopt(self, slot: int, length: int) -> None:
        """Count positions ``0 .. length - 1`` of ``slot`` as valid: others have computed them, or put them off."""
        super().adopt(slot, length)
        self._ready[slot] = length
        if len(self.is_waiting) and length > 0:
            waits_N = self.is_waiting[self.tables.places([Segment(slot, 0, length)]).row_numbers.numpy()]
            self._ready[slot] = int(waits_N.argmax()) if waits_N.any() else length

    def reserve(self, segments: Sequence[Segment]) -> None:
        """Check that ``segments`` continue their slots and fit, then count them as written."""
        super().reserve(segments)
        for segment in segments:
            self._ready[segment.slot] = min(self._ready[segment.slot], segment.start)

    def num_behind(self, slot: int) -> int:
        """Tokens of the slot's context that may wait at their places."""
        return self.lengths[slot] - self._ready[slot] if len(self.is_waiting) else 0

    def not_ready(self, slots: Sequence[int]) -> list[Segment]:
        """The context of these slots that may wait: what comes before is known to be computed."""
        lengths, ready = self.lengths, self._ready
        late = [slot for slot in slots if ready[slot] < lengths[slot]]
        return [Segment(slot, ready[slot], lengths[slot] - ready[slot]) for slot in late]

    def set_ready(self, segments: Sequence[Segment]) -> None:
        """Nothing waits any more in what `not_ready` gave."""
        for segment in segments:
            self._ready[segment.slot] = segment.end

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
