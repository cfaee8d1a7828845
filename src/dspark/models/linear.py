"""Linear layers of a frozen model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class Linear(Protocol):
    """``y = x Wᵀ + b`` on rows."""

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor: ...


class FloatLinear:
    """A linear layer in the model's floating-point type."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.weight_OI = weight_OI
        self.bias_O = bias_O

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return functional.linear(x_NI, self.weight_OI, self.bias_O)
