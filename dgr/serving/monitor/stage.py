"""What a stage counts, in Prometheus' terms. Everything is read when it is asked for: nothing is formatted before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dgr.cluster.certificates import CertificateSource
from dgr.cluster.server import ServerStatistics, StageServer
from dgr.core.log_fields import short_route
from dgr.serving.http.metrics import CertificateCollector
from dgr.stage.ledger import Ledger
from dgr.stage.shard import Shard
from dgr.stage.statistics import Distribution, SchedulerStatistics, ShardStatistics

__all__ = ["StageMonitor"]

_Labels = TypeVar("_Labels", bound=tuple[str, ...])

_LOADING = "the weights are being loaded"
_ENDING = "the stage is about to end"
_DRAINING = "the stage is being drained"


class StageMonitor(Collector):
    """A stage as it is seen from outside: from its start, through :meth:`opened`, to :meth:`ending`."""

    def __init__(self, certificates: tuple[CertificateSource, ...] = ()) -> None:
        self._not_ready: str | None = _LOADING
        self._stage: tuple[Shard, StageServer] | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._registry.register(CertificateCollector(certificates))
        ProcessCollector(registry=self._registry)

    def opened(self, shard: Shard, server: StageServer) -> None:
        """The engine is open and the links are listened for."""
        self._stage, self._not_ready = (shard, server), None

    def ending(self) -> None:
        """It takes no more links."""
        self._not_ready = _ENDING

    @property
    def not_ready(self) -> str | None:
        """Why it takes nobody new now; None when it does."""
        if self._not_ready is None and self._stage is not None and self._stage[0].draining.is_on:
            return _DRAINING
        return self._not_ready

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """No metric, so that the registry asks nothing of a stage that is not open."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        text = "1 while the stage takes pipelines and sessions."
        yield GaugeMetricFamily("dgr_stage_ready", text, value=int(self.not_ready is None))
        if self._stage is None:
            return
        shard, server = self._stage
        seen = shard.statistics()
        text = "1 while the stage takes nobody new, to be maintained."
        yield GaugeMetricFamily("dgr_stage_draining", text, value=int(seen.draining))
        yield _info(shard)
        yield from _memory(shard.ledger)
        yield from _sessions(shard.ledger, seen)
        yield from _batches(seen.steps)
        yield from _links(server.statistics())


def _info(shard: Shard) -> Metric:
    about = shard.description
    labels = {
        "layers": str(about.layers),
        "artifact": about.artifact,
        "kernel_fingerprint": about.kernel_fingerprint,
        "numerics": about.context.numerics.value,
        "runtime": about.runtime,
    }
    text = "1; its labels say what the stage is."
    return _labelled(GaugeMetricFamily, "dgr_stage_info", text, labels, {tuple(labels.values()): 1})


def _memory(ledger: Ledger) -> Iterator[Metric]:
    memory = ledger.memory
    yield GaugeMetricFamily("dgr_stage_weights_bytes", "Weights, as allocated natively.", value=memory.weights)
    yield GaugeMetricFamily("dgr_stage_compute_bytes", "Compute buffers, as allocated natively.", value=memory.compute)
    for name, text, sizes in (
        ("dgr_stage_state_bytes", "State of all slots, by component; allocated at the start.", memory.state),
        ("dgr_stage_state_leased_bytes", "State of the slots that sessions hold, by component.", ledger.leased()),
    ):
        by_component = {(component,): size for component, size in sizes.items()}
        yield _labelled(GaugeMetricFamily, name, text, ("component",), by_component)


def _sessions(ledger: Ledger, seen: ShardStatistics) -> Iterator[Metric]:
    for name, text, value in (
        ("dgr_stage_routes", "Route sessions: pipelines with state or a wish for it here.", seen.routes),
        ("dgr_stage_sessions", "Sessions of all of them.", seen.sessions),
        ("dgr_stage_slots", "Sequence slots (n_seq_max).", ledger.n_slots),
        ("dgr_stage_slots_leased", "Sequence slots that sessions hold.", len(ledger.leases)),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    # Ids are the pipelines' own choice: two that begin alike must not make one scrape of two equal series.
    epochs: dict[tuple[str, ...], float] = {}
    for route, epoch in seen.epochs.items():
        key = (short_route(route),)
        epochs[key] = max(epoch, epochs.get(key, 0))
    text = "Epoch of each route session, by the beginning of its id."
    yield _labelled(GaugeMetricFamily, "dgr_stage_route_epoch", text, ("route",), epochs)
    yield CounterMetricFamily("dgr_stage_evictions", "Sessions ended to make room for others.", value=seen.evictions)
    text = "Frames of route sessions that are not known here; they were dropped."
    yield CounterMetricFamily("dgr_stage_unroutable_frames", text, value=seen.unroutable_frames)


def _batches(steps: SchedulerStatistics) -> Iterator[Metric]:
    kinds = {"decode": steps.decode, "prefill": steps.prefill}
    for name, text, distributions in (
        ("dgr_stage_batch_tokens", "Tokens of a native batch.", {kind: one.tokens for kind, one in kinds.items()}),
        (
            "dgr_stage_batch_seconds",
            "Seconds in which it was computed.",
            {kind: one.seconds for kind, one in kinds.items()},
        ),
        (
            "dgr_stage_batch_wait_seconds",
            "From when an item of a batch was ready until the batch began.",
            {kind: one.waits for kind, one in kinds.items()},
        ),
    ):
        family = HistogramMetricFamily(name, text, labels=("kind",))
        for kind, distribution in distributions.items():
            family.add_metric((kind,), _buckets(distribution), distribution.total)
        yield family
    text = "For how long the batch under way has been computed; 0 when none is."
    yield GaugeMetricFamily("dgr_stage_batch_running_seconds", text, value=steps.running_seconds)


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    bounds = [*(str(float(bound)) for bound in distribution.bounds), "+Inf"]
    return list(zip(bounds, map(float, distribution.cumulative()), strict=True))


def _links(seen: ServerStatistics) -> Iterator[Metric]:
    yield GaugeMetricFamily("dgr_stage_links", "Links that came and are served.", value=seen.links)
    yield GaugeMetricFamily("dgr_stage_links_handshaking", "Connections that are no links yet.", value=seen.handshaking)
    yield CounterMetricFamily("dgr_stage_links_accepted", "Links served since the start.", value=seen.accepted)
    yield CounterMetricFamily("dgr_stage_links_refused", "Connections that never became links.", value=seen.refused)
    where = ("side", "peer")
    sent_and_received = (*where, "direction")
    traffic = {(side.value, peer): counts for (side, peer), counts in seen.traffic.items()}
    frames = {(*key, "sent"): one.frames_sent for key, one in traffic.items()}
    frames |= {(*key, "received"): one.frames_received for key, one in traffic.items()}
    sizes = {(*key, "sent"): one.bytes_sent for key, one in traffic.items()}
    sizes |= {(*key, "received"): one.bytes_received for key, one in traffic.items()}
    text = "Frames over links, by where they lead and the other stage's address."
    yield _labelled(CounterMetricFamily, "dgr_stage_link_frames", text, sent_and_received, frames)
    text = "Bytes over links, without those of TLS."
    yield _labelled(CounterMetricFamily, "dgr_stage_link_bytes", text, sent_and_received, sizes)
    waited = {key: one.seconds_waited for key, one in traffic.items()}
    text = "Seconds for which payloads waited for room on a link, all sessions together."
    yield _labelled(CounterMetricFamily, "dgr_stage_link_wait_seconds", text, where, waited)
    queued = {key: one.bytes_queued for key, one in traffic.items()}
    text = "Payload bytes taken for sending and not written yet."
    yield _labelled(GaugeMetricFamily, "dgr_stage_link_queued_bytes", text, where, queued)
    trips = {key: one.round_trip for key, one in traffic.items() if one.round_trip is not None}
    text = "From the last heartbeat of an idle link to its answer."
    yield _labelled(GaugeMetricFamily, "dgr_stage_link_round_trip_seconds", text, where, trips)


def _labelled(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: Iterable[str],
    values: Mapping[_Labels, float],
) -> Metric:
    made = family(name, text, labels=tuple(labels))
    for key, value in values.items():
        made.add_metric(key, value)
    return made
