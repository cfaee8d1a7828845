from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dspark.decoding import gumbel_noise, gumbel_of_bits, noise_bits, uniform

GOLDEN_UNIFORM = 0.8575688436448708
GOLDEN_GUMBEL = [-1.8527497054386226, -0.27216699898102936, 0.5908069412658921]


def test_a_function_of_seed_and_position_alone() -> None:
    assert torch.equal(gumbel_noise(7, 3, 100), gumbel_noise(7, 3, 100))
    assert uniform(7, 3) == uniform(7, 3)
    assert torch.equal(gumbel_noise(7, 3, 100)[:37], gumbel_noise(7, 3, 37))


def test_seeds_positions_and_streams_differ() -> None:
    seeds = (-(2**63), -1, 0, 1, 2**63 - 1)
    draws = {tuple(gumbel_noise(seed, position, 3).tolist()) for seed in seeds for position in range(20)}
    assert len(draws) == 100
    from_gumbel = torch.exp(-torch.exp(-gumbel_noise(1, 1, 4)))
    assert not np.isclose(from_gumbel[0], uniform(1, 1))


def test_golden_values() -> None:
    """Outputs of seeded requests must not change between versions."""
    assert uniform(42, 10) == GOLDEN_UNIFORM
    np.testing.assert_allclose(gumbel_noise(42, 10, 3).numpy(), GOLDEN_GUMBEL, rtol=1e-14)


def test_bits_are_52_and_make_the_noise() -> None:
    bits = noise_bits(3, 4, 10_000)
    assert 0 <= int(bits.min()) < 2**42
    assert 2**52 - 2**42 < int(bits.max()) < 2**52
    assert torch.equal(gumbel_of_bits(bits), gumbel_noise(3, 4, 10_000))
    np.testing.assert_allclose(gumbel_of_bits(bits).numpy(), -np.log(-np.log((bits.numpy() + 0.5) / 2**52)))


def test_laws() -> None:
    gumbel = torch.cat([gumbel_noise(5, position, 1000) for position in range(20)]).numpy()
    assert stats.kstest(gumbel, stats.gumbel_r.cdf).pvalue > 0.01
    assert stats.kstest([uniform(5, position) for position in range(5000)], stats.uniform.cdf).pvalue > 0.01
    across = torch.stack([gumbel_noise(5, position, 2) for position in range(5000)]).numpy()
    assert abs(np.corrcoef(across.T)[0, 1]) < 0.05
    assert abs(np.corrcoef(across[:-1, 0], across[1:, 0])[0, 1]) < 0.05


def test_finite_and_dtype() -> None:
    noise = gumbel_noise(0, 0, 100_000, torch.float32)
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    assert gumbel_noise(0, 0, 4).dtype == torch.float64


def test_negative_position() -> None:
    with pytest.raises(ValueError, match="position is -1"):
        uniform(0, -1)
