"""What Prometheus is told: vLLM's names where the meaning is the same, ``dspark_`` for what is ours.

Everything carries vLLM's labels ``model_name`` and ``engine``; other labels have few values, none of them a client's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Literal

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram

from dspark.engine.engine import Engine
from dspark.engine.request import Delta, Request, RequestResult
from dspark.scheduling import StepRecord
from dspark.scheduling.batch import IntArray
from dspark.server.engine_collector import EngineCollector, labels_of

__all__ = ["RequestObservation", "ServerMetrics"]

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_VERIFY_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)

Ending = Literal["stop", "length", "abort", "error"]
"""How an answer ended, in vLLM's words: ``abort`` is what the engine calls ``cancelled``."""
_ENDINGS: tuple[Ending, ...] = ("stop", "length", "abort", "error")

_REFUSALS = {401: "no key", 408: "body too slow", 413: "body too large", 429: "queue full", 503: "unavailable"}


class ServerMetrics:
    """Counts steps (in the engine's thread), requests (in the event loop) and HTTP responses.

    Args:
        engine: is watched from now on.
        model_name: value of the label.
    """

    def __init__(self, engine: Engine, *, model_name: str) -> None:
        self.registry = CollectorRegistry()
        counts = _one_two_five(engine.target.model.config.max_position_embeddings)
        names, self._values = zip(*labels_of(model_name).items(), strict=True)

        def counters(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, (*names, *more), registry=self.registry)

        def counter(name: str, text: str) -> Counter:
            return counters(name, text).labels(*self._values)

        def by_position(name: str, text: str) -> _ByPosition:
            return _ByPosition(counters(name, f"{text}, by position.", "position"), self._values)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, names, registry=self.registry, buckets=buckets).labels(*self._values)

        # Of steps.
        self._drafts = counter("vllm:spec_decode_num_drafts", "Drafts made: one a choice and drafting step.")
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self._verified_tokens = counter("dspark_verified_tokens", "Draft tokens sent to the target.")
        self._accepted_tokens = counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = by_position("vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted")
        self._verified_at = by_position("dspark_verified_tokens_per_pos", "Draft tokens verified")
        self._expected_at = by_position(
            "dspark_expected_accepted_tokens_per_pos",
            "Acceptances expected of the verified tokens by the calibrated confidences",
        )
        self._verify_length = histogram(
            "dspark_verify_length_tokens", "Draft tokens verified of a choice in a drafting step.", _VERIFY_LENGTHS
        )
        self._steps = counters("dspark_steps", "Steps, by why they drafted or did not.", "why")
        self._parked = counter("dspark_parked_steps", "Steps without a draft because none would have paid.")
        self._step_seconds = histogram("dspark_step_seconds", "Measured seconds of a step.", _STEP_SECONDS)
        self._part_seconds = counters("dspark_step_measured_seconds", "Measured seconds of steps, by part.", "part")
        self._predicted_seconds = counters(
            "dspark_step_predicted_seconds", "Predicted seconds of steps, by part, where the cost is known.", "part"
        )

        # Of requests and their choices.
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that have begun.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        success = counters("vllm:request_success", "Choices that ended, by reason.", "finished_reason")
        self._ended = {ending: success.labels(*self._values, ending) for ending in _ENDINGS}
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "From submission to the first token.", _FIRST_TOKEN_SECONDS
        )
        self._between_tokens = histogram(
            "vllm:inter_token_latency_seconds", "Between two outputs of a choice, one token or several.", _TOKEN_SECONDS
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean seconds a token of a finished request, after its first.",
            _TOKEN_SECONDS,
        )
        self._latency = histogram(
            "vllm:e2e_request_latency_seconds", "From submission to the last token.", _REQUEST_SECONDS
        )
        self._queue_seconds = histogram(
            "vllm:request_queue_time_seconds", "From submission to the first pass.", _REQUEST_SECONDS
        )
        self._prefill_seconds = histogram(
            "vllm:request_prefill_time_seconds", "From the first pass to the first token.", _REQUEST_SECONDS
        )
        self._decode_seconds = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _REQUEST_SECONDS
        )
        self._inference_seconds = histogram(
            "vllm:request_inference_time_seconds", "From the first pass to the last token.", _REQUEST_SECONDS
        )
        self._prompt_lengths = histogram("vllm:request_prompt_tokens", "Prompt tokens of a finished request.", counts)
        self._answer_lengths = histogram("vllm:request_generation_tokens", "Tokens of a finished choice.", counts)
        self._longest_lengths = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest choice of a finished request.", counts
        )

        # Of HTTP.
        self._responses = counters("dspark_http_responses", "HTTP responses, by route and status.", "route", "status")
        self._refused = counters("dspark_requests_refused", "Requests that were not taken, by why.", "reason")
        self._engine = EngineCollector(engine, model_name)
        self.registry.register(self._engine)
        engine.watch(self.on_step)

    def on_step(self, record: StepRecord) -> None:
        """Count a step."""
        assert record.measured is not None, "the step is over"
        assert record.accepted_R is not None, "the step is over"
        values, drafts = self._values, record.drafts
        self._steps.labels(*values, record.plan.why).inc()
        self._parked.inc(record.plan.why == "parked")
        self._step_seconds.observe(record.measured.total)
        for part in ("catch_up", "draft", "schedule", "verify"):
            self._part_seconds.labels(*values, part).inc(getattr(record.measured, part))
            if record.predicted is not None:
                self._predicted_seconds.labels(*values, part).inc(getattr(record.predicted, part))
        self._engine.after_step()
        if drafts is None:
            return
        drafted_R = drafts.lengths_R > 0
        verified_R, accepted_R = record.verify_lengths_R[drafted_R], record.accepted_R[drafted_R]
        self._drafts.inc(int(drafted_R.sum()))
        self._draft_tokens.inc(drafts.num_drafted)
        self._verified_tokens.inc(int(verified_R.sum()))
        self._accepted_tokens.inc(int(accepted_R.sum()))
        longest = int(drafts.lengths_R.max())
        self._accepted_at.add(_reaching(accepted_R, longest))
        self._verified_at.add(_reaching(verified_R, longest))
        for length in verified_R.tolist():
            self._verify_length.observe(length)
        if drafts.confidences_RG is not None:
            is_verified_RG = np.arange(drafts.survivals_RG.shape[1]) < record.verify_lengths_R[:, None]
            self._expected_at.add((drafts.survivals_RG * is_verified_RG).sum(axis=0).tolist())

    def observe(self, request: Request) -> RequestObservation:
        """Follow a request that was just submitted."""
        return RequestObservation(self, request)

    def response_sent(self, route: str, status: int) -> None:
        """Count an HTTP response; ``route`` is a template, of which there are few."""
        self._responses.labels(*self._values, route, str(status)).inc()
        if status in _REFUSALS:
            self._refused.labels(*self._values, _REFUSALS[status]).inc()


class RequestObservation:
    """One request on its way, as `dspark.server.running.observed` sees it."""

    def __init__(self, metrics: ServerMetrics, request: Request) -> None:
        self._metrics = metrics
        self._request = request
        self._began = perf_counter()
        self._last: dict[int, float] = {}  # when a choice last gave tokens
        self._lengths = [0] * request.n
        self._open = request.n

    def delta(self, delta: Delta) -> None:
        """A choice has more tokens, or has ended."""
        metrics, now = self._metrics, perf_counter()
        if delta.token_ids:
            if not self._last:
                metrics._first_token.observe(now - self._began)
                metrics._prompt_tokens.inc(len(self._request.prompt_ids))
            if delta.choice in self._last:
                metrics._between_tokens.observe(now - self._last[delta.choice])
            self._last[delta.choice] = now
            self._lengths[delta.choice] += len(delta.token_ids)
            metrics._generation_tokens.inc(len(delta.token_ids))
        if delta.finish_reason is not None:
            self._open -= 1
            metrics._ended["abort" if delta.finish_reason == "cancelled" else delta.finish_reason].inc()
            metrics._answer_lengths.observe(self._lengths[delta.choice])

    def finished(self, result: RequestResult) -> None:
        """All choices have ended."""
        metrics = self._metrics
        metrics._latency.observe(result.seconds)
        metrics._queue_seconds.observe(result.queue_seconds)
        metrics._prompt_lengths.observe(result.prompt_tokens)
        metrics._inference_seconds.observe(result.seconds - result.queue_seconds)
        longest = max(self._lengths)
        metrics._longest_lengths.observe(longest)
        if result.first_token_seconds is None:
            return
        metrics._prefill_seconds.observe(result.first_token_seconds - result.queue_seconds)
        decode_seconds = result.seconds - result.first_token_seconds
        metrics._decode_seconds.observe(decode_seconds)
        if longest > 1:
            metrics._per_token.observe(decode_seconds / (longest - 1))

    def end_open(self, ending: Ending) -> None:
        """Choices that have not ended will not: nobody looks any more."""
        self._metrics._ended[ending].inc(self._open)
        self._open = 0


class _ByPosition:
    """A counter for each draft position, from 0."""

    def __init__(self, counter: Counter, values: Sequence[str]) -> None:
        self._counter = counter
        self._values = values

    def add(self, amounts: Iterable[float]) -> None:
        for position, amount in enumerate(amounts):
            self._counter.labels(*self._values, str(position)).inc(amount)


def _reaching(lengths_R: IntArray, longest: int) -> list[float]:
    """How many lengths are above 0, above 1, ..., above ``longest`` - 1."""
    counts: list[float] = (lengths_R[:, None] > np.arange(longest)).sum(axis=0).tolist()
    return counts


def _one_two_five(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, ... up to ``largest``."""
    steps = [float(digit * 10**power) for power in range(len(str(largest))) for digit in (1, 2, 5)]
    return [step for step in steps if step <= largest]
