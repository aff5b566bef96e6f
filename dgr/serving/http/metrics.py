"""What a server counts, in Prometheus' text format. The nouns are those of vLLM's and llama.cpp's metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dgr.serving.engine import ServingEngine
from dgr.serving.sessions import Miss

__all__ = ["Metrics"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)


class _EngineCollector(Collector):
    """Reads the engine when it is asked."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, line, sessions = self._engine, self._engine.line, self._engine.sessions
        counters = engine.counters
        for name, text, value in (
            ("dgr_num_requests_running", "Answers that hold a slot.", line.running),
            ("dgr_num_requests_waiting", "Answers that wait for a slot.", line.waiting),
            ("dgr_num_tokens_waiting", "Prompt tokens of the answers that wait.", line.waiting_tokens),
            ("dgr_num_slots", "Answers that can run at once.", line.slots),
            ("dgr_sessions_kept", "Sessions kept on the stages, in use or not.", sessions.kept),
            ("dgr_prefixes_kept", "Of these, copies for whoever begins alike.", sessions.kept_prefixes),
            ("dgr_session_tokens_kept", "Tokens committed in the kept sessions.", sessions.kept_tokens),
            ("dgr_ready", "1 while requests are admitted.", int(engine.is_ready)),
            ("dgr_route_epoch", "Times the route was fenced.", engine.pipeline.epoch),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, value in (
            ("dgr_prompt_tokens", "Prompt tokens of answers begun.", counters.prompt_tokens),
            ("dgr_tokens_predicted", "Tokens drawn.", counters.completion_tokens),
            (
                "dgr_prefix_cache_queries",
                "Prompt tokens looked for in kept sessions and prefixes.",
                counters.prompt_tokens,
            ),
            ("dgr_prefix_cache_hits", "Prompt tokens found there, and not evaluated again.", counters.cached_tokens),
            ("dgr_prefixes_stored", "Copies kept on the way of a prompt.", sessions.stored),
            ("dgr_prefixes_copied", "Copies given to requests that begin alike.", sessions.copied),
            ("dgr_prefixes_refused", "Copies for which stages had no slot.", sessions.refused),
            ("dgr_requests_resumed", "Answers gone on with where an earlier try was left.", sessions.resumed),
            ("dgr_requests_cancelled", "Answers left by their client before the end.", counters.cancelled),
        ):
            yield CounterMetricFamily(name, text, value=value)
        misses = CounterMetricFamily(
            "dgr_prefix_cache_misses", "Requests evaluated from their first token, by reason.", labels=["reason"]
        )
        for reason in Miss:
            misses.add_metric([reason.value], sessions.misses[reason])
        yield misses


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self, engine: ServingEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self.requests = Counter(
            "dgr_requests", "Requests, by endpoint and status.", ["endpoint", "status"], registry=self._registry
        )
        self.first_token = self._histogram("dgr_time_to_first_token_seconds", "From admission to the first token.")
        self.inter_token = self._histogram("dgr_inter_token_latency_seconds", "Between two tokens of an answer.")
        self.whole = self._histogram("dgr_e2e_request_latency_seconds", "From admission to the end of an answer.")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self._registry)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)
