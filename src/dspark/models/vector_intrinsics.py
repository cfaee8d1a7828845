"""Vector code for compiled kernels: what loops leave to a compiler's mood, written down.

Matrices are float32 where nothing else is said, given by the address of their first element and the bytes from a row to
the next. Any processor runs this: LLVM cuts the vectors to the registers that there are.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _load(builder: Any, base: Any, step: Any, index: int, width: int) -> Any:
    vector = ir.VectorType(ir.FloatType(), width)
    return builder.load(_row(builder, base, step, index, vector), align=4, typ=vector)


def _store(builder: Any, value: Any, base: Any, step: Any, index: int) -> None:
    builder.store(value, _row(builder, base, step, index, value.type), align=4)


def _row(builder: Any, base: Any, step: Any, index: int, vector: Any) -> Any:
    address = builder.add(base, builder.mul(step, ir.Constant(step.type, index)))
    return builder.inttoptr(address, vector.as_pointer())


def _lanes(lanes: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)


def emit_prefetch(builder: Any, address: Any) -> None:
    """Ask for the line of memory at ``address``, which need not be there, for the second cache."""
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [pointer, number, number, number]), "llvm.prefetch.p0"
    )
    for_reading, second_cache, of_data = number(0), number(2), number(1)
    builder.call(function, [builder.inttoptr(address, pointer), for_reading, second_cache, of_data])


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_add(
    typing: Any, rows: Any, parts: Any, width: Any, is_half: Any, sums: Any, sums_step: Any, left: Any, left_step: Any,
    right: Any, right_step: Any, steps: Any, ahead: Any, ahead_step: Any, lines: Any,
) -> Any:  # fmt: skip
    """``sums[r, p, j] += left[r, i] * right[p][i, j]`` for r < rows, p < parts, j < width; in this order for i < steps.

    ``sums`` and ``left`` are float32, given by the address of their first element and the bytes from a row to the next;
    ``right`` is the address of the addresses (int64) of its parts, float16 if ``is_half``, else float32.

    Args:
        rows, parts, width, is_half, lines: constants where this is compiled.
        steps: 1 at least.
        ahead: each step asks for so many ``lines`` of memory (see :func:`prefetch`) from here on, the next step for
            those that lie ``ahead_step`` bytes further.
    """
    num_rows, num_parts, lanes = rows.literal_value, parts.literal_value, width.literal_value
    number = ir.HalfType() if is_half.literal_value else ir.FloatType()

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, sums_step, left, left_step, right, right_step, steps, ahead, ahead_step = arguments[4:-1]
        vector = ir.VectorType(ir.FloatType(), lanes)
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32"
        )
        cells = [(r, p) for r in range(num_rows) for p in range(num_parts)]
        places = {(r, p): builder.add(sums, ir.Constant(sums.type, 4 * lanes * p)) for r, p in cells}
        addresses = [builder.add(right, ir.Constant(right.type, 8 * p)) for p in range(num_parts)]
        addresses = [builder.load(builder.inttoptr(a, a.type.as_pointer()), typ=a.type) for a in addresses]
        start = {(r, p): _load(builder, places[r, p], sums_step, r, lanes) for r, p in cells}
        before, loop, after = (
            builder.block,
            builder.append_basic_block("step"),
            builder.append_basic_block("steps_done"),
        )
        builder.branch(loop)

        builder.position_at_end(loop)
        step = builder.phi(steps.type)
        step.add_incoming(ir.Constant(steps.type, 0), before)
        chains = {cell: builder.phi(vector) for cell in cells}
        for cell, chain in chains.items():
            chain.add_incoming(start[cell], before)
        offset = builder.mul(step, right_step)
        columns = []
        for address in addresses:
            place = builder.inttoptr(builder.add(address, offset), ir.VectorType(number, lanes).as_pointer())
            column = builder.load(place, align=2, typ=ir.VectorType(number, lanes))
            columns.append(builder.fpext(column, vector) if is_half.literal_value else column)
        for line in range(lines.literal_value):
            place = builder.add(ahead, builder.mul(step, ahead_step))
            emit_prefetch(builder, builder.add(place, ir.Constant(step.type, 64 * line)))
        factor_at = builder.add(left, builder.mul(step, ir.Constant(step.type, 4)))
        factors = []
        for r in range(num_rows):
            factor = _load(builder, factor_at, left_step, r, 1)
            factors.append(builder.shuffle_vector(factor, factor, _lanes([0] * lanes)))
        sums_now = {(r, p): builder.call(fma, [factors[r], columns[p], chains[r, p]]) for r, p in cells}
        next_step = builder.add(step, ir.Constant(step.type, 1))
        step.add_incoming(next_step, loop)
        for cell, chain in chains.items():
            chain.add_incoming(sums_now[cell], loop)
        builder.cbranch(builder.icmp_signed("<", next_step, steps), loop, after)

        builder.position_at_end(after)
        for r, p in cells:
            _store(builder, sums_now[r, p], places[r, p], sums_step, r)
        return context.get_dummy_value()

    return types.void(rows, parts, width, is_half, *[types.int64] * 9, lines), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def transpose(typing: Any, source: Any, source_step: Any, target: Any, target_step: Any) -> Any:
    """Transpose 8 by 8 float32 numbers, given as in :func:`multiply_add`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, source_step, target, target_step = arguments
        rows = [_load(builder, source, source_step, i, 8) for i in range(8)]
        for bit in (1, 2, 4):  # swap the off-diagonal quarters of all squares of 2 x 2, of 4 x 4, of 8 x 8
            upper = _lanes([8 + (lane ^ bit) if lane & bit else lane for lane in range(8)])
            lower = _lanes([8 + lane if lane & bit else lane ^ bit for lane in range(8)])
            for i in range(8):
                if not i & bit:
                    pair = rows[i], rows[i | bit]
                    rows[i] = builder.shuffle_vector(*pair, upper)
                    rows[i | bit] = builder.shuffle_vector(*pair, lower)
        for i in range(8):
            _store(builder, rows[i], target, target_step, i)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for a line of memory to be brought to the second cache; any address will do."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def largest_of(typing: Any, count: Any, address: Any) -> Any:
    """The largest of ``count`` float32 numbers from an address on."""
    lanes = count.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers = _load(builder, arguments[1], arguments[1], 0, lanes)
        largest = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.FloatType(), [numbers.type]), f"llvm.vector.reduce.fmax.v{lanes}f32"
        )
        return builder.call(largest, [numbers])

    return types.float32(count, types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def fused_multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of float32 numbers, rounded once. Loops over it become vector code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.FloatType()
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(number, [number] * 3), "llvm.fma.f32")
        return builder.call(fma, arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def pointer(typing: Any, address: Any) -> Any:
    """An address as what ``carray`` reads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def store_half(typing: Any, number: Any, address: Any) -> Any:
    """Store a float32 number as float16, the nearest one to what lies within ±65504; NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, address = arguments
        largest = ir.Constant(number.type, 65504.0)
        smallest = ir.Constant(number.type, -65504.0)
        number = builder.select(builder.fcmp_ordered(">", number, largest), largest, number)
        number = builder.select(builder.fcmp_ordered("<", number, smallest), smallest, number)
        half = builder.fptrunc(number, ir.HalfType())
        builder.store(half, builder.inttoptr(address, half.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), generate
