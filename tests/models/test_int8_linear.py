from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dspark.models.int8_intrinsics import GROUP, has_dot_products
from dspark.models.int8_linear import GroupedInt8Linear

pytestmark = pytest.mark.skipif(not has_dot_products(), reason="this processor has no AVX512-VNNI")


def random(*shape: int, seed: int) -> torch.Tensor:
    """Numbers of very different sizes, and some groups of zeros."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    numbers[:, 0] *= 50.0
    numbers[0, :GROUP] = 0.0
    return numbers


def quantised(x_NI: torch.Tensor, *, as_weights: bool) -> torch.Tensor:
    """What the int8 numbers of ``x`` stand for, in float64."""
    size = x_NI.shape[1]
    x_NgI = torch.nn.functional.pad(x_NI, (0, -size % GROUP)).unflatten(1, (-1, GROUP))
    scales_Ng1 = (x_NgI.abs().amax(-1, keepdim=True) / 127.0).clamp_min(1e-12)
    if as_weights:  # the next bfloat16 number that is not below
        rounded = scales_Ng1.bfloat16()
        up = (rounded.view(torch.int16) + 1).view(torch.bfloat16)
        scales_Ng1 = torch.where(rounded.float() < scales_Ng1, up, rounded).float()
    return ((x_NgI / scales_Ng1).round().double() * scales_Ng1.double()).flatten(1)[:, :size]


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


def test_it_is_near_the_float_product_where_rows_have_outliers() -> None:
    weight_OI, x_NI = random(96, 576, seed=0), random(16, 576, seed=1)
    expected_NO = x_NI @ weight_OI.T
    # Without the group of the outlier, which one scale for all would let drown the others.
    x_NI[:, :GROUP] = 0.0
    error_NO = GroupedInt8Linear(weight_OI, None)(x_NI) - x_NI @ weight_OI.T
    assert error_NO.norm() < 0.012 * (x_NI @ weight_OI.T).norm() < 0.012 * expected_NO.norm()


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads() -> None:
    linear, x_NI = GroupedInt8Linear(random(200, 96, seed=0), None), random(37, 96, seed=1)
    alone_NO = torch.cat([linear(row) for row in x_NI.split(1)])
    before = torch.get_num_threads()
    try:
        for threads, size in itertools.product((1, 2, 3), (2, 3, 5, 11, 37)):
            torch.set_num_threads(threads)
            assert torch.equal(torch.cat([linear(rows) for rows in x_NI.split(size)]), alone_NO)
    finally:
        torch.set_num_threads(before)


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    linear, x_NI = GroupedInt8Linear(random(200, 96, seed=0), None), random(64, 96, seed=1)
    alone = [linear(rows) for rows in x_NI.split(8)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(linear, x_NI.split(8) * 20))
    assert all(torch.equal(y_NO, alone[index % 8]) for index, y_NO in enumerate(together))


def test_rows_may_be_strided_and_none_at_all() -> None:
    linear, x_NI = GroupedInt8Linear(random(50, 64, seed=0), None), random(6, 128, seed=1)
    assert torch.equal(linear(x_NI[::2, 32:96]), linear(x_NI[::2, 32:96].clone()))
    assert linear(x_NI[:0, :64]).shape == (0, 50)
