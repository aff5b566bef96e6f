"""What two readings of ``/metrics``, some seconds apart, say of a server or a stage: states, and rates between the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen
from prometheus_client.parser import text_string_to_metric_families

from dgr.errors import InputError

__all__ = ["Reading", "ServerView", "StageView", "view"]


class Reading:
    """The samples of one exposition. Raises :class:`~dgr.errors.InputError` for text that is none."""

    def __init__(self, text: str, time: float) -> None:
        #: Seconds, on a clock that readings to be compared share.
        self.time = time
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        except (ValueError, KeyError, IndexError) as error:
            raise InputError(f"it is not Prometheus' text format: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._samples

    def all(self, name: str, **labels: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and values of a metric's series that have these labels, among others perhaps."""
        return [one for one in self._samples.get(name, ()) if labels.items() <= one[0].items()]

    def sum(self, name: str, **labels: str) -> float:
        """Sum of these series; 0 for none."""
        return sum(value for _, value in self.all(name, **labels))

    def label(self, name: str, label: str) -> str:
        """The label of the first of these series that is not 0; empty for none."""
        return next((labels.get(label, "") for labels, value in self.all(name) if value), "")


@frozen
class ServerView:
    """A server, as its metrics tell."""

    ready: bool
    #: ``live``, ``fencing``, ``down``, ``closed``.
    route_state: str
    #: The beginning of the route session's id.
    route: str
    epoch: int
    running: int
    waiting: int
    slots: int
    sessions_kept: int
    #: Tokens a second between the readings: of prompts of answers begun, and drawn.
    prompt_tokens_per_second: float
    tokens_per_second: float
    #: Of the prompt tokens between the readings, those that were not evaluated; None without any.
    cache_hit_ratio: float | None


@frozen
class StageView:
    """A stage, as its metrics tell. A stage that is still loading has no layers and no slots."""

    ready: bool
    #: It takes nobody new, to be maintained.
    draining: bool
    layers: str
    #: Epoch of each route session, by the beginning of its id.
    routes: Mapping[str, int]
    sessions: int
    slots_leased: int
    slots: int
    #: Share of the time between the readings in which the engine computed.
    busy: float
    #: Tokens a second between the readings.
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    #: Sessions of a decode batch between the readings, on average; None without any.
    decode_batch: float | None
    #: Seconds for which the batch under way has been running; 0 when none is.
    batch_running_seconds: float
    #: Over all links, both ways.
    bytes_per_second: float
    state_leased_bytes: int
    resident_bytes: int


def view(readings: Sequence[Reading]) -> ServerView | StageView:
    """What the last reading says, with rates since the first. Raises :class:`~dgr.errors.InputError` for others' metrics."""
    first, last = readings[0], readings[-1]
    try:
        if "dgr_stage_ready" in last:
            return _stage(first, last)
        if "dgr_num_slots" in last:
            return _server(first, last)
    except (ValueError, OverflowError) as error:  # a count that is no number, or has no end
        raise InputError(f"these metrics are not those of a dgr server or stage: {error}") from error
    raise InputError("these are not the metrics of a dgr server or stage")


def _rate(first: Reading, last: Reading, name: str, **labels: str) -> float:
    """Increase a second; a counter that went back has begun anew."""
    before, now = first.sum(name, **labels), last.sum(name, **labels)
    seconds = last.time - first.time
    return (now if now < before else now - before) / seconds if seconds > 0 else 0.0


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _server(first: Reading, last: Reading) -> ServerView:
    queries, hits = (_rate(first, last, f"dgr_prefix_cache_{name}_total") for name in ("queries", "hits"))
    return ServerView(
        ready=bool(last.sum("dgr_ready")),
        route_state=last.label("dgr_route_state", "state"),
        route=last.label("dgr_route_info", "route"),
        epoch=int(last.sum("dgr_route_epoch")),
        running=int(last.sum("dgr_num_requests_running")),
        waiting=int(last.sum("dgr_num_requests_waiting")),
        slots=int(last.sum("dgr_num_slots")),
        sessions_kept=int(last.sum("dgr_sessions_kept")),
        prompt_tokens_per_second=_rate(first, last, "dgr_prompt_tokens_total"),
        tokens_per_second=_rate(first, last, "dgr_tokens_predicted_total"),
        cache_hit_ratio=_ratio(hits, queries),
    )


def _stage(first: Reading, last: Reading) -> StageView:
    decode, prefill = (_rate(first, last, "dgr_stage_batch_tokens_sum", kind=kind) for kind in ("decode", "prefill"))
    return StageView(
        ready=bool(last.sum("dgr_stage_ready")),
        draining=bool(last.sum("dgr_stage_draining")),
        layers=last.label("dgr_stage_info", "layers"),
        routes={labels.get("route", ""): int(epoch) for labels, epoch in last.all("dgr_stage_route_epoch")},
        sessions=int(last.sum("dgr_stage_sessions")),
        slots_leased=int(last.sum("dgr_stage_slots_leased")),
        slots=int(last.sum("dgr_stage_slots")),
        busy=_rate(first, last, "dgr_stage_batch_seconds_sum"),
        decode_tokens_per_second=decode,
        prefill_tokens_per_second=prefill,
        decode_batch=_ratio(decode, _rate(first, last, "dgr_stage_batch_tokens_count", kind="decode")),
        batch_running_seconds=last.sum("dgr_stage_batch_running_seconds"),
        bytes_per_second=_rate(first, last, "dgr_stage_link_bytes_total"),
        state_leased_bytes=int(last.sum("dgr_stage_state_leased_bytes")),
        resident_bytes=int(last.sum("process_resident_memory_bytes")),
    )
