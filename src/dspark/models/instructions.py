"""Which instructions of this processor multiply 8-bit numbers; settled when this is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass

from llvmlite import binding
from numba.core import config

INT8_VARIABLE = "DSPARK_INT8"
"""The environment variable that names the instructions to use, or ``none``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions:
    """What a processor multiplies 8-bit numbers with, and the shapes that go with it.

    Attributes:
        name: of the instruction set.
        features: that a processor must have, as LLVM names them.
        lanes: 32-bit numbers of a vector.
        rows: that are computed side by side, at most.
        vectors: of outputs whose sums are kept in registers at once.
        attention_sums: vectors of 16 float32 sums that attention keeps in registers, at most; one for each head of a
            group of up to seven, at least.
        rows_to_prefetch: rows from which on memory is asked for ahead. Fewer do little else than wait: the processor's
            own guess is better.
        has_signed_weights: whether weights lie in memory as they are, or plus 128.
    """

    name: str
    features: tuple[str, ...]
    lanes: int
    rows: int
    vectors: int
    attention_sums: int
    rows_to_prefetch: int
    has_signed_weights: bool


AVX512_VNNI = Instructions(
    name="avx512vnni", features=("avx512vnni", "avx512bw"), lanes=16, rows=8, vectors=2, attention_sums=24,
    rows_to_prefetch=5, has_signed_weights=False,
)  # fmt: skip
AVX2 = Instructions(
    name="avx2", features=("avx2", "fma", "f16c"), lanes=8, rows=5, vectors=2, attention_sums=7, rows_to_prefetch=1,
    has_signed_weights=True,
)  # fmt: skip
ALL_INSTRUCTIONS = (AVX512_VNNI, AVX2)
"""The best first. All give the same bits, of rows that are finite."""


def chosen_instructions() -> Instructions | None:
    """What products of this process are compiled for; None: numba makes no vector code here, or none that fits.

    Raises:
        ValueError: the environment asks for something else than there is.
    """
    asked = os.environ.get(INT8_VARIABLE, "")
    if asked and asked not in (names := [*(each.name for each in ALL_INSTRUCTIONS), "none"]):
        raise ValueError(f"the environment variable {INT8_VARIABLE} is {asked!r}: it may be one of {', '.join(names)}")
    # Asked for code for another processor, LLVM would end the process.
    is_native = config.CPU_NAME is None and config.CPU_FEATURES is None and config.ENABLE_AVX and not config.DISABLE_JIT
    if asked == "none" or not is_native or not hasattr(os, "sched_yield"):
        return None
    host = binding.get_host_cpu_features()
    there = [each for each in ALL_INSTRUCTIONS if all(host.get(feature) for feature in each.features)]
    if asked:
        there = [each for each in there if each.name == asked]
        if not there:
            raise ValueError(
                f"the environment variable {INT8_VARIABLE} is {asked!r}: this processor has no such instructions"
            )
    return there[0] if there else None


INSTRUCTIONS = chosen_instructions()


def has_dot_products() -> bool:
    """Whether code compiled here may multiply and sum vectors of 8-bit numbers; settled when this is imported."""
    return INSTRUCTIONS is not None
