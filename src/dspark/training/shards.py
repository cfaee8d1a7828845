"""A trained parameter as an optimiser sees it: the rows that this process keeps, and how they make the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["ParameterShard", "whole_state"]


class ParameterShard:
    """The rows of a parameter that this process keeps; all of them where the parameter is not sharded.

    Attributes:
        parameter: the model's parameter.
        local: shares its memory; an ordinary parameter, so that any optimiser can move it.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        """See the class."""
        self.parameter = parameter
        self.local = parameter
        if isinstance(parameter, DTensor):
            with torch.no_grad():
                self.local = nn.Parameter(parameter.to_local())

    @property
    def is_sharded(self) -> bool:
        """Whether other processes keep other rows."""
        return isinstance(self.parameter, DTensor)

    def take_gradient(self) -> None:
        """Give the rows the gradient that a backward pass left at the parameter."""
        if self.is_sharded:
            gradient = self.parameter.grad
            self.local.grad = gradient.to_local() if isinstance(gradient, DTensor) else None

    def zero_grad(self) -> None:
        """Forget the gradient."""
        self.parameter.grad = self.local.grad = None

    def gather(self, rows_X: Tensor) -> Tensor:
        """The whole tensor of which every process has the rows that belong to its part of the parameter."""
        if not isinstance(self.parameter, DTensor):
            return rows_X
        shape = torch.Size((self.parameter.shape[0], *rows_X.shape[1:]))
        return DTensor.from_local(
            rows_X.contiguous(),
            self.parameter.device_mesh,
            self.parameter.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        ).full_tensor()

    def own(self, whole_X: Tensor) -> Tensor:
        """This process's rows of a whole tensor."""
        if not isinstance(self.parameter, DTensor):
            return whole_X
        mesh = self.parameter.device_mesh
        rank, count = mesh.get_local_rank(), mesh.size()
        length = -(-len(whole_X) // count)
        return whole_X[rank * length : (rank + 1) * length]


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's state with every sharded tensor gathered, in every process."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in module.state_dict().items()
    }
