from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import binding
from numba.core import config

from dspark.models import int8_linear
from dspark.models.instructions import ALL_INSTRUCTIONS, INT8_VARIABLE, chosen_instructions, has_dot_products
from dspark.models.int8_intrinsics import GROUP
from dspark.models.int8_linear import GroupedInt8Linear

pytestmark = pytest.mark.skipif(not has_dot_products(), reason="this processor has no instructions for it")


def random(*shape: int, seed: int) -> torch.Tensor:
    """Numbers of very different sizes, and some groups of zeros."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    numbers[:, 0] *= 50.0
    numbers[0, :GROUP] = 0.0
    return numbers


def int8_groups(x_NI: torch.Tensor, *, as_weights: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales ``[N, g]`` and numbers ``[N, g, GROUP]`` of ``x``."""
    x_NgI = torch.nn.functional.pad(x_NI, (0, -x_NI.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest_Ng = x_NgI.abs().amax(-1)
    if not as_weights:
        scales_Ng = largest_Ng.clamp_min(1e-12) * torch.tensor(1.0 / 127.0)
        return scales_Ng, (x_NgI * (1.0 / scales_Ng).unsqueeze(-1)).round()
    needed_Ng = (largest_Ng / 127.0).clamp_min(1e-12)
    rounded = needed_Ng.bfloat16()  # the next bfloat16 number that is not below
    up = (rounded.view(torch.int16) + 1).view(torch.bfloat16)
    scales_Ng = torch.where(rounded.float() < needed_Ng, up, rounded).float()
    return scales_Ng, (x_NgI / scales_Ng.unsqueeze(-1)).round()


def quantised(x_NI: torch.Tensor, *, as_weights: bool) -> torch.Tensor:
    """What the int8 numbers of ``x`` stand for, in float64."""
    scales_Ng, numbers_NgI = int8_groups(x_NI, as_weights=as_weights)
    return (numbers_NgI.double() * scales_Ng.unsqueeze(-1).double()).flatten(1)[:, : x_NI.shape[1]]


@pytest.mark.parametrize(("size_in", "size_out"), [(32, 48), (576, 144), (56, 97), (8, 1), (100, 50)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 33])
def test_it_multiplies_what_int8_numbers_stand_for(size_in: int, size_out: int, rows: int) -> None:
    weight_OI, x_NI = random(size_out, size_in, seed=0), random(rows, size_in, seed=1)
    bias_O = random(1, size_out, seed=2)[0]
    y_NO = GroupedInt8Linear(weight_OI, bias_O)(x_NI)
    assert y_NO.shape == (rows, size_out)
    assert y_NO.is_contiguous()
    weights, inputs = quantised(weight_OI, as_weights=True), quantised(x_NI, as_weights=False)
    # An input may lie so near the middle between two int8 numbers that float32 goes the other way.
    near = (y_NO.double() - (inputs @ weights.T + bias_O)).abs() < 1e-4 * (1.0 + inputs.abs() @ weights.abs().T)
    assert near.float().mean() > 0.98
    torch.testing.assert_close(GroupedInt8Linear(weight_OI, None)(x_NI) + bias_O, y_NO, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("size_in", "size_out"), [(576, 144), (56, 97)])
def test_its_bits_are_those_of_exact_groups_added_in_order(size_in: int, size_out: int) -> None:
    """Of a group comes one product, and one addition with a product; both are rounded once."""
    weight_OI, x_NI, bias_1O = (random(*shape, seed=3) for shape in ((size_out, size_in), (13, size_in), (1, size_out)))
    scales_Ng, numbers_Ngi = int8_groups(x_NI, as_weights=False)
    scales_Og, numbers_Ogi = int8_groups(weight_OI, as_weights=True)
    sums_gNO = torch.einsum("ngi,ogi->gno", numbers_Ngi.double(), numbers_Ogi.double()).float()
    expected_NO = bias_1O.expand(len(x_NI), -1).numpy()
    for group, sums_NO in enumerate(sums_gNO):
        scaled_NO = (sums_NO * scales_Og[:, group]).numpy().astype(np.longdouble)
        scale_N1 = scales_Ng[:, group, None].numpy().astype(np.longdouble)
        expected_NO = (scaled_NO * scale_N1 + expected_NO).astype(np.float32)
    assert torch.equal(GroupedInt8Linear(weight_OI, bias_1O[0])(x_NI), torch.from_numpy(expected_NO))


def test_weights_go_over_to_a_process_with_other_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_OI, x_NI = random(50, 96, seed=0), random(3, 96, seed=1)
    expected_NO = GroupedInt8Linear(weight_OI, None)(x_NI)
    signed = int8_linear.HAS_SIGNED_WEIGHTS
    monkeypatch.setattr(int8_linear, "HAS_SIGNED_WEIGHTS", not signed)
    stored = pickle.dumps(GroupedInt8Linear(weight_OI, None))
    monkeypatch.setattr(int8_linear, "HAS_SIGNED_WEIGHTS", signed)
    assert torch.equal(pickle.loads(stored)(x_NI), expected_NO)


def test_it_is_near_the_float_product_where_rows_have_outliers() -> None:
    weight_OI, x_NI = random(96, 576, seed=0), random(16, 576, seed=1)
    expected_NO = x_NI @ weight_OI.T
    # Without the group of the outlier, which one scale for all would let drown the others.
    x_NI[:, :GROUP] = 0.0
    error_NO = GroupedInt8Linear(weight_OI, None)(x_NI) - x_NI @ weight_OI.T
    assert error_NO.norm() < 0.012 * (x_NI @ weight_OI.T).norm() < 0.012 * expected_NO.norm()


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "_LEAST_SHARED_WORK", 0)
    linear, x_NI = GroupedInt8Linear(random(200, 96, seed=0), None), random(37, 96, seed=1)
    alone_NO = torch.cat([linear(row) for row in x_NI.split(1)])
    before = torch.get_num_threads()
    try:
        for threads, size in itertools.product((1, 2, 3, 9), (2, 3, 5, 11, 37)):
            torch.set_num_threads(threads)
            assert torch.equal(torch.cat([linear(rows) for rows in x_NI.split(size)]), alone_NO)
    finally:
        torch.set_num_threads(before)


def test_callers_in_several_threads_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "_LEAST_SHARED_WORK", 0)
    linear, x_NI = GroupedInt8Linear(random(200, 96, seed=0), None), random(64, 96, seed=1)
    alone = [linear(rows) for rows in x_NI.split(8)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(linear, x_NI.split(8) * 20))
    assert all(torch.equal(y_NO, alone[index % 8]) for index, y_NO in enumerate(together))


def test_rows_may_be_strided_and_none_at_all() -> None:
    linear, x_NI = GroupedInt8Linear(random(50, 64, seed=0), None), random(6, 128, seed=1)
    assert torch.equal(linear(x_NI[::2, 32:96]), linear(x_NI[::2, 32:96].clone()))
    assert linear(x_NI[:0, :64]).shape == (0, 50)


@given(
    rows=st.integers(1, 20),
    size_in=st.integers(1, 140),
    size_out=st.integers(1, 110),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_is_multiplied_and_what_lies_beside_it_is_left_alone(
    rows: int, size_in: int, size_out: int, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight_OI = torch.randn(size_out, size_in, generator=generator)
    bias_O = torch.randn(size_out, generator=generator) if bias else None
    # Between numbers that would show in every result, were they read.
    room = torch.full((rows * size_in + 128,), torch.nan)
    x_NI = room[64:-64].view(rows, size_in)
    x_NI.copy_(torch.randn(rows, size_in, generator=generator))
    before = room.clone()
    y_NO = GroupedInt8Linear(weight_OI, bias_O)(x_NI)
    assert torch.equal(room.view(torch.int32), before.view(torch.int32))
    weights, inputs = quantised(weight_OI, as_weights=True), quantised(x_NI, as_weights=False)
    expected = inputs @ weights.T + (0.0 if bias_O is None else bias_O)
    # An input near the middle between two int8 numbers may go either way.
    steps = x_NI.abs().max() / 127.0 * weight_OI.abs().max()
    assert (y_NO.double() - expected).abs().max() <= 1.01 * steps + 1e-4


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("size_in", [1, 40, 64])
def test_what_is_not_finite_stays_so_in_its_row(number: float, size_in: int) -> None:
    x_NI = random(3, size_in, seed=1)
    x_NI[1, size_in // 2] = number
    y_NO = GroupedInt8Linear(random(50, size_in, seed=0), None)(x_NI)
    assert y_NO.isfinite().all(1).tolist() == [True, False, True]
    assert not y_NO[1].isfinite().any()


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 63),
        torch.zeros(2, 65),
        torch.zeros(64),
        torch.zeros(2, 2, 64),
        torch.zeros(2, 64, dtype=torch.bfloat16),
        torch.zeros(2, 64, dtype=torch.float64),
    ],
    ids=lambda x: f"{x.dtype}{tuple(x.shape)}",
)
def test_rows_of_other_types_and_sizes_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="64 inputs takes float32 rows"):
        GroupedInt8Linear(random(50, 64, seed=0), None)(x)


@pytest.mark.parametrize("shape", [(0, 64), (50, 0), (50, 64, 1)])
def test_weights_of_no_inputs_or_outputs_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one input and one output"):
        GroupedInt8Linear(torch.ones(shape), None)


@pytest.mark.parametrize("size", [1, 49, 51])
def test_a_bias_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="50 outputs has a bias of so many"):
        GroupedInt8Linear(random(50, 64, seed=0), torch.ones(size))


def test_packing_does_not_depend_on_threads() -> None:
    weight_OI = random(1000, 600, seed=4)
    before = torch.get_num_threads()
    try:
        packed = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            packed.append(GroupedInt8Linear(weight_OI, None).packed)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*packed)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFF0001, 0x7FFFFFFF, -1, 0x7F800000, -0x800000])
def test_a_weight_that_is_no_finite_number_shows_in_its_output_alone(bits: int) -> None:
    """NaN in its many forms, and infinity."""
    weight_OI, x_NI = random(40, 64, seed=5), random(3, 64, seed=6)
    weight_OI.view(torch.int32)[7, 33] = bits
    assert not weight_OI[7, 33].isfinite()
    is_finite_NO = GroupedInt8Linear(weight_OI, None)(x_NI).isfinite()
    assert not is_finite_NO[:, 7].any()
    assert is_finite_NO[:, [*range(7), *range(8, 40)]].all()


@pytest.mark.parametrize(
    ("setting", "value"), [("CPU_NAME", "haswell"), ("CPU_FEATURES", "+avx2"), ("ENABLE_AVX", 0), ("DISABLE_JIT", 1)]
)
def test_code_for_another_processor_has_no_dot_products(
    setting: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the variables ``NUMBA_...`` ask for it; LLVM ends the process where an instruction is not there."""
    monkeypatch.setattr(config, setting, value)
    assert chosen_instructions() is None


MULTIPLY = """
import hashlib
import torch
from dspark.models.instructions import INSTRUCTIONS
from dspark.models.int8_linear import GroupedInt8Linear
print(INSTRUCTIONS is not None)
if INSTRUCTIONS is not None:
    generator = torch.Generator().manual_seed(0)
    # Not randn, whose bits depend on the processor.
    weight_OI, x_NI = (torch.randint(-999, 999, (rows, 100), generator=generator) / 64 for rows in (70, 13))
    print(INSTRUCTIONS.name, hashlib.sha256(GroupedInt8Linear(weight_OI, None)(x_NI).numpy().tobytes()).hexdigest())
"""
DIGEST = "f35f108ecd581f0d923aab38f5376197a02bd9059cf9d40312c3e3e0e378535d"
"""Of what MULTIPLY computes, whatever the instructions."""


@pytest.mark.parametrize("name", [*(each.name for each in ALL_INSTRUCTIONS), "none"])
def test_the_environment_says_what_products_are_compiled_for(name: str) -> None:
    there = binding.get_host_cpu_features()
    features = next((each.features for each in ALL_INSTRUCTIONS if each.name == name), ())
    run = subprocess.run(
        [sys.executable, "-c", MULTIPLY],
        env={**os.environ, INT8_VARIABLE: name},
        capture_output=True,
        text=True,
        check=False,
    )
    if not all(there.get(feature) for feature in features):
        assert run.returncode != 0
        assert "this processor has no such instructions" in run.stderr
        return
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == (["False"] if name == "none" else ["True", name, DIGEST])


def test_an_unknown_name_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INT8_VARIABLE, "avx")
    with pytest.raises(ValueError, match="DSPARK_INT8 is 'avx': it may be one of avx512vnni, avx2, none"):
        chosen_instructions()
