"""Vector code of int8 products, and what threads need to share work: what numba has no words for."""

from __future__ import annotations

import os
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from dspark.models.vector_intrinsics import emit_prefetch

GROUP = 32
"""Inputs that share a scale."""
LANES = 16
VECTORS = 2
COLUMNS = LANES * VECTORS
"""Outputs that are computed side by side."""
ROWS = 8
"""Rows that are computed side by side, at most: with them, all sums fit in 32 registers but a few."""
_ROWS_TO_PREFETCH = 5
"""Rows from which on memory is asked for ahead. Fewer do little else than wait: the processor's own guess is better."""
GROUP_BYTES = COLUMNS * GROUP + COLUMNS * 2
"""Bytes of a group's weights and their scales (bfloat16), for ``COLUMNS`` outputs."""
ROW_GROUP_BYTES = GROUP + 8
"""Bytes of a row's group: its numbers, their scale (float32), and -128 times their sum (int32)."""

_INT = ir.IntType(32)
_LONG = ir.IntType(64)
_INTS = ir.VectorType(_INT, LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


def has_dot_products() -> bool:
    """Whether code compiled here may multiply and sum 8-bit numbers in one instruction (AVX512-VNNI)."""
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None or not config.ENABLE_AVX:
        return False  # numba was asked for code for another processor, in which LLVM would end the process
    if not hasattr(os, "sched_yield"):
        return False
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512vnni") and features.get("avx512bw"))


def _load(builder: Any, address: Any, offset: int, kind: Any, align: int = 4) -> Any:
    place = builder.inttoptr(builder.add(address, _LONG(offset)), kind.as_pointer())
    return builder.load(place, align=align, typ=kind)


def _spread(builder: Any, number: Any, kind: Any) -> Any:
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(_INTS, [0] * LANES))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dot_products(
    typing: Any, rows: Any, x: Any, x_step: Any, groups: Any, weights: Any, ahead: Any, bias: Any, out: Any,
    out_step: Any,
) -> Any:  # fmt: skip
    """``out[r, c] = bias[c] + sum over g of scales[r, g] * weight_scales[g, c] * (x[r, g] . weights[g, c])``.

    For r < rows and c < ``COLUMNS``. Products of a group are exact; groups are added in their order. All matrices are
    given by the address of their first element and the bytes from a row to the next.

    Args:
        rows: 1 to ``ROWS``.
        x: of each row ``groups`` times ``ROW_GROUP_BYTES``, with ``scales[r, g]`` behind the numbers ``x[r, g]``.
        weights: for each group ``GROUP_BYTES``: numbers + 128 as bytes ``[GROUP / 4, COLUMNS, 4]``, and their scales.
        ahead: bytes from a group's weights to those to ask memory for meanwhile.
        bias: float32 ``[COLUMNS]``.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        after = builder.append_basic_block("after")
        cases = [builder.append_basic_block(f"rows_{count}") for count in range(1, ROWS + 1)]
        switch = builder.switch(arguments[0], cases[-1])
        for count, case in enumerate(cases[:-1], 1):
            switch.add_case(_LONG(count), case)
        for count, case in enumerate(cases, 1):
            builder.position_at_end(case)
            _dot_products(builder, count, *arguments[1:])
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


def _dot_products(
    builder: Any, rows: int, x: Any, x_step: Any, groups: Any, weights: Any, ahead: Any, bias: Any, out: Any,
    out_step: Any,
) -> None:  # fmt: skip
    """The code of :func:`dot_products` for so many rows."""

    def row(base: Any, step: Any, r: int) -> Any:
        return builder.add(base, builder.mul(step, _LONG(r)))

    kind = ir.FunctionType(_INTS, [_INTS] * 3)
    dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    cells = [(r, c) for r in range(rows) for c in range(VECTORS)]
    x_rows = [row(x, x_step, r) for r in range(rows)]
    start = [_load(builder, bias, 4 * LANES * c, _FLOATS) for c in range(VECTORS)]
    before, loop, after = (builder.block, *(builder.append_basic_block(name) for name in ("group", "groups_done")))
    builder.branch(loop)

    builder.position_at_end(loop)
    group, place, begin = builder.phi(_LONG), builder.phi(_LONG), builder.phi(_LONG)
    totals = {cell: builder.phi(_FLOATS) for cell in cells}
    group.add_incoming(_LONG(0), before)
    begin.add_incoming(_LONG(0), before)
    place.add_incoming(weights, before)
    for (_, c), total in totals.items():
        total.add_incoming(start[c], before)
    x_groups = [builder.add(base, begin) for base in x_rows]
    if rows >= _ROWS_TO_PREFETCH:
        for line in range(0, GROUP_BYTES, 64):
            emit_prefetch(builder, builder.add(place, builder.add(ahead, _LONG(line))))
    exact = {}
    for r in range(rows):
        first = _spread(builder, _load(builder, x_groups[r], GROUP + 4, _INT), _INTS)
        exact.update({(r, c): first for c in range(VECTORS)})
    for i in range(GROUP // 4):
        columns = [_load(builder, place, (i * VECTORS + c) * 4 * LANES, _INTS) for c in range(VECTORS)]
        for r in range(rows):
            four = _spread(builder, _load(builder, x_groups[r], 4 * i, _INT), _INTS)
            for c in range(VECTORS):
                exact[r, c] = builder.call(dot, [exact[r, c], columns[c], four])
    weight_scales = []
    for c in range(VECTORS):
        upper = builder.zext(_load(builder, place, COLUMNS * GROUP + 2 * LANES * c, _HALVES), _INTS)
        upper = builder.shl(upper, ir.Constant(_INTS, [16] * LANES))
        weight_scales.append(builder.bitcast(upper, _FLOATS))
    new: dict[tuple[int, int], Any] = {}
    for r in range(rows):
        scale = _spread(builder, _load(builder, x_groups[r], GROUP, ir.FloatType()), _FLOATS)
        for c in range(VECTORS):
            scaled = builder.fmul(builder.sitofp(exact[r, c], _FLOATS), weight_scales[c])
            new[r, c] = builder.call(fma, [scaled, scale, totals[r, c]])
    next_group = builder.add(group, _LONG(1))
    group.add_incoming(next_group, loop)
    place.add_incoming(builder.add(place, _LONG(GROUP_BYTES)), loop)
    begin.add_incoming(builder.add(begin, _LONG(ROW_GROUP_BYTES)), loop)
    for cell, total in totals.items():
        total.add_incoming(new[cell], loop)
    builder.cbranch(builder.icmp_signed("<", next_group, groups), loop, after)

    builder.position_at_end(after)
    for r, c in cells:
        target = builder.add(row(out, out_step, r), _LONG(4 * LANES * c))
        builder.store(new[r, c], builder.inttoptr(target, _FLOATS.as_pointer()), align=4)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_atomically(typing: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address, which other threads may do too; what was there before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", place, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def read_atomically(typing: Any, address: Any) -> Any:
    """The int64 at an address, and with it all that its writer had written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _LONG.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def pause(typing: Any) -> Any:
    """Tell the processor that this is a loop that waits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def yield_core(typing: Any) -> Any:
    """Let another thread have this core."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_INT, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def call_attention(typing: Any, function: Any, numbers: Any, scale: Any, more: Any) -> Any:
    """Call :func:`~dspark.models.attention_kernel.attention_kernel` at an address.

    Args:
        numbers, more: tuples of its int64 arguments before and after the scale.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function, numbers, scale, more = arguments
        given = [*cgutils.unpack_tuple(builder, numbers), scale, *cgutils.unpack_tuple(builder, more)]
        kind = ir.FunctionType(ir.IntType(8), [argument.type for argument in given])
        result = builder.call(builder.inttoptr(function, kind.as_pointer()), given)
        return builder.icmp_signed("!=", result, ir.IntType(8)(0))

    int64s = types.UniTuple(types.int64, len(numbers)), types.UniTuple(types.int64, len(more))
    return types.boolean(types.int64, int64s[0], types.float32, int64s[1]), generate
