"""Draft layers: Qwen3-style decoder layers whose parameter names are the published ones.

The modules only hold parameters. Training computes with them through `block_attention`, decoding through
`FusedWeights`; `dspark.drafters.dspark` has both passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.config import DSparkConfig
from dspark.models.rope import rotate


class DraftAttention(nn.Module):
    """Projections and per-head norms of one layer's attention."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)


class DraftMLP(nn.Module):
    """SwiGLU projections of one layer."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class DraftLayer(nn.Module):
    """One draft decoder layer."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """RMSNorm in the parameters' own type, so that autocast training keeps its scales exact."""
    return F.rms_norm(x.to(norm.weight.dtype), norm.normalized_shape, norm.weight, norm.eps)


@dataclass(frozen=True, kw_only=True)
class FusedWeights:
    """The projections of all layers as stacked matrices, so that decoding needs few products.

    The layers' own parameters are views into these tensors: no memory is used twice, and an optimizer's in-place update
    changes both. `is_current` tells when that stopped being so, as after ``module.to(...)``.

    Attributes:
        qkv_LOH: Rows of q_proj, k_proj and v_proj of every layer.
        gate_up_LIH: Rows of gate_proj and up_proj of every layer.
        head_norms_L2d: q_norm and k_norm of every layer.
    """

    qkv_LOH: Tensor
    gate_up_LIH: Tensor
    head_norms_L2d: Tensor
    pointers: tuple[int, ...]

    @classmethod
    def build(cls, layers: nn.ModuleList) -> FusedWeights:
        """Stack the parameters of `layers` and make them views of the stacks."""
        qkv_groups, gate_up_groups, norm_groups = _fused_groups(layers)
        # Parameters must stay ordinary tensors even if the first block is drafted in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            qkv_LOH = torch.stack([torch.cat([weight.detach() for weight in group]) for group in qkv_groups])
            gate_up_LIH = torch.stack([torch.cat([weight.detach() for weight in group]) for group in gate_up_groups])
            norms_LD = torch.stack([torch.cat([weight.detach() for weight in group]) for group in norm_groups])
            pointers: list[int] = []
            for stacked, groups in ((qkv_LOH, qkv_groups), (gate_up_LIH, gate_up_groups), (norms_LD, norm_groups)):
                for layer_rows, group in zip(stacked, groups, strict=True):
                    start = 0
                    for weight in group:
                        weight.data = layer_rows[start : start + len(weight)]
                        pointers.append(weight.data_ptr())
                        start += len(weight)
        return cls(
            qkv_LOH=qkv_LOH,
            gate_up_LIH=gate_up_LIH,
            head_norms_L2d=norms_LD.view(len(layers), 2, -1),
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


def block_attention(
    config: DSparkConfig,
    attention: DraftAttention,
    context_BSH: Tensor,
    context_rope: tuple[Tensor, Tensor],
    normed_BAIH: Tensor,
    block_rope: tuple[Tensor, Tensor],
    bias_B1A1S: Tensor,
) -> Tensor:
    """Attention of every block slot in training: one softmax over (context before the anchor, own block), then o_proj.

    Keys and values are those of SPEC eq. 3; blocks never meet, so no score between two blocks is computed.

    Args:
        config: Sizes of the drafter.
        attention: Projections and norms of the layer.
        context_BSH: h_ctx of every context position.
        context_rope: Cosines and signed sines of the context positions.
        normed_BAIH: Normed inputs of the block slots.
        block_rope: The same for the block slots, broadcastable over heads.
        bias_B1A1S: 0 where an anchor's block may see a context position, minus infinity elsewhere.

    Returns:
        ``[B, A, I, H]``, to be added to the residual stream.
    """
    batch, num_anchors, inputs, _ = normed_BAIH.shape
    span, kv_heads, head_dim = context_BSH.shape[1], config.num_key_value_heads, config.head_dim
    queries = F.linear(normed_BAIH, attention.q_proj.weight).view(batch, num_anchors, inputs, -1, head_dim)
    queries = rotate(rms_norm(queries, attention.q_norm), *block_rope)
    keys = F.linear(normed_BAIH, attention.k_proj.weight).view(batch, num_anchors, inputs, kv_heads, head_dim)
    keys = rotate(rms_norm(keys, attention.k_norm), *block_rope)
    values = F.linear(normed_BAIH, attention.v_proj.weight).view_as(keys)
    context_keys = F.linear(context_BSH, attention.k_proj.weight).view(batch, span, kv_heads, head_dim)
    context_keys = rms_norm(context_keys, attention.k_norm)
    context_keys = rotate(context_keys, *context_rope)
    context_values = F.linear(context_BSH, attention.v_proj.weight).view_as(context_keys)

    # Queries as [B, g, A, Q, d], Q = (query heads of one key head) x (block slots): every product below is one
    # batched matmul.
    queries = queries.view(batch, num_anchors, inputs, kv_heads, -1, head_dim).permute(0, 3, 1, 4, 2, 5)
    queries_BgAQd = (queries * head_dim**-0.5).reshape(batch, kv_heads, num_anchors, -1, head_dim)
    queries_BgXd = queries_BgAQd.flatten(2, 3)
    context_scores = torch.matmul(queries_BgXd, context_keys.permute(0, 2, 3, 1))
    block_scores = torch.matmul(queries_BgAQd, keys.permute(0, 3, 1, 4, 2))
    context_scores = context_scores.view(*block_scores.shape[:-1], span).add_(bias_B1A1S)
    scores = torch.cat((context_scores, block_scores), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    mixed = torch.matmul(weights[..., :span].flatten(2, 3), context_values.transpose(1, 2)).view(queries_BgAQd.shape)
    mixed = mixed + torch.matmul(weights[..., span:], values.permute(0, 3, 1, 2, 4))
    mixed = mixed.view(batch, kv_heads, num_anchors, -1, inputs, head_dim).permute(0, 2, 4, 1, 3, 5)
    return F.linear(mixed.reshape(batch, num_anchors, inputs, -1), attention.o_proj.weight)
