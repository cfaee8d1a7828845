from __future__ import annotations

import math

import pytest
import torch

from dspark.models.instructions import has_dot_products
from dspark.models.row_kernels import store_halves


@pytest.mark.skipif(not has_dot_products(), reason="float16 is for processors with AVX2")
@pytest.mark.parametrize("step", [2, 32])
def test_halves_are_the_nearest_within_their_range(step: int) -> None:
    x = torch.randn(43, generator=torch.Generator().manual_seed(0))
    x[:6] = torch.tensor([1e6, -1e6, math.inf, -math.inf, 65519.0, math.nan])
    out = torch.zeros(43, step // 2, dtype=torch.float16)
    store_halves(x.data_ptr(), out.data_ptr(), step, len(x))
    assert out[:5, 0].tolist() == [65504.0, -65504.0, 65504.0, -65504.0, 65504.0]
    assert out[5, 0].isnan()
    assert torch.equal(out[6:, 0], x[6:].half())
    assert not out[:, 1:].any()
