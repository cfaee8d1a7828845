"""What the engine holds at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dspark.engine.engine import Engine
from dspark.engine.statistics import EngineStatistics

__all__ = ["EngineCollector", "labels_of"]

_WAIT_SECONDS = 0.1


def labels_of(model_name: str) -> dict[str, str]:
    """Of every metric. vLLM numbers its engines and its dashboards choose among them; here there is one."""
    return {"model_name": model_name, "engine": "0"}


class EngineCollector(Collector):
    """Asks the engine at every scrape, without waiting for a long step to end: then it shows the step before."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = labels_of(model_name)
        self._last = engine.statistics()

    def after_step(self) -> None:
        """Keep what the engine holds now; called in its thread."""
        self._last = self._engine.statistics()

    def collect(self) -> Iterator[Metric]:
        """The engine's gauges and counters."""
        statistics = self._statistics()
        memory, steps = statistics.memory, statistics.steps
        yield self._gauge("vllm:num_requests_running", "Choices that are in memory.", statistics.running)
        yield self._gauge("vllm:num_requests_waiting", "Choices that wait for memory.", statistics.waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share, 0 to 1, of the blocks of keys and values that choices hold.",
            memory.num_used_blocks / memory.num_blocks,
        )
        yield self._gauge("dspark_kv_blocks", "Blocks of keys and values.", memory.num_blocks)
        yield self._gauge("dspark_kv_blocks_used", "Blocks that choices hold.", memory.num_used_blocks)
        yield self._gauge("dspark_kv_blocks_cached", "Blocks kept for later prompts.", memory.num_cached_blocks)
        yield self._counter("vllm:num_preemptions", "Choices that lost their memory to older ones.", steps.preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked for in memory.", memory.prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in memory.", memory.reused_tokens)
        if statistics.cost is not None:
            ratio = GaugeMetricFamily(
                "dspark_cost_correction_ratio",
                "Measured over profiled seconds, slowly averaged; at 0.5 or 2 the profile is not of this hardware.",
                labels=(*self._labels, "part"),
            )
            ratio.add_metric((*self._labels.values(), "verify"), statistics.cost.verify_ratio)
            ratio.add_metric((*self._labels.values(), "added"), statistics.cost.added_ratio)
            ratio.add_metric((*self._labels.values(), "draft"), statistics.cost.draft_ratio)
            yield ratio
        yield self._gauge(
            "dspark_acceptance_odds_ratio",
            "Odds of draft tokens to be accepted over those by their confidences, slowly averaged; 1 for right ones.",
            statistics.acceptance_odds_ratio,
        )

    def _statistics(self) -> EngineStatistics:
        with suppress(TimeoutError):
            self._last = self._engine.statistics(timeout=_WAIT_SECONDS)
        return self._last

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family
