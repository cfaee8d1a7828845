"""Draft layers: Qwen3-style decoder layers whose parameter names are the published ones.

Training calls the layers; decoding computes with `FusedWeights`. `dspark.drafters.dspark` has both passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.dspark_config import DSparkConfig
from dspark.drafters.layers import DraftAttention, DraftMLP, Rotation, rms_norm, swiglu
from dspark.drafters.packing import BlockLayout, attend_blocks
from dspark.models.rope import rotate


class DraftLayer(nn.Module):
    """One draft decoder layer; called in training."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.self_attn = DraftAttention(config, config.hidden_size)
        self.mlp = DraftMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden_MIH: Tensor, block_rope: Rotation, context_NH: Tensor, context_rope: Rotation, layout: BlockLayout
    ) -> Tensor:
        """Residual stream ``[M, I, H]`` of all block slots after this layer.

        Keys and values are those of SPEC eq. 3: of the context features, and of the own block in both directions.

        Args:
            hidden_MIH: The stream before the layer.
            block_rope: Cosines and signed sines of the block slots, ``[M, I, 1, d]``.
            context_NH: h_ctx of every context position.
            context_rope: The same for the context positions, ``[N, 1, d]``.
            layout: Which context positions a block sees.
        """
        attention, head_dim = self.self_attn, self.head_dim
        normed_MIH = rms_norm(hidden_MIH, self.input_layernorm)
        queries = F.linear(normed_MIH, attention.q_proj.weight).unflatten(-1, (-1, head_dim))
        keys = F.linear(normed_MIH, attention.k_proj.weight).unflatten(-1, (-1, head_dim))
        values = F.linear(normed_MIH, attention.v_proj.weight).unflatten(-1, (-1, head_dim))
        context_keys = F.linear(context_NH, attention.k_proj.weight).unflatten(-1, (-1, head_dim))
        context_values = F.linear(context_NH, attention.v_proj.weight).unflatten(-1, (-1, head_dim))
        mixed_MIO = attend_blocks(
            layout,
            rotate(rms_norm(queries, attention.q_norm), *block_rope),
            rotate(rms_norm(keys, attention.k_norm), *block_rope),
            values,
            rotate(rms_norm(context_keys, attention.k_norm), *context_rope),
            context_values,
        )
        hidden_MIH = hidden_MIH + F.linear(mixed_MIO, attention.o_proj.weight)
        return hidden_MIH + swiglu(rms_norm(hidden_MIH, self.post_attention_layernorm), self.mlp)


@dataclass(frozen=True, kw_only=True)
class FusedWeights:
    """The projections of all layers as stacked matrices, so that decoding needs few products.

    The layers' own parameters are views into these tensors: no memory is used twice, and an optimizer's in-place update
    changes both. `is_current` tells when that stopped being so, as after ``module.to(...)``.

    Attributes:
        qkv_LOH: Rows of q_proj, k_proj and v_proj of every layer.
        gate_up_LOH: Rows of gate_proj and up_proj of every layer.
        head_norms_L2d: q_norm and k_norm of every layer.
    """

    qkv_LOH: Tensor
    gate_up_LOH: Tensor
    head_norms_L2d: Tensor
    pointers: tuple[int, ...]

    @classmethod
    def build(cls, layers: nn.ModuleList) -> FusedWeights:
        """Stack the parameters of `layers` and make them views of the stacks."""
        qkv_groups, gate_up_groups, norm_groups = _fused_groups(layers)
        # Parameters must stay ordinary tensors even if the first block is drafted in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            qkv_LOH = torch.stack([torch.cat([weight.detach() for weight in group]) for group in qkv_groups])
            gate_up_LOH = torch.stack([torch.cat([weight.detach() for weight in group]) for group in gate_up_groups])
            norms_LO = torch.stack([torch.cat([weight.detach() for weight in group]) for group in norm_groups])
            pointers: list[int] = []
            for stacked, groups in ((qkv_LOH, qkv_groups), (gate_up_LOH, gate_up_groups), (norms_LO, norm_groups)):
                for layer_rows, group in zip(stacked, groups, strict=True):
                    start = 0
                    for weight in group:
                        weight.data = layer_rows[start : start + len(weight)]
                        pointers.append(weight.data_ptr())
                        start += len(weight)
        return cls(
            qkv_LOH=qkv_LOH,
            gate_up_LOH=gate_up_LOH,
            head_norms_L2d=norms_LO.view(len(layers), 2, -1),
            pointers=tuple(pointers),
        )

    def is_current(self, layers: nn.ModuleList) -> bool:
        """Whether the parameters that `layers` have now are still views of the stacks."""
        weights = [weight for groups in _fused_groups(layers) for group in groups for weight in group]
        return all(weight.data_ptr() == pointer for weight, pointer in zip(weights, self.pointers, strict=True))


def _fused_groups(layers: nn.ModuleList) -> tuple[list[list[Tensor]], list[list[Tensor]], list[list[Tensor]]]:
    qkv_groups: list[list[Tensor]] = []
    gate_up_groups: list[list[Tensor]] = []
    norm_groups: list[list[Tensor]] = []
    for layer in layers:
        assert isinstance(layer, DraftLayer)
        attention, mlp = layer.self_attn, layer.mlp
        qkv_groups.append([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        gate_up_groups.append([mlp.gate_proj.weight, mlp.up_proj.weight])
        norm_groups.append([attention.q_norm.weight, attention.k_norm.weight])
    return qkv_groups, gate_up_groups, norm_groups
