"""Generation for one request: draft, verify, accept, commit, until something ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from dspark.calibration.calibration import NO_CALIBRATION
from dspark.decoding import Acceptance, SamplingSettings
from dspark.drafters.protocol import DraftBlock, Drafter
from dspark.engine.batch_sampling import VerifyRow, draft_sampler, verify_rows
from dspark.engine.result import GenerationResult, RoundEvent
from dspark.engine.round_counts import RoundCounts, num_judged
from dspark.engine.sampling import request_sampling
from dspark.engine.speculation import SpeculationSettings
from dspark.engine.tensors import as_tensor
from dspark.engine.text import IncrementalText
from dspark.models.target import Target, TargetOutput
from dspark.types import Segment

# Prompt tokens per forward pass: bounds the memory of activations and attention masks.
_PREFILL_CHUNK = 1024


def generate(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: Sequence[int],
    settings: SamplingSettings,
    *,
    max_tokens: int,
    stop_token_ids: frozenset[int] = frozenset(),
    stop_strings: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    random: Callable[[], float] | None = None,
    speculation: SpeculationSettings | None = None,
) -> Iterator[RoundEvent]:
    """Continue ``prompt_ids``, speculatively if there is a drafter; what comes out is the target's either way.

    Arguments are checked here; the work happens as the iterator is advanced. The last event carries the result.

    Args:
        max_tokens: generated tokens at most; the context's end may come first.
        stop_token_ids: tokens that end the answer (kept in ``token_ids``).
        stop_strings: texts that end the answer and are not shown; they need ``tokenizer``.
        tokenizer: for text; without one the events carry token ids only.
        random: uniforms in [0, 1) for sampling without a seed; operating-system entropy by default.
        speculation: how much to draft and verify; by default whole blocks.

    Raises:
        ValueError: naming the argument, if a confidence threshold is asked of a drafter without confidence head, the
            prompt is empty, holds ids outside the vocabulary or fills the context, ``max_tokens`` is not positive, or
            stop strings come without a tokenizer.
    """
    context = target.config.max_position_embeddings
    if len(prompt_ids) == 0:
        raise ValueError("prompt is empty: give at least one token (or use the chat template)")
    if len(prompt_ids) >= context:
        raise ValueError(f"prompt has {len(prompt_ids)} tokens; the target's context holds {context} with the answer")
    if not all(0 <= token < target.config.vocab_size for token in prompt_ids):
        raise ValueError(f"prompt holds a token id outside the vocabulary 0..{target.config.vocab_size - 1}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
    if stop_strings and tokenizer is None:
        raise ValueError("stop_strings need a tokenizer")
    speculation = speculation or SpeculationSettings()
    if drafter is not None and speculation.confidence_threshold is not None and not drafter.has_confidence_head:
        raise ValueError(
            "confidence_threshold needs a drafter with a confidence head; this one has none, so leave it out"
        )
    text = None if tokenizer is None else IncrementalText(tokenizer, stop_strings)
    budget = min(max_tokens, context - len(prompt_ids))
    run = _Generation(target, drafter, list(prompt_ids), settings, budget, stop_token_ids, text, random, speculation)
    return run.events()


class _Generation:
    """State of one request between rounds."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        prompt_ids: list[int],
        settings: SamplingSettings,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        text: IncrementalText | None,
        random: Callable[[], float] | None,
        speculation: SpeculationSettings,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._speculation = speculation
        self._calibration = NO_CALIBRATION if drafter is None else drafter.calibration or NO_CALIBRATION
        self._temperature = settings.temperature
        self._tap_layers = drafter.tap_layers if drafter is not None else ()
        self._prompt_ids = prompt_ids
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._text = text
        self._sampling = request_sampling(settings, prompt_ids, drafter, random)
        length = len(prompt_ids) + max_tokens
        self._cache = target.new_cache(1, length)
        self._drafter_cache = drafter.new_cache(1, length) if drafter is not None else None
        self._generated: list[int] = []
        self._finish_reason: str | None = None
        self._counts = RoundCounts(0 if drafter is None else drafter.block_size)
        self._draft_seconds = self._schedule_seconds = self._verify_seconds = self._commit_seconds = 0.0

    def events(self) -> Iterator[RoundEvent]:
        started = time.perf_counter()
        first = self._verify(self._prefill(), [], None)
        event = self._commit([first.next_token], accepted=0, verified=0)
        seconds = prefill_seconds = time.perf_counter() - started
        while self._finish_reason is None:
            yield event
            # The clock stands while the caller has the event: printing it is not generating.
            started = time.perf_counter()
            event = self._round()
            seconds += time.perf_counter() - started
        held_back = self._text.finish() if self._text is not None else ""
        if self._text is not None and self._text.stopped:
            self._finish_reason = "stop"
        yield replace(event, text=event.text + held_back, result=self._result(seconds, prefill_seconds))

    def _prefill(self) -> TargetOutput:
        """Run the prompt; returns its last pass, with the logits after the last token."""
        last_start = (len(self._prompt_ids) - 1) // _PREFILL_CHUNK * _PREFILL_CHUNK
        for start in range(0, last_start, _PREFILL_CHUNK):
            self._forward(self._prompt_ids[start : start + _PREFILL_CHUNK], start, ())
        rest = self._prompt_ids[last_start:]
        return self._forward(rest, last_start, (len(rest) - 1,))

    def _round(self) -> RoundEvent:
        """Draft, schedule, verify, commit (SPEC "One round")."""
        anchor_position = len(self._prompt_ids) + len(self._generated) - 1
        started = time.perf_counter()
        block = self._draft()
        draft_tokens = [] if block is None else block.tokens_RG[0].tolist()  # the one wait for the device
        drafted = time.perf_counter()
        logits, verify_length = self._schedule(block)
        scheduled = time.perf_counter()
        verify_tokens = draft_tokens[:verify_length]
        output = self._forward([self._generated[-1], *verify_tokens], anchor_position, range(1 + verify_length))
        probs_RGD = None if block is None else block.probs_RGD
        draft_probs_LD = None if probs_RGD is None else probs_RGD[0, :verify_length]
        acceptance = self._verify(output, verify_tokens, draft_probs_LD)
        verified = time.perf_counter()
        self._roll_back(anchor_position + 1 + acceptance.num_accepted)
        committed = [*verify_tokens[: acceptance.num_accepted], acceptance.next_token]
        event = self._commit(committed, accepted=acceptance.num_accepted, verified=verify_length)
        self._counts.add(
            drafted=len(draft_tokens),
            verified=verify_length,
            accepted=acceptance.num_accepted,
            committed=len(committed),
            kept=len(event.token_ids),
        )
        self._draft_seconds += drafted - started
        self._schedule_seconds += scheduled - drafted
        self._verify_seconds += verified - scheduled
        self._commit_seconds += time.perf_counter() - verified
        return replace(event, drafted=len(draft_tokens), confidence_logits=logits)

    def _schedule(self, block: DraftBlock | None) -> tuple[tuple[float, ...] | None, int]:
        """Confidence logits of the draft, and how many of its tokens to verify."""
        if block is None:
            return None, 0
        if block.confidence_logits_RG is None:
            return None, block.tokens_RG.shape[1]
        logits = tuple(block.confidence_logits_RG[0].tolist())
        return logits, self._speculation.verify_length(self._calibration.confidences(logits, self._temperature))

    def _draft(self) -> DraftBlock | None:
        # The target adds one token of its own, so the last one needs no draft.
        if self._drafter is None or self._drafter_cache is None:
            return None
        most = self._drafter.block_size
        if self._speculation.max_draft_tokens is not None:
            most = min(most, self._speculation.max_draft_tokens)
        room = min(most, self._max_tokens - len(self._generated) - 1)
        if room == 0:
            return None
        anchor_1 = as_tensor([self._generated[-1]], self._target.device)
        sample = draft_sampler([self._sampling], [room])
        return self._drafter.propose(self._drafter_cache, [0], anchor_1, sample, room)

    def _verify(self, output: TargetOutput, draft_tokens: list[int], draft_probs_LD: torch.Tensor | None) -> Acceptance:
        assert output.logits_MV is not None, "they were asked for"
        row = VerifyRow(sampling=self._sampling, draft_tokens=draft_tokens, draft_probs_LD=draft_probs_LD)
        return verify_rows([row], output.logits_MV, output.best_M)[0]

    def _forward(self, token_ids: list[int], start: int, logit_rows: Sequence[int]) -> TargetOutput:
        segment = Segment(0, start, len(token_ids))
        tokens_N = as_tensor(token_ids, self._target.device)
        output = self._target.forward(tokens_N, [segment], self._cache, self._tap_layers, logit_rows)
        if self._drafter is not None and self._drafter_cache is not None and output.taps_NT is not None:
            self._drafter.extend(self._drafter_cache, [segment], tokens_N, output.taps_NT)
        return output

    def _roll_back(self, length: int) -> None:
        self._cache.truncate(0, length)
        if self._drafter_cache is not None:
            self._drafter_cache.truncate(0, length)

    def _commit(self, token_ids: list[int], *, accepted: int, verified: int) -> RoundEvent:
        """Append tokens up to the first that ends the answer; what lies after it is dropped uncounted."""
        shown = []
        kept = []
        for token in token_ids:
            kept.append(token)
            self._generated.append(token)
            if self._text is not None:
                shown.append(self._text.push(token))
            if token in self._stop_token_ids or (self._text is not None and self._text.stopped):
                self._finish_reason = "stop"
                break
            if len(self._generated) == self._max_tokens:
                self._finish_reason = "length"
                break
        self._sampling.commit(kept)
        return RoundEvent(
            token_ids=tuple(kept),
            text="".join(shown),
            accepted=min(accepted, len(kept)),
            drafted=verified,
            verified=verified,
            judged=num_judged(verified=verified, committed=len(token_ids), kept=len(kept)),
        )

    def _result(self, seconds: float, prefill_seconds: float) -> GenerationResult:
        assert self._finish_reason is not None
        counts = self._counts.counts()
        return GenerationResult(
            text=self._text.text if self._text is not None else "",
            token_ids=tuple(self._generated),
            finish_reason=self._finish_reason,
            prompt_tokens=len(self._prompt_ids),
            rounds=counts.rounds,
            drafted=counts.drafted,
            verified=counts.verified,
            accepted=counts.accepted,
            accepted_length=counts.accepted_length,
            seconds=seconds,
            prefill_seconds=prefill_seconds,
            draft_seconds=self._draft_seconds,
            schedule_seconds=self._schedule_seconds,
            verify_seconds=self._verify_seconds,
            commit_seconds=self._commit_seconds,
            accepted_per_position=counts.accepted_per_position,
            reached_per_position=counts.reached_per_position,
            verified_per_position=counts.verified_per_position,
        )
