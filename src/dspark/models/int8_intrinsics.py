"""Vector code of int8 products, and the call of a kernel at an address: what numba has no words for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dspark.models.instructions import AVX2, INSTRUCTIONS
from dspark.models.vector_intrinsics import emit_prefetch

GROUP = 32
"""Inputs that share a scale."""
_USED = INSTRUCTIONS or AVX2
COLUMNS = 32
"""Outputs that are computed side by side."""
ROWS = _USED.rows
HAS_SIGNED_WEIGHTS = _USED.has_signed_weights
GROUP_BYTES = COLUMNS * GROUP + COLUMNS * 2
"""Bytes of a group's weights and their scales (bfloat16), for ``COLUMNS`` outputs."""
ROW_GROUP_BYTES = GROUP + 8
"""Bytes of a row's group: its numbers, their scale (float32), and -128 times their sum (int32) for unsigned weights."""

_INT = ir.IntType(32)
_LONG = ir.IntType(64)


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    place = builder.inttoptr(builder.add(address, _LONG(offset)), kind.as_pointer())
    return builder.load(place, align=4, typ=kind)


def _spread(builder: Any, number: Any, lanes: int) -> Any:
    vector = builder.insert_element(ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes))


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
        weights: for each group ``GROUP_BYTES``: numbers ``[GROUP / 4, COLUMNS, 4]``, plus 128 unless
            ``HAS_SIGNED_WEIGHTS``, and their scales.
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
    lanes, vectors = _USED.lanes, COLUMNS // _USED.lanes
    ints, floats = ir.VectorType(_INT, lanes), ir.VectorType(ir.FloatType(), lanes)

    def row(base: Any, step: Any, r: int) -> Any:
        return builder.add(base, builder.mul(step, _LONG(r)))

    kind = ir.FunctionType(floats, [floats] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{lanes}f32")
    cells = [(r, c) for r in range(rows) for c in range(vectors)]
    x_rows = [row(x, x_step, r) for r in range(rows)]
    start = [_load(builder, bias, 4 * lanes * c, floats) for c in range(vectors)]
    before, loop, after = (builder.block, *(builder.append_basic_block(name) for name in ("group", "groups_done")))
    builder.branch(loop)

    builder.position_at_end(loop)
    group, place, begin = builder.phi(_LONG), builder.phi(_LONG), builder.phi(_LONG)
    totals = {cell: builder.phi(floats) for cell in cells}
    group.add_incoming(_LONG(0), before)
    begin.add_incoming(_LONG(0), before)
    place.add_incoming(weights, before)
    for (_, c), total in totals.items():
        total.add_incoming(start[c], before)
    x_groups = [builder.add(base, begin) for base in x_rows]
    if rows >= _USED.rows_to_prefetch:
        for line in range(0, GROUP_BYTES, 64):
            emit_prefetch(builder, builder.add(place, builder.add(ahead, _LONG(line))))
    exact = _group_sums(builder, x_groups, place)
    weight_scales = []
    for c in range(vectors):
        halves = _load(builder, place, COLUMNS * GROUP + 2 * lanes * c, ir.VectorType(ir.IntType(16), lanes))
        upper = builder.shl(builder.zext(halves, ints), ir.Constant(ints, [16] * lanes))
        weight_scales.append(builder.bitcast(upper, floats))
    new: dict[tuple[int, int], Any] = {}
    for r in range(rows):
        scale = _spread(builder, _load(builder, x_groups[r], GROUP, ir.FloatType()), lanes)
        for c in range(vectors):
            scaled = builder.fmul(builder.sitofp(exact[r, c], floats), weight_scales[c])
            new[r, c] = builder.call(fma, [scaled, scale, totals[r, c]])
    next_group = builder.add(group, _LONG(1))
    place_after, begin_after = builder.add(place, _LONG(GROUP_BYTES)), builder.add(begin, _LONG(ROW_GROUP_BYTES))
    group.add_incoming(next_group, builder.block)
    place.add_incoming(place_after, builder.block)
    begin.add_incoming(begin_after, builder.block)
    for cell, total in totals.items():
        total.add_incoming(new[cell], builder.block)
    builder.cbranch(builder.icmp_signed("<", next_group, groups), loop, after)

    builder.position_at_end(after)
    for r, c in cells:
        target = builder.add(row(out, out_step, r), _LONG(4 * lanes * c))
        builder.store(new[r, c], builder.inttoptr(target, floats.as_pointer()), align=4)


def _group_sums(builder: Any, x_groups: list[Any], place: Any) -> dict[tuple[int, int], Any]:
    """Exact products of a group of each row and its weights, by row and vector of outputs.

    As many vectors at once as there are registers for; where that is not all, in a loop, lest the compiler reorders its
    steps and keeps what it needs of them on the stack.
    """
    vectors = COLUMNS // _USED.lanes
    at_once = min(vectors, _USED.vectors)
    sums: dict[tuple[int, int], Any] = {}
    for first in range(0, vectors, at_once):
        sums.update(_part_of_sums(builder, x_groups, place, range(first, first + at_once), in_loop=at_once < vectors))
    return sums


def _part_of_sums(
    builder: Any, x_groups: list[Any], place: Any, vectors: range, *, in_loop: bool
) -> dict[tuple[int, int], Any]:
    """The sums of some vectors of outputs, step by step over the inputs: written out, or in a loop."""
    lanes, rows = _USED.lanes, range(len(x_groups))
    ints = ir.VectorType(_INT, lanes)
    if HAS_SIGNED_WEIGHTS:
        multiply = _signed_products(builder, ints)
        firsts = [ir.Constant(ints, [0] * lanes)] * len(x_groups)
    else:
        multiply = _unsigned_products(builder, ints)
        firsts = [_spread(builder, _load(builder, x_group, GROUP + 4, _INT), lanes) for x_group in x_groups]
    sums = {(r, c): firsts[r] for r in rows for c in vectors}

    def add_four(sums: dict[tuple[int, int], Any], inputs: Any) -> dict[tuple[int, int], Any]:
        """The sums and the products of the four inputs behind the first ``inputs`` of the group."""
        weights = builder.add(place, builder.mul(inputs, _LONG(COLUMNS)))
        columns = {c: _load(builder, weights, c * 4 * lanes, ints) for c in vectors}
        new = {}
        for r in rows:
            four = _spread(builder, _load(builder, builder.add(x_groups[r], inputs), 0, _INT), lanes)
            new.update({(r, c): multiply(sums[r, c], columns[c], four) for c in vectors})
        return new

    if not in_loop:
        for i in range(0, GROUP, 4):
            sums = add_four(sums, _LONG(i))
        return sums
    before, loop, after = builder.block, builder.append_basic_block("four"), builder.append_basic_block("fours_done")
    # The compiler would write out so short a loop, if it knew its length.
    end = builder.asm(ir.FunctionType(_LONG, [_LONG]), "", "=r,0", [_LONG(GROUP)], side_effect=False)
    builder.branch(loop)
    builder.position_at_end(loop)
    inputs = builder.phi(_LONG)
    phis = {cell: builder.phi(ints) for cell in sums}
    inputs.add_incoming(_LONG(0), before)
    for cell, phi in phis.items():
        phi.add_incoming(sums[cell], before)
    new = add_four(phis, inputs)
    next_inputs = builder.add(inputs, _LONG(4))
    inputs.add_incoming(next_inputs, loop)
    for cell, phi in phis.items():
        phi.add_incoming(new[cell], loop)
    builder.cbranch(builder.icmp_signed("<", next_inputs, end), loop, after)
    builder.position_at_end(after)
    return new


def _unsigned_products(builder: Any, ints: Any) -> Callable[[Any, Any, Any], Any]:
    """AVX512-VNNI: a sum plus the products of four weights + 128 and four numbers, in each lane."""
    kind = ir.FunctionType(ints, [ints] * 3)
    dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
    return lambda total, weights, numbers: builder.call(dot, [total, weights, numbers])


def _signed_products(builder: Any, ints: Any) -> Callable[[Any, Any, Any], Any]:
    """AVX2: a sum plus the products of four weights and four numbers, in each lane.

    One factor must be unsigned: the weights' signs go over to the numbers. All lie within ±127, so that the sum of two
    products fits in 16 bits.
    """
    bytes_, shorts = (ir.VectorType(ir.IntType(bits), ints.count * 32 // bits) for bits in (8, 16))

    def function(name: str, result: Any, *arguments: Any) -> Any:
        return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), f"llvm.{name}")

    absolute = function(f"abs.v{bytes_.count}i8", bytes_, bytes_, ir.IntType(1))
    with_sign = function("x86.avx2.psign.b", bytes_, bytes_, bytes_)
    two_products = function("x86.avx2.pmadd.ub.sw", shorts, bytes_, bytes_)
    sum_of_two = function("x86.avx2.pmadd.wd", ints, shorts, shorts)
    ones = ir.Constant(shorts, [1] * shorts.count)

    def multiply(total: Any, weights: Any, numbers: Any) -> Any:
        weights, numbers = builder.bitcast(weights, bytes_), builder.bitcast(numbers, bytes_)
        sizes = builder.call(absolute, [weights, ir.IntType(1)(0)])
        products = builder.call(two_products, [sizes, builder.call(with_sign, [numbers, weights])])
        return builder.add(total, builder.call(sum_of_two, [products, ones]))

    return multiply


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
