"""A target and a drafter whose distributions are tables, so that every probability of an output can be computed.

The next token depends on the sum of all tokens so far modulo ``STATES``. The target reads that sum from its cache, so
a stale or missing entry changes what it says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.drafters.cache import DrafterCache
from dspark.drafters.protocol import DraftBlock, DraftSampler, stack_distributions
from dspark.models.block_tables import BlockTables
from dspark.models.config import DecoderConfig
from dspark.models.kv_cache import KVCache
from dspark.models.rope import RopeSettings
from dspark.models.target import TargetOutput
from dspark.types import Segment

STATES = 7


def random_table(vocab_size: int, seed: int, sharpness: float = 2.0) -> torch.Tensor:
    """Distributions ``[STATES, vocab_size]``."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(STATES, vocab_size, generator=generator) * sharpness).softmax(-1)


class TableTarget:
    """Implements :class:`dspark.models.target.Target`; its one tap layer is the running sum."""

    def __init__(self, table_SV: torch.Tensor, context: int = 64) -> None:
        self.table_SV = table_SV
        self.forward_tokens: list[int] = []
        self.config = DecoderConfig(
            vocab_size=table_SV.shape[1],
            hidden_size=STATES,
            intermediate_size=1,
            num_layers=2,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            norm_eps=1e-6,
            max_position_embeddings=context,
            tie_word_embeddings=False,
            rope=RopeSettings.default(2, 10000.0),
            rope_theta=10000.0,
        )
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.embedding_weight_VH = torch.zeros(table_SV.shape[1], STATES)
        self.lm_head_weight_VH = table_SV.log().T

    @property
    def shares_blocks(self) -> bool:
        return True

    def new_cache(self, num_slots: int, max_length: int, tables: BlockTables | None = None) -> KVCache:
        return KVCache(
            num_layers=1,
            num_slots=num_slots,
            num_kv_heads=1,
            max_length=max_length,
            head_dim=1,
            dtype=self.dtype,
            device=self.device,
            tables=tables,
        )

    def forward(
        self,
        token_ids_N: torch.Tensor,
        segments: Sequence[Segment],
        cache: KVCache,
        tap_layers: Sequence[int] = (),
        logit_rows: Sequence[int] = (),
    ) -> TargetOutput:
        self.forward_tokens.append(len(token_ids_N))
        cache.reserve(list(segments))
        states = []
        for segment, tokens in zip(segments, token_ids_N.split([s.length for s in segments]), strict=True):
            memory_P = cache.keys[0, 0, :, 0]
            memory_P[cache.tables.places([segment]).rows] = tokens.float()
            known = memory_P[cache.tables.slot_rows([segment.slot], segment.end)[0]]
            states.append(known.cumsum(0)[segment.start :] % STATES)
        state_N = torch.cat(states)
        hidden_NH = torch.nn.functional.one_hot(state_N.long(), STATES).float()
        return TargetOutput(
            hidden_NH=hidden_NH,
            taps_NT=state_N[:, None] if tap_layers else None,
            logits_MV=self.logits(hidden_NH[list(logit_rows)]) if logit_rows else None,
        )

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        return self.table_SV.log()[hidden_MH.argmax(-1)]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding_weight_VH[token_ids]


class TableDrafter:
    """Implements :class:`dspark.drafters.protocol.Drafter` over the columns ``draft_token_ids_D`` (all if None)."""

    def __init__(self, table_SD: torch.Tensor, block_size: int, draft_token_ids_D: torch.Tensor | None = None) -> None:
        self.table_SD = table_SD
        self.block_size = block_size
        self.tap_layers = (0,)
        self.draft_vocab_size = table_SD.shape[1]
        self.draft_token_ids_D = draft_token_ids_D
        self.has_confidence_head = False
        self.calibration = None

    def new_cache(self, num_slots: int, max_length: int, tables: BlockTables | None = None) -> DrafterCache:
        return DrafterCache(
            num_layers=1,
            num_slots=num_slots,
            num_kv_heads=1,
            head_dim=1,
            max_length=max_length,
            scratch=0,
            device=torch.device("cpu"),
            dtype=torch.float32,
            tables=tables,
        )

    def extend(
        self, cache: DrafterCache, segments: Sequence[Segment], token_ids_N: torch.Tensor, taps_NT: torch.Tensor
    ) -> None:
        cache.reserve(segments)
        cache.keys[0, 0, cache.tables.places(segments).rows] = taps_NT

    def catch_up(self, cache: DrafterCache, slots: Sequence[int]) -> None:
        """It puts nothing off."""

    def propose(
        self,
        cache: DrafterCache,
        slots: Sequence[int],
        anchors_R: torch.Tensor,
        sample: DraftSampler,
        num_tokens: int | None = None,
    ) -> DraftBlock:
        last = cache.tables.places([Segment(slot, cache.lengths[slot] - 1, 1) for slot in slots])
        state_R = (cache.keys[0, 0, last.rows, 0].long() + anchors_R) % STATES
        tokens_RG = torch.empty(len(slots), 0, dtype=torch.long)
        distributions = []
        for k in range(num_tokens or self.block_size):
            columns_R, probs_RD = sample(k, self.table_SD.log()[state_R], tokens_RG)
            drawn_R = columns_R if self.draft_token_ids_D is None else self.draft_token_ids_D[columns_R]
            tokens_RG = torch.cat([tokens_RG, drawn_R[:, None]], dim=1)
            state_R = (state_R + drawn_R) % STATES
            distributions.append(probs_RD)
        return DraftBlock(tokens_RG=tokens_RG, probs_RGD=stack_distributions(distributions), confidence_logits_RG=None)
