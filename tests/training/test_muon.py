from __future__ import annotations

import pytest
import torch

from dspark.training.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(3, 24, 40), (2, 40, 24), (1, 32, 32)])
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 0.1), (torch.bfloat16, 0.15)])
def test_singular_values_end_near_one_and_vectors_stay(
    shape: tuple[int, ...], dtype: torch.dtype, slack: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    small = min(shape[1:])
    u, _, vt = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    values = torch.logspace(0, -1.8, small)
    result = orthogonalise(u * values @ vt, dtype=dtype).float()
    assert result.dtype == torch.float32
    singular = torch.linalg.svdvals(result)
    assert singular.min() > 1 - slack
    assert singular.max() < 1 + slack
    aligned = torch.einsum("bmk,bmn,bkn->bk", u, result, vt)
    torch.testing.assert_close(aligned, torch.ones_like(aligned), atol=slack, rtol=0)


def test_a_zero_matrix_stays_zero() -> None:
    assert torch.equal(orthogonalise(torch.zeros(1, 4, 6)), torch.zeros(1, 4, 6))


def test_a_step_moves_every_direction_by_the_learning_rate() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(16, 8))
    weight.grad = torch.randn(16, 8, generator=generator)
    optimiser = Muon([weight], lr=0.02)
    optimiser.step()
    singular = torch.linalg.svdvals(weight.detach())
    torch.testing.assert_close(singular, torch.full((8,), 0.02 * 2**0.5), rtol=0.1, atol=0)
    assert (weight.detach() * weight.grad).sum() < 0


def test_matrices_are_stacked_without_mixing() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 12), (12, 8), (8, 12)]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    together = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter, gradient in zip(together, gradients, strict=True):
        parameter.grad = gradient
    Muon(together, lr=0.1).step()
    for parameter, gradient in zip(together, gradients, strict=True):
        alone = torch.nn.Parameter(torch.zeros(gradient.shape))
        alone.grad = gradient
        Muon([alone], lr=0.1).step()
        torch.testing.assert_close(parameter, alone, rtol=1e-4, atol=1e-6)


def test_column_scales_make_the_size_of_inputs_irrelevant() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 3, 12)
    plain = torch.nn.Parameter(torch.randn(8, 12, generator=generator))
    scaled = torch.nn.Parameter(plain.detach() / scale)
    ours, theirs = Muon([scaled], column_scales={scaled: scale}), Muon([plain])
    for _ in range(3):
        plain.grad = torch.randn(8, 12, generator=generator)
        scaled.grad = plain.grad * scale  # of inputs that are larger by the scale
        ours.step()
        theirs.step()
    torch.testing.assert_close(scaled * scale, plain, rtol=1e-4, atol=1e-5)


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="give it to AdamW"):
        Muon([torch.nn.Parameter(torch.zeros(4))])
