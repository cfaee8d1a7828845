"""A drafter over pairs of a feature and the token after it: what Eagle3 and MTP-1 have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.cache import DrafterCache
from dspark.drafters.draft_model import DraftModel
from dspark.drafters.layers import RopeTables
from dspark.drafters.packing import PackedBlocks
from dspark.drafters.pairs import PairLayer, extend_pairs, new_pair_cache, propose_pairs, train_pairs
from dspark.drafters.protocol import DraftBlock, DraftSampler
from dspark.models.block_tables import BlockTables
from dspark.types import Segment


class PairDrafter(DraftModel):
    """One decoder layer over pairs; a subclass says what a feature is and what the layer starts from.

    `dspark.drafters.pairs` says which feature meets which token.
    """

    rope: RopeTables

    def _add_layer(self, *, doubled: bool) -> None:
        """Add the decoder layer (``doubled`` as in `PairLayer`) and the norm behind it, after the subclass's own parts.

        The order matters: a seed's start and the optimisers' state go by it.
        """
        with torch.device("meta"):
            self.layers = nn.ModuleList([PairLayer(self.config, doubled=doubled)])
            self.norm = nn.RMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)
        self.rope = RopeTables(self.config)

    @abstractmethod
    def features(self, taps_XT: Tensor) -> Tensor:
        """Features ``[X, H]`` of positions, from the target's taps."""

    @abstractmethod
    def combine(self, features_XH: Tensor, embedding_XH: Tensor) -> Tensor:
        """The stream ``[X, H]`` that the layer starts from."""

    @property
    def has_confidence_head(self) -> bool:
        """Whether blocks come with confidence logits: never."""
        return False

    @property
    def layer(self) -> PairLayer:
        """The one decoder layer."""
        return cast(PairLayer, self.layers[0])

    def new_cache(self, num_slots: int, max_length: int, tables: BlockTables | None = None) -> DrafterCache:
        """Allocate the context memory (see `dspark.drafters.protocol.Drafter.new_cache`)."""
        return new_pair_cache(self, num_slots, max_length, tables)

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

    def teacher_forced(
        self, hidden_MGH: Tensor, previous_MG: Tensor, at_MG: Tensor | None = None, *, detach_confidence: bool = False
    ) -> tuple[Tensor, None]:
        """Logits ``[M, G, D]``, or ``[N, D]`` of the slots ``at_MG``; the previous tokens are in the states already."""
        return F.linear(hidden_MGH if at_MG is None else hidden_MGH[at_MG], self.lm_head.weight), None
