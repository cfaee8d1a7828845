"""One of a request's choices: its tokens, how they are drawn, and what became of its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class _OwnRandom:
    """A request's own numbers. What is wrong with them is kept until its choice can be ended without the others."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self.error: Exception | None = None

    def __call__(self) -> float:
        try:
            value = float(self._random())
        except Exception as error:
            self.error = error
            return 0.0
        if not 0 <= value < 1:
            self.error = ValueError(f"random gave {value:g}; it must give numbers in [0, 1)")
            return 0.0
        return value


class Choice:
    """A sequence of tokens that grows until something ends it.

    Attributes:
        choice_id: a number that no other choice of the engine ever gets.
        index: which of the request's choices.
        tokens: prompt, then what was generated. The last token is the anchor: keys and values are known before it.
        slot: where its memory is while it runs; None while it waits.
        rounds: what became of its drafts.
        grammar: how far it has come in its grammar; None without one.
        error: what of its own went wrong; it then gets no further, and its request ends.
        prompt_logprobs: of the prompt's tokens from the second on, as far as computed; None if nobody asked for them.
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
        self._random = None if request.random is None else _OwnRandom(request.random)
        self.sampling = request_sampling(settings, self.tokens.copy(), drafter, self._random)
        self.grammar = None if request.grammar is None else request.grammar.start()
        self.error: Exception | None = None
        self._stop_token_ids = request.stop_token_ids
        if request.grammar is not None:  # behind the end of what the grammar describes nothing can follow
            self._stop_token_ids = request.stop_token_ids | request.grammar.stop_token_ids
        self._max_tokens = max_tokens
        self._text = None if tokenizer is None else IncrementalText(tokenizer, request.stop_strings)
        self._logprobs: list[TokenLogprob] | None = None if request.logprobs is None else []
        asked_of_prompt = index == 0 and request.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprob] | None = [] if asked_of_prompt else None
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
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def draftable(self) -> int:
        """Draft tokens that a round can use: the target adds one of its own, so the last token needs no draft."""
        return min(self._most_drafted, self._max_tokens - self.num_generated - 1)

    def append(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> Delta:
        """Take in what a pass brought, up to the first token that ends the choice; what lies after it is dropped.

        Raises:
            Exception: whatever the request's own parts raise: its random, its grammar, its tokenizer.
        """
        if self._random is not None and self._random.error is not None:
            raise self._random.error
        shown, kept = [], 0
        for token in token_ids:
            kept += 1
            self.tokens.append(token)
            if self._text is not None and token not in self._stop_token_ids:
                shown.append(self._text.push(token))
            if token in self._stop_token_ids or (self._text is not None and self._text.stopped):
                self.finish_reason = "stop"
                break
            if self.num_generated == self._max_tokens:
                self.finish_reason = "length"
                break
        self.sampling.commit(list(token_ids[:kept]))
        if self.grammar is not None:
            self.grammar.extend(token_ids[:kept])
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
