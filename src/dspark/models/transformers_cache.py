"""Key/value memory for models of transformers: slots that roll back, whatever the layer's attention.

A layer keeps every position of every slot, also one with a sliding window: its mask hides what lies outside the window.
transformers itself keeps the window only, and could then not go back behind a rejected token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from dspark.models.kv_cache import check_size, check_slot, reserve_slots, truncate_slot
from dspark.types import Segment

# Layers whose whole state are keys and values by position; the reason why the others cannot be used goes to the user.
_KEEPS_POSITIONS = (DynamicLayer, DynamicSlidingWindowLayer)
# Stands for a layer without keys and values of its own; older releases leave such layers out.
_NoLayer = getattr(cache_utils, "DummyLayer", None)


class SlotCache:
    """Keys and values of ``num_slots`` requests (implements :class:`~dspark.models.target.TargetCache`).

    Memory of a layer is ``[slots, kv_heads, max_length, head_dim]``, taken at its first use. ``lengths[slot]`` counts
    the valid positions; what lies beyond is stale and overwritten before it counts, so rolling back costs nothing.

    Args:
        layer_kinds: for each decoder layer, whether it has keys and values of its own (:func:`layer_kinds`).
    """

    def __init__(self, *, layer_kinds: Sequence[bool], num_slots: int, max_length: int) -> None:
        check_size(num_slots, max_length)
        self.num_slots = num_slots
        self.max_length = max_length
        self.lengths = [0] * num_slots
        self._own_layers = [_SlotLayer(num_slots, max_length) for has_own in layer_kinds if has_own]
        own = iter(self._own_layers)
        self._cache = Cache(layers=[next(own) if has_own else _no_layer() for has_own in layer_kinds])

    def truncate(self, slot: int, length: int) -> None:
        """Forget every position of ``slot`` from ``length`` on (see :func:`~dspark.models.kv_cache.truncate_slot`)."""
        truncate_slot(self.lengths, slot, length)

    def reserve(self, segments: Sequence[Segment]) -> None:
        """Check that ``segments`` continue their slots and fit, then count them as written."""
        reserve_slots(self.lengths, lambda slot: self.max_length, segments)

    def adopt(self, slot: int, length: int) -> None:
        """Refused for more than nothing: slots share no blocks."""
        check_slot(self.lengths, slot)
        if length != 0:
            raise ValueError(f"slot {slot} cannot adopt {length} positions: a transformers target shares no blocks")
        self.lengths[slot] = 0

    def rows(self, slots: Sequence[int], start: int) -> Cache:
        """The cache as transformers sees it in one pass: a batch of ``slots``, ``start`` positions known in each."""
        for layer in self._own_layers:
            layer.begin(slots, start)
        return self._cache


def _no_layer() -> Any:
    assert _NoLayer is not None, "layer_kinds names no such layer where there is no class for it"
    return _NoLayer()


class _SlotLayer(DynamicLayer):  # type: ignore[misc] # untyped base
    """One layer's memory; a pass writes behind ``start`` in its slots and reads all positions up to there."""

    is_sliding = False  # for the masks: all positions are here

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__()
        self._num_slots = num_slots
        self._max_length = max_length
        self._memory: tuple[torch.Tensor, torch.Tensor] | None = None
        self._slots: Sequence[int] = ()
        self._length = 0

    def begin(self, slots: Sequence[int], start: int) -> None:
        self._slots = slots
        self._length = start

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[R, kv_heads, Q, D]`` and return all positions so far, ``[R, kv_heads, start + Q, D]``."""
        if self._memory is None:
            self._memory = self._allocate(key_states), self._allocate(value_states)
        start, end = self._length, self._length + key_states.shape[2]
        self._length = end
        keys, values = self._memory
        first = self._slots[0]
        if list(self._slots) == list(range(first, first + len(self._slots))):
            rows: slice | list[int] = slice(first, first + len(self._slots))
        else:
            rows = list(self._slots)
        keys[rows, :, start:end] = key_states
        values[rows, :, start:end] = value_states
        return keys[rows, :, :end], values[rows, :, :end]

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        shape = (self._num_slots, states.shape[1], self._max_length, states.shape[3])
        return torch.zeros(shape, dtype=states.dtype, device=states.device)


def layer_kinds(config: Any) -> tuple[bool, ...]:
    """For each decoder layer, whether it has keys and values of its own (a layer may also share or need none).

    Args:
        config: of the text model, as transformers has it.

    Raises:
        ValueError: naming the model type and the layers, if a layer keeps a state that cannot be rolled back.
    """
    reason = "it cannot be rolled back when a draft token is rejected; take a model whose layers all are attention"
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, AttributeError) as error:
        raise ValueError(
            f"model_type {config.model_type!r} keeps a state of its own kind ({error}) and cannot be a target: {reason}"
        ) from error
    kinds = [type(layer) for layer in layers]
    for index, kind in enumerate(kinds):
        if kind in _KEEPS_POSITIONS or kind is _NoLayer:
            continue
        what = "an index beside its keys and values" if "Indexed" in kind.__name__ else "a recurrent state"
        count = sum(other is kind for other in kinds)
        raise ValueError(
            f"model_type {config.model_type!r} cannot be a target: {count} of its {len(kinds)} layers (the first is "
            f"{index}) keep {what} ({kind.__name__}), and {reason}"
        )
    return tuple(kind in _KEEPS_POSITIONS for kind in kinds)
