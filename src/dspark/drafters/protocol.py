"""What the engine needs from any drafter, and what a drafter needs from its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.calibration.calibration import Calibration
from dspark.decoding import SamplingSettings, argmax_rows, sample_rows, token_probs
from dspark.drafters.cache import DrafterCache
from dspark.models.block_tables import BlockTables
from dspark.types import Segment

DraftSampler = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""``sample(k, logits_RD, tokens_Rk) -> (columns_R, probs_RD)``: draws draft token k (0-based) of every row.

``tokens_Rk`` are the target ids drafted so far in this block (without the anchor). ``columns_R`` are chosen columns of
the draft vocabulary and ``probs_RD`` the full distribution that each was drawn from (None, for every k, if no row's
acceptance rule needs it).
"""


@dataclass(frozen=True, kw_only=True)
class DraftBlock:
    """The draft tokens of one round, G per row.

    Attributes:
        tokens_RG: Draft tokens as target ids.
        probs_RGD: Distribution, over the D columns of the draft vocabulary, that each token was drawn from, as the
            sampler gave it; None if it gave none.
        confidence_logits_RG: Logit of the probability that a token is accepted given that all before it are
            (SPEC eq. 7); None where the drafter has no confidence head.
    """

    tokens_RG: Tensor
    probs_RGD: Tensor | None
    confidence_logits_RG: Tensor | None


class Drafter(Protocol):
    """A model that proposes a block of tokens after an anchor, from features of the target."""

    @property
    def block_size(self) -> int:
        """Most draft tokens proposed in one round, gamma."""
        ...

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `extend` is fed with, concatenated in this order."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Columns D of the draft distribution."""
        ...

    @property
    def draft_token_ids_D(self) -> Tensor | None:
        """Target id of every draft column; None where the draft vocabulary is the target's."""
        ...

    @property
    def has_confidence_head(self) -> bool:
        """Whether blocks carry confidence logits."""
        ...

    @property
    def calibration(self) -> Calibration | None:
        """What makes probabilities of the confidence logits; None where none was fitted."""
        ...

    def new_cache(self, num_slots: int, max_length: int, tables: BlockTables | None = None) -> DrafterCache:
        """Allocate the context memory of `num_slots` requests of up to `max_length` tokens.

        Args:
            tables: Which blocks hold the positions of each slot, where the caller decides it, who then gives a slot
                room for its tokens and `block_size` + 1 more whenever it drafts; by default every slot has it.
        """
        ...

    def extend(self, cache: DrafterCache, segments: Sequence[Segment], token_ids_N: Tensor, taps_NT: Tensor) -> None:
        """Take in newly committed tokens and the target's features of them."""
        ...

    def catch_up(self, cache: DrafterCache, slots: Sequence[int]) -> None:
        """Compute what was put off of these slots' context, where that is more than a round brings.

        `propose` would do it too: this way it can be told from the time that a draft takes.
        """
        ...

    def propose(
        self,
        cache: DrafterCache,
        slots: Sequence[int],
        anchors_R: Tensor,
        sample: DraftSampler,
        num_tokens: int | None = None,
    ) -> DraftBlock:
        """Draft `num_tokens` (default: the block size) tokens after the anchor of every row.

        A row's anchor sits at the position that its slot's length names: every token before it has been taken in.
        """
        ...


class TargetDimensions(Protocol):
    """The sizes of a target that a drafter has to agree with."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...


class DraftTarget(Protocol):
    """What a drafter shares with its target: sizes, embedding and LM head; and the type that the target computes in."""

    @property
    def config(self) -> TargetDimensions: ...

    @property
    def compute_dtype(self) -> str: ...

    @property
    def embedding_weight_VH(self) -> Tensor: ...

    @property
    def lm_head_weight_VH(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class PlainSampler:
    """The `DraftSampler` of rows that go by temperature alone; a drafter may know a faster way to the same tokens.

    Attributes:
        temperatures_R: 0 for the most likely token, ties to the lowest id.
        uniforms_RG: what tokens of the other rows are drawn with, by inverse CDF, in [0, 1); for each wanted token.
    """

    temperatures_R: tuple[float, ...]
    uniforms_RG: npt.NDArray[np.float64]

    @property
    def is_greedy(self) -> bool:
        """Whether no row needs a distribution."""
        return not any(self.temperatures_R)

    def __call__(self, position: int, logits_RD: Tensor, tokens_Rk: Tensor) -> tuple[Tensor, Tensor | None]:
        """Distributions of greedy rows are zero; None if all are."""
        if self.is_greedy:
            return argmax_rows(logits_RD), None
        if len(set(self.temperatures_R)) == 1:
            probs_RD = token_probs(logits_RD, SamplingSettings(temperature=self.temperatures_R[0]))
            return sample_rows(probs_RD, torch.from_numpy(self.uniforms_RG[:, position])), probs_RD
        columns_R = tokens_Rk.new_empty(len(logits_RD))
        dtype = torch.promote_types(logits_RD.dtype, torch.float32)  # of distributions
        probs_RD = torch.zeros_like(logits_RD, dtype=dtype)
        for temperature in set(self.temperatures_R):
            rows = [row for row, other in enumerate(self.temperatures_R) if other == temperature]
            if temperature == 0:
                columns_R[rows] = argmax_rows(logits_RD[rows])
                continue
            probs_RD[rows] = probs = token_probs(logits_RD[rows], SamplingSettings(temperature=temperature))
            columns_R[rows] = sample_rows(probs, torch.from_numpy(self.uniforms_RG[rows, position]))
        return columns_R, probs_RD


def greedy_sampler(position: int, logits_RD: Tensor, tokens_Rk: Tensor) -> tuple[Tensor, None]:
    """The `DraftSampler` of temperature 0 for any number of rows: the argmax, ties to the lowest id."""
    return argmax_rows(logits_RD), None


def stack_distributions(distributions: Sequence[Tensor | None]) -> Tensor | None:
    """What a sampler gave with each of the G draft tokens, ``[R, G, D]``; None if it gave none."""
    given = [probs_RD for probs_RD in distributions if probs_RD is not None]
    return torch.stack(given, dim=1) if given else None
