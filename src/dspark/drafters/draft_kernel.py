"""A DSpark drafter's part of a round in int8, as one call of compiled code, which threads share.

The phases of a call (see `dspark.models.decoder_kernel`): keys and values of the context that waits, the draft layers
over the blocks, base logits, and if it is wanted the most likely tokens one after the other, with their confidences.

Shapes: N context tokens, T concatenated taps, R rows (requests), I inputs of a block, G draft tokens, H hidden, D
draft vocabulary, V target ids, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from dspark.drafters.cache import DrafterCache
from dspark.models.attention import AttentionPlan
from dspark.models.compiling import SOURCE, remembered
from dspark.models.decoder_kernel import OUTSIDE, DecoderKernel, quantise_rows, run_layers
from dspark.models.decoder_layer import LayersShape
from dspark.models.int8_intrinsics import GROUP, add_atomically
from dspark.models.int8_linear import LINE, GroupedInt8Linear, finish, multiply, new_counters, quantise, take, wait
from dspark.models.rope import RopeTable
from dspark.models.row_kernels import add_row, copy_row, norm_row, rotate_head
from dspark.models.threads import run_together
from dspark.models.vector_intrinsics import pointer

__all__ = ["DraftKernel", "DraftWeights", "DraftedBlocks"]

_CONTEXT_PHASES = 5
_PHASES_BESIDE_LAYERS = 4
_PHASES_A_TOKEN = 3


@dataclass(frozen=True, kw_only=True)
class DraftWeights:
    """What a drafter has beside its layers; float32 where nothing else is said.

    Attributes:
        fc, context_norm_H: from taps to context features.
        context_kv: from those to keys and values of all layers.
        key_norms_Ld: norms of keys.
        mask_embedding_H: what every input of a block but the first is.
        lm_head: on the draft vocabulary.
        draft_token_ids_D: None where the draft vocabulary is the target's.
        w1_Vr, w2: of a vanilla sequential head; None without one.
        confidence_H, confidence_V: the confidence logit of a slot is ``confidence_H · hidden`` and a number of the
            token before it; None without a confidence head.
    """

    fc: GroupedInt8Linear
    context_norm_H: Tensor
    context_kv: GroupedInt8Linear
    key_norms_Ld: Tensor
    mask_embedding_H: Tensor
    lm_head: GroupedInt8Linear
    draft_token_ids_D: Tensor | None
    w1_Vr: Tensor | None
    w2: GroupedInt8Linear | None
    confidence_H: Tensor | None
    confidence_V: Tensor | None


@dataclass(frozen=True, kw_only=True)
class DraftedBlocks:
    """What a call gave.

    Attributes:
        hidden_RGH: backbone states of the predicting slots.
        base_RGD: base logits.
        tokens_RG: the most likely tokens, one after the other, as target ids; None if they were not asked for.
        confidence_logits_RG: of those; None without a confidence head.
    """

    hidden_RGH: Tensor
    base_RGD: Tensor
    tokens_RG: Tensor | None
    confidence_logits_RG: Tensor | None


class DraftKernel:
    """Computes context and blocks with weights that do not change any more.

    Args:
        layers: of the backbone; keys and values in float32.
        block_size: predicting slots of a block, the last of its inputs.
    """

    def __init__(
        self, layers: DecoderKernel, shape: LayersShape, weights: DraftWeights, *, rope: RopeTable, block_size: int
    ) -> None:
        self._layers = layers
        self._shape = shape
        self._weights = weights
        self._rope = rope
        self._block_size = block_size
        self._features_V = _quantised_rows(weights.w1_Vr) if weights.w1_Vr is not None else None
        self._num_tokens = next((len(t) for t in (weights.w1_Vr, weights.confidence_V) if t is not None), 0)
        self._kernel = _kernel()

    def write_context(self, cache: DrafterCache) -> None:
        """Compute and store the keys and values of what waits, and nothing else."""
        threads = torch.get_num_threads()
        context, memory = self._context(cache)
        counters, counters_at = new_counters(_CONTEXT_PHASES, threads)
        kernel = _context_kernel()
        run_together(lambda: kernel(context, counters_at, threads), threads, (self, cache, memory, counters))
        cache.waiting = []  # not before: after an error, others may still read these places as their prefix

    def draft(
        self, cache: DrafterCache, slots: Sequence[int], anchors_RH: Tensor, num_inputs: int, count: int,
        anchors_R: Tensor | None,
    ) -> DraftedBlocks:  # fmt: skip
        """Blocks behind the context of ``slots``, that which waits included.

        Args:
            anchors_RH: embeddings of the anchors.
            num_inputs: I.
            count: draft tokens G wanted.
            anchors_R: the anchors themselves, to get the most likely tokens too; or None.
        """
        weights, threads = self._weights, torch.get_num_threads()
        rows, hidden = len(slots), anchors_RH.shape[1]
        plan = AttentionPlan(cache.blocks(slots, num_inputs), cache, causal=False)
        x_NH = torch.empty(rows * num_inputs, hidden)
        rope = self._rope.table(plan.places.last_position)
        layers = self._layers.prepare(x_NH, (rope, rope), plan, cache, ())
        context, context_memory = self._context(cache)
        num_slots, groups = rows * count, weights.lm_head.packed.shape[1]
        correction_width = 0
        if weights.w2 is not None:
            groups, correction_width = max(groups, weights.w2.packed.shape[1]), weights.w2.padded_out
        scratch = torch.empty(num_slots * groups * (GROUP // 4 + 2) + rows * correction_width)
        hidden_MH = torch.empty(num_slots, hidden)
        base_MD = torch.empty(num_slots, weights.lm_head.padded_out)
        known = np.empty((rows, count + 1), np.int64)
        if anchors_R is not None:
            known[:, 0] = anchors_R.numpy()
        confidences_M = torch.empty(num_slots)
        heads = (
            anchors_RH.data_ptr(), weights.mask_embedding_H.data_ptr(), x_NH.data_ptr(), layers.out_NH.data_ptr(), rows,
            num_inputs, self._block_size, count, hidden, hidden_MH.data_ptr(), *_addresses(weights.lm_head),
            weights.lm_head.size_out, scratch.data_ptr(), base_MD.data_ptr(),
            0 if anchors_R is None else known.ctypes.data, _address(weights.draft_token_ids_D),
            _address(self._features_V), self._num_tokens, *_addresses(weights.w2),
            scratch.data_ptr() + num_slots * groups * (GROUP + 8), _address(weights.confidence_H),
            _address(weights.confidence_V), confidences_M.data_ptr(),
        )  # fmt: skip
        phases = _CONTEXT_PHASES + layers.phases + _PHASES_BESIDE_LAYERS + _PHASES_A_TOKEN * count
        counters, counters_at = new_counters(phases, threads)
        kernel = self._kernel
        memory = (self, cache, anchors_RH, layers, context_memory, scratch, hidden_MH, base_MD, known, confidences_M)
        if not run_together(
            lambda: kernel(context, layers.arguments, heads, counters_at, threads), threads, (memory, counters)
        ):
            raise ValueError(OUTSIDE)
        cache.waiting = []
        is_greedy = anchors_R is not None
        has_confidence = is_greedy and weights.confidence_H is not None
        return DraftedBlocks(
            hidden_RGH=hidden_MH.view(rows, count, hidden),
            base_RGD=base_MD[:, : weights.lm_head.size_out].unflatten(0, (rows, count)),
            tokens_RG=torch.from_numpy(known)[:, 1:] if is_greedy else None,
            confidence_logits_RG=confidences_M.view(rows, count) if has_confidence else None,
        )

    def _context(self, cache: DrafterCache) -> tuple[tuple[object, ...], tuple[object, ...]]:
        """Arguments of ``_write_context``, and what they know by address. The later of two at one place comes later."""
        c, weights, waiting = self._shape, self._weights, cache.waiting
        taps_NT = _joined([context.taps_NT for context in waiting], torch.empty(0, weights.fc.size_in))
        taps_NT = taps_NT.float().contiguous()
        positions_N = _joined([context.places.positions_N for context in waiting], torch.empty(0, dtype=torch.int64))
        token_rows_N = _joined([context.places.row_numbers for context in waiting], torch.empty(0, dtype=torch.int64))
        rope = self._rope.table(max((context.places.last_position for context in waiting), default=0))
        rows = len(taps_NT)
        groups = max(weights.fc.packed.shape[1], weights.context_kv.packed.shape[1])
        widths = weights.fc.padded_out, weights.context_kv.padded_out
        scratch = torch.empty(rows * (sum(widths) + groups * (GROUP // 4 + 2)))
        places = np.cumsum((0, *(rows * width for width in widths))) * 4 + scratch.data_ptr()
        arguments = (
            taps_NT.data_ptr(), rows, *_addresses(weights.fc), weights.fc.size_in, weights.fc.size_out,
            weights.context_norm_H.data_ptr(), np.float32(c.norm_eps), *_addresses(weights.context_kv),
            weights.key_norms_Ld.data_ptr(), c.num_layers, c.num_kv_heads, c.head_dim,
            *(table.data_ptr() for table in rope), positions_N.data_ptr(), token_rows_N.data_ptr(),
            cache.keys.data_ptr(), cache.values.data_ptr(), cache.tables.num_rows, *places.tolist(),
        )  # fmt: skip
        return arguments, (taps_NT, positions_N, token_rows_N, rope, scratch)


def _joined(parts: Sequence[Tensor], nothing: Tensor) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts))) if parts else nothing


def _address(tensor: Tensor | None) -> int:
    assert tensor is None or tensor.is_contiguous(), "an address says nothing of strides"
    return 0 if tensor is None else tensor.data_ptr()


def _addresses(linear: GroupedInt8Linear | None) -> tuple[int, int, int, int]:
    """Weights, groups of inputs, bias, width of the result; zeros for none."""
    if linear is None:
        return 0, 0, 0, 0
    return linear.packed.data_ptr(), linear.packed.shape[1], linear.bias.data_ptr(), linear.padded_out


def _quantised_rows(values_Vr: Tensor) -> Tensor:
    """All rows as `multiply` reads them: numbers, then scales, then sums."""
    rows, size = values_Vr.shape
    out = torch.empty(rows * -(-size // GROUP) * (GROUP + 8), dtype=torch.uint8)
    _quantiser()(values_Vr.contiguous().data_ptr(), rows, size, out.data_ptr())
    return out


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _norm_rows(
    y_at: int, rows: int, width: int, size: int, norm_at: int, eps: Any, q_at: int, counters_at: int, threads: int
) -> Any:
    """One phase: norm and quantise every row."""
    while True:
        row = take(counters_at)
        if row >= rows:
            break
        row_at = y_at + row * width * 4
        norm_row(row_at, row_at, norm_at, size, eps)
        quantise(row_at, row, rows, size, q_at)
        finish(counters_at, 1)
    return wait(counters_at, rows, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _write_context(
    taps_at: int, rows: int, fc_at: int, fc_groups: int, fc_bias_at: int, fc_width: int, taps_size: int, hidden: int,
    norm_at: int, eps: Any, kv_at: int, kv_groups: int, kv_bias_at: int, kv_width: int, key_norms_at: int,
    num_layers: int, kv_heads: int, head_dim: int, cos_at: int, sin_at: int, positions_at: int, token_rows_at: int,
    keys_at: int, values_at: int, num_rows: int, context_at: int, projected_at: int, q_at: int, counters_at: int,
    threads: int, thread: int,
) -> Any:  # fmt: skip
    """The phases of context tokens (SPEC eq. 2-3)."""
    if rows == 0:
        return counters_at
    positions = carray(pointer(positions_at), rows, np.int64)
    token_rows = carray(pointer(token_rows_at), rows, np.int64)
    at = quantise_rows(taps_at, rows, taps_size, q_at, counters_at, threads)
    at = multiply(q_at, rows, fc_groups, fc_at, fc_bias_at, context_at, fc_width, at, threads, thread)
    at = _norm_rows(context_at, rows, fc_width, hidden, norm_at, eps, q_at, at, threads)
    at = multiply(q_at, rows, kv_groups, kv_at, kv_bias_at, projected_at, kv_width, at, threads, thread)
    step, pieces = head_dim * 4, num_layers * kv_heads
    while True:
        piece = take(at)
        if piece >= pieces:
            break
        key_norm_at = key_norms_at + piece // kv_heads * step
        column = piece // kv_heads * 2 * kv_heads + piece % kv_heads
        for row in range(rows):  # in their order: the later of two at one place stays
            key_at = projected_at + row * kv_width * 4 + column * step
            place = (piece * num_rows + token_rows[row]) * step
            norm_row(key_at, key_at, key_norm_at, head_dim, eps)
            rotate_head(
                key_at, keys_at + place, cos_at + positions[row] * step, sin_at + positions[row] * step, head_dim
            )
            copy_row(key_at + kv_heads * step, values_at + place, head_dim)
        finish(at, 1)
    return wait(at, pieces, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _embed(
    anchors_at: int, mask_at: int, rows: int, inputs: int, hidden: int, x_at: int, counters_at: int, threads: int
) -> Any:
    """One phase: inputs of all blocks, an anchor and masks."""
    while True:
        row = take(counters_at)
        if row >= rows * inputs:
            break
        source_at = mask_at if row % inputs else anchors_at + row // inputs * hidden * 4
        copy_row(source_at, x_at + row * hidden * 4, hidden)
        finish(counters_at, 1)
    return wait(counters_at, rows * inputs, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _quantise_slots(
    out_at: int, rows: int, inputs: int, block_size: int, count: int, hidden: int, hidden_at: int, q_at: int,
    counters_at: int, threads: int,
) -> Any:  # fmt: skip
    """One phase: the states of the wanted slots side by side, and quantised."""
    while True:
        slot = take(counters_at)
        if slot >= rows * count:
            break
        source = slot // count * inputs + inputs - block_size + slot % count
        copy_row(out_at + source * hidden * 4, hidden_at + slot * hidden * 4, hidden)
        quantise(hidden_at + slot * hidden * 4, slot, rows * count, hidden, q_at)
        finish(counters_at, 1)
    return wait(counters_at, rows * count, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _copy_features(
    features_at: int, num_features: int, feature: int, row: int, rows: int, groups: int, q_at: int
) -> None:
    """A row of what `_quantised_rows` gave, as ``row`` of ``rows``."""
    size = groups * GROUP
    numbers = carray(pointer(features_at + feature * size), size, np.int8)
    to = carray(pointer(q_at + row * size), size, np.int8)
    for i in range(size):
        to[i] = numbers[i]
    for part in range(2):  # scales and sums
        begin = num_features * (size + part * groups * 4)
        copy_row(
            features_at + begin + feature * groups * 4,
            q_at + rows * (size + part * groups * 4) + row * groups * 4,
            groups,
        )


@njit(fastmath={"nnan", "nsz"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _largest(values: Any) -> Any:
    largest = values[0]
    for i in range(1, len(values)):
        largest = max(largest, values[i])
    return largest


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _most_likely(logits_at: int, size: int) -> int:
    """The column of the largest number, of equal ones the first."""
    logits = carray(pointer(logits_at), size, np.float32)
    largest = _largest(logits)
    for i in range(size):
        if logits[i] == largest:
            return i
    return 0


@njit(fastmath={"reassoc", "contract"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _dot(x: Any, y: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _take_most_likely(
    base_at: int, base_width: int, size: int, rows: int, count: int, known_at: int, draft_ids_at: int, features_at: int,
    num_tokens: int, w2_at: int, w2_groups: int, w2_bias_at: int, w2_width: int, correction_at: int, q_at: int,
    counters_at: int, threads: int, thread: int,
) -> Any:  # fmt: skip
    """The phases of greedy drafting: each token in turn, with the correction by the one before it (SPEC eq. 4)."""
    known = carray(pointer(known_at), (rows, count + 1), np.int64)
    at = counters_at
    for k in range(count):
        if w2_at != 0:
            while True:
                row = take(at)
                if row >= rows:
                    break
                _copy_features(features_at, num_tokens, known[row, k], row, rows, w2_groups, q_at)
                finish(at, 1)
            at = wait(at, rows, threads)
            at = multiply(q_at, rows, w2_groups, w2_at, w2_bias_at, correction_at, w2_width, at, threads, thread)
        while True:
            row = take(at)
            if row >= rows:
                break
            logits_at = base_at + (row * count + k) * base_width * 4
            if w2_at != 0:
                corrected_at = correction_at + row * w2_width * 4
                add_row(corrected_at, logits_at, size)
                logits_at = corrected_at
            column = _most_likely(logits_at, size)
            if draft_ids_at != 0:
                column = carray(pointer(draft_ids_at), size, np.int64)[column]
            known[row, k + 1] = column
            finish(at, 1)
        at = wait(at, rows, threads)
    return at


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _take_confidences(
    hidden_at: int, hidden: int, rows: int, count: int, known_at: int, weight_at: int, of_tokens_at: int,
    num_tokens: int, confidences_at: int, counters_at: int, threads: int,
) -> Any:  # fmt: skip
    """One phase: confidence logits of all slots (SPEC eq. 7)."""
    known = carray(pointer(known_at), (rows, count + 1), np.int64)
    weight = carray(pointer(weight_at), hidden, np.float32)
    of_tokens = carray(pointer(of_tokens_at), num_tokens, np.float32)
    confidences = carray(pointer(confidences_at), (rows, count), np.float32)
    while True:
        row = take(counters_at)
        if row >= rows:
            break
        for k in range(count):
            state = carray(pointer(hidden_at + (row * count + k) * hidden * 4), hidden, np.float32)
            confidences[row, k] = _dot(state, weight) + of_tokens[known[row, k]]
        finish(counters_at, 1)
    return wait(counters_at, rows, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _draft_heads(
    hidden_at: int, hidden: int, rows: int, inputs: int, block_size: int, count: int, out_at: int, lm_head_at: int,
    lm_head_groups: int, lm_head_bias_at: int, base_width: int, size: int, q_at: int, base_at: int, known_at: int,
    draft_ids_at: int, features_at: int, num_tokens: int, w2_at: int, w2_groups: int, w2_bias_at: int, w2_width: int,
    correction_at: int, weight_at: int, of_tokens_at: int, confidences_at: int, counters_at: int, threads: int,
    thread: int,
) -> None:  # fmt: skip
    """The phases behind the layers."""
    at = _quantise_slots(
        out_at, rows, inputs, block_size, count, hidden, hidden_at, q_at, counters_at, threads
    )  # fmt: skip
    at = multiply(
        q_at, rows * count, lm_head_groups, lm_head_at, lm_head_bias_at, base_at, base_width, at, threads, thread
    )
    if known_at == 0:
        return
    at = _take_most_likely(
        base_at, base_width, size, rows, count, known_at, draft_ids_at, features_at, num_tokens, w2_at, w2_groups,
        w2_bias_at, w2_width, correction_at, q_at, at, threads, thread,
    )  # fmt: skip
    if weight_at != 0:
        _take_confidences(
            hidden_at, hidden, rows, count, known_at, weight_at, of_tokens_at, num_tokens, confidences_at, at, threads
        )


@lru_cache
def _kernel(source: str = SOURCE) -> Callable[..., bool]:
    def draft(context, layers, heads, counters_at, threads):  # type: ignore[no-untyped-def]
        _ = source
        (
            anchors_at, mask_at, x_at, out_at, rows, inputs, block_size, count, hidden, hidden_at, lm_head_at,
            lm_head_groups, lm_head_bias_at, base_width, size, q_at, base_at, known_at, draft_ids_at, features_at,
            num_tokens, w2_at, w2_groups, w2_bias_at, w2_width, correction_at, weight_at, of_tokens_at, confidences_at,
        ) = heads  # fmt: skip
        thread = add_atomically(counters_at, 1)
        at = _write_context(*context, counters_at + LINE, threads, thread)
        at = _embed(anchors_at, mask_at, rows, inputs, hidden, x_at, at, threads)
        understood, at = run_layers(*layers, at, threads, thread)
        _draft_heads(
            hidden_at, hidden, rows, inputs, block_size, count, out_at, lm_head_at, lm_head_groups, lm_head_bias_at,
            base_width, size, q_at, base_at, known_at, draft_ids_at, features_at, num_tokens, w2_at, w2_groups,
            w2_bias_at, w2_width, correction_at, weight_at, of_tokens_at, confidences_at, at, threads, thread,
        )  # fmt: skip
        return understood

    kernel: Callable[..., bool] = remembered(draft)
    return kernel


@lru_cache
def _context_kernel(source: str = SOURCE) -> Callable[..., bool]:
    def write_context(context, counters_at, threads):  # type: ignore[no-untyped-def]
        _ = source
        thread = add_atomically(counters_at, 1)
        _write_context(*context, counters_at + LINE, threads, thread)
        return True

    kernel: Callable[..., bool] = remembered(write_context)
    return kernel


@lru_cache
def _quantiser(source: str = SOURCE) -> Callable[..., None]:
    def quantise_all(values_at, rows, size, q_at):  # type: ignore[no-untyped-def]
        _ = source
        for row in range(rows):
            quantise(values_at + row * size * 4, row, rows, size, q_at)

    kernel: Callable[..., None] = remembered(quantise_all)
    return kernel
