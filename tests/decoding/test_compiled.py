"""Compiled distributions against plain float64 arithmetic, and rows that do not depend on their neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.decoding import SamplingSettings, token_probs, warp_logits
from dspark.decoding.compiled import residual, row_masses, sample_row, softmax_rows


def random_logits(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, columns)) * 4).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_softmax_is_that_of_float64(temperature: float) -> None:
    logits = random_logits(3, 1000)
    logits[1, ::3] = -np.inf
    probs, bad_row = softmax_rows(logits, temperature)
    expected = (torch.from_numpy(logits).double() / temperature).softmax(-1).numpy()
    assert bad_row == -1
    np.testing.assert_allclose(probs, expected, rtol=2e-5, atol=1e-30)
    assert (probs[1, ::3] == 0.0).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_the_same_alone_and_in_company(threads: int) -> None:
    logits = random_logits(45, 300)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        probs, _ = softmax_rows(logits, 0.7)
        sums, smallest = row_masses(probs)
    finally:
        torch.set_num_threads(before)
    for row in range(len(logits)):
        alone, _ = softmax_rows(logits[row : row + 1], 0.7)
        assert (alone[0] == probs[row]).all()
        assert row_masses(alone)[0][0] == sums[row]
        assert smallest[row] == alone.min()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_the_first_row_without_a_finite_maximum_is_named(wrong: float) -> None:
    logits = random_logits(40, 50)
    logits[33, 7] = logits[21, 49] = wrong
    assert softmax_rows(logits, 1.0)[1] == 21
    logits[4] = -np.inf
    assert softmax_rows(logits, 1.0)[1] == 4
    with pytest.raises(ValueError, match="no finite maximum"):
        token_probs(torch.from_numpy(logits), SamplingSettings(temperature=1.0))


def test_temperature_alone_is_what_all_steps_together_give() -> None:
    logits = torch.from_numpy(random_logits(2, 100))
    for asked in (SamplingSettings(temperature=0.6), SamplingSettings(temperature=0.6, min_p=0.05)):
        assert asked.is_temperature_alone == (asked.min_p == 0)
        torch.testing.assert_close(token_probs(logits, asked), warp_logits(logits, asked).softmax(-1))


def test_not_a_number_is_in_the_masses() -> None:
    probs = np.full((2, 300), 1 / 300, np.float32)
    probs[1, 17] = np.nan
    sums, smallest = row_masses(probs)
    assert sums[0] == pytest.approx(1.0)
    assert math.isnan(sums[1])
    assert math.isnan(smallest[1])


@given(
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=700),
    uniform=st.floats(0, 1, exclude_max=True),
    kind=st.sampled_from([np.float32, np.float64]),
)
@settings(max_examples=200)
def test_a_draw_is_the_first_whose_cumulative_mass_exceeds(weights: list[int], uniform: float, kind: type) -> None:
    """Small whole numbers, whose sums are exact in any order."""
    probs = np.array(weights, kind)
    token = sample_row(probs, uniform)
    if not any(weights):
        assert token == -1
        return
    beyond = np.flatnonzero(np.cumsum(probs, dtype=np.float64) > uniform * sum(weights))
    assert token == (beyond[0] if len(beyond) else np.flatnonzero(probs)[-1])
    assert probs[token] > 0


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 3), (0.2, 3), (0.5, 1501), (1.0 - 2**-53, 1501)])
def test_a_draw_has_mass_at_the_ends(uniform: float, expected: int) -> None:
    probs = np.zeros(2000, np.float32)
    probs[[3, 700, 1501]] = 0.1, 1e-30, 0.3
    assert sample_row(probs, uniform) == expected
    assert sample_row(np.full(3, np.nan, np.float32), uniform) == -1


@pytest.mark.parametrize("reduced", [False, True])
def test_residual_is_that_of_float64(reduced: bool) -> None:
    generator = np.random.default_rng(1)
    p, columns = generator.random(500).astype(np.float32), generator.permutation(500)[:80]
    q = generator.random(80 if reduced else 500).astype(np.float32)
    expected = p / p.sum(dtype=np.float64)
    expected[columns if reduced else slice(None)] -= q / q.sum(dtype=np.float64)
    expected = expected.clip(min=0.0)
    np.testing.assert_allclose(residual(p, q, columns if reduced else None), expected / expected.sum(), rtol=1e-12)


def test_residual_of_equal_distributions_is_the_target() -> None:
    p = np.random.default_rng(1).random(40).astype(np.float32)
    np.testing.assert_allclose(residual(p, p, None), p / p.sum(dtype=np.float64), rtol=1e-12)


def test_residual_of_what_does_not_fit_is_refused() -> None:
    p, q = np.full(10, 0.1, np.float32), np.full(3, 1 / 3, np.float32)
    with pytest.raises(ValueError, match="draft_probs_D has 3 columns"):
        residual(p, q, None)
    with pytest.raises(ValueError, match="draft_probs_D has 3 columns"):
        residual(p, q, np.array([1, 2]))
    for wrong in (-1, 10):
        with pytest.raises(ValueError, match=r"an id outside the vocabulary 0..9"):
            residual(p, q, np.array([1, 2, wrong]))
