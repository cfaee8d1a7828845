"""The weights of one decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.models.linear import Linear


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one decoder layer; projections that read the same input are one matrix."""

    attention_norm_H: torch.Tensor
    qkv: Linear
    qk_norm_hD: torch.Tensor | None
    output: Linear
    post_attention_norm_H: torch.Tensor | None
    mlp_norm_H: torch.Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm_H: torch.Tensor | None
    is_sliding: bool
