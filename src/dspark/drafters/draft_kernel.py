"""A DSpark drafter's part of a round in int8, as one call of compiled code, which threads share.

The phases of a call (see `dspark.models.decoder_kernel`): keys and values of the context that was put off, the draft
layers over the blocks, base logits, and if it is wanted tokens, drawn one after the other, with their confidences.

Shapes: N context tokens, T concatenated taps, R rows (requests), I inputs of a block, G draft tokens, H hidden, D
draft vocabulary, V target ids, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from dspark.compiling import remembered
from dspark.drafters.cache import DrafterCache
from dspark.drafters.protocol import DraftBlock, PlainSampler
from dspark.models.attention import AttentionPlan
from dspark.models.block_tables import BLOCK_SIZE, Places
from dspark.models.compiling import SOURCE
from dspark.models.decoder_kernel import OUTSIDE, DecoderKernel, address, run_layers, store_key_and_value
from dspark.models.decoder_layer import LayersShape
from dspark.models.int8_intrinsics import GROUP, ROW_GROUP_BYTES
from dspark.models.int8_linear import GroupedInt8Linear, multiply, quantise, quantised_bytes
from dspark.models.phases import LINE, add_atomically, meet, new_counters, read_atomically, take
from dspark.models.rope import RopeTable
from dspark.models.row_kernels import add_row, copy_row, draw, most_likely, norm_row, quantise_row, softmax_of
from dspark.models.threads import run_together
from dspark.models.vector_intrinsics import pointer
from dspark.types import Segment

__all__ = ["DraftKernel", "DraftWeights", "quantised_rows"]

_MOST_CONTEXT = 512
"""Context tokens of one call: more of them take no less time for each, but memory for what lies between products."""
_CONTEXT_PHASES = 5
_PHASES_BESIDE_LAYERS = 4
_PHASES_A_TOKEN = 3

Floats = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class DraftWeights:
    """What a drafter has beside its layers; float32 where nothing else is said.

    Attributes:
        fc, context_norm_H: from taps to context features.
        context_kv: from those to keys and values of all layers.
        key_norms_Ld: norms of keys.
        embedding_VH, mask_token_id: of a block's inputs, the anchor and masks behind it; float32 or bfloat16.
        lm_head: on the draft vocabulary.
        draft_token_ids_D: None where the draft vocabulary is the target's.
        features_V, w2: of a vanilla sequential head: `quantised_rows` of W1, and W2; None without one.
        confidence_H, confidence_V: the confidence logit of a slot is ``confidence_H · hidden`` and a number of the
            token before it; None without a confidence head.
    """

    fc: GroupedInt8Linear
    context_norm_H: Tensor
    context_kv: GroupedInt8Linear
    key_norms_Ld: Tensor
    embedding_VH: Tensor
    mask_token_id: int
    lm_head: GroupedInt8Linear
    draft_token_ids_D: Tensor | None
    features_V: Tensor | None
    w2: GroupedInt8Linear | None
    confidence_H: Tensor | None
    confidence_V: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drafted:
    """What a call wrote: tokens, their confidences, what they were drawn from, and the states.

    ``tokens_RK`` has K = G + 1 columns: the anchor, then what was drawn, or -1 where nothing could be. The parts of
    ``scratch`` are ``sizes`` numbers long: backbone states, then base logits, padded.
    """

    tokens_RK: npt.NDArray[np.int64]
    confidences_RG: npt.NDArray[np.float32]
    probs_RGD: Tensor | None
    scratch: Tensor
    sizes: tuple[int, ...]


class DraftKernel:
    """Computes context and blocks with weights that do not change any more.

    Args:
        layers: of the backbone; keys and values in float16.
        num_inputs: of a block.
        block_size: predicting slots of a block, the last of its inputs.
    """

    def __init__(
        self,
        layers: DecoderKernel,
        shape: LayersShape,
        weights: DraftWeights,
        *,
        rope: RopeTable,
        num_inputs: int,
        block_size: int,
    ) -> None:
        self._layers = layers
        self._shape = shape
        self._weights = weights
        self._rope = rope
        self._num_inputs, self._block_size = num_inputs, block_size
        self._kernel = _kernel()
        w = weights
        self._head_arguments = _linear_arguments(w.lm_head)
        self._draw_arguments = (address(w.draft_token_ids_D), address(w.features_V), *_linear_arguments(w.w2))
        self._confidence_arguments = (address(w.confidence_H), address(w.confidence_V))
        self._context_arguments = (*_linear_arguments(w.fc), w.fc.size_out, w.context_norm_H.data_ptr())
        self._kv_arguments = (
            *_linear_arguments(w.context_kv), w.key_norms_Ld.data_ptr(), shape.num_layers, shape.num_kv_heads,
            shape.head_dim,
        )  # fmt: skip

    def __reduce__(self) -> tuple[Callable[..., DraftKernel], tuple[object, ...]]:
        """A copy looks up the addresses of its own weights."""
        copy = partial(DraftKernel, rope=self._rope, num_inputs=self._num_inputs, block_size=self._block_size)
        return copy, (self._layers, self._shape, self._weights)

    @property
    def feature_bytes(self) -> int:
        """Bytes in which features of a token wait: quantised, as the first product reads them."""
        return quantised_bytes(1, self._weights.fc.packed.shape[1])

    def put_off(self, cache: DrafterCache, places: Places, taps_NT: Tensor) -> None:
        """Keep features of context tokens at their places."""
        taps_NT = taps_NT.float().contiguous()
        rows = places.row_numbers.contiguous()
        features = cache.features_of_rows
        _keeper()(
            taps_NT.data_ptr(), *taps_NT.shape, rows.data_ptr(), features.data_ptr(), features.shape[1],
            cache.is_waiting,
        )  # fmt: skip

    def catch_up(self, cache: DrafterCache, slots: Sequence[int], least: int) -> None:
        """Compute what was put off of the context of those slots of which more than ``least`` tokens may wait."""
        self.check_cache(cache)
        self._write_context(cache, [segment for segment in cache.not_ready(slots) if segment.length > least])

    def _write_context(self, cache: DrafterCache, segments: Sequence[Segment]) -> None:
        """Compute what waits in these segments, which `not_ready` gave."""
        positions_N, rows_N = _waiting(cache, segments)
        threads, kernel = torch.get_num_threads(), _context_kernel()
        for start in range(0, len(rows_N), _MOST_CONTEXT):
            part = slice(start, start + _MOST_CONTEXT)
            context, memory = self._context(cache, positions_N[part], rows_N[part])
            counters, counters_at = new_counters(_CONTEXT_PHASES, threads)
            arguments = context, counters_at, threads
            run_together(partial(kernel, *arguments), threads, (self, cache, memory, counters))
            cache.is_waiting[rows_N[part]] = False  # not before: after an error they still wait
        cache.set_ready(segments)

    def states(self, cache: DrafterCache, slots: Sequence[int], anchors_R: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Backbone states ``[R, G, H]`` and base logits ``[R, G, D]`` of what `draft` would draw from."""
        rows, head = len(slots), self._weights.lm_head
        drafted = self._run(cache, slots, anchors_R, count, None)
        hidden, base = drafted.scratch[: sum(drafted.sizes[:2])].split(drafted.sizes[:2])
        return hidden.view(rows, count, -1), base.view(rows, count, head.padded_out)[..., : head.size_out]

    def draft(
        self, cache: DrafterCache, slots: Sequence[int], anchors_R: Tensor, count: int, sampler: PlainSampler
    ) -> DraftBlock:
        """Blocks behind the context of ``slots``, that which was put off included.

        Args:
            anchors_R: int64, the last token of each.
            count: draft tokens G wanted.

        Raises:
            ValueError: an anchor is outside the vocabulary, the sampler is of other rows or fewer tokens, the cache is
                another model's, or logits that are drawn from have no finite maximum.
        """
        drafted = self._run(cache, slots, anchors_R, count, sampler)
        if min(map(min, drafted.tokens_RK.tolist())) < 0:
            raise ValueError("the drafter's logits have no finite maximum: its weights hold NaN or infinity")
        has_confidences = self._weights.confidence_H is not None
        return DraftBlock(
            tokens_RG=torch.from_numpy(drafted.tokens_RK[:, 1:]),
            probs_RGD=drafted.probs_RGD,
            confidence_logits_RG=torch.from_numpy(drafted.confidences_RG) if has_confidences else None,
        )

    def _run(
        self, cache: DrafterCache, slots: Sequence[int], anchors_R: Tensor, count: int, sampler: PlainSampler | None
    ) -> _Drafted:
        """One call of compiled code; without a sampler it ends with the base logits."""
        self.check_cache(cache)
        weights, threads = self._weights, torch.get_num_threads()
        rows, num_inputs, num_predicted = len(slots), self._num_inputs, len(slots) * count
        vocab_size, hidden = weights.embedding_VH.shape
        size, width = weights.lm_head.size_out, weights.lm_head.padded_out
        anchors = anchors_R.tolist()
        if not 0 <= min(anchors) <= max(anchors) < vocab_size:
            raise ValueError(f"anchors_R has an id outside the vocabulary 0..{vocab_size - 1}")
        known = np.empty((rows, count + 1), np.int64)
        known[:, 0] = anchors
        scales_R, uniforms_RG = _draws(sampler, rows, count)
        plan = AttentionPlan(cache.blocks(slots, num_inputs), cache, causal=False)
        x_NH = torch.empty(rows * num_inputs, hidden)
        rope = self._rope.table(plan.places.last_position)
        layers = self._layers.prepare(x_NH, (rope, rope), plan, cache, ())
        not_ready = cache.not_ready(slots)
        if sum(segment.length for segment in not_ready) > _MOST_CONTEXT:
            self._write_context(cache, not_ready)
            not_ready = []
        positions_N, rows_N = _waiting(cache, not_ready)
        context, context_memory = self._context(cache, positions_N, rows_N)
        groups = max(linear.packed.shape[1] for linear in (weights.lm_head, weights.w2) if linear is not None)
        confidences_RG = np.empty((rows, count), np.float32)
        correction_width = 0 if weights.w2 is None else weights.w2.padded_out
        sizes = (
            num_predicted * hidden,
            num_predicted * width,
            rows * correction_width,
            quantised_bytes(num_predicted, groups) // 4,
        )
        scratch = torch.empty(sum(sizes))
        scratch_at = scratch.data_ptr()
        hidden_at, base_at, correction_at, q_at, _ = (scratch_at + 4 * place for place in accumulate(sizes, initial=0))
        probs_RGD: Tensor | None = None
        if sampler is not None and not sampler.is_greedy:
            probs_RGD = torch.empty(rows, count, size)
            for row in np.flatnonzero(scales_R < 0.0).tolist():
                probs_RGD[row] = 0.0
        arguments = (
            context,
            (
                rows, num_inputs, hidden, x_NH.data_ptr(), weights.embedding_VH.data_ptr(),
                weights.embedding_VH.dtype == torch.bfloat16, weights.mask_token_id,
            ),
            layers.arguments,
            (
                layers.out_NH.data_ptr(), rows, num_inputs, self._block_size, count, hidden, hidden_at, q_at,
                *self._head_arguments, base_at,
            ),
            (
                base_at, width, size, rows, count, address(probs_RGD), *self._draw_arguments, correction_at, q_at,
            ),
            (
                hidden_at, hidden, rows, count, *self._confidence_arguments, vocab_size,
            ),
            (known, scales_R, uniforms_RG, confidences_RG),
            sampler is not None,
            weights.confidence_H is not None,
        )  # fmt: skip
        phases = _CONTEXT_PHASES + layers.phases + _PHASES_BESIDE_LAYERS + _PHASES_A_TOKEN * count
        counters, counters_at = new_counters(phases, threads)
        kernel = self._kernel
        memory = (
            self, cache, layers, context_memory, scratch, known, scales_R, uniforms_RG, probs_RGD, confidences_RG,
            counters,
        )  # fmt: skip
        if not run_together(lambda: kernel(*arguments, counters_at, threads), threads, memory):
            raise ValueError(OUTSIDE)
        cache.is_waiting[rows_N] = False
        cache.set_ready(not_ready)
        return _Drafted(
            tokens_RK=known, confidences_RG=confidences_RG, probs_RGD=probs_RGD, scratch=scratch, sizes=sizes
        )

    def confidences(self, hidden_RGH: Tensor, known_RG: Tensor) -> Tensor | None:
        """Confidence logits ``[R, G]`` of slots whose previous tokens are known, as `draft` gives them; or None."""
        weights, (rows, count, hidden) = self._weights, hidden_RGH.shape
        if weights.confidence_H is None:
            return None
        out_RG, hidden_RGH = np.empty((rows, count), np.float32), hidden_RGH.contiguous()
        counters, counters_at = new_counters(1, 1)
        slots = hidden_RGH.data_ptr(), hidden, rows, count, *self._confidence_arguments, len(weights.embedding_VH)
        _confidence_kernel()(slots, known_RG.contiguous().numpy(), out_RG, counters_at)
        del counters
        return torch.from_numpy(out_RG)

    def check_cache(self, cache: DrafterCache) -> None:
        """Raise ValueError unless the memory of ``cache`` is this drafter's."""
        self._layers.check_cache(cache)
        if cache.features_of_rows.shape[1] != self.feature_bytes:
            raise ValueError(
                f"the cache keeps features in {cache.features_of_rows.shape[1]} bytes, this drafter in "
                f"{self.feature_bytes}: take one from its new_cache"
            )

    def _context(
        self, cache: DrafterCache, positions_N: Ints, rows_N: Ints
    ) -> tuple[tuple[object, ...], tuple[object, ...]]:
        """Arguments of ``_write_context``, and what they know by address."""
        weights, rows = self._weights, len(rows_N)
        rope = self._rope.table(int(positions_N.max(initial=0)))
        groups = max(weights.fc.packed.shape[1], weights.context_kv.packed.shape[1])
        widths = weights.fc.padded_out, weights.context_kv.padded_out
        scratch = torch.empty(rows * sum(widths) + quantised_bytes(rows, groups) // 4)
        scratch_at, features = scratch.data_ptr(), cache.features_of_rows
        arguments = (
            features.data_ptr(), rows, *self._context_arguments, np.float32(self._shape.norm_eps),
            *self._kv_arguments, *(table.data_ptr() for table in rope), positions_N, rows_N,
            cache.keys.data_ptr(), cache.values.data_ptr(), cache.tables.num_rows, scratch_at,
            scratch_at + 4 * rows * widths[0], scratch_at + 4 * rows * sum(widths),
        )  # fmt: skip
        return arguments, (cache, positions_N, rows_N, rope, scratch)


def _draws(sampler: PlainSampler | None, rows: int, count: int) -> tuple[Floats, Floats]:
    """What the exponents of 2 in each row's softmax are scaled by, negative for the most likely token; and uniforms."""
    if sampler is None:
        return np.full(rows, -1.0, np.float32), np.empty((0, 0))
    if len(sampler.temperatures_R) != rows:
        raise ValueError(
            f"the sampler has {len(sampler.temperatures_R)} temperatures: give one for each of {rows} rows"
        )
    if sampler.is_greedy:
        return np.full(rows, -1.0, np.float32), np.empty((0, 0))
    uniforms_RG = np.ascontiguousarray(sampler.uniforms_RG[:, :count], np.float64)
    if uniforms_RG.shape != (rows, count) or not ((uniforms_RG >= 0.0) & (uniforms_RG < 1.0)).all():
        raise ValueError(
            f"the sampler's uniforms have shape {sampler.uniforms_RG.shape}: give a number in [0, 1) for each of "
            f"{rows} rows and {count} tokens"
        )
    scales = [math.log2(math.e) / value if value > 0.0 else -1.0 for value in sampler.temperatures_R]
    return np.array(scales, np.float32), uniforms_RG


def _waiting(cache: DrafterCache, segments: Sequence[Segment]) -> tuple[Ints, Ints]:
    """Positions and rows of what waits in these segments, each row once."""
    total = sum(segment.length for segment in segments)
    positions_N, rows_N = np.empty(total, np.int64), np.empty(total, np.int64)
    count = 0
    if segments:
        table = np.array([(segment.slot, segment.start, segment.end) for segment in segments], np.int64)
        count = _finder()(table, cache.tables.tables_SB.numpy(), cache.is_waiting, positions_N, rows_N)
    return positions_N[:count], rows_N[:count]


def _linear_arguments(linear: GroupedInt8Linear | None) -> tuple[int, int, int, int]:
    """Weights, groups of inputs, bias, width of the result; zeros for none."""
    if linear is None:
        return 0, 0, 0, 0
    return linear.packed.data_ptr(), linear.packed.shape[1], linear.bias.data_ptr(), linear.padded_out


def quantised_rows(values_Vr: Tensor) -> Tensor:
    """All rows as `multiply` reads them."""
    rows, size = values_Vr.shape
    out = torch.empty(quantised_bytes(rows, -(-size // GROUP)), dtype=torch.uint8)
    values_Vr = values_Vr.contiguous()
    _quantiser()(values_Vr.data_ptr(), rows, size, out.data_ptr())
    return out


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _norm_rows(
    y_at: int, rows: int, width: int, size: int, norm_at: int, eps: Any, q_at: int, counters_at: int, threads: int,
    thread: int,
) -> Any:  # fmt: skip
    """One phase: norm and quantise every row."""
    done, turn = 0, 0
    while True:
        row, turn = take(rows, turn, counters_at, threads, thread)
        if row >= rows:
            break
        row_at = y_at + row * width * 4
        norm_row(row_at, row_at, norm_at, size, eps)
        quantise(row_at, row, size, q_at)
        done += 1
    return meet(counters_at, done, rows, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _copy_features(features_at: int, feature: int, row: int, groups: int, q_at: int) -> None:
    """A row of what `quantised_rows` gave, as ``row``."""
    size = groups * ROW_GROUP_BYTES
    copy_row(features_at + feature * size, q_at + row * size, size // 4)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _gather(
    features_at: int, rows: int, token_rows: Any, groups: int, q_at: int, counters_at: int, threads: int, thread: int
) -> Any:  # fmt: skip
    """One phase: features of the rows side by side."""
    done, turn = 0, 0
    while True:
        row, turn = take(rows, turn, counters_at, threads, thread)
        if row >= rows:
            break
        _copy_features(features_at, token_rows[row], row, groups, q_at)
        done += 1
    return meet(counters_at, done, rows, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _write_context(
    features_at: int, rows: int, fc_at: int, fc_groups: int, fc_bias_at: int, fc_width: int, hidden: int,
    norm_at: int, eps: Any, kv_at: int, kv_groups: int, kv_bias_at: int, kv_width: int, key_norms_at: int,
    num_layers: int, kv_heads: int, head_dim: int, cos_at: int, sin_at: int, positions: Any, token_rows: Any,
    keys_at: int, values_at: int, num_rows: int, context_at: int, projected_at: int, q_at: int, counters_at: int,
    threads: int, thread: int,
) -> Any:  # fmt: skip
    """The phases of context tokens (SPEC eq. 2-3)."""
    if rows == 0:
        return counters_at
    at = _gather(features_at, rows, token_rows, fc_groups, q_at, counters_at, threads, thread)
    at = multiply(q_at, rows, fc_groups, fc_at, fc_bias_at, context_at, fc_width, at, threads, thread)
    at = _norm_rows(context_at, rows, fc_width, hidden, norm_at, eps, q_at, at, threads, thread)
    at = multiply(q_at, rows, kv_groups, kv_at, kv_bias_at, projected_at, kv_width, at, threads, thread)
    step, pieces = head_dim * 4, num_layers * kv_heads
    done, turn = 0, 0
    while True:
        piece, turn = take(pieces, turn, at, threads, thread)
        if piece >= pieces:
            break
        key_norm_at = key_norms_at + piece // kv_heads * step
        column = piece // kv_heads * 2 * kv_heads + piece % kv_heads
        for row in range(rows):
            key_at = projected_at + row * kv_width * 4 + column * step
            norm_row(key_at, key_at, key_norm_at, head_dim, eps)
            store_key_and_value(
                key_at, key_at + kv_heads * step, cos_at + positions[row] * step, sin_at + positions[row] * step,
                keys_at, values_at, piece * num_rows + token_rows[row], head_dim,
            )  # fmt: skip
        done += 1
    return meet(at, done, pieces, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _embed(
    rows: int, inputs: int, hidden: int, x_at: int, embedding_at: int, is_bfloat16: bool,
    mask_token_id: int, known: Any, counters_at: int, threads: int, thread: int,
) -> Any:  # fmt: skip
    """One phase: inputs of all blocks, an anchor and masks."""
    done, turn = 0, 0
    while True:
        row, turn = take(rows * inputs, turn, counters_at, threads, thread)
        if row >= rows * inputs:
            break
        token = mask_token_id if row % inputs else known[row // inputs, 0]
        x_row_at = x_at + row * hidden * 4
        if is_bfloat16:  # the upper half of a float32
            halves = carray(pointer(embedding_at + token * hidden * 2), hidden, np.uint16)
            bits = carray(pointer(x_row_at), hidden, np.uint32)
            for i in range(hidden):
                bits[i] = np.uint32(halves[i]) << np.uint32(16)
        else:
            copy_row(embedding_at + token * hidden * 4, x_row_at, hidden)
        done += 1
    return meet(counters_at, done, rows * inputs, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _base_logits(
    out_at: int, rows: int, inputs: int, block_size: int, count: int, hidden: int, hidden_at: int, q_at: int,
    lm_head_at: int, groups: int, bias_at: int, width: int, base_at: int, counters_at: int, threads: int, thread: int,
) -> Any:  # fmt: skip
    """The phases from the last layer to base logits: the states of the wanted slots side by side, and their product."""
    done, turn = 0, 0
    while True:
        index, turn = take(rows * count, turn, counters_at, threads, thread)
        if index >= rows * count:
            break
        source = index // count * inputs + inputs - block_size + index % count
        copy_row(out_at + source * hidden * 4, hidden_at + index * hidden * 4, hidden)
        quantise(hidden_at + index * hidden * 4, index, hidden, q_at)
        done += 1
    at = meet(counters_at, done, rows * count, threads)
    return multiply(q_at, rows * count, groups, lm_head_at, bias_at, base_at, width, at, threads, thread)


@njit(fastmath={"reassoc", "contract"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _dot(x: Any, y: Any) -> Any:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _draw_tokens(
    base_at: int, base_width: int, size: int, rows: int, count: int, probs_at: int, draft_ids_at: int,
    features_at: int, w2_at: int, w2_groups: int, w2_bias_at: int, w2_width: int, correction_at: int, q_at: int,
    known: Any, scales: Any, uniforms: Any, counters_at: int, threads: int, thread: int,
) -> Any:  # fmt: skip
    """The phases of drawing: each token in turn, with the correction by the one before it (SPEC eq. 4)."""
    at = counters_at
    for k in range(count):
        if w2_at != 0:
            done, turn = 0, 0
            while True:
                row, turn = take(rows, turn, at, threads, thread)
                if row >= rows:
                    break
                _copy_features(features_at, max(known[row, k], 0), row, w2_groups, q_at)
                done += 1
            at = meet(at, done, rows, threads)
            at = multiply(q_at, rows, w2_groups, w2_at, w2_bias_at, correction_at, w2_width, at, threads, thread)
        done, turn = 0, 0
        while True:
            row, turn = take(rows, turn, at, threads, thread)
            if row >= rows:
                break
            logits_at = base_at + (row * count + k) * base_width * 4
            if w2_at != 0:
                corrected_at = correction_at + row * w2_width * 4
                add_row(corrected_at, logits_at, size)
                logits_at = corrected_at
            column = most_likely(logits_at, size)
            if scales[row] >= 0.0:
                logits = carray(pointer(logits_at), size, np.float32)
                probs = carray(pointer(probs_at + (row * count + k) * size * 4), size, np.float32)
                is_distribution = softmax_of(logits, logits[column], scales[row], probs)
                column = draw(probs, uniforms[row, k]) if is_distribution else -1
            if draft_ids_at != 0 and column >= 0:
                column = carray(pointer(draft_ids_at), size, np.int64)[column]
            known[row, k + 1] = column
            done += 1
        at = meet(at, done, rows, threads)
    return at


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _take_confidences(
    hidden_at: int, hidden: int, rows: int, count: int, weight_at: int, of_tokens_at: int, num_tokens: int,
    known: Any, confidences: Any, counters_at: int, threads: int, thread: int,
) -> Any:  # fmt: skip
    """One phase: confidence logits of all slots (SPEC eq. 7)."""
    weight = carray(pointer(weight_at), hidden, np.float32)
    of_tokens = carray(pointer(of_tokens_at), num_tokens, np.float32)
    done, turn = 0, 0
    while True:
        row, turn = take(rows, turn, counters_at, threads, thread)
        if row >= rows:
            break
        for k in range(count):
            state = carray(pointer(hidden_at + (row * count + k) * hidden * 4), hidden, np.float32)
            confidences[row, k] = _dot(state, weight) + of_tokens[max(known[row, k], 0)]
        done += 1
    return meet(counters_at, done, rows, threads)


@lru_cache
def _kernel(source: str = SOURCE) -> Callable[..., bool]:
    def draft(  # type: ignore[no-untyped-def]
        context, inputs, layers, heads, draws, confidences, arrays, wants_tokens, wants_confidences, counters_at,
        threads,
    ):  # fmt: skip
        _ = source
        known, scales, uniforms, confidences_out = arrays
        thread, failures_at = add_atomically(counters_at, 1), counters_at + 8
        at = _write_context(*context, counters_at + LINE, threads, thread)
        at = _embed(*inputs, known, at, threads, thread)
        at = run_layers(*layers, failures_at, at, threads, thread)
        at = _base_logits(*heads, at, threads, thread)
        if wants_tokens:
            at = _draw_tokens(*draws, known, scales, uniforms, at, threads, thread)
            if wants_confidences:
                _take_confidences(*confidences, known, confidences_out, at, threads, thread)
        return read_atomically(failures_at) == 0

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
def _keeper(source: str = SOURCE) -> Callable[..., None]:
    def keep(taps_at, rows, size, token_rows_at, features_at, feature_bytes, is_waiting):  # type: ignore[no-untyped-def]
        _ = source
        token_rows = carray(pointer(token_rows_at), rows, np.int64)
        for row in range(rows):
            place = token_rows[row]
            quantise_row(taps_at + row * size * 4, size, features_at + place * feature_bytes)
            is_waiting[place] = True

    kernel: Callable[..., None] = remembered(keep)
    return kernel


@lru_cache
def _finder(source: str = SOURCE) -> Callable[..., int]:
    def find(segments_R3, tables_SB, is_waiting, positions_N, rows_N):  # type: ignore[no-untyped-def]
        _ = source
        count = 0
        for slot, start, end in segments_R3:
            for position in range(start, end):
                row = np.int64(tables_SB[slot, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
                if is_waiting[row]:
                    positions_N[count], rows_N[count] = position, row
                    count += 1
                    is_waiting[row] = False  # slots may share it
        for n in range(count):
            is_waiting[rows_N[n]] = True
        return count

    kernel: Callable[..., int] = remembered(find)
    return kernel


@lru_cache
def _confidence_kernel(source: str = SOURCE) -> Callable[..., None]:
    def confidences(slots, known, out, counters_at):  # type: ignore[no-untyped-def]
        _ = source
        _take_confidences(*slots, known, out, counters_at, 1, 0)

    kernel: Callable[..., None] = remembered(confidences)
    return kernel


@lru_cache
def _quantiser(source: str = SOURCE) -> Callable[..., None]:
    def quantise_all(values_at, rows, size, q_at):  # type: ignore[no-untyped-def]
        _ = source
        for row in range(rows):
            quantise(values_at + row * size * 4, row, size, q_at)

    kernel: Callable[..., None] = remembered(quantise_all)
    return kernel
