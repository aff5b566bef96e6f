"""What a stage counts, in Prometheus' terms. Everything is read when it is asked for: nothing is formatted before."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dgr.cluster.server import ServerStatistics, StageServer
from dgr.serving.metrics.stages import SeenStage, stage_metrics
from dgr.stage.shard import Shard

__all__ = ["StageMonitor"]

_LOADING = "the weights are being loaded"
_ENDING = "the stage is about to end"


class StageMonitor(Collector):
    """A stage as it is seen from outside: from its start, through :meth:`opened`, to :meth:`ending`."""

    def __init__(self) -> None:
        #: Why it takes no links now; None when it does.
        self.not_ready: str | None = _LOADING
        self._stage: tuple[Shard, StageServer] | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def opened(self, shard: Shard, server: StageServer) -> None:
        """The engine is open and the links are listened for."""
        self._stage, self.not_ready = (shard, server), None

    def ending(self) -> None:
        """It takes no more links."""
        self.not_ready = _ENDING

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """No metric, so that the registry asks nothing of a stage that is not open."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("dgr_stage_ready", "1 while the stage takes links.", value=int(self.not_ready is None))
        if self._stage is None:
            return
        shard, server = self._stage
        yield from stage_metrics([SeenStage(shard.description, shard.load())])
        yield from _connections(server.statistics())


def _connections(seen: ServerStatistics) -> Iterator[Metric]:
    yield GaugeMetricFamily("dgr_stage_links", "Links that came and are served.", value=seen.links)
    yield GaugeMetricFamily("dgr_stage_links_handshaking", "Connections that are no links yet.", value=seen.handshaking)
    yield CounterMetricFamily("dgr_stage_links_accepted", "Links served since the start.", value=seen.accepted)
    yield CounterMetricFamily("dgr_stage_links_refused", "Connections that never became links.", value=seen.refused)
