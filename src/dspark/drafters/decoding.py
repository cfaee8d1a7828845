"""What a DSpark drafter computes while it drafts, in its parameters' own type or in int8.

Both give the drafter what its rounds are made of: keys and values of context tokens, backbone states of blocks, base
logits. Letters as in `dspark.drafters.dspark`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.drafters.backbone import DraftLayer, FusedWeights
from dspark.drafters.cache import DrafterCache
from dspark.drafters.layers import Rotation, project_taps, rms_norm
from dspark.drafters.sequential import corrected_logits
from dspark.models.attention import AttentionPlan, attend
from dspark.models.decoder_kernel import DecoderKernel
from dspark.models.decoder_layer import DecoderLayer, LayersShape
from dspark.models.int8_linear import GroupedInt8Linear
from dspark.models.rope import rotate

if TYPE_CHECKING:
    from dspark.drafters.dspark import DSparkDrafter

__all__ = ["DraftComputation", "FloatComputation", "Int8Computation"]


class DraftComputation(Protocol):
    """The products of a drafter's rounds."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations between products, and of rotations."""
        ...

    def context(self, taps_NT: Tensor) -> tuple[Tensor, Tensor]:
        """Normed keys, not rotated yet, and values of context tokens in every layer, ``[L, N, g, d]`` (eq. 2-3)."""
        ...

    def hidden(self, embedded_NH: Tensor, rope: Rotation, plan: AttentionPlan, cache: DrafterCache) -> Tensor:
        """Backbone states ``[N, H]`` of all block inputs, after the final norm."""
        ...

    def base_logits(self, hidden_NH: Tensor) -> Tensor:
        """``U``, float32 ``[N, D]``."""
        ...

    def corrected(self, base_RD: Tensor, features_Rr: Tensor) -> Tensor:
        """``U + f W2``, of a drafter with a sequential head."""
        ...


class FloatComputation:
    """In the type of the drafter's parameters, from those themselves: a step of training changes both."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        self._drafter = drafter
        self._fused: FusedWeights | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self._drafter.dtype

    def context(self, taps_NT: Tensor) -> tuple[Tensor, Tensor]:
        config, fused = self._drafter.config, self._fused_weights()
        context_NH = rms_norm(project_taps(taps_NT, self._drafter.fc), self._drafter.hidden_norm)
        first_key_row = config.num_attention_heads * config.head_dim
        kv_LNO = torch.stack([F.linear(context_NH, qkv_OH[first_key_row:]) for qkv_OH in fused.qkv_LOH])
        keys, values = kv_LNO.view(*kv_LNO.shape[:2], 2, config.num_key_value_heads, config.head_dim).unbind(2)
        norms_L11d = fused.head_norms_L2d[:, 1, None, None]
        return F.rms_norm(keys, (config.head_dim,), None, config.rms_norm_eps) * norms_L11d, values

    def hidden(self, embedded_NH: Tensor, rope: Rotation, plan: AttentionPlan, cache: DrafterCache) -> Tensor:
        config, fused = self._drafter.config, self._fused_weights()
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        # Query and key heads stand side by side, so that one norm and one rotation serve both.
        norms_Lhd = head_norms(fused.head_norms_L2d, heads, kv_heads)
        num_rotated = (heads + kv_heads) * head_dim
        hidden = embedded_NH
        for index, layer in enumerate(cast(list[DraftLayer], list(self._drafter.layers))):
            normed = rms_norm(hidden, layer.input_layernorm)
            qkv_NO = F.linear(normed, fused.qkv_LOH[index])
            qk_Nhd = qkv_NO[:, :num_rotated].view(-1, heads + kv_heads, head_dim)
            qk_Nhd = rotate(F.rms_norm(qk_Nhd, (head_dim,), None, config.rms_norm_eps) * norms_Lhd[index], *rope)
            mixed_Nhd = attend(
                qk_Nhd[:, :heads],
                qk_Nhd[:, heads:],
                qkv_NO[:, num_rotated:].view(-1, kv_heads, head_dim),
                cache.keys[index],
                cache.values[index],
                plan,
                scale=head_dim**-0.5,
            )
            hidden = hidden + F.linear(mixed_Nhd.flatten(1), layer.self_attn.o_proj.weight)
            normed = rms_norm(hidden, layer.post_attention_layernorm)
            gate, up = F.linear(normed, fused.gate_up_LOH[index]).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.mlp.down_proj.weight)
        return rms_norm(hidden, self._drafter.norm)

    def base_logits(self, hidden_NH: Tensor) -> Tensor:
        return F.linear(hidden_NH, self._drafter.lm_head.weight).float()

    def corrected(self, base_RD: Tensor, features_Rr: Tensor) -> Tensor:
        return corrected_logits(self._drafter.markov_head, base_RD, features_Rr)

    def _fused_weights(self) -> FusedWeights:
        if self._fused is None or not self._fused.is_current(self._drafter.layers):
            self._fused = FusedWeights.build(self._drafter.layers)
        return self._fused


class Int8Computation:
    """In int8 products with float32 between them, from a copy of the weights made now; on a CPU.

    As in the target, a row's numbers depend on that row alone.
    """

    dtype = torch.float32

    def __init__(self, drafter: DSparkDrafter) -> None:
        config = drafter.config
        fused = FusedWeights.build(drafter.layers)
        self._eps = config.rms_norm_eps
        self._kv_shape = (config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
        first_key_row = config.num_attention_heads * config.head_dim
        self._fc = _int8(drafter.fc.weight)
        self._context_norm_H = _copy(drafter.hidden_norm.weight)
        self._context_kv = _int8(fused.qkv_LOH[:, first_key_row:].flatten(0, 1))
        self._key_norms_L11d = _copy(fused.head_norms_L2d[:, 1, None, None])
        norms_Lhd = head_norms(
            fused.head_norms_L2d.float(), config.num_attention_heads, config.num_key_value_heads
        ).contiguous()
        layers = [
            DecoderLayer(
                attention_norm_H=_copy(layer.input_layernorm.weight),
                qkv=_int8(fused.qkv_LOH[index]),
                qk_norm_hD=norms_Lhd[index],
                output=_int8(layer.self_attn.o_proj.weight),
                post_attention_norm_H=None,
                mlp_norm_H=_copy(layer.post_attention_layernorm.weight),
                gate_up=_int8(fused.gate_up_LOH[index]),
                down=_int8(layer.mlp.down_proj.weight),
                post_mlp_norm_H=None,
                is_sliding=False,
            )
            for index, layer in enumerate(cast(list[DraftLayer], list(drafter.layers)))
        ]
        shape = LayersShape(
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            query_scale=config.head_dim**-0.5,
            activation="silu",
        )
        self._kernel = DecoderKernel(shape, layers, _copy(drafter.norm.weight), is_half=False)
        self._lm_head = _int8(drafter.lm_head.weight)
        self._correction = _int8(drafter.markov_head.markov_w2.weight) if config.markov_rank > 0 else None

    def context(self, taps_NT: Tensor) -> tuple[Tensor, Tensor]:
        context_NH = self._fc(taps_NT.float())
        context_NH = F.rms_norm(context_NH, context_NH.shape[1:], self._context_norm_H, self._eps)
        kv_L2Ngd = self._context_kv(context_NH).unflatten(1, self._kv_shape).permute(1, 2, 0, 3, 4)
        keys, values = kv_L2Ngd.unbind(1)
        return F.rms_norm(keys, keys.shape[-1:], None, self._eps) * self._key_norms_L11d, values

    def hidden(self, embedded_NH: Tensor, rope: Rotation, plan: AttentionPlan, cache: DrafterCache) -> Tensor:
        return self._kernel(embedded_NH, rope, rope, plan, cache, ())[0]

    def base_logits(self, hidden_NH: Tensor) -> Tensor:
        return self._lm_head(hidden_NH)

    def corrected(self, base_RD: Tensor, features_Rr: Tensor) -> Tensor:
        assert self._correction is not None, "the drafter has no sequential head"
        return base_RD + self._correction(features_Rr.float())


def head_norms(norms_L2d: Tensor, heads: int, kv_heads: int) -> Tensor:
    """q_norm for every query head and k_norm for every key head, side by side: ``[L, h + g, d]``."""
    return torch.cat((norms_L2d[:, :1].expand(-1, heads, -1), norms_L2d[:, 1:].expand(-1, kv_heads, -1)), dim=1)


def _copy(weight: Tensor) -> Tensor:
    return weight.detach().float().clone()


def _int8(weight_OI: Tensor) -> GroupedInt8Linear:
    return GroupedInt8Linear(weight_OI.detach().float(), None)
