from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from dspark.decoding import (
    argmax_rows,
    coupled_sample,
    coupled_sample_bits,
    coupled_sample_rows,
    gumbel_noise,
    gumbel_of_bits,
    noise_bits,
    sample_from,
    sample_rows,
)
from dspark.decoding.enumeration import coupling_law, intervals_of_constancy

WEIGHTS = st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 0.3, 1.0]), min_size=1, max_size=6).filter(any)
UNIFORMS = st.floats(0, 1, exclude_max=True)


@given(weights=WEIGHTS, uniform=UNIFORMS, dtype=st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=300, deadline=None)
def test_inverse_cdf_never_returns_an_impossible_token(
    weights: list[float], uniform: float, dtype: torch.dtype
) -> None:
    probs_V = torch.tensor(weights, dtype=dtype) / sum(weights)
    assert probs_V[sample_from(probs_V, uniform)] > 0


@given(st.data(), st.sampled_from([256, 1024, 1000]), UNIFORMS)
@settings(max_examples=100, deadline=None)
def test_inverse_cdf_is_the_first_token_above(data: st.DataObject, columns: int, uniform: float) -> None:
    possible = data.draw(st.lists(st.integers(0, columns - 1), min_size=1, max_size=8, unique=True))
    probs_V = torch.zeros(columns)
    probs_V[possible] = torch.tensor(data.draw(st.lists(st.integers(1, 8), min_size=len(possible), max_size=8)))[
        : len(possible)
    ].float()  # whole numbers: sums are exact in any order
    cumulative_V = probs_V.double().cumsum(dim=0)
    assert sample_from(probs_V, uniform) == int((cumulative_V > uniform * cumulative_V[-1]).nonzero()[0])


@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.5, 1 - 2**-53])
def test_ends_of_the_uniform(uniform: float) -> None:
    probs_V = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0])
    assert sample_from(probs_V, uniform) == (2 if uniform < 0.5 else 4)


def test_intervals_have_the_probabilities() -> None:
    probs_V = torch.tensor([0.2, 0.0, 0.5, 0.3], dtype=torch.float64)
    widths = {}
    for start, end, token in intervals_of_constancy(lambda uniform: sample_from(probs_V, uniform), []):
        widths[token] = widths.get(token, 0.0) + end - start
    assert widths == pytest.approx({0: 0.2, 2: 0.5, 3: 0.3}, abs=1e-12)


def test_rows_are_independent_and_need_not_be_normalised() -> None:
    probs_RV = torch.rand(50, 200, generator=torch.Generator().manual_seed(1))
    uniforms_R = torch.rand(50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens_R = sample_rows(probs_RV, uniforms_R)
    assert tokens_R.dtype == torch.long
    for row in range(50):
        assert sample_from(probs_RV[row] * 7, float(uniforms_R[row])) == tokens_R[row]


@pytest.mark.parametrize(
    ("probs_RV", "uniforms_R"),
    [
        (torch.ones(2, 3), torch.zeros(3)),
        (torch.ones(3), torch.zeros(3)),
        (torch.ones(1, 3), torch.tensor([1.0])),
        (torch.ones(1, 3), torch.tensor([-0.1])),
        (torch.ones(1, 3), torch.tensor([math.nan])),
        (torch.zeros(1, 3), torch.tensor([0.5])),
        (torch.tensor([[1.0, math.nan]]), torch.tensor([0.5])),
    ],
)
def test_inverse_cdf_errors(probs_RV: torch.Tensor, uniforms_R: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"uniforms_R|probs_RV"):
        sample_rows(probs_RV, uniforms_R)


@given(weights=WEIGHTS, position=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_gumbel_max_never_returns_an_impossible_token(weights: list[float], position: int) -> None:
    probs_V = torch.tensor(weights, dtype=torch.float64)
    assert probs_V[coupled_sample(probs_V, gumbel_noise(3, position, len(weights)))] > 0


def test_gumbel_max_is_the_argmax_of_log_probs_plus_noise() -> None:
    probs_RV = torch.rand(40, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gumbel_RV = torch.stack([gumbel_noise(1, position, 30) for position in range(40)])
    expected_R = (probs_RV.log() + gumbel_RV).argmax(dim=-1)
    assert torch.equal(coupled_sample_rows(probs_RV, gumbel_RV), expected_R)
    assert torch.equal(coupled_sample_rows(probs_RV.float() * 3, gumbel_RV), expected_R)


def test_gumbel_max_ties_go_to_the_lowest_id() -> None:
    assert coupled_sample(torch.tensor([0.0, 0.4, 0.4]), torch.zeros(3)) == 1


@pytest.mark.parametrize("probs", [[0.3, 0.7], [0.2, 0.5, 0.3], [0.05, 0.6, 0.0, 0.35]])
def test_gumbel_max_has_the_law_of_the_probabilities(probs: list[float]) -> None:
    """P(i) integrated over the noise: i wins exactly above the threshold max_j(log p_j + g_j) - log p_i.

    That the threshold is where the function really switches is probed; the maximum of the others is Gumbel with
    location log(1 - p_i), so P(i) is one integral of known densities.
    """
    probs_V = torch.tensor(probs, dtype=torch.float64)
    noise = torch.Generator().manual_seed(1)
    for i, p in enumerate(probs):
        if p == 0:
            continue
        for _ in range(20):
            gumbel_V = -torch.rand(len(probs), dtype=torch.float64, generator=noise).log().neg().log()
            others_V = probs_V.log() + gumbel_V
            others_V[i] = -math.inf
            threshold = float(others_V.max()) - math.log(p)
            gumbel_V[i] = threshold + 1e-12
            assert coupled_sample(probs_V, gumbel_V) == i
            gumbel_V[i] = threshold - 1e-12
            assert coupled_sample(probs_V, gumbel_V) != i

        def density(m: float, p: float = p) -> float:
            z = m - math.log(1 - p)
            return math.exp(-z - math.exp(-z)) * -math.expm1(-math.exp(-(m - math.log(p))))

        law, _ = integrate.quad(density, -8, 60, epsabs=1e-13, epsrel=1e-12, limit=500)
        assert law == pytest.approx(p, abs=1e-10)


@pytest.mark.parametrize(
    ("p_V", "q_V"),
    [
        ([0.7, 0.3], [0.5, 0.5]),
        ([0.2, 0.5, 0.3], [0.6, 0.1, 0.3]),
        ([0.2, 0.5, 0.3], [0.2, 0.5, 0.3]),
        ([0.0, 0.5, 0.5, 0.0], [0.25, 0.25, 0.0, 0.5]),
        ([1.0, 0.0, 0.0], [0.0, 0.5, 0.5]),
        ([0.0, 1.0, 0.0], [0.1, 0.5, 0.4]),
    ],
)
def test_coupling_law(p_V: list[float], q_V: list[float]) -> None:
    """Its margins are q and p, agreement keeps the promise of the docstring, and real draws follow it."""
    law = coupling_law(p_V, q_V)
    for i in range(len(p_V)):
        assert sum(mass for (x, _), mass in law.items() if x == i) == pytest.approx(q_V[i], abs=1e-12)
        assert sum(mass for (_, s), mass in law.items() if s == i) == pytest.approx(p_V[i], abs=1e-12)
    total_variation = sum(abs(p - q) for p, q in zip(p_V, q_V, strict=True)) / 2
    agreement = sum(mass for (x, s), mass in law.items() if x == s)
    assert (1 - total_variation) / (1 + total_variation) - 1e-12 <= agreement <= 1 - total_variation + 1e-12

    draws = 4000
    gumbel_RV = torch.stack([gumbel_noise(9, position, len(p_V)) for position in range(draws)])
    x_R = coupled_sample_rows(torch.tensor([q_V] * draws), gumbel_RV).tolist()
    s_R = coupled_sample_rows(torch.tensor([p_V] * draws), gumbel_RV).tolist()
    for pair in set(zip(x_R, s_R, strict=True)):
        frequency = sum(drawn == pair for drawn in zip(x_R, s_R, strict=True)) / draws
        assert frequency == pytest.approx(law[pair], abs=5 * math.sqrt(0.25 / draws))


@pytest.mark.parametrize(
    ("probs_RV", "gumbel_RV"),
    [
        (torch.ones(2, 3), torch.zeros(2, 4)),
        (torch.zeros(1, 3), torch.zeros(1, 3)),
        (torch.tensor([[1.0, math.nan]]), torch.zeros(1, 2)),
    ],
)
def test_gumbel_max_errors(probs_RV: torch.Tensor, gumbel_RV: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="probs_RV"):
        coupled_sample_rows(probs_RV, gumbel_RV)


@pytest.mark.parametrize("columns", [1, 255, 256, 512, 2560])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_argmax_is_that_of_the_whole_row(columns: int, dtype: torch.dtype) -> None:
    values_NV = (torch.randn(40, columns, generator=torch.Generator().manual_seed(1)) * 3).round().to(dtype)  # ties
    values_NV[0] = -math.inf
    values_NV[1, -1] = math.nan
    assert torch.equal(argmax_rows(values_NV), values_NV.argmax(dim=-1))
    assert argmax_rows(values_NV[:0]).shape == (0,)


@given(
    weights=st.lists(
        st.sampled_from([0.0, 1e-30, 1e-8, 1e-4, 0.1, 1.0]) | st.floats(0, 1), min_size=1, max_size=60
    ).filter(lambda weights: max(weights) >= 1e-30),
    position=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    extreme=st.dictionaries(st.integers(0, 59), st.sampled_from([0, 2**51, 2**52 - 2**42, 2**52 - 1]), max_size=5),
)
@settings(max_examples=400, deadline=None)
def test_only_tokens_that_cannot_win_are_left_out(
    weights: list[float], position: int, dtype: torch.dtype, extreme: dict[int, int]
) -> None:
    probs_V = torch.tensor(weights, dtype=dtype)
    bits_V = noise_bits(3, position, len(weights))
    for token, bits in extreme.items():
        bits_V[min(token, len(weights) - 1)] = bits
    assert coupled_sample_bits(probs_V, bits_V) == coupled_sample(probs_V, gumbel_of_bits(bits_V))


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 3.0, 30.0])
def test_coupled_sample_of_a_whole_vocabulary(scale: float) -> None:
    """From flat to peaked; with luck as rare as it is, many a winner is a token of the tail."""
    for position in range(40):
        logits_V = torch.randn(5000, generator=torch.Generator().manual_seed(position)) * scale
        probs_V, bits_V = logits_V.softmax(-1), noise_bits(7, position, 5000)
        assert coupled_sample_bits(probs_V, bits_V) == coupled_sample(probs_V, gumbel_of_bits(bits_V))


@pytest.mark.parametrize(
    ("probs_V", "size"), [(torch.ones(3), 4), (torch.zeros(3), 3), (torch.tensor([1.0, math.nan, math.inf]), 3)]
)
def test_coupled_sample_of_bits_errors(probs_V: torch.Tensor, size: int) -> None:
    with pytest.raises(ValueError, match="probs_V"):
        coupled_sample_bits(probs_V, noise_bits(0, 0, size))
