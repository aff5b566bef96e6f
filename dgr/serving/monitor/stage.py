"""What a stage counts, in Prometheus' terms. Everything is read when it is asked for: nothing is formatted before."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dgr.cluster.certificates import CertificateSource
from dgr.cluster.server import ServerStatistics, StageServer
from dgr.serving.http.metrics import CertificateCollector
from dgr.serving.metrics.stages import SeenStage, stage_metrics
from dgr.stage.shard import Shard

__all__ = ["StageMonitor"]

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
        text = "1 while the stage takes nobody new, to be maintained."
        yield GaugeMetricFamily("dgr_stage_draining", text, value=int(shard.draining.is_on))
        yield from stage_metrics([SeenStage(shard.description, shard.load())])
        yield from _connections(server.statistics())


def _connections(seen: ServerStatistics) -> Iterator[Metric]:
    yield GaugeMetricFamily("dgr_stage_links", "Links that came and are served.", value=seen.links)
    yield GaugeMetricFamily("dgr_stage_links_handshaking", "Connections that are no links yet.", value=seen.handshaking)
    yield CounterMetricFamily("dgr_stage_links_accepted", "Links served since the start.", value=seen.accepted)
    yield CounterMetricFamily("dgr_stage_links_refused", "Connections that never became links.", value=seen.refused)
