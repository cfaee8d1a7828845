from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.registry import drafter_from_target
from dspark.training.drafter_config import drafter_config
from dspark.training.optimisers import Optimisers
from dspark.training.recipe import OptimiserRecipe
from tests.training.tiny import tiny_recipe, tiny_target


@pytest.fixture
def optimisers_of() -> Callable[[float | None], tuple[DSparkDrafter, Optimisers]]:
    def make(limit: float | None) -> tuple[DSparkDrafter, Optimisers]:
        target = tiny_target()
        recipe = tiny_recipe(Path("data"), Path("out"), drafter={"draft_vocab_size": 61})
        drafter = drafter_from_target(drafter_config(recipe, target), target.model)
        assert isinstance(drafter, DSparkDrafter)
        return drafter, Optimisers(drafter, OptimiserRecipe(gradient_clip=limit), torch.ones(64))

    return make


@pytest.mark.parametrize(("limit", "kept"), [(1.0, 1.0), (None, None), (1e9, None)])
def test_gradients_are_clipped_together(
    limit: float | None, kept: float | None, optimisers_of: Callable[..., tuple[DSparkDrafter, Optimisers]]
) -> None:
    drafter, optimisers = optimisers_of(limit)
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    gradients = [torch.randn_like(parameter) for parameter in trained]
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
    assert optimisers.clip() == pytest.approx(norm)
    factor = 1.0 if kept is None else kept / norm
    for parameter, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * factor)


def test_rates_are_those_of_the_recipe_times_the_factor(
    optimisers_of: Callable[..., tuple[DSparkDrafter, Optimisers]],
) -> None:
    steps = {}
    for factor in (0.0, 0.5, 1.0):
        drafter, optimisers = optimisers_of(None)
        before = drafter.norm.weight.detach().clone()
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        optimisers.clip()
        optimisers.step(factor)
        steps[factor] = float((before - drafter.norm.weight.detach()).max())
    rate = OptimiserRecipe().learning_rate  # AdamW's first step is as long as the rate
    assert steps == pytest.approx({0.0: 0.0, 0.5: 0.5 * rate, 1.0: rate}, rel=1e-3)
