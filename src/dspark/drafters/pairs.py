"""Drafters over pairs: one decoder layer that reads (feature of a position, token after it), as in Eagle3 and MTP.

The pair at index t is (feature of position t, embedding of token t + 1) and sits at rotary position t. With an anchor
at position a, features are known for positions before a: the context pairs are t = 0 .. a - 2, and the first draft step
is the pair t = a - 1, (f_{a-1}, embedding of the anchor), which predicts the token after the anchor. Every further step
pairs the step's own output, before the final norm, with the token just drafted. There is one layer, so keys and values
of context pairs depend on these pairs alone and are cached without any attention.

In memory the pair t is at position t + 1, where the token is that completes it: so what is at a position depends on the
tokens up to there only, as it must where blocks are shared between requests. Position 0 holds no pair.

A drafter's own way of making a layer's input out of a pair is `PairModel.combine`; everything else is here.

Letters: N flat tokens or pairs, T concatenated taps, H hidden, R rows (requests), M training blocks, G draft tokens of
a block, D draft vocabulary, h heads, g key/value heads, d head size, W width of the attention input (H, or 2 H), O
width of what attention mixed (h d), X any leading shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.cache import DrafterCache, check_proposal, position_range, reserve_extension
from dspark.drafters.config import DrafterConfig
from dspark.drafters.layers import DraftAttention, DraftMLP, RopeTables, Rotation, rms_norm, swiglu
from dspark.drafters.packing import BlockLayout, PackedBlocks, attend_blocks
from dspark.drafters.protocol import DraftBlock, DraftSampler, stack_distributions
from dspark.models.attention import AttentionPlan, attend
from dspark.models.block_tables import BlockTables
from dspark.models.rope import rotate
from dspark.types import Segment


class PairLayer(nn.Module):
    """The one decoder layer; its residual stream starts as a pair's feature.

    Args:
        config: Sizes.
        doubled: True (Eagle3): attention reads ``[norm(embedding) ; norm(stream)]``, twice as wide. False: it reads
            ``norm(stream)`` as in any decoder layer.
    """

    def __init__(self, config: DrafterConfig, *, doubled: bool) -> None:
        super().__init__()
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.doubled = doubled
        self.head_dim = config.head_dim
        self.self_attn = DraftAttention(config, 2 * hidden_size if doubled else hidden_size)
        self.mlp = DraftMLP(config)
        if doubled:
            self.hidden_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=eps)

    def forward(
        self,
        context_stream_NH: Tensor,
        context_embedding_NH: Tensor,
        context_rope: Rotation,
        stream_MH: Tensor,
        embeddings_MGH: Tensor,
        block_rope: Rotation,
        layout: BlockLayout,
    ) -> Tensor:
        """Output stream ``[M, G, H]`` of all steps of all blocks, each step fed with the output of the one before.

        A step sees its block's context pairs, the steps before it and itself.

        Args:
            context_stream_NH: Stream of every context pair.
            context_embedding_NH: Their embeddings.
            context_rope: Cosines and signed sines of the context pairs, ``[N, 1, d]``.
            stream_MH: Stream of the blocks' first pairs.
            embeddings_MGH: Embeddings of the tokens x_0 .. x_{G-1} that the steps read.
            block_rope: The same for the steps, ``[M, G, 1, d]``.
            layout: Which context pairs a block sees.
        """
        context_keys, context_values = self.keys_values(context_stream_NH, context_embedding_NH, context_rope)
        cos_MG1d, sin_MG1d = block_rope
        keys, values, outputs = [], [], []
        for step in range(embeddings_MGH.shape[1]):
            rope = cos_MG1d[:, step], sin_MG1d[:, step]
            queries_Mhd, keys_Mgd, values_Mgd = self.project(stream_MH, embeddings_MGH[:, step], rope)
            keys.append(keys_Mgd)
            values.append(values_Mgd)
            mixed_M1O = attend_blocks(
                layout,
                queries_Mhd[:, None],
                torch.stack(keys, dim=1),
                torch.stack(values, dim=1),
                context_keys,
                context_values,
            )
            stream_MH = self.finish(stream_MH, mixed_M1O[:, 0])
            outputs.append(stream_MH)
        return torch.stack(outputs, dim=1)

    def project(self, stream_XH: Tensor, embedding_XH: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries ``[X, h, d]`` and keys ``[X, g, d]``, and values ``[X, g, d]``, of pairs."""
        inputs, attention = self._attention_input(stream_XH, embedding_XH), self.self_attn
        queries = F.linear(inputs, attention.q_proj.weight).unflatten(-1, (-1, self.head_dim))
        return rotate(rms_norm(queries, attention.q_norm), *rope), *self._keys_values(inputs, rope)

    def keys_values(self, stream_XH: Tensor, embedding_XH: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and values ``[X, g, d]`` of pairs."""
        return self._keys_values(self._attention_input(stream_XH, embedding_XH), rope)

    def finish(self, stream_XH: Tensor, mixed_XO: Tensor) -> Tensor:
        """The stream after the layer, given what attention mixed."""
        stream_XH = stream_XH + F.linear(mixed_XO, self.self_attn.o_proj.weight)
        return stream_XH + swiglu(rms_norm(stream_XH, self.post_attention_layernorm), self.mlp)

    def _attention_input(self, stream_XH: Tensor, embedding_XH: Tensor) -> Tensor:
        if not self.doubled:
            return rms_norm(stream_XH, self.input_layernorm)
        normed = rms_norm(embedding_XH, self.input_layernorm), rms_norm(stream_XH, self.hidden_norm)
        return torch.cat(normed, dim=-1)

    def _keys_values(self, inputs_XW: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        attention = self.self_attn
        keys = F.linear(inputs_XW, attention.k_proj.weight).unflatten(-1, (-1, self.head_dim))
        values = F.linear(inputs_XW, attention.v_proj.weight).unflatten(-1, (-1, self.head_dim))
        return rotate(rms_norm(keys, attention.k_norm), *rope), values


class PairModel(Protocol):
    """What the functions below need of a drafter over pairs."""

    norm: nn.RMSNorm
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    rope: RopeTables

    @property
    def config(self) -> DrafterConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def draft_token_ids_D(self) -> Tensor | None: ...

    @property
    def layer(self) -> PairLayer: ...

    def features(self, taps_XT: Tensor) -> Tensor:
        """Features ``[X, H]`` of positions, from the target's taps."""
        ...

    def combine(self, features_XH: Tensor, embedding_XH: Tensor) -> Tensor:
        """The stream ``[X, H]`` that the layer starts from."""
        ...


def new_pair_cache(
    model: PairModel, num_slots: int, max_length: int, tables: BlockTables | None = None
) -> DrafterCache:
    """Allocate keys, values and features (see `dspark.drafters.protocol.Drafter.new_cache`)."""
    config = model.config
    return DrafterCache(
        num_layers=1,
        num_slots=num_slots,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_length=max_length,
        scratch=config.block_size,
        device=model.device,
        dtype=model.dtype,
        feature_size=config.hidden_size,
        tables=tables,
    )


@torch.no_grad()
def extend_pairs(
    model: PairModel, cache: DrafterCache, segments: Sequence[Segment], token_ids_N: Tensor, taps_NT: Tensor
) -> None:
    """Store the features of newly committed tokens, and keys and values of the pairs that these tokens complete.

    A token at position p completes the pair p - 1, whose feature may have been stored long before.

    Args:
        model: The drafter.
        cache: The cache to extend.
        segments: For each slot at most one run of tokens, starting at the slot's length.
        token_ids_N: The tokens, flat.
        taps_NT: The target's features of these tokens, flat.

    Raises:
        ValueError: if a segment does not continue its slot or does not fit, or if the number of features or tokens is
            wrong.
    """
    width = len(model.config.target_layer_ids) * model.config.hidden_size
    segments = reserve_extension(cache, segments, token_ids_N, taps_NT, width)
    if not segments:
        return
    tables = cache.tables
    places = tables.places(segments)
    cache.features[places.rows] = model.features(taps_NT)
    if any(segment.start == 0 for segment in segments):  # the first token of all completes no pair
        token_ids_N = token_ids_N[places.positions_N > 0]
        starts = [max(segment.start, 1) for segment in segments]
        segments = [
            Segment(segment.slot, start, segment.end - start)
            for segment, start in zip(segments, starts, strict=True)
            if segment.end > start
        ]
        if not segments:
            return
        places = tables.places(segments)
    features = tables.places([Segment(segment.slot, segment.start - 1, segment.length) for segment in segments])
    embedding_NH = F.embedding(token_ids_N, model.embed_tokens.weight)
    stream_NH = model.combine(cache.features[features.rows], embedding_NH)
    rope = model.rope.like(stream_NH).lookup(features.positions_N, features.last_position)
    keys_Ngd, values_Ngd = model.layer.keys_values(stream_NH, embedding_NH, rope)
    cache.keys[0][:, places.rows] = keys_Ngd.transpose(0, 1).to(cache.keys.dtype)
    cache.values[0][:, places.rows] = values_Ngd.transpose(0, 1).to(cache.values.dtype)


@torch.no_grad()
def propose_pairs(
    model: PairModel,
    cache: DrafterCache,
    slots: Sequence[int],
    anchors_R: Tensor,
    sample: DraftSampler,
    num_tokens: int | None,
) -> DraftBlock:
    """Draft the tokens after each row's anchor, which sits at the position that the slot's length names.

    The steps' keys and values are written behind the context, where the next `extend_pairs` overwrites them; nothing
    beyond a slot's length is ever read again.

    Args:
        model: The drafter.
        cache: Context of the slots; its lengths stay.
        slots: One different slot per row.
        anchors_R: The last token that the target produced, per row.
        sample: Draws each token; temperature and the like are its business.
        num_tokens: Draft tokens G wanted, 1 to the block size; None for all.

    Raises:
        ValueError: for a wrong number of tokens, rows or slots, and for a slot without context.
    """
    count = check_proposal(slots, anchors_R, num_tokens, model.config.block_size)
    for slot in slots:
        if cache.lengths[slot] < 1:
            raise ValueError(
                f"slot {slot} holds no token, but the first draft step needs the feature of the one before the anchor; "
                "extend the slot first"
            )
    layer, draft_ids_D = model.layer, model.draft_token_ids_D
    rows, head_dim = len(slots), model.config.head_dim
    steps = cache.blocks(slots, count)
    features_RH = cache.features[cache.tables.places([Segment(step.slot, step.start - 1, 1) for step in steps]).rows]
    known = torch.empty(rows, count + 1, dtype=torch.int64, device=model.device)  # x_0 .. x_G
    known[:, 0] = anchors_R
    distributions = []
    for k in range(count):
        embedding_RH = F.embedding(known[:, k], model.embed_tokens.weight)
        stream_RH = model.combine(features_RH, embedding_RH)
        plan = AttentionPlan([Segment(step.slot, step.start + k, 1) for step in steps], cache, first=1)
        places = plan.places
        rope = model.rope.like(stream_RH).lookup(places.positions_N - 1, places.last_position)
        mixed_Rhd = attend(
            *layer.project(stream_RH, embedding_RH, rope), cache.keys[0], cache.values[0], plan, scale=head_dim**-0.5
        )
        features_RH = layer.finish(stream_RH, mixed_Rhd.flatten(1))
        logits_RD = F.linear(rms_norm(features_RH, model.norm), model.lm_head.weight).float()
        columns_R, probs_RD = sample(k, logits_RD, known[:, 1 : k + 1])
        known[:, k + 1] = columns_R if draft_ids_D is None else draft_ids_D[columns_R]
        distributions.append(probs_RD)
    return DraftBlock(tokens_RG=known[:, 1:], probs_RGD=stack_distributions(distributions), confidence_logits_RG=None)


def train_pairs(model: PairModel, blocks: PackedBlocks) -> Tensor:
    """States ``[M, G, H]`` after the final norm: step k of a block predicts the (k+1)-th token after its anchor.

    Steps read the data's tokens and the drafter's own outputs: the training-time test of EAGLE-3.

    Raises:
        ValueError: if an anchor is at position 0, where there is no feature to start from.
    """
    if len(blocks.anchors_M) > 0 and int(blocks.anchors_M.min()) < 1:
        raise ValueError("an anchor is at position 0, but this drafter needs the feature of the token before it")
    device, steps = blocks.taps_NT.device, blocks.block_tokens_MG.shape[1]
    if steps > model.config.block_size:
        raise ValueError(f"blocks have {steps} tokens, more than the block size {model.config.block_size}; cut them")
    first_pairs_M = blocks.anchors_M - 1
    layout = BlockLayout(blocks, first_pairs_M, steps)
    features_NH = model.features(blocks.taps_NT)
    # The last pair of a sequence gets the wrong token; it is no block's context.
    context_embedding_NH = F.embedding(blocks.token_ids_N.roll(-1), model.embed_tokens.weight)
    context_stream_NH = model.combine(features_NH, context_embedding_NH)
    embeddings_MGH = F.embedding(blocks.block_tokens_MG, model.embed_tokens.weight)
    stream_MH = model.combine(features_NH.index_select(0, layout.context_rows(first_pairs_M)), embeddings_MGH[:, 0])
    positions_MG = first_pairs_M[:, None] + position_range(0, steps, device)
    table = model.rope.like(stream_MH)
    cos, sin = table.lookup(positions_MG.flatten(), layout.last_position)
    output_MGH = model.layer(
        context_stream_NH,
        context_embedding_NH,
        table.lookup(layout.positions_N, layout.last_position),
        stream_MH,
        embeddings_MGH,
        (cos.unflatten(0, positions_MG.shape), sin.unflatten(0, positions_MG.shape)),
        layout,
    )
    return rms_norm(output_MGH, model.norm)
