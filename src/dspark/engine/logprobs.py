"""Log-probabilities of tokens as requests get them: the target's own, of an answer's tokens and of a prompt's.

Shapes: M rows of logits, L tokens of a prompt in one pass, H hidden size, V target ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.engine.batch_sampling import token_logprobs
from dspark.engine.choice import Choice
from dspark.engine.request import TokenLogprob
from dspark.models.target import Target

__all__ = ["add_prompt_logprobs", "logprobs_of"]

_ROWS_AT_ONCE = 32  # logits of a whole piece of a prompt could take more memory than anything else


def logprobs_of(logits_MV: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Of one token a row, with the ``top`` most likely ones beside it."""
    ids_M = torch.tensor(token_ids, device=logits_MV.device)
    chosen_M, top_ids_MK, top_values_MK = token_logprobs(logits_MV, ids_M, top)
    tops = zip(top_ids_MK.tolist(), top_values_MK.tolist(), strict=True)
    return [
        TokenLogprob(token_id=token, logprob=value, top=tuple(zip(ids, values, strict=True)))
        for token, value, (ids, values) in zip(token_ids, chosen_M.tolist(), tops, strict=True)
    ]


def add_prompt_logprobs(choice: Choice, start: int, hidden_LH: torch.Tensor, target: Target) -> None:
    """Give a choice that wants them the log-probabilities of the prompt tokens that follow those of a pass.

    Args:
        start: position of the first token of the pass. What a preemption lets come again is passed over.
        hidden_LH: the target's last hidden states.
    """
    known, top = choice.prompt_logprobs, choice.request.prompt_logprobs
    assert known is not None, "nobody has asked for these"
    assert top is not None, "nobody has asked for these"
    prompt_ids = choice.request.prompt_ids
    end = min(start + len(hidden_LH), len(prompt_ids) - 1)
    for first in range(len(known), end, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, end)
        logits_MV = target.logits(hidden_LH[first - start : last - start])
        known += logprobs_of(logits_MV, prompt_ids[first + 1 : last + 1], top)
