"""Parts of a draft layer that all kinds share; parameter names are the published ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig
from dspark.models.rope import RopeSettings, RopeTable

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines, broadcastable over heads (`RopeTable.lookup`)."""


class DraftAttention(nn.Module):
    """Projections and per-head norms of one layer's attention, over inputs of width `input_size`."""

    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)


class DraftMLP(nn.Module):
    """SwiGLU projections of one layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class RopeTables:
    """The rotary table of a drafter in every type and on every device that it is asked for."""

    def __init__(self, config: DrafterConfig) -> None:
        self._settings = RopeSettings.default(config.head_dim, config.rope_theta)
        self._tables: dict[tuple[torch.dtype, torch.device], RopeTable] = {}

    def like(self, tensor: Tensor) -> RopeTable:
        """The table in the type and on the device of `tensor`."""
        key = (tensor.dtype, tensor.device)
        if key not in self._tables:
            self._tables[key] = RopeTable(self._settings, *key)
        return self._tables[key]


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """RMSNorm in the parameters' own type, so that autocast training keeps its scales exact."""
    return F.rms_norm(x.to(norm.weight.dtype), norm.normalized_shape, norm.weight, norm.eps)


def swiglu(normed_XH: Tensor, mlp: DraftMLP) -> Tensor:
    """``W_down (SiLU(W_gate x) * W_up x)``."""
    gate, up = F.linear(normed_XH, mlp.gate_proj.weight), F.linear(normed_XH, mlp.up_proj.weight)
    return F.linear(F.silu(gate) * up, mlp.down_proj.weight)


def project_taps(taps_XT: Tensor, fc: nn.Linear) -> Tensor:
    """``W_fc [h^{t_1}; ...; h^{t_m}]`` for features of any type."""
    if not torch.is_autocast_enabled(taps_XT.device.type):
        taps_XT = taps_XT.to(fc.weight.dtype)
    return F.linear(taps_XT, fc.weight)
