"""All layers of an int8 decoder as one call of compiled code, which threads share.

A pass is a row of phases: a step on every row (norms, rotation, quantisation), or a linear layer, or attention. Threads
take pieces of a phase as they get to them and meet at its end, so none is waited for that does not get a core. Each
row's numbers are computed in an order of their own, so they depend neither on the rows beside it nor on threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from numba.np.numpy_support import carray

from dspark.compiling import remembered
from dspark.models.attention import AttentionPlan
from dspark.models.attention_kernel import attention_kernel, queries_together
from dspark.models.block_tables import BLOCK_SIZE
from dspark.models.compiling import SOURCE
from dspark.models.decoder_layer import DecoderLayer, LayersShape
from dspark.models.int8_intrinsics import GROUP, call_attention
from dspark.models.int8_linear import (
    GroupedInt8Linear,
    multiply,
    quantise,
    quantise_rows,
    quantised_bytes,
)
from dspark.models.kv_cache import KVCache
from dspark.models.linear import Linear
from dspark.models.phases import LINE, add_atomically, meet, new_counters, read_atomically, take
from dspark.models.row_kernels import (
    activate_row,
    add_row,
    copy_row,
    most_likely,
    norm_row,
    rotate_head,
    rotate_head_to_halves,
    store_halves,
)
from dspark.models.target import TargetOutput
from dspark.models.threads import run_together
from dspark.models.vector_intrinsics import pointer

_PARTS = 4  # of attention, for each thread
_PHASES = 10  # of a layer
_HEAD_PHASES = 3
_WHOLE = 2**62  # a window that sees everything
# The columns of a layer's row in the table of addresses; 0 for what it does not have.
(
    _ATTENTION_NORM, _QKV, _QKV_BIAS, _QK_NORM, _OUTPUT, _OUTPUT_BIAS, _POST_ATTENTION_NORM, _MLP_NORM, _GATE_UP,
    _GATE_UP_BIAS, _DOWN, _DOWN_BIAS, _POST_MLP_NORM, _IS_SLIDING,
) = range(14)  # fmt: skip


Ropes = tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Cosines and signed sines by position, of full and of sliding layers."""

OUTSIDE = "a slot, position or block of the pass is outside the tables or the cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLayers:
    """A pass that is ready to run.

    Attributes:
        arguments: of :func:`run_layers`, those of the threads left out.
        memory: what ``arguments`` knows by its addresses, beside the results.
        phases: that it has.
        out_NH, taps_NT: its results, once it has run.
    """

    arguments: tuple[object, ...]
    memory: tuple[object, ...]
    phases: int
    out_NH: torch.Tensor
    taps_NT: torch.Tensor


class DecoderKernel:
    """Runs the layers of a decoder whose linear layers are :class:`GroupedInt8Linear`, in float32 between them.

    Keys and values are kept in float16, those beyond ±65504 as that, and keys as columns.

    Args:
        head: from hidden states to logits; None for a model that is only asked for states.
    """

    def __init__(
        self,
        shape: LayersShape,
        layers: Sequence[DecoderLayer],
        final_norm_H: torch.Tensor,
        head: GroupedInt8Linear | None,
    ) -> None:
        self._shape = shape
        self._layers, self._final_norm_H, self._head = list(layers), final_norm_H, head  # they outlive the addresses
        self._table = np.array([_addresses(layer) for layer in layers], dtype=np.int64)
        linears = [_packed(linear) for linear in (layers[0].qkv, layers[0].output, layers[0].gate_up, layers[0].down)]
        self._widths = tuple(linear.padded_out for linear in linears)
        self._groups = max(linear.packed.shape[1] for linear in linears)
        self._attention = attention_kernel(shape.head_dim, shape.num_heads // shape.num_kv_heads, is_half=True)
        self._same_arguments = (
            self._table.ctypes.data, shape.num_layers, len(final_norm_H), shape.intermediate_size, shape.num_heads,
            shape.num_kv_heads, shape.head_dim, np.float32(shape.norm_eps), shape.activation == "gelu_tanh",
            *self._widths, final_norm_H.data_ptr(),
        )  # fmt: skip
        self._attention_at = self._attention.address
        self._query_scale = np.float32(shape.query_scale * math.log2(math.e))
        self._tap_columns: dict[tuple[int, ...], tuple[npt.NDArray[np.int64], int, int]] = {}
        self._kernel = _kernel()

    def __reduce__(self) -> tuple[Callable[..., DecoderKernel], tuple[object, ...]]:
        """A copy looks up the addresses of its own weights."""
        return DecoderKernel, (self._shape, self._layers, self._final_norm_H, self._head)

    def __call__(
        self,
        x_NH: torch.Tensor,
        ropes: Ropes,
        plan: AttentionPlan,
        cache: KVCache,
        tap_layers: Sequence[int],
        logit_rows: Sequence[int],
    ) -> TargetOutput:
        """Run all layers on embedded tokens, and the head on the asked rows of what they give.

        Args:
            x_NH: float32, is written to.
            ropes: float32 tables ``[P, D]`` (:meth:`~dspark.models.rope.RopeTable.table`).

        Raises:
            ValueError: the tables of the cache name what it has not.
        """
        threads = torch.get_num_threads()
        prepared = self.prepare(x_NH, ropes, plan, cache, tap_layers)
        head, logits_MV, best_M, head_memory = self._prepare_head(logit_rows)
        counters, counters_at = new_counters(prepared.phases + _HEAD_PHASES, threads)
        kernel = self._kernel
        memory = (self, prepared, logits_MV, best_M, head_memory, counters)
        if not run_together(
            lambda: kernel(prepared.arguments, prepared.out_NH.data_ptr(), head, counters_at, threads), threads, memory
        ):
            raise ValueError(OUTSIDE)
        taps_NT = prepared.taps_NT if tap_layers else None
        if taps_NT is not None and list(tap_layers) != (layers := sorted(set(tap_layers))):
            order = [layers.index(layer) for layer in tap_layers]
            taps_NT = taps_NT.view(len(x_NH), -1, x_NH.shape[1])[:, order].flatten(1)
        if logits_MV is not None and self._head is not None:
            logits_MV = self._head.without_padding(logits_MV)
        return TargetOutput(hidden_NH=prepared.out_NH, taps_NT=taps_NT, logits_MV=logits_MV, best_M=best_M)

    def _prepare_head(
        self, logit_rows: Sequence[int]
    ) -> tuple[tuple[int, ...], torch.Tensor | None, torch.Tensor | None, object]:
        """Arguments of ``_pick_logits``; its results, the logits still padded; and what else it needs in memory."""
        count, head = len(logit_rows), self._head
        if count == 0:
            return (0,) * 10, None, None, None
        assert head is not None, "logits are asked of a model without a head"
        groups = head.packed.shape[1]
        rows_M, best_M = np.array(logit_rows, np.int64), torch.empty(count, dtype=torch.int64)
        logits_MV, q = torch.empty(count, head.padded_out), torch.empty(quantised_bytes(count, groups) // 4)
        arguments = (
            rows_M.ctypes.data, count, head.size_in, q.data_ptr(), head.packed.data_ptr(), head.bias.data_ptr(),
            logits_MV.data_ptr(), head.padded_out, best_M.data_ptr(), head.size_out,
        )  # fmt: skip
        return arguments, logits_MV, best_M, (rows_M, q)

    def prepare(
        self, x_NH: torch.Tensor, ropes: Ropes, plan: AttentionPlan, cache: KVCache, tap_layers: Sequence[int]
    ) -> PreparedLayers:
        """What :func:`run_layers` needs for such a call, in which taps are in the order of their layers.

        The cache is this model's (`check_cache`): that is checked before its positions are counted.
        """
        c, threads, tables = self._shape, torch.get_num_threads(), plan.tables.tables_SB
        rows, hidden = x_NH.shape
        tap_columns, tap_columns_at, num_taps = self._columns_of_taps(tuple(tap_layers))
        taps_NT = torch.empty(rows, hidden * num_taps)
        out_NH = torch.empty(rows, hidden)
        heads_size = c.num_heads * c.head_dim
        sizes = (rows * max(self._widths), rows * hidden, rows * heads_size, rows * heads_size)
        scratch = torch.empty(sum(sizes) + quantised_bytes(rows, self._groups) // 4)
        scratch_at, slots_at = scratch.data_ptr(), plan.places.table_5N.data_ptr()
        positions_at, token_rows_at, visible_at, ends_at = (slots_at + 8 * rows * line for line in range(1, 5))
        arguments = (
            *self._same_arguments, x_NH.data_ptr(), rows,
            *(scratch_at + 4 * place for place in accumulate(sizes, initial=0)), out_NH.data_ptr(),
            taps_NT.data_ptr(), hidden * num_taps, tap_columns_at,
            *(table.data_ptr() for rope in ropes for table in rope), positions_at,
            cache.keys.data_ptr(), cache.values.data_ptr(), plan.tables.num_rows, token_rows_at,
            self._attention_at, tables.data_ptr(), *tables.shape, slots_at,
            visible_at if plan.is_causal else ends_at, self._query_scale, plan.window or _WHOLE, plan.first,
            queries_together(rows * c.num_kv_heads, threads),
            min(rows * c.num_kv_heads, _PARTS * threads if threads > 1 else 1),
        )  # fmt: skip
        return PreparedLayers(
            arguments=arguments,
            memory=(self, x_NH, ropes, plan, cache, tap_columns, scratch),
            phases=c.num_layers * _PHASES + 1,
            out_NH=out_NH,
            taps_NT=taps_NT,
        )

    def check_cache(self, cache: KVCache) -> None:
        """Raise ValueError unless the memory of ``cache`` is this model's."""
        c = self._shape
        cache.check_layout(
            num_layers=c.num_layers,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            dtype=torch.float16,
            has_key_columns=True,
        )

    def _columns_of_taps(self, tap_layers: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], int, int]:
        """For each layer its column among the taps, which go by layer, or -1; its address; how many taps there are."""
        if tap_layers not in self._tap_columns:
            layers = sorted(set(tap_layers))
            columns = np.full(self._shape.num_layers, -1, dtype=np.int64)
            columns[layers] = np.arange(len(layers)) * len(self._final_norm_H)
            self._tap_columns[tap_layers] = columns, columns.ctypes.data, len(layers)
        return self._tap_columns[tap_layers]


def _packed(linear: Linear) -> GroupedInt8Linear:
    assert isinstance(linear, GroupedInt8Linear)
    return linear


def address(tensor: torch.Tensor | None) -> int:
    """Where the numbers of a contiguous tensor begin; 0 for none."""
    assert tensor is None or tensor.is_contiguous(), "an address says nothing of strides"
    return 0 if tensor is None else tensor.data_ptr()


def _addresses(layer: DecoderLayer) -> list[int]:
    def linear(linear: Linear) -> tuple[int, int]:
        return address(_packed(linear).packed), address(_packed(linear).bias)

    return [
        address(layer.attention_norm_H), *linear(layer.qkv), address(layer.qk_norm_hD), *linear(layer.output),
        address(layer.post_attention_norm_H), address(layer.mlp_norm_H), *linear(layer.gate_up), *linear(layer.down),
        address(layer.post_mlp_norm_H), int(layer.is_sliding),
    ]  # fmt: skip


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _add_and_norm(
    x_at: int, rows: int, size: int, y_at: int, width: int, post_norm_at: int, tap_at: int, tap_step: int, norm_at: int,
    eps: Any, out_at: int, q_at: int, counters_at: int, threads: int, thread: int,
) -> Any:  # fmt: skip
    """One phase: add what a sublayer gave to the residual stream and norm the sum for the next sublayer.

    Args:
        y_at: float32 rows of ``width``, normed first if there is a ``post_norm_at``; 0: there is nothing to add.
        tap_at: where the sum is kept too, in rows of ``tap_step`` bytes; or 0.
        q_at: where the normed rows are quantised to; or 0.
    """
    done, turn = 0, 0
    while True:
        row, turn = take(rows, turn, counters_at, threads, thread)
        if row >= rows:
            break
        x_row_at, y_row_at, out_row_at = x_at + row * size * 4, y_at + row * width * 4, out_at + row * size * 4
        if y_at != 0:
            if post_norm_at != 0:
                norm_row(y_row_at, y_row_at, post_norm_at, size, eps)
            add_row(x_row_at, y_row_at, size)
        if tap_at != 0:
            copy_row(x_row_at, tap_at + row * tap_step, size)
        norm_row(x_row_at, out_row_at, norm_at, size, eps)
        if q_at != 0:
            quantise(out_row_at, row, size, q_at)
        done += 1
    return meet(counters_at, done, rows, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _norm_head(row_at: int, head: int, qk_norm_at: int, head_dim: int, eps: Any) -> None:
    """Norm a query or key head in place, in a model that does."""
    if qk_norm_at != 0:
        head_at = row_at + head * head_dim * 4
        norm_row(head_at, head_at, qk_norm_at + head * head_dim * 4, head_dim, eps)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def store_key_and_value(
    key_at: int, value_at: int, cos_at: int, sin_at: int, keys_at: int, values_at: int, place: int, head_dim: int
) -> None:
    """Rotate a key and store it as a column of its block, and the value as a row, at a place of all heads' places."""
    column_at = keys_at + (place // BLOCK_SIZE * head_dim * BLOCK_SIZE + place % BLOCK_SIZE) * 2
    rotate_head_to_halves(key_at, column_at, 2 * BLOCK_SIZE, cos_at, sin_at, head_dim)
    store_halves(value_at, values_at + place * head_dim * 2, 2, head_dim)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _place_heads(
    y_at: int, rows: int, width: int, heads: int, kv_heads: int, head_dim: int, qk_norm_at: int, eps: Any, cos_at: int,
    sin_at: int, positions_at: int, q_at: int, keys_at: int, values_at: int, num_rows: int,
    token_rows_at: int, counters_at: int, threads: int, thread: int,
) -> Any:  # fmt: skip
    """One phase: norm and rotate queries and keys; keys and values go to their places in the cache.

    A piece of work is a key head, with its queries and values, of neighbouring rows: those may lie in one block, and
    threads that write to the same lines of memory take them from each other each time.
    """
    token_rows = carray(pointer(token_rows_at), rows, np.int64)
    positions = carray(pointer(positions_at), rows, np.int64)
    step, group = head_dim * 4, heads // kv_heads
    pieces = (rows + BLOCK_SIZE - 1) // BLOCK_SIZE * kv_heads
    done, turn = 0, 0
    while True:
        piece, turn = take(pieces, turn, counters_at, threads, thread)
        if piece >= pieces:
            break
        kv_head, begin = piece % kv_heads, piece // kv_heads * BLOCK_SIZE
        for row in range(begin, min(begin + BLOCK_SIZE, rows)):
            row_at, place = y_at + row * width * 4, kv_head * num_rows + token_rows[row]
            cos_row_at, sin_row_at = cos_at + positions[row] * step, sin_at + positions[row] * step
            for h in range(group):
                head = kv_head * group + h
                _norm_head(row_at, head, qk_norm_at, head_dim, eps)
                rotate_head(row_at + head * step, q_at + (row * heads + head) * step, cos_row_at, sin_row_at, head_dim)
            key_at, value_at = row_at + (heads + kv_head) * step, row_at + (heads + kv_heads + kv_head) * step
            _norm_head(row_at, heads + kv_head, qk_norm_at, head_dim, eps)
            store_key_and_value(key_at, value_at, cos_row_at, sin_row_at, keys_at, values_at, place, head_dim)
        done += 1
    return meet(counters_at, done, pieces, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _activate_rows(
    y_at: int, rows: int, width: int, size: int, is_gelu: bool, q_at: int, counters_at: int, threads: int, thread: int
) -> Any:
    """One phase: the gated activation of every row, quantised."""
    done, turn = 0, 0
    while True:
        row, turn = take(rows, turn, counters_at, threads, thread)
        if row >= rows:
            break
        gate_at = y_at + row * width * 4
        activate_row(gate_at, gate_at + size * 4, size, is_gelu)
        quantise(gate_at, row, size, q_at)
        done += 1
    return meet(counters_at, done, rows, threads)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def run_layers(
    table_at: int, num_layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, eps: Any,
    is_gelu: bool, qkv_width: int, output_width: int, gate_up_width: int, down_width: int, final_norm_at: int,
    x_at: int, rows: int, y_at: int, normed_at: int, queries_at: int, attended_at: int, q_at: int, out_at: int,
    taps_at: int, taps_width: int, tap_columns_at: int, cos_at: int, sin_at: int, sliding_cos_at: int,
    sliding_sin_at: int, positions_at: int, keys_at: int, values_at: int, num_rows: int,
    token_rows_at: int, attention_at: int, tables_at: int, num_slots: int, num_blocks: int, slots_at: int,
    visible_at: int, scale: Any, window: int, first: int, together: int, parts: int, failures_at: int, counters_at: int,
    threads: int, thread: int,
) -> Any:  # fmt: skip
    """The phases of all layers (:meth:`DecoderKernel.prepare`).

    Args:
        failures_at: counts the pieces of attention in which a slot, position or block does not exist.
    """
    table = carray(pointer(table_at), (num_layers, 14), np.int64)
    tap_columns = carray(pointer(tap_columns_at), num_layers, np.int64)
    hidden_groups = (hidden + GROUP - 1) // GROUP
    heads_groups = (heads * head_dim + GROUP - 1) // GROUP
    intermediate_groups = (intermediate + GROUP - 1) // GROUP
    layer_bytes = kv_heads * num_rows * head_dim * 2
    at = counters_at
    added_at, added_norm_at, tap_at = 0, 0, 0  # what the layer before leaves to be done
    for index in range(num_layers):
        layer = table[index]
        layer_keys_at, layer_values_at = keys_at + index * layer_bytes, values_at + index * layer_bytes
        is_sliding = layer[_IS_SLIDING] != 0
        at = _add_and_norm(
            x_at, rows, hidden, added_at, down_width, added_norm_at, tap_at, taps_width * 4, layer[_ATTENTION_NORM],
            eps, normed_at, q_at, at, threads, thread,
        )  # fmt: skip
        at = multiply(
            q_at, rows, hidden_groups, layer[_QKV], layer[_QKV_BIAS], y_at, qkv_width, at, threads, thread
        )  # fmt: skip
        at = _place_heads(
            y_at, rows, qkv_width, heads, kv_heads, head_dim, layer[_QK_NORM], eps,
            sliding_cos_at if is_sliding else cos_at, sliding_sin_at if is_sliding else sin_at, positions_at,
            queries_at, layer_keys_at, layer_values_at, num_rows, token_rows_at, at, threads, thread,
        )  # fmt: skip
        done, turn = 0, 0
        while True:
            part, turn = take(parts, turn, at, threads, thread)
            if part >= parts:
                break
            numbers = (
                queries_at, layer_keys_at, layer_values_at, tables_at, slots_at, visible_at, attended_at, rows,
                kv_heads, num_rows, num_slots, num_blocks,
            )  # fmt: skip
            seen = window if is_sliding else _WHOLE
            if not call_attention(attention_at, numbers, scale, (seen, first, together, part, parts)):
                add_atomically(failures_at, 1)
            done += 1
        at = meet(at, done, parts, threads)
        at = quantise_rows(attended_at, rows, heads * head_dim, q_at, at, threads, thread)
        at = multiply(
            q_at, rows, heads_groups, layer[_OUTPUT], layer[_OUTPUT_BIAS], y_at, output_width, at, threads, thread
        )  # fmt: skip
        at = _add_and_norm(
            x_at, rows, hidden, y_at, output_width, layer[_POST_ATTENTION_NORM], 0, 0, layer[_MLP_NORM], eps,
            normed_at, q_at, at, threads, thread,
        )  # fmt: skip
        at = multiply(
            q_at, rows, hidden_groups, layer[_GATE_UP], layer[_GATE_UP_BIAS], y_at, gate_up_width, at, threads,
            thread,
        )  # fmt: skip
        at = _activate_rows(y_at, rows, gate_up_width, intermediate, is_gelu, q_at, at, threads, thread)
        at = multiply(
            q_at, rows, intermediate_groups, layer[_DOWN], layer[_DOWN_BIAS], y_at, down_width, at, threads, thread
        )  # fmt: skip
        added_at, added_norm_at = y_at, layer[_POST_MLP_NORM]
        tap_at = taps_at + tap_columns[index] * 4 if tap_columns[index] >= 0 else 0
    return _add_and_norm(
        x_at, rows, hidden, added_at, down_width, added_norm_at, tap_at, taps_width * 4, final_norm_at, eps, out_at,
        0, at, threads, thread,
    )  # fmt: skip


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _pick_logits(
    hidden_at: int, rows_at: int, count: int, size: int, q_at: int, weights_at: int, bias_at: int, logits_at: int,
    width: int, best_at: int, num_ids: int, counters_at: int, threads: int, thread: int,
) -> Any:  # fmt: skip
    """The phases of the head: quantise the picked rows of hidden states, multiply, and find the largest logits."""
    rows = carray(pointer(rows_at), count, np.int64)
    groups = (size + GROUP - 1) // GROUP
    done, turn = 0, 0
    while True:
        index, turn = take(count, turn, counters_at, threads, thread)
        if index >= count:
            break
        quantise(hidden_at + rows[index] * size * 4, index, size, q_at)
        done += 1
    at = meet(counters_at, done, count, threads)
    at = multiply(q_at, count, groups, weights_at, bias_at, logits_at, width, at, threads, thread)
    best = carray(pointer(best_at), count, np.int64)
    done, turn = 0, 0
    while True:
        index, turn = take(count, turn, at, threads, thread)
        if index >= count:
            break
        best[index] = most_likely(logits_at + index * width * 4, num_ids)
        done += 1
    return meet(at, done, count, threads)


@lru_cache
def _kernel(source: str = SOURCE) -> Callable[..., bool]:
    def decode(layers, hidden_at, head, counters_at, threads):  # type: ignore[no-untyped-def]
        _ = source
        thread, failures_at = add_atomically(counters_at, 1), counters_at + 8
        at = run_layers(*layers, failures_at, counters_at + LINE, threads, thread)
        if head[1] > 0:
            _pick_logits(hidden_at, *head, at, threads, thread)
        return read_atomically(failures_at) == 0

    kernel: Callable[..., bool] = remembered(decode)
    return kernel


def embed_rows(token_ids_N: torch.Tensor, embedding_VH: torch.Tensor, x_NH: torch.Tensor) -> bool:
    """Copy the embeddings of tokens, all float32; False, with some rows copied, if an id is outside the vocabulary.

    Raises:
        ValueError: the ids are on another device.
    """
    if not token_ids_N.is_cpu:
        raise ValueError(f"token_ids_N is on {token_ids_N.device}, and an int8 target on the CPU")
    token_ids_N = token_ids_N.to(torch.int64).contiguous()
    tokens, (vocab_size, hidden) = token_ids_N.shape[0], embedding_VH.shape
    arguments = token_ids_N.data_ptr(), tokens, address(embedding_VH), vocab_size, hidden, address(x_NH)
    return _embedder()(*arguments)


@lru_cache
def _embedder(source: str = SOURCE) -> Callable[..., bool]:
    def embed(ids_at, tokens, embedding_at, vocab_size, hidden, x_at):  # type: ignore[no-untyped-def]
        _ = source
        ids = carray(pointer(ids_at), tokens, np.int64)
        for n in range(tokens):
            if not 0 <= ids[n] < vocab_size:
                return False
            copy_row(embedding_at + ids[n] * hidden * 4, x_at + n * hidden * 4, hidden)
        return True

    kernel: Callable[..., bool] = remembered(embed)
    return kernel
