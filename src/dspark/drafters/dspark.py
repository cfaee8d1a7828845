"""The DSpark drafter: parallel backbone, sequential head, confidence head (SPEC, sections 3.1 and 3.2.1 of the paper).

Letters in names: N flat tokens, T concatenated taps, H hidden, R rows (requests), M training blocks, G draft tokens of
a block, I block inputs (G, or 1 + G), D draft vocabulary, h heads, g key/value heads, d head size, r rank, L layers,
O rows of a fused projection, K keys, X any leading shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.backbone import DraftLayer
from dspark.drafters.cache import DrafterCache, check_proposal, position_range, reserve_extension
from dspark.drafters.confidence import ConfidenceHead
from dspark.drafters.decoding import DraftComputation, FloatComputation, Int8Computation
from dspark.drafters.draft_model import DraftModel
from dspark.drafters.dspark_config import DSparkConfig
from dspark.drafters.layers import RopeTables, project_taps, rms_norm
from dspark.drafters.packing import BlockLayout, PackedBlocks
from dspark.drafters.protocol import DraftBlock, DraftSampler, PlainSampler, stack_distributions
from dspark.drafters.sequential import HEADS, SequentialHead, corrected_logits, embed_previous
from dspark.models.attention_kernel import HEAD_MULTIPLE
from dspark.models.block_tables import BlockTables
from dspark.models.instructions import has_dot_products
from dspark.types import Segment


class DSparkDrafter(DraftModel):
    """A drafter in the published form: the names of its ``state_dict`` are those of FORMATS.md, form A.

    ``embed_tokens`` and ``lm_head`` are the target's and frozen; everything else is trained. With a reduced vocabulary
    ``lm_head`` holds the target's rows of the draft tokens. Parameters start without values: use
    `dspark.drafters.registry.drafter_from_target` for a new drafter and `dspark.drafters.checkpoint.load_drafter` for
    a stored one.
    """

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        with torch.device("meta"):
            self.fc = nn.Linear(len(config.target_layer_ids) * hidden_size, hidden_size, bias=False)
            self.hidden_norm = nn.RMSNorm(hidden_size, eps=eps)
            self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
            self.norm = nn.RMSNorm(hidden_size, eps=eps)
            if config.markov_rank > 0:
                assert config.markov_head_type is not None
                head_type = HEADS[config.markov_head_type]
                self.markov_head = head_type(
                    config.vocab_size, config.draft_vocab_size, config.markov_rank, hidden_size
                )
            if config.enable_confidence_head:
                rank = config.markov_rank if config.confidence_head_with_markov else 0
                self.confidence_head = ConfidenceHead(hidden_size, rank)
        self._rope = RopeTables(config)
        self._computation: DraftComputation = FloatComputation(self, self._rope)

    @property
    def has_confidence_head(self) -> bool:
        """Whether blocks come with confidence logits."""
        return self.config.enable_confidence_head

    @property
    def can_compute_in_int8(self) -> bool:
        """Whether `compute_in_int8` is possible: on a CPU with the instructions for it, for heads of 8 n dimensions."""
        return self.device.type == "cpu" and has_dot_products() and self.config.head_dim % HEAD_MULTIPLE == 0

    def compute_in_int8(self) -> None:
        """Draft in int8 from now on, with a copy of the weights as they are now: for a drafter that is not trained.

        Raises:
            ValueError: it cannot (`can_compute_in_int8`).
        """
        if not self.can_compute_in_int8:
            raise ValueError(
                f"int8 needs a CPU with AVX2 or AVX512-VNNI and head_dim divisible by {HEAD_MULTIPLE} "
                f"(device {self.device}, head_dim {self.config.head_dim})"
            )
        self._computation = Int8Computation(self, self._rope)

    @property
    def compute_dtype(self) -> str:
        """What drafts are computed in: the parameters' type, or ``int8``."""
        return "int8" if isinstance(self._computation, Int8Computation) else super().compute_dtype

    # ---- decoding ----------------------------------------------------------------------------------------------------

    def new_cache(self, num_slots: int, max_length: int, tables: BlockTables | None = None) -> DrafterCache:
        """Allocate context keys and values (see `dspark.drafters.protocol.Drafter.new_cache`)."""
        config = self.config
        return DrafterCache(
            num_layers=config.num_hidden_layers,
            num_slots=num_slots,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_length=max_length,
            scratch=config.num_block_inputs,
            device=self.device,
            dtype=self.dtype,
            for_int8=self.compute_dtype == "int8",
            feature_bytes=self._computation.feature_bytes,
            tables=tables,
        )

    def extend(self, cache: DrafterCache, segments: Sequence[Segment], token_ids_N: Tensor, taps_NT: Tensor) -> None:
        """Take in newly committed tokens as context.

        Their keys and values are computed with the slot's next draft. Until then the features are kept: in int8 for as
        long as it takes; else until many tokens have come together, so that one product takes the place of many.

        Args:
            cache: The cache to extend.
            segments: For each slot at most one run of tokens, starting at the slot's length.
            token_ids_N: The tokens, flat; only their number matters here.
            taps_NT: The target's features of these tokens, flat; they or a quantised copy are kept until then.

        Raises:
            ValueError: if a segment does not continue its slot or does not fit, if the number of features or tokens is
                wrong, or if the cache is another drafter's. Nothing is changed then.
        """
        self._computation.check_cache(cache)
        segments = reserve_extension(cache, segments, token_ids_N, taps_NT, self.fc.in_features)
        if segments:
            self._computation.put_off(cache, cache.tables.places(segments), taps_NT)

    def catch_up(self, cache: DrafterCache, slots: Sequence[int]) -> None:
        """Compute what was put off of these slots' context (see `dspark.drafters.protocol.Drafter.catch_up`)."""
        self._computation.catch_up(cache, slots, 1 + self.block_size)

    def propose(
        self,
        cache: DrafterCache,
        slots: Sequence[int],
        anchors_R: Tensor,
        sample: DraftSampler,
        num_tokens: int | None = None,
    ) -> DraftBlock:
        """Draft the tokens after each row's anchor, which sits at the position that the slot's length names.

        The backbone always sees a whole block: its slots attend to each other, so that fewer inputs would change what
        is predicted. With `num_tokens` below the block size only the heads do less. A `PlainSampler` is not called
        where there is a faster way to the same tokens.

        Args:
            cache: Context of the slots; its scratch rows are overwritten, its lengths stay.
            slots: One different slot per row.
            anchors_R: The last token that the target produced, per row.
            sample: Draws each token; temperature and the like are its business.
            num_tokens: Draft tokens G wanted, 1 to the block size (the default).

        Raises:
            ValueError: for a wrong number of tokens, rows or slots.
        """
        count = check_proposal(slots, anchors_R, num_tokens, self.block_size)
        if isinstance(sample, PlainSampler):
            block = self._computation.drawn(cache, slots, anchors_R, count, sample)
            if block is not None:
                return block
        return self._propose(cache, slots, anchors_R, sample, count)

    @torch.no_grad()
    def _propose(
        self, cache: DrafterCache, slots: Sequence[int], anchors_R: Tensor, sample: DraftSampler, count: int
    ) -> DraftBlock:
        """`propose`, token by token."""
        hidden_RGH, base_RGD = self._computation.blocks(cache, slots, anchors_R, count)
        head_hidden_RGH = hidden_RGH.to(self.dtype)  # the type of the heads' parameters
        draft_ids_D = self.draft_token_ids_D
        head = self._head
        known = torch.empty(len(slots), count + 1, dtype=torch.int64, device=self.device)  # x_0 .. x_G
        known[:, 0] = anchors_R
        state: Tensor | None = None
        distributions = []
        for k in range(count):
            logits_RD = base_RGD[:, k]
            if head is not None:
                embedding_Rr = embed_previous(head, known[:, k])
                features_Rr, state = head.step_features(embedding_Rr, head_hidden_RGH[:, k], state)
                logits_RD = self._computation.corrected(logits_RD, features_Rr)
            columns_R, probs_RD = sample(k, logits_RD, known[:, 1 : k + 1])
            known[:, k + 1] = columns_R if draft_ids_D is None else draft_ids_D[columns_R]
            distributions.append(probs_RD)
        return DraftBlock(
            tokens_RG=known[:, 1:],
            probs_RGD=stack_distributions(distributions),
            confidence_logits_RG=self._computation.confidences(hidden_RGH, known[:, :count]),
        )

    # ---- training ----------------------------------------------------------------------------------------------------

    def context_features(self, taps_NT: Tensor) -> Tensor:
        """``h_ctx = RMSNorm(W_fc [h^{t_1}; ...; h^{t_m}])`` (eq. 2), ``[N, H]``."""
        return rms_norm(project_taps(taps_NT, self.fc), self.hidden_norm)

    def training_hidden(self, blocks: PackedBlocks) -> Tensor:
        """Backbone states ``[M, G, H]``: slot k of a block predicts the (k+1)-th token after its anchor."""
        config = self.config
        inputs, device = config.num_block_inputs, blocks.taps_NT.device
        layout = BlockLayout(blocks, blocks.anchors_M, inputs)
        context_NH = self.context_features(blocks.taps_NT)
        ids_MI = torch.full((len(blocks.anchors_M), inputs), config.mask_token_id, dtype=torch.int64, device=device)
        ids_MI[:, 0] = blocks.block_tokens_MG[:, 0]
        hidden_MIH = F.embedding(ids_MI, self.embed_tokens.weight)
        positions_MI = blocks.anchors_M[:, None] + position_range(0, inputs, device)
        table = self._rope.like(hidden_MIH)
        context_rope = table.lookup(layout.positions_N, layout.last_position)
        cos, sin = table.lookup(positions_MI.flatten(), layout.last_position)
        block_rope = (cos.unflatten(0, positions_MI.shape), sin.unflatten(0, positions_MI.shape))
        for layer in self.layers:
            hidden_MIH = layer(hidden_MIH, block_rope, context_NH, context_rope, layout)
        return rms_norm(hidden_MIH[:, inputs - self.block_size :], self.norm)

    def teacher_forced(
        self, hidden_MGH: Tensor, previous_MG: Tensor, at_MG: Tensor | None = None, *, detach_confidence: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Heads over blocks whose previous tokens ``x_0 .. x_{G-1}`` are known.

        The recurrent head looks at whole blocks; for the others only the slots that are asked for cost something.

        Args:
            at_MG: the slots to compute, N of them; None for all.
            detach_confidence: let the gradient of the confidence logits reach their own head alone.

        Returns:
            ``(logits, confidence_logits)``: base logits plus sequential correction, ``[M, G, D]`` or with ``at_MG``
            ``[N, D]``, and ``[M, G]`` or ``[N]``; None for a drafter without the head.
        """
        hidden, previous, head = hidden_MGH, previous_MG, self._head
        picks_late = at_MG is not None and self.config.markov_head_type == "rnn"
        if at_MG is not None and not picks_late:
            hidden, previous = hidden[at_MG], previous[at_MG]
        logits, embedding = F.linear(hidden, self.lm_head.weight), None
        if head is not None:
            embedding = embed_previous(head, previous)
            features = head.block_features(embedding, hidden)
            rank = features.shape[-1]
            logits = corrected_logits(head, logits.flatten(0, -2), features.reshape(-1, rank)).view_as(logits)
        confidence = None
        if self.config.enable_confidence_head:
            if detach_confidence:
                hidden, embedding = hidden.detach(), None if embedding is None else embedding.detach()
            confidence = self.confidence_head(hidden, embedding if self.confidence_head.uses_markov else None)
        if picks_late:
            logits, confidence = logits[at_MG], None if confidence is None else confidence[at_MG]
        return logits, confidence

    # ---- shared ------------------------------------------------------------------------------------------------------

    def confidence_logits(self, hidden_XGH: Tensor, previous_XG: Tensor) -> Tensor | None:
        """Confidence logits ``[X, G]`` of slots whose previous tokens are known; None without the head."""
        if not self.config.enable_confidence_head:
            return None
        head = self._head
        embedding = embed_previous(head, previous_XG) if head is not None and self.confidence_head.uses_markov else None
        return cast(Tensor, self.confidence_head(hidden_XGH, embedding))

    @property
    def _head(self) -> SequentialHead | None:
        return self.markov_head if self.config.markov_rank > 0 else None
