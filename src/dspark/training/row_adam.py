"""Adam for embedding tables of which a step touches few rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["RowAdam"]


class RowAdam(torch.optim.Optimizer):
    """Adam that updates only the rows with a gradient, each with its own step count.

    A row's moments decay only when it is touched, and its bias correction counts its own updates, so the first update
    of a rare token's row is as well scaled as that of a frequent one. There is no weight decay.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
    ) -> None:
        """See the class."""
        super().__init__(list(params), {"lr": lr, "betas": betas, "eps": eps})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, the step counts too on the parameters' device (torch moves all state but ``step``)."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            state["step"] = state["step"].to(parameter.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the rows that have a gradient."""
        if closure is not None:
            raise ValueError("RowAdam takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows, gradient = _touched_rows(parameter.grad)
                    self._update(parameter, rows, gradient, group)

    def _update(self, parameter: torch.nn.Parameter, rows: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(parameter.shape[0], 1, dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        step = state["step"][rows] + 1.0
        first = state["exp_avg"][rows].lerp_(gradient, 1.0 - beta1)
        second = state["exp_avg_sq"][rows].lerp_(gradient.square(), 1.0 - beta2)
        state["step"][rows] = step
        state["exp_avg"][rows] = first
        state["exp_avg_sq"][rows] = second
        denominator = second.div_(1.0 - beta2**step).sqrt_().add_(group["eps"])
        parameter.index_add_(0, rows, first.div_(1.0 - beta1**step).div_(denominator), alpha=-group["lr"])


def _touched_rows(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers and their gradients, of a dense gradient or one that has only some rows."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        touched = gradient.values().abs().amax(dim=1) > 0
        return gradient.indices()[0, touched], gradient.values()[touched]
    rows = gradient.abs().amax(dim=1).nonzero().squeeze(1)
    return rows, gradient[rows]
