"""The optimisers of a drafter's parameters, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dspark.drafters.registry import TrainableDrafter
from dspark.training.distributed import World
from dspark.training.muon import Muon
from dspark.training.recipe import OptimiserRecipe
from dspark.training.row_adam import RowAdam
from dspark.training.shards import ParameterShard

__all__ = ["Optimisers"]

_W1 = "markov_head.markov_w1.weight"
_TAP_PROJECTION = "fc.weight"
_HEADS = ("embed_tokens.", "lm_head.", "markov_head.", "confidence_head.")
"""Modules with a vocabulary, or a single number, on one side: their matrices are tables, not maps between features."""


class Optimisers:
    """Muon for the matrices between features, Adam by row for W1, AdamW for everything else that is trained.

    Parameters may be sharded over the processes of ``world``: moments are then sharded like them, and the numbers are
    those of the whole parameters.
    """

    def __init__(
        self,
        drafter: TrainableDrafter,
        recipe: OptimiserRecipe,
        tap_scale_T: Tensor,
        *,
        world: World | None = None,
        muon_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Sort the parameters.

        Args:
            drafter: its parameters must be sharded already, if they will be.
            recipe: learning rates and the like.
            tap_scale_T: sizes of the inputs of ``fc``.
            world: the processes.
            muon_dtype: of Muon's iteration; moments and updates are float32 in any case.
        """
        self._recipe = recipe
        self._world = world or World.single(drafter.device)
        self._shards = {
            name: ParameterShard(parameter) for name, parameter in drafter.named_parameters() if parameter.requires_grad
        }
        self._shard_of = {shard.local: shard for shard in self._shards.values()}
        trained = {name: shard.local for name, shard in self._shards.items()}
        matrices = {
            name: parameter
            for name, parameter in trained.items()
            if recipe.muon_learning_rate > 0.0 and parameter.ndim == 2 and not name.startswith(_HEADS)
        }
        rest = [parameter for name, parameter in trained.items() if name != _W1 and name not in matrices]
        decayed = [parameter for parameter in rest if parameter.ndim == 2]
        betas = (recipe.beta1, recipe.beta2)
        groups = [
            {"params": decayed, "weight_decay": recipe.weight_decay},
            {"params": [parameter for parameter in rest if parameter.ndim != 2], "weight_decay": 0.0},
        ]
        self._optimisers: dict[str, tuple[torch.optim.Optimizer, float]] = {
            "adamw": (torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=betas, fused=True), recipe.learning_rate)
        }
        if matrices:
            scaled = [matrices[_TAP_PROJECTION]] if _TAP_PROJECTION in matrices else []
            muon = Muon(
                matrices.values(),
                lr=recipe.muon_learning_rate,
                momentum=recipe.muon_momentum,
                weight_decay=recipe.weight_decay,
                dtype=muon_dtype,
                column_scales={parameter: tap_scale_T.to(parameter.device) for parameter in scaled},
                shards={parameter: self._shard_of[parameter] for parameter in matrices.values()},
            )
            self._optimisers["muon"] = (muon, recipe.muon_learning_rate)
        if _W1 in trained:
            rows = RowAdam([trained[_W1]], lr=recipe.learning_rate, betas=betas)
            self._optimisers["rows"] = (rows, recipe.learning_rate)

    @property
    def num_parameters(self) -> int:
        """Trained numbers."""
        return sum(shard.parameter.numel() for shard in self._shards.values())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for shard in self._shards.values():
            shard.zero_grad()

    @torch.no_grad()
    def clip(self) -> float:
        """Scale all gradients to a common norm of at most the recipe's; returns the norm before that."""
        gradients: list[Tensor] = []
        for shard in self._shards.values():
            shard.take_gradient()
            gradient = shard.local.grad
            if gradient is not None and gradient.is_sparse:
                shard.local.grad = gradient.coalesce()
                gradient = shard.local.grad.values()
            if gradient is not None:
                gradients.append(gradient)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        if any(shard.is_sharded for shard in self._shards.values()):
            norm = self._world.sum(norm.square()).sqrt()
        limit = self._recipe.gradient_clip
        if limit is not None and bool(norm > limit):
            for gradient in gradients:
                gradient.mul_(limit / norm)
        return float(norm)

    def step(self, factor: float) -> None:
        """Move all parameters by the gradients that `clip` saw, with the peak learning rates times ``factor``."""
        for optimiser, rate in self._optimisers.values():
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.step()

    def state_dict(self) -> dict[str, Any] | None:
        """State of every optimiser by name, of the whole parameters and on the CPU; None but in the main process."""
        states = {}
        for name, (optimiser, _) in self._optimisers.items():
            state = optimiser.state_dict()
            whole: dict[int, dict[str, Any]] = {}
            for index, parameter in enumerate(_parameters(optimiser)):
                shard = self._shard_of[parameter]
                for key, value in state["state"].get(index, {}).items():
                    gathered = shard.gather(value) if _has_rows(value) else value
                    if self._world.is_main:
                        whole.setdefault(index, {})[key] = gathered.cpu() if isinstance(value, Tensor) else value
            states[name] = {**state, "state": whole}
        return states if self._world.is_main else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave, in a run of any number of processes.

        Raises:
            ValueError: it comes from other optimisers.
        """
        if state.keys() != self._optimisers.keys():
            raise ValueError(f"the optimiser state is of {sorted(state)}, this run has {sorted(self._optimisers)}")
        for name, (optimiser, _) in self._optimisers.items():
            own = {
                index: {
                    key: self._shard_of[parameter].own(value) if _has_rows(value) else value
                    for key, value in state[name]["state"].get(index, {}).items()
                }
                for index, parameter in enumerate(_parameters(optimiser))
            }
            optimiser.load_state_dict({**state[name], "state": {index: value for index, value in own.items() if value}})


def _parameters(optimiser: torch.optim.Optimizer) -> Sequence[nn.Parameter]:
    """In the order in which a state dict counts them."""
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def _has_rows(value: Any) -> bool:
    """Whether a state belongs to the rows of its parameter; a step count does not."""
    return isinstance(value, Tensor) and value.ndim > 0
