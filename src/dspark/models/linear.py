"""Linear layers of a frozen model: floating point, or int8 weights and activations."""

from __future__ import annotations

import warnings
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


class Int8Linear:
    """int8 weights with one scale per output channel, int8 activations with one scale per row.

    The product is an exact int32 sum, so a row's result depends on that row alone, never on its batch mates.
    float32 rows in, float32 rows out. CPU only (FBGEMM through ``torch.ops.quantized``).
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        weight_OI = weight_OI.float()
        scales_O = (weight_OI.abs().amax(dim=1) / 127.0).clamp_min(1e-12).double()
        zeros_O = torch.zeros(len(scales_O), dtype=torch.int64)
        with warnings.catch_warnings():
            # Eager quantisation is deprecated in PyTorch, the kernels behind it are not; the dependency ends here.
            warnings.simplefilter("ignore")
            quantised = torch.quantize_per_channel(weight_OI, scales_O, zeros_O, 0, torch.qint8)
            self._packed = torch.ops.quantized.linear_prepack(quantised, None)
        self._bias_O = None if bias_O is None else bias_O.float()

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        row_max_N1 = x_NI.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12)
        y_NO: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x_NI / row_max_N1, 1.0 / 127.0, 128, self._packed
        )
        y_NO *= row_max_N1
        return y_NO if self._bias_O is None else y_NO + self._bias_O
