"""A server's requests, traced: whose trace they are part of, what is exported and written, and what the log says of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from serving.http.http_servers import Server
from serving.monitor.test_logs import SECRET, leaks, lines
from serving.tracing.perfetto_files import faults

from dgr.errors import InputError
from dgr.serving.tracing import server as server_module
from dgr.serving.tracing.context import TraceParent, trace_parent
from dgr.serving.tracing.otel import OtelSpans
from dgr.serving.tracing.server import check_folder
from dgr.testing.waits import until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return int(span.parent.span_id)


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def service(span: ReadableSpan) -> str:
    return str(span.resource.attributes["service.name"])


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


async def chat(server: Server, text: str = SECRET, **headers: str) -> int:
    body = {"messages": [{"role": "user", "content": text}], "thinking": {"type": "disabled"}, "temperature": 0}
    return (await server.ask("POST", "/v1/chat/completions", body, **headers)).status


@pytest.mark.parametrize(
    ("value", "parent"),
    [
        (PARENT, TraceParent(bytes.fromhex(TRACE), bytes.fromhex(SPAN), sampled=True)),
        (PARENT[:-1] + "0", TraceParent(bytes.fromhex(TRACE), bytes.fromhex(SPAN), sampled=False)),
        (PARENT.replace("00-", "cc-", 1) + "-later", TraceParent(bytes.fromhex(TRACE), bytes.fromhex(SPAN), sampled=True)),
        (PARENT + "-more", None),
        (PARENT.replace("00-", "ff-", 1), None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (PARENT.upper(), None),
        (PARENT[1:], None),
        ("", None),
        ("\xff" * 55, None),
    ],
)  # fmt: skip
def test_a_trace_context_is_read_as_the_standard_has_it(value: str, parent: TraceParent | None) -> None:
    header = (b"traceparent", value.encode("latin-1"))
    assert trace_parent([(b"host", b"x"), header]) == parent
    assert trace_parent([header, header]) is None  # whose is it?
    assert trace_parent([]) is None


async def test_a_request_goes_on_with_the_trace_of_who_asks(serve: Callable[..., Any]) -> None:
    exporter = InMemorySpanExporter()
    async with serve(spans=OtelSpans(exporter)) as server:
        assert await chat(server, traceparent=PARENT) == 200
        await until(lambda: bool(exporter.get_finished_spans()))
        spans = exporter.get_finished_spans()
    assert {span.context.trace_id for span in spans if span.context} == {int(TRACE, 16)}
    (root,) = [span for span in spans if span.kind is SpanKind.SERVER]
    assert (root.name, parent_of(root)) == ("POST /v1/chat/completions", int(SPAN, 16))
    assert attributes(root)["http.response.status_code"] == 200
    assert root.status.status_code is StatusCode.UNSET
    phases = [span for span in spans if span.name in ("queue", "prefill", "decode")]
    frames = [span for span in spans if span.name == "work frame"]
    of_stages = [span for span in spans if span.name == "stage"]
    assert len(phases) == 3
    assert {parent_of(span) for span in phases + frames} == {id_of(root)}
    assert len(frames) > 5
    by_id = {id_of(span): span for span in frames}
    assert len(of_stages) == 3 * len(frames)
    for span in of_stages:
        frame = by_id[parent_of(span)]
        assert frame.start_time is not None
        assert frame.end_time is not None
        assert span.start_time is not None
        assert span.end_time is not None
        slack = 2e6 + 1e9 * attributes(span)["dgr.clock_error_seconds"]
        assert frame.start_time - slack <= span.start_time <= span.end_time <= frame.end_time + slack
        assert attributes(span)["dgr.compute_seconds"] >= 0
    assert {service(span) for span in of_stages} == {"dgr-stage"}
    assert {span.resource.attributes["service.instance.id"] for span in of_stages} == {f"stage-{n}" for n in range(3)}
    assert {service(span) for span in (root, *frames, *phases)} == {"dgr-serve"}
    assert SECRET not in "".join(span.to_json() for span in spans)


async def test_who_does_not_record_is_not_traced(serve: Callable[..., Any], tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    async with serve(spans=OtelSpans(exporter), trace_folder=tmp_path) as server:
        assert await chat(server, traceparent=PARENT[:-1] + "0") == 200
        assert await chat(server, "later") == 200  # of whom nobody says anything: the sampler takes all
        await until(lambda: bool(exporter.get_finished_spans()))
    traces = {span.context.trace_id for span in exporter.get_finished_spans() if span.context}
    assert len(traces) == 1
    assert int(TRACE, 16) not in traces
    assert len(files(tmp_path)) == 1


async def test_names_and_sampling_are_the_environments(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-server")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    exporter = InMemorySpanExporter()
    async with serve(spans=OtelSpans(exporter)) as server:
        assert await chat(server, "unsampled") == 200
        assert await chat(server, traceparent=PARENT) == 200
        await until(lambda: bool(exporter.get_finished_spans()))
    spans = exporter.get_finished_spans()
    assert {span.context.trace_id for span in spans if span.context} == {int(TRACE, 16)}
    assert {service(span) for span in spans} == {"my-server", "dgr-stage"}


async def test_files_and_logs_name_the_trace_and_nothing_that_was_said(
    serve: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve(trace_folder=tmp_path) as server:
        assert await chat(server, traceparent=PARENT) == 200
        assert await chat(server, "another") == 200
        assert (await server.chat(SECRET, model="other")).status == 404
    found = files(tmp_path)  # what had ended was still written
    assert len(found) == 3
    assert TRACE in found[0].name
    for path in found:
        text = path.read_text()
        assert faults(json.loads(text)) == []
        assert SECRET not in text
    said = lines(caplog)
    assert leaks(said, SECRET.encode()) == []
    traces = [line["trace"] for line in said if line["logger"] == "dgr.serve" and "after" in line["message"]]
    assert traces[0] == TRACE
    assert len(set(traces)) == 3
    assert all(trace in path.name for trace, path in zip(traces, found, strict=True))


async def test_without_tracing_the_log_names_no_trace(
    serve: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve() as server:
        assert await chat(server, traceparent=PARENT) == 200
        assert all(not shard.traces for shard in server.model.offline.cluster.shards.values())
    assert not any("trace" in line for line in lines(caplog))


async def test_a_request_that_fails_is_told_as_that(serve: Callable[..., Any]) -> None:
    exporter = InMemorySpanExporter()
    async with serve(spans=OtelSpans(exporter)) as server:
        server.model.offline.cluster.stop("stage-1")
        await until(lambda: not server.engine.is_ready)
        assert await chat(server) == 503
        await until(lambda: bool(exporter.get_finished_spans()))
    (root,) = exporter.get_finished_spans()
    assert root.status.status_code is StatusCode.ERROR
    assert attributes(root)["http.response.status_code"] == 503


class Refusing(SpanExporter):
    """A collector that takes nothing."""

    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.FAILURE


class Broken(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        raise RuntimeError("out of order")


@pytest.mark.parametrize(
    ("exporter", "words"), [(Refusing, "were not taken by the collector"), (Broken, "lost by a defect")]
)
async def test_a_collector_that_fails_is_logged_and_holds_up_nobody(
    serve: Callable[..., Any], caplog: pytest.LogCaptureFixture, exporter: type[SpanExporter], words: str
) -> None:
    async with serve(spans=OtelSpans(exporter())) as server:
        assert await chat(server) == 200
        assert await chat(server, "again") == 200
        await until(lambda: sum(words in record.getMessage() for record in caplog.records) == 2)
        assert server.engine.pipeline.tracer._open == []


async def test_traces_that_nobody_can_write_in_time_are_dropped(
    serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "_WAITING", 1)
    hold, written = trio.Event(), server_module.ServerTracing._put_away

    async def slowly(self: Any, served: Any) -> None:
        await hold.wait()
        await written(self, served)

    monkeypatch.setattr(server_module.ServerTracing, "_put_away", slowly)
    async with serve(trace_folder=tmp_path) as server:
        for text in ("a", "b", "c", "d"):
            assert await chat(server, text) == 200
        await until(lambda: sum("a trace is dropped" in record.getMessage() for record in caplog.records) == 2)
        hold.set()
    assert len(files(tmp_path)) == 2


async def test_the_oldest_files_make_room(
    serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_FILES", 2)
    (tmp_path / "mine.json").write_text("{}")
    async with serve(trace_folder=tmp_path) as server:
        for text in ("a", "b", "c"):
            assert await chat(server, text) == 200
    assert len(files(tmp_path)) == 3  # one of them is nobody's trace
    assert (tmp_path / "mine.json").exists()


def test_a_folder_that_cannot_be_written_into_is_refused(tmp_path: Path) -> None:
    check_folder(tmp_path)
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(InputError, match="is no folder"):
            check_folder(path)
