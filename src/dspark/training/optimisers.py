"""The optimisers of a drafter's parameters, as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.drafters.dspark import DSparkDrafter
from dspark.training.muon import Muon
from dspark.training.recipe import OptimiserRecipe
from dspark.training.row_adam import RowAdam

__all__ = ["Optimisers"]

_W1 = "markov_head.markov_w1.weight"


class Optimisers:
    """Muon for the matrices inside layers and ``fc``, Adam by row for W1, AdamW for everything else that is trained."""

    def __init__(self, drafter: DSparkDrafter, recipe: OptimiserRecipe, tap_scale_T: Tensor) -> None:
        """Sort the parameters; ``tap_scale_T`` are the sizes of the inputs of ``fc``.

        W1's gradients become sparse where the drafter's lookup allows it.
        """
        self._recipe = recipe
        fc_weight = drafter.get_parameter("fc.weight")
        trained = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
        if _W1 in trained:
            drafter.markov_head.markov_w1.sparse = True
        matrices = {
            name: parameter
            for name, parameter in trained.items()
            if recipe.muon_learning_rate > 0.0 and parameter.ndim == 2 and name.startswith(("layers.", "fc."))
        }
        rest = [parameter for name, parameter in trained.items() if name != _W1 and name not in matrices]
        decayed = [parameter for parameter in rest if parameter.ndim == 2]
        betas = (recipe.beta1, recipe.beta2)
        groups = [
            {"params": decayed, "weight_decay": recipe.weight_decay},
            {"params": [parameter for parameter in rest if parameter.ndim != 2], "weight_decay": 0.0},
        ]
        self._parameters = list(trained.values())
        self._optimisers: dict[str, tuple[torch.optim.Optimizer, float]] = {
            "adamw": (torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=betas, fused=True), recipe.learning_rate)
        }
        if matrices:
            muon = Muon(
                matrices.values(),
                lr=recipe.muon_learning_rate,
                momentum=recipe.muon_momentum,
                weight_decay=recipe.weight_decay,
                dtype=torch.bfloat16,
                column_scales={fc_weight: tap_scale_T.to(drafter.device)},
            )
            self._optimisers["muon"] = (muon, recipe.muon_learning_rate)
        if _W1 in trained:
            rows = RowAdam([trained[_W1]], lr=recipe.learning_rate, betas=betas)
            self._optimisers["rows"] = (rows, recipe.learning_rate)

    @property
    def num_parameters(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self._parameters)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def clip(self) -> float:
        """Scale all gradients to a common norm of at most the recipe's; returns the norm before that."""
        gradients: list[Tensor] = []
        for parameter in self._parameters:
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
                    gradients.append(parameter.grad._values())
                else:
                    gradients.append(parameter.grad)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        limit = self._recipe.gradient_clip
        if limit is not None and bool(norm > limit):
            for gradient in gradients:
                gradient.mul_(limit / norm)
        return float(norm)

    def step(self, factor: float) -> None:
        """Move all parameters, with the peak learning rates times ``factor``."""
        for optimiser, rate in self._optimisers.values():
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.step()

    def state_dict(self) -> dict[str, Any]:
        """State of every optimiser by name."""
        return {name: optimiser.state_dict() for name, (optimiser, _) in self._optimisers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave.

        Raises:
            ValueError: it comes from other optimisers.
        """
        if state.keys() != self._optimisers.keys():
            raise ValueError(f"the optimiser state is of {sorted(state)}, this run has {sorted(self._optimisers)}")
        for name, (optimiser, _) in self._optimisers.items():
            optimiser.load_state_dict(state[name])
