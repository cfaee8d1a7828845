"""One of a request's choices: its tokens, how they are drawn, and what became of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from dspark.calibration.calibration import NO_CALIBRATION
from dspark.drafters.protocol import Drafter
from dspark.engine.request import Completion, Delta, FinishReason, Request, TokenLogprob
from dspark.engine.round_counts import RoundCounts
from dspark.engine.sampling import request_sampling
from dspark.engine.text import IncrementalText
from dspark.scheduling.batch import FloatArray


class Choice:
    """A sequence of tokens that grows until something ends it.

    Attributes:
        choice_id: a number that no other choice of the engine ever gets.
        index: which of the request's choices.
        tokens: prompt, then what was generated. The last token is the anchor: keys and values are known before it.
        slot: where its memory is while it runs; None while it waits.
        rounds: what became of its drafts.
    """

    def __init__(
        self,
        request: Request,
        *,
        choice_id: int,
        index: int,
        max_tokens: int,
        drafter: Drafter | None,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.request = request
        self.choice_id = choice_id
        self.index = index
        self.slot: int | None = None
        self.tokens = list(request.prompt_ids)
        self.finish_reason: FinishReason | None = None
        self.preemptions = 0
        settings = request.sampling
        if settings.seed is not None and index > 0:  # seeds are signed 64-bit numbers: behind the last comes the first
            settings = replace(settings, seed=(settings.seed + index + 2**63) % 2**64 - 2**63)
        self.sampling = request_sampling(settings, self.tokens.copy(), drafter, request.random)
        self._max_tokens = max_tokens
        self._text = None if tokenizer is None else IncrementalText(tokenizer, request.stop_strings)
        self._logprobs: list[TokenLogprob] | None = None if request.logprobs is None else []
        block_size = 0 if drafter is None else drafter.block_size
        self.rounds = RoundCounts(block_size)
        asked = request.max_draft_tokens
        self._most_drafted = block_size if asked is None else min(block_size, asked)
        calibration = (drafter.calibration if drafter is not None else None) or NO_CALIBRATION
        fitted = calibration.at(settings.temperature)
        self.confidence_temperatures_G: FloatArray = np.array(fitted or [1.0] * block_size, np.float64)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first generated one."""
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        """Generated tokens so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def draftable(self) -> int:
        """Draft tokens that a round can use: the target adds one of its own, so the last token needs no draft."""
        return min(self._most_drafted, self._max_tokens - self.num_generated - 1)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> Delta:
        """Take in what a pass brought, up to the first token that ends the choice; what lies after it is dropped."""
        shown, kept = [], 0
        for token in token_ids:
            kept += 1
            self.tokens.append(token)
            if self._text is not None and token not in self.request.stop_token_ids:
                shown.append(self._text.push(token))
            if token in self.request.stop_token_ids or (self._text is not None and self._text.stopped):
                self.finish_reason = "stop"
                break
            if self.num_generated == self._max_tokens:
                self.finish_reason = "length"
                break
        self.sampling.commit(list(token_ids[:kept]))
        kept_logprobs = None if logprobs is None else tuple(logprobs[:kept])
        if kept_logprobs is not None and self._logprobs is not None:
            self._logprobs.extend(kept_logprobs)
        if self.finish_reason is not None:
            shown.append(self._finish_text())
        return Delta(
            choice=self.index,
            token_ids=tuple(token_ids[:kept]),
            text="".join(shown),
            logprobs=kept_logprobs,
            finish_reason=self.finish_reason,
        )

    def cancel(self) -> Delta:
        """End it where it is."""
        self.finish_reason = "cancelled"
        return Delta(choice=self.index, token_ids=(), text=self._finish_text(), finish_reason="cancelled")

    def completion(self) -> Completion:
        """What it came to, once it is finished."""
        assert self.finish_reason is not None, "the choice still runs"
        return Completion(
            text="" if self._text is None else self._text.text,
            token_ids=tuple(self.tokens[self.num_prompt_tokens :]),
            finish_reason=self.finish_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            counts=self.rounds.counts(),
        )

    def _finish_text(self) -> str:
        if self._text is None:
            return ""
        held_back = self._text.finish()
        if self._text.stopped and self.finish_reason == "length":
            self.finish_reason = "stop"  # a stop string stood before an unfinished character
        return held_back
