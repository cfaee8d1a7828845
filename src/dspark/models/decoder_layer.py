"""The weights of one decoder layer, and what is the same in all of them."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersShape:
    """Sizes and settings of all layers; ``query_scale`` is the factor on attention scores."""

    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    query_scale: float
    activation: str
