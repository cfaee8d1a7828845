"""What a DSpark drafter computes while it drafts, in its parameters' own type or in int8.

Letters as in `dspark.drafters.dspark`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.drafters.backbone import DraftLayer, FusedWeights
from dspark.drafters.cache import DrafterCache, WaitingContext
from dspark.drafters.draft_kernel import DraftKernel, DraftWeights, quantised_rows
from dspark.drafters.layers import RopeTables, Rotation, project_taps, rms_norm
from dspark.drafters.protocol import DraftBlock, PlainSampler
from dspark.drafters.sequential import corrected_logits
from dspark.models.attention import AttentionPlan, attend
from dspark.models.block_tables import Places
from dspark.models.decoder_kernel import DecoderKernel
from dspark.models.decoder_layer import DecoderLayer, LayersShape
from dspark.models.int8_linear import GroupedInt8Linear
from dspark.models.rope import rotate

if TYPE_CHECKING:
    from dspark.drafters.dspark import DSparkDrafter

__all__ = ["DraftComputation", "FloatComputation", "Int8Computation"]

MOST_WAITING = 256
"""Context tokens that wait together at most."""


class DraftComputation(Protocol):
    """A drafter's part of a round."""

    @property
    def feature_bytes(self) -> int:
        """Bytes in which features of a token wait at its own place; 0 if they wait together (`DrafterCache`)."""
        ...

    def check_cache(self, cache: DrafterCache) -> None:
        """Raise ValueError if the cache is another drafter's, where that can be told."""
        ...

    def put_off(self, cache: DrafterCache, places: Places, taps_NT: Tensor) -> None:
        """Keep features of context tokens, whose keys and values in every draft layer (SPEC eq. 2-3) will follow."""
        ...

    def catch_up(self, cache: DrafterCache, slots: Sequence[int], least: int) -> None:
        """Compute what was put off of these slots' context, at least where it is more than ``least`` tokens of one."""
        ...

    def blocks(self, cache: DrafterCache, slots: Sequence[int], anchors_R: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Backbone states ``[R, G, H]`` and base logits ``[R, G, D]`` in float32 of the first ``count`` slots.

        What was put off of the slots' context is computed first. The backbone always sees a whole block.
        """
        ...

    def drawn(
        self, cache: DrafterCache, slots: Sequence[int], anchors_R: Tensor, count: int, sampler: PlainSampler
    ) -> DraftBlock | None:
        """Blocks as ``sampler`` draws them, all tokens in one go; None if it has no way to do that."""
        ...

    def corrected(self, base_RD: Tensor, features_Rr: Tensor) -> Tensor:
        """``U + f W2``, of a drafter with a sequential head."""
        ...

    def confidences(self, hidden_RGH: Tensor, known_RG: Tensor) -> Tensor | None:
        """Confidence logits ``[R, G]`` of slots whose previous tokens are ``known_RG``; None without the head."""
        ...


class FloatComputation:
    """In the type of the drafter's parameters, from those themselves: a step of training changes both."""

    def __init__(self, drafter: DSparkDrafter, ropes: RopeTables) -> None:
        self._drafter = drafter
        self._ropes = ropes
        self._fused: FusedWeights | None = None

    @property
    def feature_bytes(self) -> int:
        return 0

    def check_cache(self, cache: DrafterCache) -> None:
        pass

    def put_off(self, cache: DrafterCache, places: Places, taps_NT: Tensor) -> None:
        cache.waiting.append(WaitingContext(taps_NT=taps_NT, places=places))
        if cache.num_waiting >= MOST_WAITING:
            self._write_context(cache)

    def catch_up(self, cache: DrafterCache, slots: Sequence[int], least: int) -> None:
        if cache.num_waiting > least * len(slots):
            self._write_context(cache)

    @torch.no_grad()
    def _write_context(self, cache: DrafterCache) -> None:
        if not cache.waiting:
            return
        waiting = cache.waiting
        keys, values = self.context(torch.cat([context.taps_NT for context in waiting]))
        positions_N = torch.cat([context.places.positions_N for context in waiting])
        last_position = max(context.places.last_position for context in waiting)
        keys = rotate(keys, *self._ropes.like(keys).lookup(positions_N, last_position))
        keys, values = keys.transpose(1, 2).to(cache.keys.dtype), values.transpose(1, 2).to(cache.values.dtype)
        start = 0
        for context in waiting:  # one after the other, so that the later of two at one place stays
            end = start + len(context.taps_NT)
            cache.keys[:, :, context.places.rows] = keys[:, :, start:end]
            cache.values[:, :, context.places.rows] = values[:, :, start:end]
            start = end
        cache.waiting = []  # not before: after an error, others may still read these places as their prefix

    def blocks(self, cache: DrafterCache, slots: Sequence[int], anchors_R: Tensor, count: int) -> tuple[Tensor, Tensor]:
        self._write_context(cache)
        drafter = self._drafter
        config = drafter.config
        rows, inputs = len(slots), config.num_block_inputs
        ids_RI = torch.full((rows, inputs), config.mask_token_id, dtype=torch.int64, device=drafter.device)
        ids_RI[:, 0] = anchors_R
        embedded_NH = F.embedding(ids_RI.view(-1), drafter.embed_tokens.weight).to(drafter.dtype)
        plan = AttentionPlan(cache.blocks(slots, inputs), cache, causal=False)
        rope = self._ropes.like(embedded_NH).lookup(plan.places.positions_N, plan.places.last_position)
        hidden_RIH = self.hidden(embedded_NH, rope, plan, cache).view(rows, inputs, -1)
        hidden_RGH = hidden_RIH[:, inputs - config.block_size :][:, :count]
        # Flat rows: for a part of a block a linear layer would else work row by row, and copy its weights for each.
        base_MD = F.linear(hidden_RGH.reshape(-1, hidden_RGH.shape[-1]), drafter.lm_head.weight).float()
        return hidden_RGH, base_MD.view(rows, count, -1)

    def drawn(
        self, cache: DrafterCache, slots: Sequence[int], anchors_R: Tensor, count: int, sampler: PlainSampler
    ) -> DraftBlock | None:
        return None

    def context(self, taps_NT: Tensor) -> tuple[Tensor, Tensor]:
        """Normed keys, not rotated yet, and values of context tokens in every layer, ``[L, N, g, d]``."""
        config, fused = self._drafter.config, self._fused_weights()
        context_NH = rms_norm(project_taps(taps_NT, self._drafter.fc), self._drafter.hidden_norm)
        first_key_row = config.num_attention_heads * config.head_dim
        kv_LNO = torch.stack([F.linear(context_NH, qkv_OH[first_key_row:]) for qkv_OH in fused.qkv_LOH])
        keys, values = kv_LNO.view(*kv_LNO.shape[:2], 2, config.num_key_value_heads, config.head_dim).unbind(2)
        norms_L11d = fused.head_norms_L2d[:, 1, None, None]
        return F.rms_norm(keys, (config.head_dim,), None, config.rms_norm_eps) * norms_L11d, values

    def hidden(self, embedded_NH: Tensor, rope: Rotation, plan: AttentionPlan, cache: DrafterCache) -> Tensor:
        """Backbone states ``[N, H]`` of all block inputs, after the final norm."""
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

    def corrected(self, base_RD: Tensor, features_Rr: Tensor) -> Tensor:
        return corrected_logits(self._drafter.markov_head, base_RD, features_Rr)

    def confidences(self, hidden_RGH: Tensor, known_RG: Tensor) -> Tensor | None:
        return self._drafter.confidence_logits(hidden_RGH, known_RG)

    def _fused_weights(self) -> FusedWeights:
        if self._fused is None or not self._fused.is_current(self._drafter.layers):
            self._fused = FusedWeights.build(self._drafter.layers)
        return self._fused


class Int8Computation:
    """In int8 products with float32 between them, from a copy of the weights made now; on a CPU.

    As in the target, a row's numbers depend on that row alone.
    """

    def __init__(self, drafter: DSparkDrafter, ropes: RopeTables) -> None:
        config = drafter.config
        fused = FusedWeights.build(drafter.layers)
        first_key_row = config.num_attention_heads * config.head_dim
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
        self._w2 = _int8(drafter.markov_head.markov_w2.weight) if config.markov_rank > 0 else None
        self._has_other_head = self._w2 is not None and config.markov_head_type != "vanilla"
        confidence_H, confidence_V = _confidence_parts(drafter)
        weights = DraftWeights(
            fc=_int8(drafter.fc.weight),
            context_norm_H=_copy(drafter.hidden_norm.weight),
            context_kv=_int8(fused.qkv_LOH[:, first_key_row:].flatten(0, 1)),
            key_norms_Ld=_copy(fused.head_norms_L2d[:, 1]),
            embedding_VH=_readable(drafter.embed_tokens.weight),
            mask_token_id=config.mask_token_id,
            lm_head=_int8(drafter.lm_head.weight),
            draft_token_ids_D=drafter.draft_token_ids_D,
            features_V=None if self._w2 is None else quantised_rows(_copy(drafter.markov_head.markov_w1.weight)),
            w2=self._w2,
            confidence_H=confidence_H,
            confidence_V=confidence_V,
        )
        self._kernel = DraftKernel(
            DecoderKernel(shape, layers, _copy(drafter.norm.weight), None),
            shape,
            weights,
            rope=ropes.like(weights.context_norm_H),
            num_inputs=config.num_block_inputs,
            block_size=config.block_size,
        )

    @property
    def feature_bytes(self) -> int:
        return self._kernel.feature_bytes

    def check_cache(self, cache: DrafterCache) -> None:
        self._kernel.check_cache(cache)

    def put_off(self, cache: DrafterCache, places: Places, taps_NT: Tensor) -> None:
        self._kernel.put_off(cache, places, taps_NT)

    def catch_up(self, cache: DrafterCache, slots: Sequence[int], least: int) -> None:
        self._kernel.catch_up(cache, slots, least)

    def blocks(self, cache: DrafterCache, slots: Sequence[int], anchors_R: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return self._kernel.states(cache, slots, anchors_R, count)

    def drawn(
        self, cache: DrafterCache, slots: Sequence[int], anchors_R: Tensor, count: int, sampler: PlainSampler
    ) -> DraftBlock | None:
        if self._has_other_head:
            return None
        return self._kernel.draft(cache, slots, anchors_R, count, sampler)

    def corrected(self, base_RD: Tensor, features_Rr: Tensor) -> Tensor:
        assert self._w2 is not None, "the drafter has no sequential head"
        return base_RD + self._w2(features_Rr.float())

    def confidences(self, hidden_RGH: Tensor, known_RG: Tensor) -> Tensor | None:
        return self._kernel.confidences(hidden_RGH, known_RG)


def _confidence_parts(drafter: DSparkDrafter) -> tuple[Tensor | None, Tensor | None]:
    """The confidence head as weights of the state, and what it adds for every token that may come before; or None."""
    config = drafter.config
    if not config.enable_confidence_head:
        return None, None
    weight_F, bias = drafter.confidence_head.proj.weight[0].detach().float(), drafter.confidence_head.proj.bias
    confidence_V = bias.detach().float().expand(config.vocab_size)
    if drafter.confidence_head.uses_markov:
        w1_Vr = drafter.markov_head.markov_w1.weight.detach().float()
        confidence_V = confidence_V + w1_Vr @ weight_F[config.hidden_size :]
    return weight_F[: config.hidden_size].clone(), confidence_V.contiguous()


def head_norms(norms_L2d: Tensor, heads: int, kv_heads: int) -> Tensor:
    """q_norm for every query head and k_norm for every key head, side by side: ``[L, h + g, d]``."""
    return torch.cat((norms_L2d[:, :1].expand(-1, heads, -1), norms_L2d[:, 1:].expand(-1, kv_heads, -1)), dim=1)


def _readable(weight: Tensor) -> Tensor:
    """The weight itself in a type that compiled code reads, else a copy."""
    weight = weight.detach()
    return (weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()).contiguous()


def _copy(weight: Tensor) -> Tensor:
    return weight.detach().float().clone()


def _int8(weight_OI: Tensor) -> GroupedInt8Linear:
    return GroupedInt8Linear(weight_OI.detach().float(), None)
