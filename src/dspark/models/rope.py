"""Rotary position embeddings: frequencies read from a config, tables grown on demand."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Rotation of one kind of layer.

    Attributes:
        inverse_frequencies: radians per position, ``head_dim / 2`` of them, any scaling already applied.
        attention_scaling: factor on cos and sin (YaRN); 1 otherwise.
    """

    inverse_frequencies: tuple[float, ...]
    attention_scaling: float = 1.0

    @staticmethod
    def default(head_dim: int, theta: float) -> RopeSettings:
        """Unscaled rotary embedding with base ``theta``."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return RopeSettings(inverse_frequencies=tuple((1.0 / theta**exponents).tolist()))


class RopeTable:
    """Cosines and sines by absolute position, computed in float32 and doubled in length when outgrown."""

    def __init__(self, settings: RopeSettings, dtype: torch.dtype, device: torch.device) -> None:
        self._settings = settings
        self._dtype = dtype
        self._device = device
        self._cos_PD = torch.empty(0, dtype=dtype, device=device)
        self._sin_PD = torch.empty(0, dtype=dtype, device=device)

    def lookup(self, positions_N: torch.Tensor, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines ``[N, 1, head_dim]`` of ``positions_N``, none above ``max_position``."""
        cos_PD, sin_PD = self.table(max_position)
        return cos_PD[positions_N].unsqueeze(1), sin_PD[positions_N].unsqueeze(1)

    def table(self, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines ``[P, head_dim]`` of all positions up to ``max_position`` at least."""
        if max_position >= len(self._cos_PD):
            self._grow(max(1024, 1 << max_position.bit_length()))
        return self._cos_PD, self._sin_PD

    def _grow(self, length: int) -> None:
        frequencies = torch.tensor(self._settings.inverse_frequencies, dtype=torch.float32, device=self._device)
        angles_PF = torch.arange(length, dtype=torch.float32, device=self._device).unsqueeze(1) * frequencies
        cos_PF = angles_PF.cos() * self._settings.attention_scaling
        sin_PF = angles_PF.sin() * self._settings.attention_scaling
        self._cos_PD = torch.cat([cos_PF, cos_PF], dim=-1).to(self._dtype)
        # The minus of rotate_half is folded in here, so that applying it is one roll.
        self._sin_PD = torch.cat([-sin_PF, sin_PF], dim=-1).to(self._dtype)


def rotate(x_NhD: torch.Tensor, cos_N1D: torch.Tensor, signed_sin_N1D: torch.Tensor) -> torch.Tensor:
    """Rotate the heads of ``x`` by the angles that :meth:`RopeTable.lookup` returned."""
    return x_NhD * cos_N1D + x_NhD.roll(x_NhD.shape[-1] // 2, dims=-1) * signed_sin_N1D
