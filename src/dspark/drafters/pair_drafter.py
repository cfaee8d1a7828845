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
    def needs_whole_blocks(self) -> bool:
        """Whether `teacher_forced` looks at a slot's whole block: never."""
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

    def teacher_forced(self, hidden_XGH: Tensor, previous_XG: Tensor) -> tuple[Tensor, Tensor | None]:
        """``(logits [X, G, D], None)`` of any selection of slots: the previous tokens are in the states already."""
        return F.linear(hidden_XGH, self.lm_head.weight), None

    def detached_confidence(self, hidden_XGH: Tensor, previous_XG: Tensor) -> Tensor | None:
        """None: there is no confidence head."""
        return None
