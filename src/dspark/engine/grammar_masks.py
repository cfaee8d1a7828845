"""The masks of many choices' grammars, on the logits of their rows.

Shapes: M rows of logits, L rows of one choice, V target ids, W words of 32 bits of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import llguidance.numpy
import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from dspark.engine.choice import Choice

__all__ = ["GrammarMasks"]

# What the eight ids of each byte of a mask may have at most: a minimum with it is far faster than masked_fill_.
_IS_SET = torch.arange(256).unsqueeze(-1).bitwise_right_shift(torch.arange(8)) & 1 == 1
_BOUNDS = torch.where(_IS_SET, math.inf, -math.inf)


class GrammarMasks:
    """Computes masks, in memory that is used again.

    Args:
        vocab_size: ids of the target.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._bits_MW = llguidance.numpy.allocate_token_bitmask(0, vocab_size)
        self._executor: LLExecutor | None = None

    @torch.inference_mode()  # some targets make their logits in this mode: they cannot be changed outside of it
    def apply(
        self, choices: Sequence[Choice], drafts: Sequence[Sequence[int]], logits_MV: torch.Tensor
    ) -> tuple[torch.Tensor, dict[int, int]]:
        """Logits without what the grammars of some of the choices forbid; grammars stay where they are.

        A row behind a draft token that leaves the grammar stays as it is: that token is rejected, whatever is there.

        Args:
            drafts: the draft tokens of each choice.
            logits_MV: a row after the last token of a choice and one after each of its draft tokens, choice after
                choice. Changed in place, unless a choice with a grammar wants the target's own log-probabilities.

        Returns:
            ``[M, V]``, and by choice id the first of a choice's rows that has nothing left, where there is such a one.
            A grammar that has come to a limit of its own says so when it is extended.
        """
        walks: list[tuple[LLMatcher, int, list[int]]] = []
        places: list[tuple[Choice, int, int]] = []
        row = used = 0
        for choice, draft in zip(choices, drafts, strict=True):
            if choice.grammar is not None:
                walks.append((choice.grammar.matcher, used, list(draft)))
                places.append((choice, row, used))
                used += 1 + len(draft)
            row += 1 + len(draft)
        if not walks:
            return logits_MV, {}
        if any(choice.request.logprobs is not None for choice, _, _ in places):
            logits_MV = logits_MV.clone()
        bits_MW = self._bits(walks, used)
        bounds = _BOUNDS.to(logits_MV.device, logits_MV.dtype)
        empty_rows: dict[int, int] = {}
        for (choice, row, start), (_, _, draft) in zip(places, walks, strict=True):
            length = 1 + len(draft)
            empty_row = _mask(logits_MV[row : row + length], bits_MW[start : start + length], bounds, choice)
            if empty_row is not None:
                empty_rows[choice.choice_id] = empty_row
        return logits_MV, empty_rows

    def _bits(self, walks: Sequence[tuple[LLMatcher, int, list[int]]], num_rows: int) -> NDArray[np.int32]:
        """Allowed ids ``[num_rows, W]``; all of them where no mask is needed."""
        if self._executor is None:
            self._executor = LLExecutor(torch.get_num_threads())
        if len(self._bits_MW) < num_rows:
            self._bits_MW = llguidance.numpy.allocate_token_bitmask(num_rows, self._vocab_size)
        bits_MW = self._bits_MW[:num_rows]
        bits_MW[:] = -1
        drafted = [walk for walk in walks if walk[2]]
        if drafted:
            llguidance.numpy.fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bits_MW)
        plain = [(matcher, start) for matcher, start, draft in walks if not draft]
        if plain:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, plain, bits_MW)
        return bits_MW


def _mask(logits_LV: torch.Tensor, bits_LW: NDArray[np.int32], bounds: torch.Tensor, choice: Choice) -> int | None:
    """Mask one choice's rows in place; the first row that has nothing left, its other bans counted, if there is one."""
    num_rows, vocab_size = logits_LV.shape
    mask_bytes = torch.from_numpy(bits_LW.astype("<i4", copy=False).view(np.uint8)).to(logits_LV.device)
    bounds_LV = bounds.index_select(0, mask_bytes.flatten().int()).view(num_rows, -1)[:, :vocab_size]
    torch.minimum(logits_LV, bounds_LV, out=logits_LV)
    banned_ids = [token for token, bias in choice.sampling.settings.logit_bias.items() if bias == -math.inf]
    if banned_ids:
        logits_LV[:, banned_ids] = -math.inf
    is_empty_L = logits_LV.amax(dim=-1).isneginf()
    if not bool(is_empty_L.any()):
        return None
    logits_LV[is_empty_L] = 0.0  # a distribution, so that the rule of acceptance goes through for all others
    return int(is_empty_L.int().argmax())
