"""Prometheus metrics: a collector over the runtime's counters, and two histograms of times.

Every app has a registry of its own; nothing is global. Counters are read when they are scraped.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aprefetch import Runtime

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TIMES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """What `/metrics` shows. `first_token` and `inter_token` observe seconds."""

    def __init__(self, runtime: Runtime) -> None:
        self._registry = CollectorRegistry()
        self.first_token = Histogram(
            "aprefetch_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=_TIMES_S,
            registry=self._registry,
        )
        self.inter_token = Histogram(
            "aprefetch_inter_token_seconds",
            "Between two tokens of one answer, as they are sent.",
            buckets=_TIMES_S,
            registry=self._registry,
        )
        self._registry.register(_StatsCollector(runtime))

    def exposition(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)


def _counter(name: str, about: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"aprefetch_{name}", about, value=value)


class _StatsCollector(Collector):
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known only from a scrape, and registering must not need one."""
        return []

    def collect(self) -> Iterable[Metric]:
        stats = self._runtime.stats()
        lookups = CounterMetricFamily(
            "aprefetch_expert_lookups", "Experts looked for in a tier.", labels=["tier", "result"]
        )
        for labels, value in (
            (("device", "hit"), stats.hits_device),
            (("device", "miss"), stats.misses_device),
            (("ram", "hit"), stats.hits_ram),
            (("ram", "miss"), stats.misses_ram),
        ):
            lookups.add_metric(labels, value)
        yield lookups
        yield _counter("read_bytes", "Bytes that arrived from storage.", stats.bytes_read)
        yield _counter("reads", "Positional reads.", stats.reads)
        yield _counter("read_errors", "Reads that failed for good.", stats.io_errors)
        yield _counter("uploaded_bytes", "Bytes copied to the device.", stats.bytes_uploaded)
        yield _counter("demoted_bytes", "Bytes copied back to host memory.", stats.bytes_demoted)
        yield _counter("wasted_bytes", "Bytes read for guesses in vain.", stats.bytes_wasted)
        yield _counter("stall_seconds", "Compute waited for experts.", stats.stall_ns / 1e9)
        yield _counter("stalls", "Waits of compute for experts.", stats.stalls)
        yield _counter("steps", "Steps of the model.", stats.steps)
        evictions = CounterMetricFamily(
            "aprefetch_evictions", "Experts that left a tier.", labels=["tier"]
        )
        evictions.add_metric(["device"], stats.evictions_device)
        evictions.add_metric(["ram"], stats.evictions_ram)
        yield evictions
        tokens = CounterMetricFamily("aprefetch_tokens", "Tokens, by kind.", labels=["kind"])
        tokens.add_metric(["prompt"], stats.prompt_tokens)
        tokens.add_metric(["output"], stats.output_tokens)
        tokens.add_metric(["reused"], stats.reused_tokens)
        yield tokens
        memory = GaugeMetricFamily(
            "aprefetch_memory_bytes", "Bytes held, and budgets.", labels=["tier"]
        )
        for name, n_bytes in stats.memory.items():
            memory.add_metric([name.removesuffix("_bytes")], n_bytes)
        yield memory
        requests = self._runtime.requests()
        states = GaugeMetricFamily("aprefetch_requests", "Requests now.", labels=["phase"])
        for phase in ("running", "waiting"):
            states.add_metric([phase], sum(request.phase == phase for request in requests))
        yield states
        yield GaugeMetricFamily(
            "aprefetch_reads_in_flight", "Reads in flight now.", value=self._runtime.reads_in_flight
        )
