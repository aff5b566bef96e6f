"""The load of stages, in Prometheus' terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from attrs import frozen
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dgr.core.load import BatchLoad, Distribution, LinkLoad, StageLoad
from dgr.core.values import StageIdentity

__all__ = ["SeenStage", "stage_metrics"]


@frozen
class SeenStage:
    """A stage, and what it told."""

    about: StageIdentity
    load: StageLoad
    #: By which it is told from others in one exposition; empty where it is the only one.
    name: str = ""


def stage_metrics(stages: Sequence[SeenStage]) -> Iterator[Metric]:
    """Every metric of some stages. Those that have a name have it as the label ``stage``."""
    named = ("stage",) if any(stage.name for stage in stages) else ()
    seen = [((stage.name,) if named else (), stage) for stage in stages]

    def gauge(name: str, text: str, value: Callable[[StageLoad], float]) -> Metric:
        return labelled(GaugeMetricFamily, name, text, named, {own: value(stage.load) for own, stage in seen})

    def counter(name: str, text: str, value: Callable[[StageLoad], float]) -> Metric:
        return labelled(CounterMetricFamily, name, text, named, {own: value(stage.load) for own, stage in seen})

    def by(
        family: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        labels: Iterable[str],
        values: Callable[[StageLoad], Mapping[tuple[str, ...], float]],
    ) -> Metric:
        found = {(*own, *key): value for own, stage in seen for key, value in values(stage.load).items()}
        return labelled(family, name, text, (*named, *labels), found)

    yield _info(named, seen)
    yield gauge("dgr_stage_weights_bytes", "Weights, as allocated natively.", lambda load: load.weights)
    yield gauge("dgr_stage_compute_bytes", "Compute buffers, as allocated natively.", lambda load: load.compute)
    text = "State of all slots, by component; allocated at the start."
    yield by(GaugeMetricFamily, "dgr_stage_state_bytes", text, ("component",), lambda load: _keyed(load.state))
    text = "State of the slots that sessions hold, by component."
    yield by(
        GaugeMetricFamily, "dgr_stage_state_leased_bytes", text, ("component",), lambda load: _keyed(load.state_leased)
    )
    text = "Route sessions: pipelines with state or a wish for it here."
    yield gauge("dgr_stage_routes", text, lambda load: load.routes)
    yield gauge("dgr_stage_sessions", "Sessions of all of them.", lambda load: load.sessions)
    yield gauge("dgr_stage_slots", "Sequence slots (n_seq_max).", lambda load: load.slots)
    yield gauge("dgr_stage_slots_leased", "Sequence slots that sessions hold.", lambda load: load.slots_leased)
    text = "Epoch of each route session, by the beginning of its id."
    yield by(GaugeMetricFamily, "dgr_stage_route_epoch", text, ("route",), lambda load: _keyed(load.epochs))
    yield counter("dgr_stage_evictions", "Sessions ended to make room for others.", lambda load: load.evictions)
    text = "Frames of route sessions that are not known here; they were dropped."
    yield counter("dgr_stage_unroutable_frames", text, lambda load: load.unroutable_frames)
    for name, text, distribution in _DISTRIBUTIONS:
        family = HistogramMetricFamily(name, text, labels=(*named, "kind"))
        for own, stage in seen:
            for kind, batches in (("decode", stage.load.decode), ("prefill", stage.load.prefill)):
                values = distribution(batches)
                family.add_metric((*own, kind), _buckets(values), values.total)
        yield family
    text = "For how long the batch under way has been computed; 0 when none is."
    yield gauge("dgr_stage_batch_running_seconds", text, lambda load: load.running_seconds)
    directions = ("direction", "side", "peer")
    text = "Frames over links, by where they lead and the other stage's address."
    yield by(CounterMetricFamily, "dgr_stage_link_frames", text, directions, _frames)
    text = "Bytes over links, without those of TLS."
    yield by(CounterMetricFamily, "dgr_stage_link_bytes", text, directions, _bytes)
    for family_of, name, text, value in _OF_LINKS:
        yield by(family_of, name, text, ("side", "peer"), partial(_of_links, value))
    # Only an idle link has one.
    text = "From the last heartbeat of an idle link to its answer."
    yield by(GaugeMetricFamily, "dgr_stage_link_round_trip_seconds", text, ("side", "peer"), _round_trips)


#: Name, help, and which of a kind's distributions it is.
_DISTRIBUTIONS: tuple[tuple[str, str, Callable[[BatchLoad], Distribution]], ...] = (
    ("dgr_stage_batch_tokens", "Tokens of a native batch.", lambda batches: batches.tokens),
    ("dgr_stage_batch_seconds", "Seconds in which it was computed.", lambda batches: batches.seconds),
    (
        "dgr_stage_batch_wait_seconds",
        "From when an item of a batch was ready until the batch began.",
        lambda batches: batches.waits,
    ),
)
#: What is told of the links to each peer.
_OF_LINKS: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[LinkLoad], float]], ...] = (
    (
        CounterMetricFamily,
        "dgr_stage_link_wait_seconds",
        "Seconds for which payloads waited for room on a link, all sessions together.",
        lambda link: link.seconds_waited,
    ),
    (
        GaugeMetricFamily,
        "dgr_stage_link_queued_bytes",
        "Payload bytes taken for sending and not written yet.",
        lambda link: link.bytes_queued,
    ),
)


def _keyed(values: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(name,): value for name, value in values.items()}


def _frames(load: StageLoad) -> dict[tuple[str, ...], float]:
    return _both_ways(load, lambda link: (link.frames_sent, link.frames_received))


def _bytes(load: StageLoad) -> dict[tuple[str, ...], float]:
    return _both_ways(load, lambda link: (link.bytes_sent, link.bytes_received))


def _both_ways(load: StageLoad, values: Callable[[LinkLoad], tuple[int, int]]) -> dict[tuple[str, ...], float]:
    return {
        (direction, link.side.value, link.peer): value
        for link in load.links
        for direction, value in zip(("sent", "received"), values(link), strict=True)
    }


def _of_links(value: Callable[[LinkLoad], float], load: StageLoad) -> dict[tuple[str, ...], float]:
    return {(link.side.value, link.peer): value(link) for link in load.links}


def _round_trips(load: StageLoad) -> dict[tuple[str, ...], float]:
    return {(link.side.value, link.peer): link.round_trip for link in load.links if link.round_trip}


def _info(named: tuple[str, ...], seen: Sequence[tuple[tuple[str, ...], SeenStage]]) -> Metric:
    labels = ("layers", "artifact", "kernel_fingerprint", "numerics", "runtime")
    values = {}
    for own, stage in seen:
        about = stage.about
        told = (
            str(about.layers),
            about.artifact,
            about.kernel_fingerprint,
            about.context.numerics.value,
            about.runtime,
        )
        values[*own, *told] = 1.0
    return labelled(
        GaugeMetricFamily, "dgr_stage_info", "1; its labels say what the stage is.", (*named, *labels), values
    )


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    bounds = [*(str(float(bound)) for bound in distribution.bounds), "+Inf"]
    return list(zip(bounds, map(float, distribution.cumulative()), strict=True))


def labelled(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: Iterable[str],
    values: Mapping[tuple[str, ...], float],
) -> Metric:
    """A family of the series that ``values`` has by their labels' values."""
    made = family(name, text, labels=tuple(labels))
    for key, value in values.items():
        made.add_metric(key, value)
    return made
