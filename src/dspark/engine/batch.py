"""Plain decoding of many requests at once, each freed slot refilled at once: the generator behind training data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import torch

from dspark.decoding import (
    GenerationCompletion,
    GenerationRequest,
    TokenHistory,
    sample_rows,
    token_probs,
    uniform,
)
from dspark.models.target import Target
from dspark.types import Segment

# Prompts are run in passes of about this many padded tokens, so that memory stays bounded.
_PREFILL_TOKENS = 4096


@dataclass(slots=True)
class _Row:
    request: GenerationRequest
    generated: list[int] = field(default_factory=list)
    history: TokenHistory | None = None

    @property
    def position(self) -> int:
        """Position of the next token to be fed."""
        return len(self.request.prompt_ids) + len(self.generated) - 1


class BatchGenerator:
    """Continuous batching over a fixed number of slots.

    Args:
        target: the model.
        max_concurrency: requests decoded at once.
        max_length: prompt and generated tokens of one request together.
    """

    def __init__(self, target: Target, *, max_concurrency: int, max_length: int) -> None:
        self._target = target
        self._max_length = min(max_length, target.config.max_position_embeddings)
        self._cache = target.new_cache(max_concurrency, self._max_length)
        self._rows: list[_Row | None] = [None] * max_concurrency

    @property
    def max_length(self) -> int:
        """Prompt and generated tokens that fit together."""
        return self._max_length

    def run(self, requests: Iterator[GenerationRequest | None]) -> Iterator[GenerationCompletion]:
        """Decode until ``requests`` is exhausted, yielding each completion as it ends.

        A request is pulled whenever a slot is free; None means that there is none right now (a later one may depend
        on a completion still to come). ``settings.seed`` must be given: a result then depends on its request alone.

        Raises:
            ValueError: if a request has an empty prompt, one that fills ``max_length``, no token to make, or no seed.
        """
        exhausted = False
        while True:
            admitted: list[int] = []
            while not exhausted and None in self._rows:
                try:
                    request = next(requests)
                except StopIteration:
                    exhausted = True
                    break
                if request is None:
                    break
                self._check(request)
                slot = self._rows.index(None)
                history = TokenHistory(request.prompt_ids) if request.settings.needs_history else None
                self._rows[slot] = _Row(request, history=history)
                admitted.append(slot)
            if admitted:
                yield from self._prefill(admitted)
                continue
            active = [slot for slot, row in enumerate(self._rows) if row is not None]
            if active:
                yield from self._decode(active)
            elif exhausted:
                return

    def _check(self, request: GenerationRequest) -> None:
        if not 0 < len(request.prompt_ids) < self._max_length:
            raise ValueError(
                f"request {request.request_id}: the prompt has {len(request.prompt_ids)} tokens, it must have at least "
                f"1 and leave room below max_length ({self._max_length})"
            )
        if request.max_tokens < 1:
            raise ValueError(f"request {request.request_id}: max_tokens is {request.max_tokens}; give at least 1")
        if request.settings.seed is None:
            raise ValueError(f"request {request.request_id}: settings.seed is missing; a batch needs one a request")

    def _prefill(self, slots: list[int]) -> Iterator[GenerationCompletion]:
        # Like lengths together: padding inside attention is then small.
        slots = sorted(slots, key=lambda slot: len(self._row(slot).request.prompt_ids))
        while slots:
            longest = len(self._row(slots[-1]).request.prompt_ids)
            count = max(1, _PREFILL_TOKENS // longest)
            chunk, slots = slots[-count:], slots[:-count]
            prompts = [self._row(slot).request.prompt_ids for slot in chunk]
            yield from self._step(chunk, prompts, starts=[0] * len(chunk))

    def _decode(self, slots: list[int]) -> Iterator[GenerationCompletion]:
        rows = [self._row(slot) for slot in slots]
        yield from self._step(slots, [(row.generated[-1],) for row in rows], starts=[row.position for row in rows])

    def _step(
        self, slots: list[int], inputs: list[tuple[int, ...]], starts: list[int]
    ) -> Iterator[GenerationCompletion]:
        """Feed ``inputs``, append one sampled token to each row, and yield the rows that end."""
        device = self._target.device
        segments = [Segment(slot, start, len(ids)) for slot, start, ids in zip(slots, starts, inputs, strict=True)]
        flat = torch.tensor([token for ids in inputs for token in ids], device=device)
        last = [end - 1 for end in accumulate(segment.length for segment in segments)]
        output = self._target.forward(flat, segments, self._cache, logit_rows=last)
        assert output.logits_MV is not None, "rows were asked for"
        sampled = self._sample(slots, output.logits_MV)
        for slot, token in zip(slots, sampled, strict=True):
            row = self._row(slot)
            row.generated.append(token)
            if row.history is not None:
                row.history.append(token)
            request = row.request
            stopped = token in request.stop_token_ids
            full = len(row.generated) == request.max_tokens or row.position + 1 == self._max_length
            if stopped or full:
                self._rows[slot] = None
                self._cache.truncate(slot, 0)
                yield GenerationCompletion(
                    request_id=request.request_id,
                    token_ids=tuple(row.generated),
                    finish_reason="stop" if stopped else "length",
                )

    def _sample(self, slots: list[int], logits_RV: torch.Tensor) -> list[int]:
        """One token a row; rows that share settings are transformed together."""
        groups: defaultdict[object, list[int]] = defaultdict(list)
        for index, slot in enumerate(slots):
            settings = self._row(slot).request.settings
            key = (settings.temperature, settings.top_k, settings.top_p, settings.min_p)
            groups[index if settings.needs_history or settings.logit_bias else key].append(index)
        sampled = [0] * len(slots)
        for indices in groups.values():
            row = self._row(slots[indices[0]])
            logits_GV = logits_RV[indices]
            if row.request.settings.is_greedy and row.history is None and not row.request.settings.logit_bias:
                chosen = logits_GV.argmax(dim=-1)
            else:
                probs_GV = token_probs(logits_GV, row.request.settings, row.history)
                noise = [self._uniform(slots[index]) for index in indices]
                chosen = sample_rows(probs_GV, torch.tensor(noise, dtype=torch.float64, device=logits_RV.device))
            for index, token in zip(indices, chosen.tolist(), strict=True):
                sampled[index] = token
        return sampled

    def _uniform(self, slot: int) -> float:
        row = self._row(slot)
        return uniform(cast(int, row.request.settings.seed), row.position + 1)

    def _row(self, slot: int) -> _Row:
        return cast(_Row, self._rows[slot])
