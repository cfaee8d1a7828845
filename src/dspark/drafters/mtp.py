"""The MTP-1 drafter: multi-token prediction as in DeepSeek-V3 (arXiv 2412.19437), one token ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.calibration.calibration import Calibration
from dspark.drafters.cache import DrafterCache
from dspark.drafters.initialization import draft_token_ids, register_target_parts
from dspark.drafters.layers import RopeTables, rms_norm
from dspark.drafters.mtp_config import MtpConfig
from dspark.drafters.packing import PackedBlocks
from dspark.drafters.pairs import PairLayer, extend_pairs, new_pair_cache, propose_pairs, train_pairs
from dspark.drafters.protocol import DraftBlock, DraftSampler
from dspark.types import Segment


class MtpDrafter(nn.Module):
    """One decoder layer over ``W_eh [norm(embedding) ; norm(h)]``, h the output of the target's final layer.

    ``embed_tokens`` and ``lm_head`` are the target's and frozen. `dspark.drafters.pairs` says which h meets which
    token.
    """

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    d2t: Tensor
    t2d: Tensor
    calibration: Calibration | None = None

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        with torch.device("meta"):
            register_target_parts(self, config)
            self.enorm = nn.RMSNorm(hidden_size, eps=eps)
            self.hnorm = nn.RMSNorm(hidden_size, eps=eps)
            self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
            self.layers = nn.ModuleList([PairLayer(config, doubled=False)])
            self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self.rope = RopeTables(config)

    @property
    def block_size(self) -> int:
        """Draft tokens of one round, gamma."""
        return self.config.block_size

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `extend` is fed with, concatenated in this order."""
        return self.config.target_layer_ids

    @property
    def draft_vocab_size(self) -> int:
        """Columns D of the draft distribution."""
        return self.config.draft_vocab_size

    @property
    def draft_token_ids_D(self) -> Tensor | None:
        """Target id of every draft column; None where the draft vocabulary is the target's."""
        return draft_token_ids(self)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return self.norm.weight.dtype

    @property
    def has_confidence_head(self) -> bool:
        """Whether blocks come with confidence logits: never."""
        return False

    @property
    def needs_whole_blocks(self) -> bool:
        """Whether `teacher_forced` looks at a slot's whole block: never."""
        return False

    @property
    def layer(self) -> PairLayer:
        """The one decoder layer."""
        return cast(PairLayer, self.layers[0])

    def features(self, taps_XT: Tensor) -> Tensor:
        """Features ``[X, H]`` of positions: the target's final layer output as it is."""
        return taps_XT.to(self.dtype)

    def combine(self, features_XH: Tensor, embedding_XH: Tensor) -> Tensor:
        """The stream that the layer starts from: ``W_eh [norm(embedding) ; norm(feature)]``."""
        normed = rms_norm(embedding_XH, self.enorm), rms_norm(features_XH, self.hnorm)
        return F.linear(torch.cat(normed, dim=-1), self.eh_proj.weight).to(self.dtype)

    def new_cache(self, num_slots: int, max_length: int) -> DrafterCache:
        """Allocate the context memory of `num_slots` requests of up to `max_length` tokens."""
        return new_pair_cache(self, num_slots, max_length)

    def extend(self, cache: DrafterCache, segments: Sequence[Segment], token_ids_N: Tensor, taps_NT: Tensor) -> None:
        """Take in newly committed tokens and the target's features of them; see `extend_pairs`."""
        extend_pairs(self, cache, segments, token_ids_N, taps_NT)

    def propose(
        self,
        cache: DrafterCache,
        slots: Sequence[int],
        anchors_R: Tensor,
        sample: DraftSampler,
        num_tokens: int | None = None,
    ) -> DraftBlock:
        """Draft the tokens after each row's anchor; see `propose_pairs`."""
        return propose_pairs(self, cache, slots, anchors_R, sample, num_tokens)

    def training_hidden(self, blocks: PackedBlocks) -> Tensor:
        """States ``[M, G, H]`` after the final norm; see `train_pairs`."""
        return train_pairs(self, blocks)

    def teacher_forced(self, hidden_XGH: Tensor, previous_XG: Tensor) -> tuple[Tensor, Tensor | None]:
        """``(logits [X, G, D], None)`` of any selection of slots: the previous tokens are in the states already."""
        return F.linear(hidden_XGH, self.lm_head.weight), None

    def detached_confidence(self, hidden_XGH: Tensor, previous_XG: Tensor) -> Tensor | None:
        """None: there is no confidence head."""
        return None
