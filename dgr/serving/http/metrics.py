"""What a server counts, in Prometheus' text format. The nouns are those of vLLM's and llama.cpp's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dgr.client.events import RE_PREFILL_REASONS
from dgr.client.pipeline import PipelineStatistics
from dgr.cluster.certificates import CertificateSource, report_of
from dgr.core.log_fields import short_route
from dgr.protocol.states import RouteState
from dgr.serving.engine import Answer, ServingEngine
from dgr.serving.metrics.stages import SeenStage, stage_metrics
from dgr.serving.sessions import Miss

__all__ = ["CertificateCollector", "Metrics"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
#: Between two tokens: on loopback with a small model to a large one over a slow network.
_SHORT_SECONDS = (0.001, 0.0025, 0.005, *_SECONDS)
_TOKENS = (1, 10, 100, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000)


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
        yield from _route(engine.pipeline.route_id, engine.pipeline.statistics())


def _route(route_id: bytes, seen: PipelineStatistics) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "dgr_route_state", "1 for the state in which the route is, 0 for others.", labels=["state"]
    )
    for one in RouteState:
        state.add_metric([one.value], int(seen.state == one.value))
    yield state
    about = GaugeMetricFamily(
        "dgr_route_info", "1; the beginning of the route session's id, as stages show it.", labels=["route"]
    )
    about.add_metric([short_route(route_id)], 1)
    yield about
    yield CounterMetricFamily("dgr_route_downs", "Times a stage or a link of the route was lost.", value=seen.downs)
    again = CounterMetricFamily(
        "dgr_re_prefills", "Sessions evaluated again from their first token, by reason.", labels=["reason"]
    )
    tokens = CounterMetricFamily("dgr_re_prefilled_tokens", "Tokens evaluated again, by reason.", labels=["reason"])
    for reason in RE_PREFILL_REASONS:
        again.add_metric([reason], seen.re_prefills.get(reason, 0))
        tokens.add_metric([reason], seen.re_prefilled_tokens.get(reason, 0))
    yield again
    yield tokens


class CertificateCollector(Collector):
    """Reads the files when it is asked; tells nothing where there are no certificates."""

    def __init__(self, sources: tuple[CertificateSource, ...]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        if not self._sources:
            return
        report = report_of(self._sources)
        ends = GaugeMetricFamily(
            "dgr_certificate_expiry_timestamp_seconds",
            "When a certificate in use ends, seconds since 1970.",
            labels=["certificate"],
        )
        for name, end in report.expiries.items():
            ends.add_metric([name], end)
        yield ends
        text = "1 while newer files of certificates cannot be used; those before them are."
        yield GaugeMetricFamily("dgr_certificate_reload_failed", text, value=int(bool(report.problems)))


class _StageCollector(Collector):
    """What stages have told last."""

    def __init__(self) -> None:
        self.stages: Sequence[SeenStage] = ()

    def collect(self) -> Iterator[Metric]:
        yield from stage_metrics(self.stages) if self.stages else ()


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self, engine: ServingEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._stages = _StageCollector()
        self._registry.register(self._stages)
        ProcessCollector(registry=self._registry)
        self.requests = Counter(
            "dgr_requests", "Requests, by endpoint and status.", ["endpoint", "status"], registry=self._registry
        )
        self.first_token = self._histogram("dgr_time_to_first_token_seconds", "From admission to the first token.")
        self.inter_token = self._histogram(
            "dgr_inter_token_latency_seconds", "Between two tokens of an answer.", _SHORT_SECONDS
        )
        self.queue = self._histogram("dgr_request_queue_time_seconds", "From admission to a slot.")
        self.prefill = self._histogram("dgr_request_prefill_time_seconds", "From the slot to the first token.")
        self.decode = self._histogram(
            "dgr_request_decode_time_seconds", "From the first token to the end of an answer."
        )
        self.prompt = self._histogram("dgr_request_prompt_tokens", "Prompt tokens of an answer begun.", _TOKENS)
        self.generation = self._histogram("dgr_request_generation_tokens", "Tokens of a complete answer.", _TOKENS)
        self.whole = self._histogram("dgr_e2e_request_latency_seconds", "From admission to the end of an answer.")

    def tell_of_certificates(self, sources: tuple[CertificateSource, ...]) -> None:
        """Have those in use among the metrics."""
        self._registry.register(CertificateCollector(sources))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def first(self, answer: Answer, began: float, now: float) -> None:
        """An answer has its first token."""
        turn = max(answer.place.since, began)  # it may have come at admission, before anybody asked for a token
        self.first_token.observe(now - began)
        self.queue.observe(turn - began)
        self.prefill.observe(now - turn)
        self.prompt.observe(answer.usage.prompt)

    def complete(self, answer: Answer, began: float, first: float, now: float) -> None:
        """An answer is complete; ``first``: when its first token came."""
        self.whole.observe(now - began)
        if answer.usage.completion:
            self.decode.observe(now - first)
        self.generation.observe(answer.usage.completion)

    def text(self, stages: Sequence[SeenStage] = ()) -> bytes:
        """The exposition, with what stages have told."""
        self._stages.stages = stages
        return generate_latest(self._registry)
