"""A trace as OpenTelemetry spans: the request, what it waited for, each work frame, and under it what each stage did.

Spans are made when a request has ended, with the times that were noted, and exported together. Stages are resources of
their own (``service.name`` ``dgr-stage``, ``service.instance.id`` their address), though this process exports them: it alone
knows all clocks. Names, limits and the exporter's endpoint are those of the ``OTEL_*`` environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from dgr.client.tracing import Trace
from dgr.serving.tracing.context import TraceParent
from dgr.serving.tracing.spans import CLIENT, FrameLife, Part, lives_of

__all__ = ["OtelSpans", "otlp_exporter"]

#: Spans handed to the exporter at once.
_BATCH = 512


class _Ended(SpanProcessor):
    """Keeps spans until they are exported."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


@frozen
class _Clock:
    """Trio's seconds as nanoseconds since 1970."""

    offset: int

    def __call__(self, seconds: float) -> int:
        return round(seconds * 1e9) + self.offset


def otlp_exporter() -> SpanExporter:
    """OTLP over HTTP, as the environment says (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``..._HEADERS``, ``..._TIMEOUT``, ...)."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


class OtelSpans:
    """Makes spans and exports them. ``exporter`` is shut down with :meth:`close`."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._ended = _Ended()
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "dgr-serve"}))
        self._resource = resource
        self._server = self._tracer(resource)
        self._stages: dict[str, otel.Tracer] = {}

    def _tracer(self, resource: Resource) -> otel.Tracer:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        return provider.get_tracer("dgr")

    def begin(self, name: str, parent: TraceParent | None, now: int) -> otel.Span:
        """The span of a request that came at ``now`` (ns since 1970); it is not recording if the sampler does not want it."""
        context = Context()
        if parent is not None:
            flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
            trace_id, span_id = int.from_bytes(parent.trace_id), int.from_bytes(parent.span_id)
            remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)
            context = otel.set_span_in_context(NonRecordingSpan(remote), context)
        return self._server.start_span(name, context=context, kind=SpanKind.SERVER, start_time=now)

    def end(self, span: otel.Span, trace: Trace, offset: int, about: Mapping[str, str | int], *, failed: bool) -> None:
        """End a request's span, and make those below it. ``offset``: ns since 1970 at trio's second 0."""
        clock = _Clock(offset)
        for name, value in about.items():
            span.set_attribute(name, value)
        errors = {stage.address: stage.clock.error for stage in trace.stages if stage.clock is not None}
        within = otel.set_span_in_context(span, Context())
        for phase in trace.phases:
            start = clock(phase.began)
            self._server.start_span(phase.name, context=within, start_time=start).end(clock(phase.ended))
        for life in lives_of(trace):
            self._frame(life, within, clock, errors)
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(clock(trace.ended))

    def _frame(self, life: FrameLife, within: Context, clock: _Clock, errors: Mapping[str, float]) -> None:
        work = life.work
        about = {"dgr.session": work.session, "dgr.epoch": work.epoch, "dgr.seq": work.seq}
        about |= {"dgr.position": work.position, "dgr.tokens": work.tokens}
        frame = self._server.start_span("work frame", context=within, start_time=clock(work.sent), attributes=about)
        if not life.is_complete:
            frame.set_attribute("dgr.incomplete", True)
        below = otel.set_span_in_context(frame, Context())
        for where, record in life.records.items():
            spans = [span for span in life.spans if span.where == where and span.part is not Part.WIRE]
            if not spans:
                continue
            seconds = {f"dgr.{span.part.value}_seconds": span.seconds for span in life.spans if span.where == where}
            seconds["dgr.clock_error_seconds"] = errors[where]
            batch = {"dgr.batch.sessions": record.batch_items, "dgr.batch.tokens": record.batch_tokens}
            made = self._of_stage(where).start_span(
                "stage", context=below, start_time=clock(spans[0].began), attributes={**seconds, **batch}
            )
            made.end(clock(spans[-1].ended))
        back = sum(span.seconds for span in life.spans if span.where == CLIENT)
        frame.set_attribute("dgr.reply_wire_seconds", back)
        if work.came is None:
            frame.set_status(Status(StatusCode.ERROR, "no reply came"))
        frame.end(clock(work.sent if work.came is None else work.came))

    def _of_stage(self, address: str) -> otel.Tracer:
        if address not in self._stages:
            own = Resource({SERVICE_NAME: "dgr-stage", "service.instance.id": address})
            self._stages[address] = self._tracer(self._resource.merge(own))
        return self._stages[address]

    def take(self) -> Sequence[ReadableSpan]:
        """The spans that have ended and were not taken yet."""
        taken, self._ended.spans = self._ended.spans, []
        return taken

    def export(self, spans: Sequence[ReadableSpan]) -> bool:
        """Send spans away; for a thread. Returns whether all of them went; the exporter logs why not."""
        parts = [spans[start : start + _BATCH] for start in range(0, len(spans), _BATCH)]
        return all([self._exporter.export(part) is SpanExportResult.SUCCESS for part in parts])  # noqa: C419 (each is sent)

    def close(self) -> None:
        """For a thread; nothing is exported any more."""
        self._exporter.shutdown()
