"""Muon: momentum whose update is orthogonalised, for the matrices inside layers.

The update of a matrix is the nearest semi-orthogonal matrix to its momentum, found by a Newton-Schulz iteration: every
direction of the matrix then moves by the same amount, however small its gradient. Matrices of equal shape are stacked
and iterated together. (K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dspark.training.shards import ParameterShard

__all__ = ["Muon", "orthogonalise"]

_COEFFICIENTS = (
    (8.2987, -24.4306, 18.0904),
    (3.9152, -2.9211, 0.5592),
    (3.1746, -2.3804, 0.4978),
    (2.1895, -1.5672, 0.4079),
)
"""Odd quintics x ↦ ax + bx³ + cx⁵, one a step. Each is the best approximation of 1 (minimax) on the interval that the
one before leaves of [0.005, 1]; together they bring singular values from there to within 0.09 of 1, in one step fewer
than one fixed quintic needs for within 0.3."""


def orthogonalise(matrices_BMN: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Replace the singular values of each matrix by numbers near 1, keeping its singular vectors.

    Singular values below 0.005 of the Frobenius norm end between 0 and 1.

    Args:
        matrices_BMN: matrices, stacked.
        dtype: of the iteration; bfloat16 suffices.

    Returns:
        Tensor of the same shape, in ``dtype``.
    """
    wide = matrices_BMN.shape[-2] <= matrices_BMN.shape[-1]
    x = matrices_BMN if wide else matrices_BMN.mT
    x = (x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)).to(dtype).contiguous()
    for a, b, c in _COEFFICIENTS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a, alpha=1.0)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay.

    Each matrix ``W[M, N]`` moves by ``lr · sqrt(max(1, M / N)) · orthogonalise(update)``: an update of spectral norm
    near ``lr``, so ``lr`` means the same for every shape; 0.02 is usual. A matrix with column scales ``s``, the sizes
    of its inputs, is trained as ``W diag(s)`` would be on inputs divided by ``s``: none is favoured for its size.

    Of a sharded matrix this process has some rows, momentum included; the update is gathered, orthogonalised whole in
    every process, and each keeps its own rows of the result.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
        column_scales: Mapping[torch.nn.Parameter, Tensor] | None = None,
        shards: Mapping[torch.nn.Parameter, ParameterShard] | None = None,
    ) -> None:
        """See the class; ``dtype`` is that of the Newton-Schulz iteration, ``shards`` those of sharded parameters.

        Raises:
            ValueError: a parameter is not a matrix.
        """
        parameters = list(params)
        for parameter in parameters:
            if parameter.ndim != 2:
                raise ValueError(
                    f"Muon is for matrices; a parameter has shape {tuple(parameter.shape)}: give it to AdamW"
                )
        self.iteration_dtype = dtype
        self._column_scales = dict(column_scales or {})
        self._shards = dict(shards or {})
        super().__init__(
            [{"params": parameters}],
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[tuple[torch.nn.Parameter, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._nesterov(parameter, group["momentum"])
                    if parameter in self._shards:
                        update = self._shards[parameter].gather(update)
                    by_shape[tuple(update.shape)].append((parameter, update))
            for (rows, columns), pairs in by_shape.items():
                updates = orthogonalise(torch.stack([update for _, update in pairs]), dtype=self.iteration_dtype)
                length = group["lr"] * max(1.0, rows / columns) ** 0.5
                for (parameter, _), update in zip(pairs, updates, strict=True):
                    if parameter in self._shards:
                        update = self._shards[parameter].own(update)
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                    update = update.to(parameter.dtype)
                    if (scale := self._column_scales.get(parameter)) is not None:
                        update = update / scale
                    parameter.add_(update, alpha=-length)

    def _nesterov(self, parameter: torch.nn.Parameter, momentum: float) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if (scale := self._column_scales.get(parameter)) is not None:
            gradient = gradient / scale
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1.0 - momentum)
        return gradient.lerp(buffer, momentum)
