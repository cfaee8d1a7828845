"""Vector code for compiled kernels: what loops leave to a compiler's mood, written down.

Matrices are float32, given by the address of their first element and the bytes from a row to the next. Any processor
runs this: LLVM cuts the vectors to the registers that there are.
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


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_add(
    typing: Any, rows: Any, width: Any, steps: Any, sums: Any, sums_step: Any, left: Any, left_step: Any, right: Any,
    right_step: Any,
) -> Any:  # fmt: skip
    """``sums[r, j] += left[r, i] * right[i, j]`` for r < rows, j < width and, in this order, i < steps.

    All matrices are float32, given by the address of their first element and the bytes from a row to the next.
    """
    num_rows, lanes, num_steps = rows.literal_value, width.literal_value, steps.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, sums_step, left, left_step, right, right_step = arguments[3:]
        vector = ir.VectorType(ir.FloatType(), lanes)
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32"
        )
        chains = [_load(builder, sums, sums_step, r, lanes) for r in range(num_rows)]
        for i in range(num_steps):
            right_row = _load(builder, right, right_step, i, lanes)
            for r in range(num_rows):
                factor = _load(builder, builder.add(left, ir.Constant(left.type, 4 * i)), left_step, r, 1)
                factor = builder.shuffle_vector(factor, factor, _lanes([0] * lanes))
                chains[r] = builder.call(fma, [factor, right_row, chains[r]])
        for r in range(num_rows):
            _store(builder, chains[r], sums, sums_step, r)
        return context.get_dummy_value()

    return types.void(rows, width, steps, *[types.int64] * 6), generate


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
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        prefetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer, number, number, number]), "llvm.prefetch.p0"
        )
        for_reading, second_cache, of_data = number(0), number(2), number(1)
        builder.call(prefetch, [builder.inttoptr(arguments[0], pointer), for_reading, second_cache, of_data])
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
